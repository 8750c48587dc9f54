"""A recorded graph in a file: what comes back is what was recorded; and what cannot be written or read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import functionalize as fz
from functionalize._compat.fakes import FakeTensorMode
from functionalize.errors import LoadError, SaveError
from functionalize.planner.cli.graphs import graph_text
from functionalize.planner.cli.recorded import Job, recorded
from functionalize.planner.cli.recorded_step import Recorded, read_graph, write_graph
from functionalize.planner.time.communication import communication
from tests.planner.cli.entry import TRAINING


def quiet(text: str) -> None:
    """What goes on, for nobody."""


@pytest.mark.filterwarnings("ignore:a warning of the script's")
def test_what_comes_back(tmp_path: Path) -> None:
    path = str(tmp_path / "step.fzp")
    with recorded(Job(TRAINING, parameters={"layers": 3}, mesh={"dp": 4}), quiet) as found:
        write_graph(path, found)
        text, timeline, sent = (
            graph_text(found.program),
            found.timeline(),
            communication(found.program),
        )
    back = read_graph(path)
    assert graph_text(back.program) == text
    assert back.timeline().bytes == timeline.bytes
    assert back.timeline().stacked() == timeline.stacked()
    assert communication(back.program, back.groups) == sent
    assert back.groups == found.groups and set(back.groups.values()) == {(0, 1, 2, 3)}
    for name in ("name", "world", "target", "stats", "notes", "input_categories"):
        assert getattr(back, name) == getattr(found, name)
    assert back.eager is None
    assert back.after("default", quiet).program.history[-1].startswith("schedule_memory")


def recorded_of(constant: torch.Tensor) -> Recorded:
    program = fz.functions.trace(lambda a: a + torch.tensor([1.0, 2.0, 3.0]), torch.ones(3))
    (name,) = program.constants
    program.describe()
    return Recorded("a", replace(program, constants={name: constant}), {}, "1 rank", "cpu", {}, {})


def test_constants_without_data(tmp_path: Path) -> None:
    path = tmp_path / "step.fzp"
    with FakeTensorMode():
        small, large = torch.empty(2, 3).t(), torch.empty(1 << 19)
    write_graph(str(path), recorded_of(small))
    (constant,) = read_graph(str(path)).program.constants.values()
    assert (
        constant.shape == (3, 2) and constant.stride() == (1, 3) and type(constant) is torch.Tensor
    )
    path.unlink()
    with pytest.raises(
        SaveError, match=r"it holds the constant `\w+` of 2,097,152 bytes, which has no"
    ):
        write_graph(str(path), recorded_of(large))
    assert not path.exists()


def test_no_place_to_write(tmp_path: Path) -> None:
    with pytest.raises(SaveError, match="cannot be written: No such file or directory"):
        write_graph(str(tmp_path / "no" / "step.fzp"), recorded_of(torch.ones(3)))


def test_other_files_are_refused_by_both_sides(tmp_path: Path) -> None:
    saved, graph, text = (str(tmp_path / name) for name in ("a.fzp", "b.fzp", "c.fzp"))
    fz.functions.trace(lambda a: a + 1, torch.ones(3)).save(saved)
    with pytest.raises(LoadError, match="it holds a program that runs, no graph to look at"):
        read_graph(saved)
    write_graph(graph, recorded_of(torch.ones(3)))
    with pytest.raises(LoadError, match="cannot be replayed"):
        fz.load(graph)
    with pytest.raises(LoadError, match="cannot be replayed"):
        fz.capture(lambda a: a + 1).load(graph)
    Path(text).write_text("no zip")
    with pytest.raises(LoadError, match="is no saved program, or is damaged"):
        read_graph(text)
    with pytest.raises(LoadError, match="it is not there"):
        read_graph(str(tmp_path / "nothing.fzp"))
