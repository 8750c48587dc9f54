"""Regions: the parts of a program's graph that are compiled as a whole, each in a form that identical layers share.

    wait_tensor                                      wait_tensor
    split, view, mm, relu, mm, add, view, cat   ->   region 0 (of class a)
    all_gather_into_tensor, wait_tensor              all_gather_into_tensor, wait_tensor
    split, view, mm, relu, mm, add, view, cat        region 1 (of class a: compiled once)

A region consists of consecutive nodes; only `getitem`s are moved, to where their tuple is made. A stretch that is too
long is cut where it repeats itself (identical layers become identical regions), else where the fewest values are
live. Linear in nodes and edges.

Invariant: a region returns every value that a node outside reads. Regions of one class have one graph: names of nodes
do not count.
Refusals: a stretch of fewer than `least` computing ops is not compiled: calling compiled code would cost more.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor, fx

from functionalize.analysis.aliases import is_view
from functionalize.ir.ops import geometry_of
from functionalize.repeats import runs

_CONTEXT = 12  # consecutive equal ops that count as a repetition
_SHORTEST = 6  # the shortest period that counts as a layer


@dataclass(slots=True, eq=False)
class Region:
    """Nodes that are compiled together.

    inputs: the values from outside that they read. outputs: their values that nodes outside read.
    """

    nodes: list[fx.Node]
    inputs: list[fx.Node]
    outputs: list[fx.Node]


def regions_of(
    graph: fx.Graph, accepts: Callable[[fx.Node], bool], least: int, most: int
) -> list[Region]:
    """The regions of a graph, in order, of nodes that the compiler `accepts`.

    least: the fewest computing ops of a region. most: the most nodes of a region; a longer stretch is cut.
    """
    found = []
    for stretch in _stretches(graph, accepts):
        for part in _cut(stretch, most) if len(stretch) > most else [stretch]:
            nodes = [each for node in part for each in (node, *_parts(node))]
            if sum(_computes(node) for node in nodes) >= least:
                found.append(_region(nodes))
    return found


def _stretches(graph: fx.Graph, accepts: Callable[[fx.Node], bool]) -> Iterator[list[fx.Node]]:
    """Runs of consecutive accepted nodes, without `getitem`s, which are moved to their tuple."""
    stretch: list[fx.Node] = []
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr") or node.target is operator.getitem:
            continue
        if node.op == "call_function" and accepts(node):
            stretch.append(node)
        elif stretch:
            yield stretch
            stretch = []


def _parts(node: fx.Node) -> Iterator[fx.Node]:
    """The `getitem` nodes of a node's tuple, and those of nested tuples."""
    if not isinstance(node.meta["val"], Tensor):
        for user in node.users:
            if user.target is operator.getitem:
                yield user
                yield from _parts(user)


def _computes(node: fx.Node) -> bool:
    return node.target is not operator.getitem and not is_view(node)


def _region(nodes: list[fx.Node]) -> Region:
    inside = set(nodes)
    inputs = dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside)
    outputs = [
        node
        for node in nodes
        if isinstance(node.meta["val"], Tensor) and any(u not in inside for u in node.users)
    ]
    return Region(nodes, list(inputs), outputs)


# -- where a long stretch is cut ---------------------------------------------------------------------


def _cut(stretch: list[fx.Node], most: int) -> Iterator[list[fx.Node]]:
    """Parts of at most `most` nodes: one repetition each where the stretch repeats itself."""
    live = _live(stretch)
    cuts = {0, len(stretch)}
    numbers: dict[str, int] = {}
    keys = [numbers.setdefault(_signature(n), len(numbers)) for n in stretch]
    for start, period, end in runs(keys, _CONTEXT):
        if _SHORTEST <= period <= most:
            phase = min(range(start, start + period), key=live.__getitem__)
            cuts.update(range(phase, end + 1, period))
    ends = sorted(cuts)
    for start, end in pairwise(ends):
        while end - start > most:
            at = min(range(start + most // 2, start + most + 1), key=live.__getitem__)
            yield stretch[start:at]
            start = at
        yield stretch[start:end]


def _live(stretch: list[fx.Node]) -> list[int]:
    """For each position, the number of values made before it and read at it or later."""
    place = {node: i for i, node in enumerate(stretch)}
    steps = [0] * (len(stretch) + 1)
    for i, node in enumerate(stretch):
        readers = [u for part in (node, *_parts(node)) for u in part.users]
        last = max((place.get(u, len(stretch)) for u in readers), default=i)
        steps[i + 1] += 1
        if last < len(stretch):
            steps[last + 1] -= 1
    return list(accumulate(steps))


def _signature(node: fx.Node) -> str:
    """A text that is equal for the corresponding ops of identical layers."""
    value = node.meta["val"]
    return f"{node.target} {geometry_of(value) if isinstance(value, Tensor) else ''}"


# -- one form for all regions of a class -------------------------------------------------------------


def canonical(region: Region, functional: Mapping[fx.Node, Any]) -> tuple[str, fx.Graph]:
    """(a text that is equal for regions of one class, the region as a separate graph).

    functional: for a node whose op is replaced, the functional op.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    lines = []
    for i, node in enumerate(region.inputs):
        copies[node] = graph.placeholder(f"i{i}")
        value = node.meta["val"]
        lines.append(f"{geometry_of(value)._replace(offset=0)} {value.device}")
    for i, node in enumerate(region.nodes):
        target: Any = functional.get(node, node.target)
        copies[node] = graph.create_node(
            "call_function",
            target,
            fx.node.map_arg(node.args, copies.__getitem__),
            fx.node.map_arg(node.kwargs, copies.__getitem__),
            name=f"n{i}",
        )
        lines.append(f"{target} {copies[node].args!r} {copies[node].kwargs!r}")
    graph.output(tuple(copies[node] for node in region.outputs))
    lines.append(" ".join(copies[node].name for node in region.outputs))
    return "\n".join(lines), graph
