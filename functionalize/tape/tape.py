"""`program.tape()`: the autograd nodes of a program's backwards, in the order in which they run.

    backward at train.py:12, in step: loss.backward()
      4 MeanBackward0 -> 3                       train.py:11, in step: loss = model(x).square().mean()
            expand, div
      3 PowBackward0 -> 2                        train.py:11, in step: loss = model(x).square().mean()
            pow_2, mul, mul_1

A node has its number in the program's metadata (`seq_nr`), its name, the nodes to which it sends gradients, the line of
its forward, and the ops that it ran and that are in the graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from functionalize.util.text import counted


@dataclass(frozen=True, slots=True)
class TapeNode:
    """One autograd node of a backward.

    edges: the numbers of the nodes to which it sends gradients. line: the user's innermost line of its forward.
    parameter: of the node of a leaf, its name. Both are empty if unknown.
    """

    number: int
    name: str
    edges: tuple[int, ...]
    line: str
    parameter: str


@dataclass(frozen=True, slots=True)
class RecordedBackward:
    """One backward of a recording: its nodes in the order in which they ran, and the user's line that called it."""

    nodes: tuple[TapeNode, ...]
    line: str


@dataclass(frozen=True, slots=True, repr=False)
class Tape:
    """The backwards of a program, in their order. ops: the nodes of the graph, by the number of the autograd node."""

    backwards: tuple[RecordedBackward, ...]
    ops: Mapping[int, tuple[fx.Node, ...]]

    @staticmethod
    def of(backwards: Iterable[RecordedBackward], graph: fx.Graph) -> Tape:
        """The tape of a described graph."""
        ops: dict[int, Any] = {}
        for node in graph.nodes:
            if "autograd_node" in node.meta and "seq_nr" in node.meta:
                ops.setdefault(node.meta["seq_nr"], []).append(node)
        return Tape(tuple(backwards), {number: tuple(found) for number, found in ops.items()})

    @property
    def nodes(self) -> list[TapeNode]:
        """The autograd nodes of all backwards."""
        return [node for backward in self.backwards for node in backward.nodes]

    def __repr__(self) -> str:
        return f"<Tape: {counted(len(self.backwards), 'backward')}, {counted(len(self.nodes), 'node')}>"

    def __str__(self) -> str:
        lines = []
        for backward in self.backwards:
            lines.append(f"backward at {backward.line or 'an unknown line'}")
            for node in backward.nodes:
                head = f"{node.number:>5} {node.name}"
                if node.edges:
                    head += f" -> {', '.join(map(str, node.edges))}"
                lines.append(f"{head:<44}  {node.parameter or node.line}".rstrip())
                if ran := self.ops.get(node.number):
                    lines.append(f"{'':>12}{', '.join(op.name for op in ran)}")
        return "\n".join(lines) or "no backward"
