"""Configs of transformers: the scripts made from them, and their figures beside those of scripts written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import functionalize as fz
from functionalize.errors import UsageError
from functionalize.planner.cli.scripts import FunctionNames, opened
from functionalize.planner.configs.sources import script_of
from tests.planner.configs.tiny import BATCH, FAMILIES, LENGTH, by_hand, config_of, saved

_QUICK = ("qwen3", "mixtral", "t5")
_NOT_FIGURES = ("batch", "length", "planned in")


def figures(sweep: Any) -> dict[str, Any]:
    (row,) = sweep.rows()
    return {key: value for key, value in row.items() if key not in _NOT_FIGURES}


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .FSDPT5Block. returned a view")
@pytest.mark.parametrize(
    "name",
    [n if n in _QUICK else pytest.param(n, marks=pytest.mark.long) for n in FAMILIES],
)
def test_figures_are_those_of_a_script_by_hand(tmp_path: Path, name: str) -> None:
    build, step, inputs = by_hand(FAMILIES[name])
    expected = fz.plan(build, step, inputs=inputs, world=8)
    length = {} if name == "vit" else {"length": LENGTH}
    with opened(f"hf:{saved(name, tmp_path)}", FunctionNames()) as made:
        found = fz.plan(made.build, made.step, inputs=made.inputs, world=8, batch=BATCH, **length)
    assert found.plans[0].figures is not None and figures(found) == figures(expected)


@pytest.mark.parametrize("name", ["qwen3", "t5", "vit"])
def test_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expect: Any, name: str
) -> None:
    saved(name, tmp_path)
    monkeypatch.chdir(tmp_path)
    expect(name, script_of(f"hf:{name}/config.json"))


def test_what_a_script_can_change(tmp_path: Path) -> None:
    with opened(f"hf:{saved('llama', tmp_path)}", FunctionNames()) as made:
        common = {"inputs": made.inputs, "world": 2, "length": LENGTH}
        grid = {"checkpoint": [False, True], "offload": [False, True]}
        sweep = fz.plan(made.build, made.step, grid, **common)
        wide = fz.plan(made.build, made.step, dtype="float32", target="cpu", **common)
        twice = fz.plan(made.build, made.step, accumulate=2, **common)
    plain, offloaded, recomputed, _ = sweep.plans
    assert "recompute" in {node.meta.get("phase") for node in nodes(recomputed)}
    assert plain.figures.memory.host_peak == 0 < offloaded.figures.memory.host_peak
    sent = [each.rows()[0]["sent"] for each in (sweep, wide, twice)]
    assert sent[0] < sent[1] and sent[2] == 2 * sent[0]


def nodes(plan: Any) -> Any:
    return plan.figures.program.graph.nodes


def written(folder: Path, name: str = "llama", **changes: Any) -> str:
    config = config_of(FAMILIES[name])
    for key, value in changes.items():
        setattr(config, key, value)
    config.save_pretrained(folder)
    return f"hf:{folder}"


def test_the_class_of_a_config_that_names_none(tmp_path: Path) -> None:
    for name, chosen in (("llama", "LlamaForCausalLM"), ("vit", "ViTForImageClassification")):
        for named in (None, [chosen.partition("For")[0] + "Model"]):
            text = script_of(written(tmp_path / name, name, architectures=named))
            assert f"model = {chosen}(" in text


def test_other_tasks(tmp_path: Path) -> None:
    text = script_of(
        written(tmp_path, num_labels=5, architectures=["LlamaForSequenceClassification"])
    )
    assert "torch.randint(5, (rows,))," in text
    text = script_of(written(tmp_path, num_labels=5, architectures=["LlamaForTokenClassification"]))
    assert "torch.randint(5, (rows, length))," in text


def test_weights_that_are_quantised_in_files(tmp_path: Path) -> None:
    text = script_of(written(tmp_path, quantization_config={"quant_method": "fp8"}))
    assert "The weights of its files are quantised, those that are trained here are not." in text


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("models/nothing.json", "models/nothing.json is not there: give a folder with config.json"),
        ("./nothing", r"./nothing is not there: give a folder with config.json, or that file"),
        (
            "{folder}/other.json",
            r"other.json is no config of transformers: .* Give a folder with c",
        ),
    ],
)
def test_what_is_no_config(tmp_path: Path, where: str, message: str) -> None:
    (tmp_path / "other.json").write_text('{"architectures": ["Net"]}')
    with pytest.raises(UsageError, match=message):
        script_of(f"hf:{where.format(folder=tmp_path)}")


def test_models_without_a_script(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"LlamaForFlying is no model of these tasks: seq to seq"):
        script_of(written(tmp_path, architectures=["LlamaForFlying"]))
    import transformers

    transformers.Gemma3Config().save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"a gemma3 takes images or sounds beside tokens"):
        script_of(f"hf:{tmp_path}")
