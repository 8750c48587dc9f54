"""Configurations of torchtitan: their names, the script made from them, the memory of torchtitan's own Trainer."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

import functionalize as fz
from functionalize.errors import UsageError
from functionalize.planner.cli.scripts import FunctionNames, opened
from functionalize.planner.configs import torchtitan
from functionalize.planner.configs.sources import script_of
from tests.forks import run_module

needs_torchtitan = pytest.mark.skipif(
    not all(map(find_spec, ("torchtitan", "triton"))),
    reason="pip install 'functionalize[torchtitan]'",
)


def test_arguments() -> None:
    assert torchtitan.arguments("llama3_8b") == ["--config", "llama3_8b"]
    given = torchtitan.arguments("a.b.small --training.seq_len 64 --override.imports 'x y'")
    assert given[:4] == ["--module", "a.b", "--config", "small"]
    assert given[4:] == ["--training.seq_len", "64", "--override.imports", "x y"]


@pytest.mark.parametrize("where", ["", "llama3.", "--config llama3_8b", "llama3_8b '"])
def test_what_names_no_configuration(where: str) -> None:
    with pytest.raises(UsageError, match=r"names no configuration: write a function of torchtitan"):
        script_of(f"titan:{where}")


def test_without_torchtitan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchtitan, "find_spec", lambda name: None)
    message = r'needs torchtitan and triton: pip install "functionalize\[torchtitan\]"'
    with pytest.raises(UsageError, match=message):
        script_of("titan:llama3_8b")


def test_the_script(expect: Any) -> None:
    config = SimpleNamespace(
        compile=SimpleNamespace(enable=True),
        override=SimpleNamespace(imports=["kernels.rope", ("kernels.swiglu", {"block": 2})]),
        training=SimpleNamespace(disable_cuda_graphs=False, seq_len=4096, local_batch_size=2),
        parallelism=SimpleNamespace(tensor_parallel_degree=1),
        model_spec=SimpleNamespace(model=SimpleNamespace(vocab_size=128256)),
    )
    options = ["--training.seq_len", "4096", "--compile.enable"]
    text = torchtitan.text_of(["--module", "llama3", "--config", "llama3_8b", *options], config)
    compile(text, "step.py", "exec")
    expect("llama3_8b", text)


@pytest.mark.long
@needs_torchtitan
@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_memory_is_that_of_the_trainer(accumulate: int) -> None:
    """All but the number of tokens that the Trainer counts, and its loss: 12 bytes."""
    done = run_module("tests.planner.configs.titan_memory", f"{accumulate}")
    assert done.returncode == 0, done.stderr
    of_trainer, of_script = map(int, done.stdout.split())
    assert abs(of_trainer - of_script) <= 12


@pytest.mark.long
@needs_torchtitan
@pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete support")
def test_what_a_script_can_change() -> None:
    source = "titan:llama3_debugmodel --training.seq_len 64 --training.local_batch_size 2"
    with opened(source, FunctionNames()) as made:
        grid = {"checkpoint": [False, True], "tp": [1, 2]}
        sweep = fz.plan(made.build, made.step, grid, inputs=made.inputs, world=4)
    assert [plan.error for plan in sweep.plans] == [None] * 4
    peaks = [row["peak"] for row in sweep.rows()]
    assert peaks[2] < peaks[0] and peaks[3] < peaks[1] < peaks[0]


@needs_torchtitan
@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("nothing", r"no model of torchtitan has the configuration `nothing` \(deepseek_v3, "),
        ("llama3.nothing", r"torchtitan does not take it: Config function 'nothing' not found"),
        ("llama3_8b --training.sq_len 3", r"take it: Unrecognized options: --training.sq_len, 3$"),
        ("flux_dev", r"FluxTrainer.Config is not the configuration of torchtitan's own Trainer. G"),
        (
            "llama3_8b --parallelism.context_parallel_degree 2",
            r"context_parallel_degree is 2, which cannot be planned",
        ),
        ("llama3_8b --training.enable_cpu_offload", r"enable_cpu_offload: parameters that are mad"),
        ("llama3_8b --training.global_batch_size 8", r"leave it out, and give --set accumulate=N"),
    ],
)
def test_what_is_refused(where: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        script_of(f"titan:{where}")
