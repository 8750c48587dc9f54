"""Regions: the parts of a program's graph that a compiler takes whole, each in a form that layers share.

    wait_tensor                                      wait_tensor
    split, view, mm, relu, mm, add, view, cat   ->   region 0 (of class a)
    all_gather_into_tensor, wait_tensor              all_gather_into_tensor, wait_tensor
    split, view, mm, relu, mm, add, view, cat        region 1 (of class a: compiled once)

A region is a stretch of the graph; nothing is reordered but `getitem`s, which go where their tuple is made. A stretch
that is too long is cut where it repeats itself (identical layers become identical regions), else where the fewest
values are live. Linear in nodes and edges.

Invariant: a region returns every value that anything outside reads; a class has one graph, whatever the names.
Refusals: a stretch of fewer than `least` ops that compute is left as it is: calling compiled code costs more.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor, fx

from functionalize.analysis.aliases import is_view
from functionalize.ir.ops import geometry_of

_CONTEXT = 12  # ops in a row that are equal before they count as a repetition
_SHORTEST = 6  # repetitions that are shorter are no layers


@dataclass(slots=True, eq=False)
class Region:
    """Nodes that are compiled together; `inputs`, `outputs`: what it reads and what others read of it."""

    nodes: list[fx.Node]
    inputs: list[fx.Node]
    outputs: list[fx.Node]


def regions_of(
    graph: fx.Graph, accepts: Callable[[fx.Node], bool], least: int, most: int
) -> list[Region]:
    """The regions of a graph, in order, of nodes that the compiler `accepts`.

    least: ops that compute below which a stretch is left alone. most: nodes above which it is cut.
    """
    found = []
    for stretch in _stretches(graph, accepts):
        for part in _cut(stretch, most) if len(stretch) > most else [stretch]:
            nodes = [each for node in part for each in (node, *_parts(node))]
            if sum(_computes(node) for node in nodes) >= least:
                found.append(_region(nodes))
    return found


def _stretches(graph: fx.Graph, accepts: Callable[[fx.Node], bool]) -> Iterator[list[fx.Node]]:
    """Accepted nodes in a row, without the `getitem`s, which follow their tuple."""
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
    """What is taken out of the tuple that a node makes."""
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
    for start, end, period in _repetitions([_token(n) for n in stretch]):
        if period <= most:
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
    """How many values made before each place are read at it or later."""
    place = {node: i for i, node in enumerate(stretch)}
    steps = [0] * (len(stretch) + 1)
    for i, node in enumerate(stretch):
        readers = [u for part in (node, *_parts(node)) for u in part.users]
        last = max((place.get(u, len(stretch)) for u in readers), default=i)
        steps[i + 1] += 1
        if last < len(stretch):
            steps[last + 1] -= 1
    return list(accumulate(steps))


def _token(node: fx.Node) -> str:
    """What is equal for the same op in identical layers."""
    value = node.meta["val"]
    return f"{node.target} {geometry_of(value) if isinstance(value, Tensor) else ''}"


def _repetitions(tokens: Sequence[Any]) -> Iterator[tuple[int, int, int]]:
    """(start, end, period) of the stretches that repeat themselves with the period seen most often in them."""
    seen: dict[int, int] = {}
    back = [0] * len(tokens)  # how far back the same ops were seen last
    for i in range(len(tokens) - _CONTEXT + 1):
        context = hash(tuple(tokens[i : i + _CONTEXT]))
        back[i] = i - seen.get(context, i)
        seen[context] = i
    common = Counter(b for b in back if b >= _SHORTEST).most_common(8)
    taken = [False] * len(tokens)
    for period, _ in common:
        yield from _runs(back, period, taken)


def _runs(back: Sequence[int], period: int, taken: list[bool]) -> Iterator[tuple[int, int, int]]:
    """Where `back` is `period` for a whole period or more, and no other repetition was found before."""
    i, size = 0, len(back)
    while i < size:
        if back[i] != period or taken[i]:
            i += 1
            continue
        end = i
        while end < size and back[end] == period and not taken[end]:
            end += 1
        start, stop = i - period, min(end + _CONTEXT - 1, size)
        if end - i + _CONTEXT > period and not any(taken[start:stop]):
            taken[start:stop] = [True] * (stop - start)
            yield start, stop, period
        i = end


# -- one form for all regions of a class -------------------------------------------------------------


def canonical(region: Region, functional: Mapping[fx.Node, Any]) -> tuple[str, fx.Graph]:
    """What is equal for regions that the same code computes, and the region as a graph of its own.

    functional: the op for a node that is not to do what its own says.
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
