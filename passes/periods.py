"""Periods in which a gathered parameter group is read, and the gaps between them. An analysis for `reshard`.

    w = wait(all_gather(shard))        a period: the readers of the gather in one phase (`ir/phases.py`)
    y = mm(x, w)                         first = last = the place of this mm
    ...                                a gap: up to the next period of the same shards, whose gather is another one
    dx = mm(dy, t(w))                    (w is gathered twice) or the same one (w is kept)

The readers of a part are the nodes that are no views of it: views cost nothing and are moved with their readers.
Invariant: both ends of a gap have the same value, bit for bit. Linear in nodes and edges, but for sorting.
Refuses (no gap) gathers whose shards, pieces, casts or ranks differ, parts with different layouts, unknown
readers, and parts returned to the caller, who may keep them or expects separate memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from functionalize.analysis.aliases import is_view
from functionalize.ir.ops import geometry_of
from functionalize.ir.phases import in_backward
from functionalize.passes.patterns import Gather, gathers

aten = torch.ops.aten

_SPLITS = (aten.split_with_sizes_copy.default, aten.split_with_sizes.default)


@dataclass(eq=False, slots=True)
class Period:
    """The readers of one gather in one phase.

    made: places of the first wait and of the last part. first, last: places of the first and last reader.
    reads: pairs of a reader and the value that it reads, which is a part or a view of one.
    parts: the numbers of the parts that are read.
    """

    gather: Gather
    made: tuple[int, int]
    first: int
    last: int
    reads: list[tuple[fx.Node, fx.Node]] = field(default_factory=list)
    parts: set[int] = field(default_factory=set)


@dataclass(eq=False, slots=True)
class Gap:
    """The time between two periods of equal gathers.

    after: the periods of the later gather; if it is the same gather (the parameters are kept), all later periods.
    """

    before: Period
    after: list[Period]

    @property
    def kept(self) -> bool:
        return self.before.gather is self.after[0].gather

    @property
    def is_returned(self) -> bool:
        """Whether a part of the later gather is returned to the caller."""
        return any(reader.op == "output" for each in self.after for reader, _ in each.reads)

    @property
    def parts(self) -> set[int]:
        """The numbers of the parts that stay alive over the gap if the parameters are kept."""
        return set().union(*(period.parts for period in self.after))


def gaps_of(graph: fx.Graph, place: dict[fx.Node, int] | None = None) -> list[Gap]:
    """Every gap, in the order of the later periods. place: of each node, if not that in the graph."""
    if place is None:
        place = {node: i for i, node in enumerate(graph.nodes)}
    classes: dict[Any, list[list[Period]]] = {}
    for gather in gathers(graph):
        found = _periods(gather, place)
        if found:
            classes.setdefault((gather.key, _casts(gather)), []).append(found)
    gaps = [gap for each in classes.values() for gap in _between(each)]
    return sorted(gaps, key=lambda gap: (gap.after[0].first, place[gap.after[0].gather.start]))


def _between(gathered: list[list[Period]]) -> Iterator[Gap]:
    """The gaps between the periods of equal gathers."""
    rest = {p: periods[i:] for periods in gathered for i, p in enumerate(periods)}
    firsts = {periods[0] for periods in gathered}
    order = sorted(rest, key=lambda period: period.first)
    for before, after in pairwise(order):
        gap = Gap(before, rest[after])
        if not gap.kept:
            in_time = after in firsts and before.made[1] < after.made[0]
            if not in_time or not _same_parts(gap):
                continue
        if not gap.is_returned:
            yield gap


def _periods(gather: Gather, place: dict[fx.Node, int]) -> list[Period]:
    """The readers of a gather by phase; one period if it has none, and none if it has unknown ones."""
    number = {part: i for i, part in enumerate(gather.parts) if part is not None}
    reads: list[tuple[int, fx.Node, fx.Node]] = []
    views = list(number)
    for value in views:
        for user in value.users:
            if is_view(user) and len(user.all_input_nodes) == 1:
                number[user] = number[value]
                views.append(user)
            else:
                reads.append((place[user], user, value))
    inside = {*gather.waits, *gather.unpack}
    if any(user not in inside for node in inside - number.keys() for user in node.users):
        return []
    made = min(place[n] for n in gather.waits), max(place[n] for n in inside)
    if not reads:
        return [Period(gather, made, made[1], made[1])]
    periods: list[Period] = []
    late: bool | None = None
    for at, user, value in sorted(reads, key=lambda read: read[0]):
        now = late if user.op == "output" else in_backward(user)
        if now is not late or not periods:
            periods.append(Period(gather, made, at, at))
        late = now
        periods[-1].last = at
        periods[-1].reads.append((user, value))
        periods[-1].parts.add(number[value])
    return periods


def _casts(gather: Gather) -> tuple[Any, ...]:
    """The dtypes of the casts that lead to each piece."""
    feed, found = set(gather.feed), []
    for piece in gather.pieces:
        path, node = [], piece
        while node in feed and len(node.all_input_nodes) == 1:
            path.append(node.meta["val"].dtype)
            node = node.all_input_nodes[0]
        found.append(tuple(d for i, d in enumerate(path) if i == 0 or d != path[i - 1]))
    return tuple(found)


def _same_parts(gap: Gap) -> bool:
    """Whether every part of the later gather that is read can be replaced by a part of the earlier one."""
    kept, gone = gap.before.gather, gap.after[0].gather
    for mine, its in ((kept.parts[i], gone.parts[i]) for i in gap.parts):
        if mine is None or its is None:
            split = split_node(kept)
            if split is None or split.target is not getattr(split_node(gone), "target", None):
                return False
        elif geometry_of(mine.meta["val"]) != geometry_of(its.meta["val"]):
            return False
    return True


def split_node(gather: Gather) -> fx.Node | None:
    """The nodes that split the gathered buffer into parts, if the shards were packed."""
    return next((n for n in gather.unpack if n.target in _SPLITS), None)


def chain_of(gather: Gather) -> list[fx.Node]:
    """The nodes that only one gather uses, in the order of the graph."""
    nodes = nodes_of(gather)
    alone = {*nodes} - {*gather.feed}
    for node in reversed(gather.feed):
        if all(user in alone for user in node.users):
            alone.add(node)
    return [node for node in nodes if node in alone]


def nodes_of(gather: Gather) -> list[fx.Node]:
    """The nodes from the shards to the parts, in the order of the graph."""
    start = gather.start
    return [*dict.fromkeys((*gather.feed, start, *start.users, *gather.waits, *gather.unpack))]
