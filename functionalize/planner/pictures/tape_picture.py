"""The picture of a tape: a row per autograd node in the order in which the nodes run, lines for the gradients.

    tape_picture(program.tape(), "tape.svg")

        SumBackward0      ●        train.py:8, in step: return (y + model(x)).sum()
        AddBackward0      ├─╮
        AddmmBackward0    │ ●      a gradient stays in one lane until the node that gets it
        TanhBackward0     ●

Refuses: no backward; more rows than an image file can have. Linear in edges, times the lanes at their most.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from functionalize.errors import PictureError
from functionalize.planner.pictures.canvas import GREY, INK, RED, Canvas, blank, shorter
from functionalize.tape.tape import Tape, TapeNode

_ROWS = 2000  # at most, of a picture that is no SVG or PDF
_ROW, _LANE = 0.2, 0.16  # inches
_NAMES, _LINES = 2.6, 6.4  # inches of text, left and right of the lanes


class Placed(NamedTuple):
    """The lane of each node, and the gradients as (row, row, lane in which it goes down)."""

    lanes: list[int]
    gradients: list[tuple[int, int, int]]


def tape_picture(tape: Tape, path: str | Path, *, title: str = "") -> None:
    """Draw the backwards of a tape below each other; the text of a row is the line of the node's forward.

    >>> weight = torch.ones(2, requires_grad=True)
    >>> program = fz.functions.trace_backward(weight.sin().sum())
    >>> fz.planner.tape_picture(program.tape(), "tape.png")
    """
    rows = sum(len(backward.nodes) + 1 for backward in tape.backwards)
    if not rows:
        raise PictureError(f"{path} cannot be drawn: the program has no backward")
    if rows > _ROWS and Path(path).suffix.lower() == ".png":
        raise PictureError(
            f"{path} cannot be drawn: {rows:,} rows are more than an image has. Give the path the ending .svg or .pdf."
        )
    placed = [lanes_of(backward.nodes) for backward in tape.backwards]
    lanes = 1 + max((lane for each in placed for lane in each.lanes), default=0)
    lanes = max([lanes, *(1 + lane for each in placed for *_, lane in each.gradients)])
    width, height = _NAMES + lanes * _LANE + _LINES, (rows + 2) * _ROW
    with Canvas(path, width, height) as figure:
        panel = blank(figure, (0, 0, 1, 1))
        panel.set_xlim(-_NAMES, width - _NAMES)
        panel.set_ylim(rows + 1, -1)
        if title:
            panel.text(-_NAMES + 0.1, -0.3, title, fontweight="bold", color=INK, va="center")
        top = 0
        for backward, (of_nodes, gradients) in zip(tape.backwards, placed, strict=True):
            panel.text(
                -_NAMES + 0.1,
                top + 0.5,
                shorter(f"backward at {backward.line}", 150),
                color=RED,
                va="center",
            )
            top += 1
            for start, end, lane in gradients:
                lanes_on_way = [of_nodes[start], lane, lane, of_nodes[end]]
                ys = [start, start + 0.5, end - 0.5, end]
                panel.plot(
                    [_LANE * (at + 0.5) for at in lanes_on_way],
                    [top + y + 0.5 for y in ys],
                    color=GREY,
                    lw=0.8,
                    zorder=1,
                )
            for row, (node, lane) in enumerate(zip(backward.nodes, of_nodes, strict=True)):
                y, colour = top + row + 0.5, INK if node.number in tape.ops else GREY
                panel.plot([_LANE * (lane + 0.5)], [y], "o", ms=4, color=colour, zorder=2)
                panel.text(
                    -0.1, y, f"{node.name} {node.number}", ha="right", va="center", color=colour
                )
                text = node.parameter or node.line
                panel.text(lanes * _LANE + 0.1, y, shorter(text, 90), va="center", color=GREY)
            top += len(backward.nodes)


def lanes_of(nodes: Sequence[TapeNode]) -> Placed:
    """Lanes such that two gradients that go down at the same row have different ones, unless they go to one node."""
    rows = {node.number: row for row, node in enumerate(nodes)}
    waiting: list[int | None] = []  # by lane: the row of the node that gets its gradient
    lanes: list[int] = []
    gradients: list[tuple[int, int, int]] = []
    for row, node in enumerate(nodes):
        mine = [lane for lane, end in enumerate(waiting) if end == row]
        for lane in mine:
            waiting[lane] = None
        own = mine[0] if mine else _free(waiting)
        lanes.append(own)
        for number in dict.fromkeys(node.edges):
            end = rows[number]
            lane = waiting.index(end) if end in waiting else -1
            if lane < 0:
                lane = own if own == len(waiting) or waiting[own] is None else _free(waiting)
                if lane == len(waiting):
                    waiting.append(None)
                waiting[lane] = end
            gradients.append((row, end, lane))
    return Placed(lanes, gradients)


def _free(waiting: Sequence[int | None]) -> int:
    return waiting.index(None) if None in waiting else len(waiting)
