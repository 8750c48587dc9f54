"""Two plans, or two reports, side by side; and files that cannot be written are refused before anything is recorded."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.planner.cli.entry import TRAINING, Command, command

__all__ = ["command"]  # a fixture


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two plans of two batches and a report each, as the command prints them."""
    folder = tmp_path_factory.mktemp("plans")
    points = {"a": [point(1, 100, 2.0), point(2, 150, 3.0)], "b": [point(2, 75, 3.0)]}
    points |= {"c": [{**point(4, 300, 6.0), "sent": 0}], "d": [{"batch": 8, "error": "no room"}]}
    for name, rows in points.items():
        content = {"script": "train.py", "keys": ["batch"], "points": rows}
        (folder / f"{name}.json").write_text(json.dumps(content))
    for name, nbytes in (("m", 1024), ("n", 3072)):
        levels = {"requested": nbytes, "device": 2 * nbytes}
        eager = {"levels": levels, "by_category": {f"only {name}": nbytes}}
        about = {"source": "train.py", "world": "8 ranks", "target": "cuda"}
        content = {**about, "timelines": {"eager": eager}}
        (folder / f"{name}.json").write_text(json.dumps(content))
    return {path.stem: path for path in folder.iterdir()}


def point(batch: int, peak: int, seconds: float) -> dict[str, Any]:
    return {"batch": batch, "peak": peak, "step": seconds, "mfu": None}


def test_points_with_the_same_keys_are_compared(command: Command, written: dict[str, Path]) -> None:
    ran = command("compare", written["a"], written["b"])
    assert ran.code == 0 and ran.err == ""
    assert [line.split() for line in ran.out.splitlines()] == [
        ["train.py,", "batch", "2"],
        ["a", "b", "change"],
        ["peak", "150", "B", "75", "B", "-50.0%"],
        ["step", "(modelled)", "3.00", "s", "3.00", "s", "same"],
        ["only", "in", str(written["a"]) + ":", "batch", "1"],
    ]


def test_single_points_are_compared_whatever_their_keys(
    command: Command, written: dict[str, Path]
) -> None:
    found = command("compare", written["b"], written["c"], "--json").json
    assert found["only in the first"] == found["only in the second"] == []
    (both,) = found["compared"]
    assert both["differing"] == ["batch: 2 -> 4"]
    assert both["figures"]["peak"] == {"first": 75, "second": 300, "change": 3.0}
    assert both["figures"]["sent"] == {"first": None, "second": 0, "change": None}
    failed = command("compare", written["b"], written["d"])
    assert failed.code == 0 and "error: no room" in failed.out


def test_no_point_in_common(command: Command, written: dict[str, Path]) -> None:
    ran = command("compare", written["a"], written["c"])
    assert ran.code == 1 and ran.out.count("only in") == 3


def test_reports_on_memory(command: Command, written: dict[str, Path]) -> None:
    ran = command("compare", written["m"], written["n"])
    assert ran.code == 0
    rows = [line.split() for line in ran.out.splitlines()]
    assert rows[0] == ["peak", "of", "eager,", "train.py:", "8", "ranks,", "target", "cuda"]
    assert ["requested", "1.00", "KiB", "3.00", "KiB", "+200.0%"] in rows
    assert ["only", "m", "1.00", "KiB"] in rows and ["only", "n", "3.00", "KiB"] in rows
    assert "host" not in ran.out
    offloaded = {**json.loads(written["n"].read_text()), "host": 512}
    file = written["n"].with_name("offloaded.json")
    file.write_text(json.dumps(offloaded))
    ran = command("compare", written["m"], file)
    assert ["host", "512", "B"] in [line.split() for line in ran.out.splitlines()]


def test_what_the_commands_print_can_be_compared(command: Command, tmp_path: Path) -> None:
    for name in ("plan", "memory"):
        for world in (2, 4):
            ran = command(name, TRAINING, "--world", world, "--json")
            (tmp_path / f"{name}{world}.json").write_text(ran.out)
    found = command("compare", tmp_path / "plan2.json", tmp_path / "plan4.json", "--json").json
    (both,) = found["compared"]
    assert both["differing"] == ["world: 2 -> 4"]
    assert both["figures"]["sent"]["second"] > both["figures"]["sent"]["first"] > 0
    assert both["figures"]["samples/s/rank"]["first"] > 0
    found = command("compare", tmp_path / "memory2.json", tmp_path / "memory4.json", "--json").json
    assert [each["what"] for each in found["compared"]] == ["peak of eager", "peak of program"]
    for each in found["compared"]:
        shards = each["figures"]["sharded parameters"]
        assert 0 < shards["second"] < shards["first"]


def test_files_that_cannot_be_compared(
    command: Command, written: dict[str, Path], tmp_path: Path
) -> None:
    text, other, old = tmp_path / "text.json", tmp_path / "other.json", tmp_path / "old.json"
    rows = [3, [{"a": 1}], [{"k": 1, "peak": "x"}], [{"k": 1, "categories": [1]}]]
    plans = [{"points": row, "keys": ["k"], "script": "a"} for row in rows]
    about = {"source": "a", "world": "b", "target": "c"}
    reports = [{"timelines": {}}, {"timelines": {"eager": {"levels": {"peak": "x"}}}, **about}]
    for content, kind in (*((each, "plan") for each in plans), *((r, "memory") for r in reports)):
        (wrong := tmp_path / "wrong.json").write_text(json.dumps(content))
        ran = command("compare", wrong, wrong, columns=500)
        assert ran.code == 2, ran.err
        assert f"wrong.json has other fields than what `{kind} --json` prints" in ran.words
    text.write_text("a table")
    other.write_text("[1]")
    old.write_text('{"points": []}')
    for file, message in (
        (tmp_path / "none.json", "none.json cannot be read: No such file or directory"),
        (text, "text.json is no JSON: "),
        (other, "other.json is not what `plan --json` or `memory --json` prints"),
        (old, "old.json does not name its keys: write it again with `plan --json`"),
        (written["m"], "is of `plan --json` and "),
    ):
        ran = command("compare", written["a"], file, columns=500)
        assert ran.code == 2 and message in ran.words, message


@pytest.mark.parametrize(
    "words",
    [
        ("capture", "-o", "step.fzp"),
        ("show", "--tape", "--png", "tape.png"),
        *(("memory", f"--{kind}", f"file.{kind}") for kind in ("png", "html", "snapshot", "trace")),
        *(("plan", f"--{kind}", f"file.{kind}") for kind in ("csv", "trace")),
        ("tune", "--limit", "h100", "--code", "policy.py"),
    ],
)
def test_files_are_checked_before_anything_is_recorded(
    command: Command, tmp_path: Path, words: tuple[str, ...]
) -> None:
    *options, file = words
    name, *more = options
    ran = command(name, TRAINING, *more, tmp_path / "none" / file, columns=500)
    assert ran.code == 2 and "cannot be written: there is no folder" in ran.words
    assert "a model is built" not in ran.out
    (tmp_path / file).mkdir()
    ran = command(name, TRAINING, *more, tmp_path / file, columns=500)
    assert ran.code == 2 and "is a folder: name a file in it" in ran.words


def test_libraries_that_draw_are_checked_before_anything_is_recorded(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for library, extra in (("matplotlib", "plots"), ("plotly", "page")):
        monkeypatch.setitem(sys.modules, library, None)
        file = tmp_path / {"plots": "file.png", "page": "file.html"}[extra]
        option = f"--{file.suffix[1:]}"
        ran = command("memory", TRAINING, "--step", "stops", option, file, columns=500)
        assert ran.code == 2, ran.err
        assert (
            f'needs {library}, which is not installed: pip install "functionalize[{extra}]"'
            in ran.words
        )


def test_the_file_of_a_calibration_is_checked_first(command: Command, tmp_path: Path) -> None:
    ran = command("calibrate", tmp_path / "none" / "here.json", columns=500)
    assert ran.code == 2 and "cannot be written: there is no folder" in ran.words
