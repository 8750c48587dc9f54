"""The picture of a tape has a row per node and a lane per gradient on its way."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from functionalize.errors import PictureError
from functionalize.planner.pictures.tape_picture import lanes_of, tape_picture
from functionalize.tape.tape import RecordedBackward, Tape, TapeNode

pytest.importorskip("matplotlib")


def node(number: int, *edges: int, parameter: str = "") -> TapeNode:
    return TapeNode(number, f"Node{number}", edges, f"train.py:{number}, in step: line", parameter)


DIAMOND = (node(0, 1, 2), node(1, 3), node(2, 3), node(3, 4), node(4, parameter="model.weight"))


def test_gradients_on_their_way_have_lanes_of_their_own() -> None:
    placed = lanes_of(DIAMOND)
    assert placed.lanes == [0, 0, 1, 0, 0]
    assert placed.gradients == [(0, 1, 0), (0, 2, 1), (1, 3, 0), (2, 3, 0), (3, 4, 0)]


def test_a_lane_is_free_again() -> None:
    placed = lanes_of([node(0, 1), node(1), node(2, 3), node(3)])
    assert placed.lanes == [0, 0, 0, 0]


def test_names_lines_and_parameters_are_drawn(tmp_path: Path) -> None:
    path = tmp_path / "tape.svg"
    op = SimpleNamespace(name="mul_1")
    backward = RecordedBackward(DIAMOND, "train.py:9, in step: loss.backward()")
    tape_picture(Tape((backward,), {0: (op,)}), path, title="Four")  # type: ignore[arg-type]
    said = path.read_text()
    for text in ("Four", "loss.backward()", "Node0 0", "train.py:3, in step", "model.weight"):
        assert text in said


def test_what_cannot_be_drawn(tmp_path: Path) -> None:
    with pytest.raises(PictureError, match="no backward"):
        tape_picture(Tape((), {}), tmp_path / "tape.svg")
    many = RecordedBackward(tuple(node(i) for i in range(2001)), "")
    with pytest.raises(PictureError, match=r"2,002 rows.*\.svg"):
        tape_picture(Tape((many,), {}), tmp_path / "tape.png")
