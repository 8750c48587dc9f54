"""`benchmarks.gpu`: predictions for a GPU are made here, its command runs on the CPU, and no failure loses a row."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import suite
from benchmarks.gpu.options import Options
from benchmarks.gpu.rows import Prediction, Row, Rows, read_rows, table

pytestmark = pytest.mark.long

CPU = ["--device", "cpu", "--small"]


def stored(path: Path) -> list[Row]:
    """The rows of a run."""
    return [Row(**row) for row in json.loads(path.read_text())["rows"]]


def run(folder: Path, part: str) -> list[Row]:
    """Predict a part and run it, small, on the CPU."""
    predicted, measured = folder / "predicted.json", folder / "measured.json"
    command.main(["predict", "--out", str(predicted), "--part", part, *CPU])
    command.main(
        ["run", "--predicted", str(predicted), "--out", str(measured), "--part", part, *CPU]
    )
    return stored(measured)


def test_every_row_of_a_part_agrees_on_the_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = run(tmp_path, "kernels")
    assert [row.fact for row in rows if row.part == "machine"] == ["release of torch"]
    facts = [row.fact for row in rows if row.part == "kernels"]
    assert "attention float32, head size 16, causal, trains" in facts
    assert {"node of rms_norm float32", "AdamW by default"} <= set(facts)
    assert [row for row in rows if not row.agrees] == []
    shown = capsys.readouterr().out
    assert f"kernels: {len(facts)} of {len(facts)} predictions agree" in shown
    assert facts[0] in (tmp_path / "measured.txt").read_text() and facts[0] not in shown


def test_a_section_that_is_stopped_has_a_row_for_each_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = replace(command.SECTIONS["kernels"], seconds=0)
    monkeypatch.setattr(command, "SECTIONS", {"kernels": section})
    rows = run(tmp_path, "kernels")
    assert len(rows) > 3
    assert {(row.measured, row.agrees, row.note) for row in rows} == {
        (None, None, "stopped after 0 s")
    }
    assert all(row.predicted is not None for row in rows)


def test_predictions_for_a_gpu_are_made_without_one() -> None:
    found = command.predict(Options("cuda", small=True), ["steps", "kernels", "facts"])
    small = {name for name, section in command.SECTIONS.items() if section.small}
    assert found.keys() == small - {"tests"}
    claims = {fact: claim for section in found.values() for fact, claim in section.items()}
    assert [fact for fact, claim in claims.items() if claim["error"]] == []

    def value(fact: str) -> object:
        return claims[fact]["value"]

    assert value("node of rms_norm float32") == "FusedRmsNormBackward0"  # on a CPU: MulBackward0
    assert value("attention float32, head size 16, causal, trains") == "efficient"
    assert value("autocast: dtype of layer_norm of bfloat16") == "float32"
    assert value("AdamW by default") == "foreach"
    start = "1 rank: overhead, 1 layer"
    levels = [value(f"{start}, eager: {level} peak") for level in ("requested", "allocated")]
    assert 0 < levels[0] < levels[1] <= value(f"{start}, eager: reserved peak")
    assert value("default: peak reserved") > value("expandable segments: peak reserved") > 0


def test_tests_that_need_a_gpu_are_found() -> None:
    names = {"tests/planner/calibration/test_calibrate.py", "tests/passes/test_offload.py"}
    assert set(suite.files(small=True)) == names
    assert {*names, "tests/run/test_cudagraphs.py"} <= set(suite.files(small=False))


# -- rows ----------------------------------------------------------------------------------------------


def test_rows_agree_by_the_rule_of_their_prediction(tmp_path: Path) -> None:
    claims = {
        "bytes": Prediction(512, "bytes"),
        "time": Prediction(0.5, "s", "at least"),
        "context": Prediction(500, "bytes", "at most"),
        "list": Prediction([1, 2]),
        "unplanned": Prediction(None, "bytes", error="WorldError: no"),
    }
    rows = Rows("facts", claims, tmp_path / "rows.jsonl")
    for fact, measured in (
        ("bytes", 512), ("bytes", 513), ("time", 0.5), ("time", 0.4), ("context", 500),
        ("context", 501), ("list", [1, 2]), ("list", [2, 1]), ("unplanned", 3), ("new", 4),
    ):  # fmt: skip
        rows.add(fact, measured)
    found = read_rows(tmp_path / "rows.jsonl")
    assert [row.agrees for row in found] == [True, False] * 4 + [None, None]
    assert found[2].note == "claimed: at least" and found[8].note == "WorldError: no"


def test_an_exception_is_a_row_and_a_line_cut_short_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = Rows("facts", {"peak": Prediction(1, "bytes")}, path)
    with rows.guarded("peak"):
        raise torch.OutOfMemoryError("tried to\nallocate")
    path.write_text(path.read_text() + '{"part": "fac')
    assert read_rows(path) == [
        Row("facts", "peak", 1, None, "bytes", None, "OutOfMemoryError: tried to allocate")
    ]


def test_the_table_of_a_stored_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        Row("facts", "fine", 1024, 1024, "bytes", True),
        Row("facts", "short", 1024, 2048, "bytes", False, "of the second stream"),
        Row("facts", "lost", 7, None, "", None, "stopped after 60 s"),
        Row("steps", "device time", None, 0.0015, "s"),
    ]
    path = tmp_path / "measured.json"
    path.write_text(json.dumps({"about": {"machine": "m"}, "rows": [vars(row) for row in rows]}))
    command.main(["table", str(path)])
    out = capsys.readouterr().out
    assert "facts: 1 of 2 predictions agree, 0 figures without one, 1 not measured" in out
    assert "steps: 0 of 0 predictions agree, 1 figures without one, 0 not measured" in out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "short 1,024 bytes 2,048 bytes DIFFERS of the second stream" in lines
    assert "lost 7 - NOT MEASURED stopped after 60 s" in lines
    assert "device time - 1.500 ms" in lines
    assert "fine" not in out
    assert "fine" in table(rows, every=True)
