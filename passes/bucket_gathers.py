"""Merge and split all-gathers by size, and drop the copies around them.

    cat = aten.cat.default([w, b])                          all_gather_into_tensor_coalesced =
    all_gather_into_tensor = ...(cat, 2, '0')                   ..._coalesced.default([w, cat], 2, '0')
    wait_tensor = ...(all_gather_into_tensor)        ->     getitem = ..._coalesced[0]
    view = aten.view.default(wait_tensor, [2, -1])          wait_tensor = ...(getitem)
    split_with_sizes_copy = ...(view, [4096, 8], 1)
    getitem = split_with_sizes_copy[0]                      (`cat` holds the small pieces, as before)

FSDP2 copies every shard into one buffer, and every parameter out of it again. A coalesced all-gather is one
collective with an output per shard, each the whole parameter. Large pieces are sent separately, without a copy on
either side; small ones share a buffer as before, since each output has a fixed cost. Memory: while a group is
unpacked, its parameters exist once and not twice.

With `mb`, neighbouring gathers that depend on shards (inputs of the program) only are started together, up to that
size; with `split`, a larger one is started in several parts, divided between pieces.

Invariant: every part has the same elements in the same order, in fresh memory, aligned as before, so all bits stay.
Decisions depend only on sizes, groups and dtypes of collectives and on the origin of shards, which are equal on all
ranks, never on the readers of a part; so the order of collectives stays equal on all ranks. A wait stays where it
was, before its first reader; of merged gathers, the small pieces are waited for where the first of them is read. Each
process group holds at most `mb` MiB more at any moment than without `mb`. Linear in nodes and edges.

Refuses a gather
- that does not match the pattern in `patterns.py`, or that is coalesced already;
- of a piece without elements, or that is not contiguous;
- to merge: whose shards are computed, or gathered in the bucket already (`reshard` keeps them), of another group,
  dtype or device than its neighbour, or with another collective between the two (`across=true`: other than a
  reduction).

Of torch's own (`torch._inductor.fx_passes.bucketing`) nothing is used: its merged all-gather writes to an argument,
bakes in the rank, and copies every piece as FSDP2 does; its buckets may exchange collectives.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import fx

from functionalize.ir.waits import WAIT
from functionalize.passes.base import Pass
from functionalize.passes.maker import Maker
from functionalize.passes.metadata import revalue
from functionalize.passes.patterns import (
    GATHER,
    GATHER_LIST,
    Gather,
    collectives,
    gathers,
)
from functionalize.program.program import Program

aten = torch.ops.aten

_MIB = 1 << 20
_VIEWS = (aten.view.default, aten.reshape.default)


@dataclass(frozen=True)
class BucketGathers(Pass):
    """Merge and split all-gathers by size, and drop the copies around them.

    mb: the largest merged gather, in MiB of gathered bytes; none: gathers are not merged.
    split: whether a larger gather is divided. across: whether neighbours may have reductions between them.
    apart_kb: the least size, in KiB of gathered bytes, of a piece that is sent separately; none: all share one buffer.
    """

    name: ClassVar[str] = "bucket_gathers"
    changes_collectives: ClassVar[bool] = True
    mb: float | None = None
    split: bool = False
    across: bool = False
    apart_kb: float | None = 64.0

    def apply(self, program: Program) -> int:
        found = self._buckets(program.graph)
        changed = [each for each in found if self._differs(each)]
        if changed:
            _rewrite(program.graph, changed)
        return len(changed)

    def _buckets(self, graph: fx.Graph) -> list[Bucket]:
        """The buckets, each of pieces that are started together, in order."""
        limit = None if self.mb is None else self.mb * _MIB
        known = {each.start: each for each in gathers(graph) if _is_plain(each)}
        found: list[Bucket] = []
        last: Bucket | None = None  # the bucket that the next gather may join
        for collective in collectives(graph):
            gather = known.get(collective.node)
            if gather is None:
                if not (self.across and collective.op is not None):
                    last = None
                continue
            for unit in self._units(gather):
                if last is None or not last.takes(gather, unit, limit):
                    last = Bucket(self.apart_kb)
                    found.append(last)
                last.add(unit)
        return found

    def _units(self, gather: Gather) -> list[list[Item]]:
        """The pieces of a gather, as lists that stay together."""
        items = [Item(gather, i) for i in range(len(gather.pieces))]
        return [[item] for item in items] if self.split and self.mb is not None else [items]

    def _differs(self, bucket: Bucket) -> bool:
        """Whether a bucket differs from a single existing gather."""
        gather, *others = bucket.gathers
        if others or len(bucket.items) != len(gather.pieces):
            return True
        return gather.pack is not None and len(bucket.packed) != len(gather.pieces)


# -- analysis --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Item:
    """One piece of a gather."""

    gather: Gather
    index: int

    @property
    def piece(self) -> fx.Node:
        return self.gather.pieces[self.index]

    @property
    def part(self) -> fx.Node | None:
        return self.gather.parts[self.index]

    @property
    def numel(self) -> int:
        return int(self.piece.meta["val"].numel())

    @property
    def nbytes(self) -> int:
        """Of the gathered part."""
        return self.numel * self.gather.dtype.itemsize * self.gather.world


@dataclass(eq=False)
class Bucket:
    """Pieces that one collective gathers."""

    apart_kb: float | None
    items: list[Item] = field(default_factory=list)
    nbytes: int = 0
    shards: set[fx.Node] = field(default_factory=set)

    @property
    def gathers(self) -> list[Gather]:
        return list({id(item.gather): item.gather for item in self.items}.values())

    @property
    def packed(self) -> list[Item]:
        """The pieces that share a buffer: at least two, or none."""
        small = [item for item in self.items if not self._is_apart(item)]
        return small if len(small) > 1 else []

    @property
    def apart(self) -> list[Item]:
        """The pieces that are sent separately."""
        packed = {id(item) for item in self.packed}
        return [item for item in self.items if id(item) not in packed]

    def _is_apart(self, item: Item) -> bool:
        return self.apart_kb is not None and item.nbytes >= self.apart_kb * 1024

    def takes(self, gather: Gather, unit: list[Item], limit: float | None) -> bool:
        """Whether pieces of the next gather may join, within `limit` bytes."""
        if limit is None or self.nbytes + sum(item.nbytes for item in unit) > limit:
            return False
        if gather is self.items[-1].gather:
            return True
        return _kind(gather) == _kind(self.items[0].gather) and all(
            n.op in ("placeholder", "get_attr") and n not in self.shards for n in gather.shards
        )

    def add(self, unit: list[Item]) -> None:
        self.items += unit
        self.nbytes += sum(item.nbytes for item in unit)
        self.shards.update(item.gather.shards[item.index] for item in unit)


def _is_plain(gather: Gather) -> bool:
    """Whether the pieces of a gather may be merged, split or sent separately."""
    if gather.start.target is not GATHER:
        return False
    values = [piece.meta["val"] for piece in gather.pieces]
    return all(v.numel() and v.is_contiguous() for v in values)


def _kind(gather: Gather) -> tuple[Any, ...]:
    return (gather.group, gather.world, gather.dtype, gather.start.meta["val"].device)


# -- rewriting -------------------------------------------------------------------------------------


def _rewrite(graph: fx.Graph, buckets: list[Bucket]) -> None:
    place = {node: i for i, node in enumerate(graph.nodes)}
    for bucket in buckets:
        sent = _start(graph, bucket, place)
        _finish(graph, bucket, sent, place)
    for gather in {id(g): g for bucket in buckets for g in bucket.gathers}.values():
        _erase(graph, gather)
    revalue(graph)


def _start(graph: fx.Graph, bucket: Bucket, place: dict[fx.Node, int]) -> list[fx.Node]:
    """Start one collective at the first of the bucket; returns its results, the shared buffer last."""
    first = bucket.gathers[0]
    anchor = first.start
    for gather in bucket.gathers:
        for node in gather.feed:
            if node is not gather.pack and place[node] > place[anchor]:
                anchor.prepend(node)
                place[node] = place[anchor]
    make = Maker(graph, anchor, others=[gather.start for gather in bucket.gathers])
    sent = [item.piece for item in bucket.apart]
    if bucket.packed:
        sent.append(make(aten.cat.default, [item.piece for item in bucket.packed]))
    if len(sent) == 1:
        return [make(GATHER, sent[0], first.world, first.group)]
    whole = make(GATHER_LIST, sent, first.world, first.group)
    return [make.part(whole, i) for i in range(len(sent))]


def _finish(
    graph: fx.Graph, bucket: Bucket, sent: list[fx.Node], place: dict[fx.Node, int]
) -> None:
    """Wait for every result where it was waited for, and let its readers read it."""
    for item, result in zip(bucket.apart, sent, strict=False):
        make = Maker(graph, item.gather.waits[0])
        wait = make(WAIT, result)
        if item.part is not None:
            _give(make, item, wait)
    if not bucket.packed:
        return
    first = min((item.gather.waits[0] for item in bucket.packed), key=place.__getitem__)
    make = Maker(graph, first, others=[item.gather.start for item in bucket.packed])
    wait = make(WAIT, sent[-1])
    if all(item.part is None for item in bucket.packed):
        return
    rows = make(aten.view.default, wait, [bucket.gathers[0].world, -1])
    sizes = [item.numel for item in bucket.packed]
    split = make(aten.split_with_sizes_copy.default, rows, sizes, 1)
    for i, item in enumerate(bucket.packed):
        if item.part is not None:
            _give(make, item, make.part(split, i))


def _give(make: Maker, item: Item, value: fx.Node) -> None:
    """Let the readers of a part read `value`, through as few views as possible."""
    part = item.part
    assert part is not None
    size = tuple(part.meta["val"].shape)
    if tuple(value.meta["val"].shape) == size:
        part.replace_all_uses_with(value)
        return
    for user in list(part.users):
        if user.target in _VIEWS and user.op == "call_function":
            user.replace_input_with(part, value)
            if user.meta["val"].shape == value.meta["val"].shape:
                user.replace_all_uses_with(value)
                user.graph.erase_node(user)
    if part.users:
        part.replace_all_uses_with(make(aten.view.default, value, list(size)))


def _erase(graph: fx.Graph, gather: Gather) -> None:
    """Erase the nodes that made the parts, which have no readers any more."""
    for node in (*reversed(gather.unpack), gather.start, gather.pack):
        if node is not None and not node.users:
            graph.erase_node(node)
