"""Steps that count, keep, print, log and schedule are saved, and a fresh copy of the script replays them."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import functionalize as fz
from functionalize.errors import LoadError, SaveError
from tests.allowance import ample_allowance
from tests.step.moving_steps import REFUSED, STEPS, World, difference
from tests.step.saved_loops import CALLS, Loop, batch, logs, prints, schedules

BEFORE, AFTER = 6, 5


def continued(make: Callable[[], Any], path: Path) -> tuple[Any, Any, Any]:
    """A world whose programs come from a file, one that is eager, and the loaded step, after calls that agree."""
    saved = make()
    with ample_allowance():
        captured = fz.capture(saved.step, audit=False)
    for i in range(BEFORE):
        captured(batch(i))
    captured.save(path)
    ours, eager = make(), make()
    for i in range(BEFORE):
        ours.step(batch(i))
        eager.step(batch(i))
    loaded = fz.capture(ours.step, audit=False)
    loaded.load(path)
    for i in range(BEFORE, BEFORE + AFTER):
        torch.manual_seed(i)
        expected = eager.step(batch(i))
        torch.manual_seed(i)
        assert difference(loaded(batch(i)), expected) is None, i
    return ours, eager, loaded


@pytest.mark.parametrize("name", [n for n in STEPS if n not in REFUSED])
def test_a_step_that_moves_state(name: str, tmp_path: Path) -> None:
    ours, eager, loaded = continued(lambda: World(STEPS[name], "SGD"), tmp_path / "step.fzp")
    assert difference(ours.state(), eager.state()) is None
    assert loaded.stats.replays, loaded.explain()


# -- calls -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CALLS)
def test_a_step_that_calls(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Each call is made again by the loaded program, with the numbers of its replay."""
    ours, eager, loaded = continued(lambda: Loop(*CALLS[name]), tmp_path / "step.fzp")
    assert loaded.stats.replays == AFTER, loaded.explain()
    assert ours.optimizer.param_groups[0]["lr"] == eager.optimizer.param_groups[0]["lr"]
    assert (ours.n, ours.losses) == (eager.n, eager.losses)
    if name == "logging":
        said = [(r.getMessage(), getattr(r, "at", None), r.lineno) for r in caplog.records]
        assert len(said) == 3 * BEFORE + 2 * AFTER and len(set(said)) == BEFORE + AFTER
    elif name != "a scheduler that gets the loss":
        # Eager and ours alternate.
        said_here = capfd.readouterr()
        for lines in (said_here.out.splitlines(), said_here.err.splitlines()):
            last = lines[-2 * AFTER * (1 if lines else 0) :]
            assert last[::2] == last[1::2]
        assert len(said_here.out.splitlines()) == 3 * BEFORE + 2 * AFTER


SCRIPT = """
import sys
import torch
import functionalize as fz
from tests.step.saved_loops import Loop, batch, schedules

loop = Loop(schedules)
step = fz.capture(loop.step, audit=False)
if sys.argv[1] == "saves":
    for i in range(6):
        step(batch(i))
    step.save(sys.argv[2])
else:
    for i in range(6):
        loop.step(batch(i))
    if sys.argv[1] == "loads":
        step.load(sys.argv[2])
found = [(step if sys.argv[1] != "eager" else loop.step)(batch(i)).item() for i in range(6, 10)]
print(found, loop.n, loop.scheduler.last_epoch, step.stats.captures)
"""


def test_another_process(tmp_path: Path) -> None:
    said = {}
    for part in ("saves", "loads", "eager"):
        command = [sys.executable, "-W", "ignore", "-c", SCRIPT, part, str(tmp_path / "step.fzp")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        said[part] = done.stdout.splitlines()[-5:]
    assert said["loads"] == said["eager"]
    assert said["saves"][:-1] == said["loads"][:-1]
    assert said["loads"][-1].endswith(" 0")


# -- refusals --------------------------------------------------------------------------------------


def saved_loop(path: Path, calls: Callable[[Any, Tensor], Any] = prints) -> None:
    loop = Loop(calls)
    with ample_allowance():
        captured = fz.capture(loop.step, audit=False)
    for i in range(BEFORE):
        captured(batch(i))
    captured.save(path)


def test_a_place_that_is_not_there(tmp_path: Path) -> None:
    """Nothing is loaded: the step is recorded as if there were no file."""
    saved_loop(tmp_path / "step.fzp")
    loop = Loop(prints)
    del loop.n
    captured = fz.capture(loop.step)
    with pytest.raises(LoadError, match=r"needs 1 of what the step calls `self\.n`, there is none"):
        captured.load(tmp_path / "step.fzp")
    assert captured.program is None


def changed(path: Path, change: Callable[[Any], None]) -> None:
    """Change the JSON of a file, with right checksums."""
    from tests.program.hostile import rewritten

    with zipfile.ZipFile(path) as archive:
        content = json.loads(archive.read("programs.json"))
    change(content)
    whole = path.with_suffix(".whole")
    path.rename(whole)
    rewritten(whole, path, content)


def records(content: Any, kind: str) -> list[Any]:
    found = [r for p in content["programs"] for r in p["records"] if r["is"] == kind]
    assert found, kind
    return found


def test_a_file_cannot_assign_elsewhere(tmp_path: Path) -> None:
    """To what the live step does not move: its model, its methods."""
    for name in ("self.model", "self.step", "self.optimizer.param_groups", "self.calls"):
        path = tmp_path / f"{name}.fzp"
        saved_loop(path)

        def elsewhere(content: Any, name: str = name) -> None:
            for each in records(content, "Assigned"):
                each["with"][0]["tuple"][0] = name

        changed(path, elsewhere)
        loop = Loop(prints)
        loop.step(batch(0))
        model, calls = loop.model, loop.calls
        captured = fz.capture(loop.step)
        with pytest.raises(LoadError, match="there is none"):
            captured.load(path)
        assert loop.model is model and loop.calls is calls


def counts(loop: Any, loss: Tensor) -> None:
    number, average = getattr(loop, "counts", (0, 0.0))
    loop.counts = number + 1, 0.5 * average + loss.item()


def test_a_place_inside_of_a_container(tmp_path: Path) -> None:
    """A file names what a replay may read in it by keys, which lead to elements alone."""
    for at, key in enumerate((5, "__class__", True, "count")):
        path = tmp_path / f"{at}.fzp"
        saved_loop(path, counts)

        def elsewhere(content: Any, key: Any = key) -> None:
            for each in records(content, "PlaceNumber"):
                place = each["with"][0]["tuple"]
                place[3:] = [key] if len(place) > 3 else []

        loop = Loop(counts)
        loop.step(batch(0))
        changed(path, elsewhere)
        with pytest.raises(LoadError, match=r"in what the step calls `self\.counts`"):
            fz.capture(loop.step).load(path)


@pytest.mark.parametrize(
    "kind, change, message",
    [
        ("Printed", lambda r: r["with"].__setitem__(1, "__stdin__"), "neither sys.stdout nor"),
        ("Logged", lambda r: r["with"].__setitem__(0, "root"), "does not reach"),
        ("SchedulerStepped", lambda r: r["with"].__setitem__(1, 10_000), "does not have"),
        ("PlaceNumber", lambda r: r["with"].__setitem__(2, {"type": "builtins:str"}), "no number"),
    ],
)
def test_a_damaged_call(kind: str, change: Any, message: str, tmp_path: Path) -> None:
    of = {"Logged": logs, "SchedulerStepped": schedules}
    saved_loop(tmp_path / "step.fzp", of.get(kind, prints))
    changed(tmp_path / "step.fzp", lambda content: change(records(content, kind)[0]))
    loop = Loop(of.get(kind, prints))
    loop.step(batch(0))
    with pytest.raises(LoadError, match=message):
        fz.capture(loop.step).load(tmp_path / "step.fzp")


def test_a_call_with_another_argument(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`print(..., file=...)` would write to whatever object a file names."""
    saved_loop(tmp_path / "step.fzp")

    def rename(content: Any) -> None:
        text = json.dumps(content)
        assert '"sep"' in text
        content["programs"] = json.loads(json.dumps(content["programs"]).replace('"sep"', '"file"'))

    changed(tmp_path / "step.fzp", rename)
    loop = Loop(prints)
    loop.step(batch(0))
    with pytest.raises(LoadError, match="arguments that it does not take"):
        fz.capture(loop.step).load(tmp_path / "step.fzp")


def test_what_no_file_holds(tmp_path: Path) -> None:
    """A function of `fz.repeat` is code of a script."""
    seen: list[float] = []
    note = fz.repeat(seen.append)

    def notes(loop: Loop, loss: Tensor) -> None:
        note(loss.item())

    loop = Loop(notes)
    with ample_allowance():
        captured = fz.capture(loop.step, audit=False)
    for i in range(BEFORE):
        captured(batch(i))
    assert captured.stats.replays
    with pytest.raises(SaveError, match="a call that a replay makes again and a file cannot name"):
        captured.save(tmp_path / "step.fzp")
    assert not list(tmp_path.iterdir())


def unreached_logger(loop: Loop, loss: Tensor) -> None:
    logging.warning("step %d", loop.n)


def test_a_logger_that_the_code_does_not_name(tmp_path: Path) -> None:
    with pytest.raises(SaveError, match="logs by `root`, a logger that the step's code does not"):
        saved_loop(tmp_path / "step.fzp", unreached_logger)
    assert not list(tmp_path.iterdir())


def test_a_constant_beside_what_is_printed(tmp_path: Path) -> None:
    def shows_a_type(loop: Loop, loss: Tensor) -> None:
        print(loop.n, loss.dtype)

    with pytest.raises(SaveError, match="a constant of the type dtype, which a file cannot hold"):
        saved_loop(tmp_path / "step.fzp", shows_a_type)
    assert not list(tmp_path.iterdir())
