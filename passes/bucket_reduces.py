"""Merge reduce-scatters (and the all-reduces that follow them under HSDP), and drop copies before them.

    _chunk_cat = _chunk_cat([dw, db], 0, 2)             (later, where the second one was)
    view = aten.view.default(_chunk_cat, [72])
    reduce_scatter_tensor = ...(view, 'avg', 2, '0')    _chunk_cat = _chunk_cat([dw, db, pad, dv], 0, 2)
    ...                                            ->   view = aten.view.default(_chunk_cat, [-1])
    _chunk_cat_1 = _chunk_cat([dv], 0, 2)               reduce_scatter_tensor = ...(view, 'avg', 2, '0')
    ...                                                 wait_tensor = ...(reduce_scatter_tensor)
    wait_tensor = ...(reduce_scatter_tensor)            slice_1 = aten.slice.Tensor(wait_tensor, 0, 0, 36)
    wait_tensor_1 = ...(reduce_scatter_tensor_1)        slice_2 = aten.slice.Tensor(wait_tensor, 0, 48, 64)

    view(_chunk_cat([dv], 0, 2), [32])    ->     view(dv, [32])     one gradient whose rows divide by the ranks

With `mb`, neighbours are merged up to that size; without it, only copies are dropped. A shard starts at an address as
aligned as before (`pad`: zeros). A shard that is returned to the caller is cloned, so that it is a separate tensor.

Invariant: all bits stay, unless `rounding`. An element of a sum is the same sum wherever it lies in the buffer if
- there are two ranks: a + b is b + a; or
- the op is min or max, or the elements are integers.
With more ranks the order of a sum depends on the position: gloo's reduce-scatter is a ring over segments that do not
end where the chunks of ranks do, so that a few elements next to the ends of chunks round differently in a larger
buffer (measured for 3 and 4 ranks, torch 2.11 and 2.13); NCCL chooses rings and algorithms by size and position.
Sizes, groups and order of collectives decide, which ranks share; and whether a shard is read before the next
reduction starts, which they share too if they run the same step. Gradients wait for their bucket: each process group
holds at most `mb` MiB more at any moment than without `mb`. Linear in nodes and edges.

Refuses
- a reduction that does not match the pattern in `patterns.py`, or whose buffer has another reader;
- to merge: another group, op, dtype or device than its neighbour; a shard that is read before the next reduction
  starts; another collective between the two (`across=true`: other than an all-gather); sums that could be rounded
  in another order (`rounding=true` allows that).

Of torch's own (`torch._inductor.fx_passes.bucketing`) nothing is used: it copies packed gradients into a second
buffer, ignores alignment, and merges sums even if their rounding changes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from functionalize._compat.distributed import group_of_name
from functionalize.analysis.aliases import Aliases, results, results_of
from functionalize.ir.epilogue import Set
from functionalize.ir.waits import WAIT
from functionalize.passes.base import Pass
from functionalize.passes.maker import Maker
from functionalize.passes.metadata import NewValues, revalue, set_value
from functionalize.passes.patterns import ALL_REDUCE, REDUCE_SCATTER, Reduce, collectives, reduces
from functionalize.program.program import Program

aten = torch.ops.aten

_MIB = 1 << 20
_ALIGNMENT = 64  # bytes: the least alignment that the CPU and CUDA allocators guarantee
_PACK = aten._chunk_cat.default
_CAST = aten._to_copy.default


@dataclass(frozen=True)
class BucketReduces(Pass):
    """Merge reduce-scatters by size, and drop copies before them.

    mb: MiB of gradients up to which neighbours are merged; none: only copies are dropped. across: whether neighbours
    may have all-gathers between them. rounding: whether sums may be taken in another order.
    """

    name: ClassVar[str] = "bucket_reduces"
    changes_collectives: ClassVar[bool] = True
    mb: float | None = None
    across: bool = False
    rounding: bool = False

    def apply(self, program: Program) -> int:
        graph = program.graph
        found = [each for each in reduces(graph) if _is_plain(each)]
        buckets = [] if self.mb is None else self._buckets(graph, found)
        if buckets:
            returned, values = _returned_shards(program), NewValues(program.fakes)
            place = {node: i for i, node in enumerate(graph.nodes)}
            for bucket in buckets:
                _merge(graph, bucket, place, returned, values)
        merged = {id(each) for bucket in buckets for each in bucket}
        single = [r for r in found if id(r) not in merged and _is_view(r)]
        for each in single:
            _unpack(graph, each)
        if buckets or single:
            revalue(graph, program.fakes)
        return len(buckets) + len(single)

    def _buckets(self, graph: fx.Graph, found: list[Reduce]) -> list[list[Reduce]]:
        """The reductions to merge, in order; each list has two or more."""
        place = {node: i for i, node in enumerate(graph.nodes)}
        known = {each.start: each for each in found}
        inner = {each.all_reduce for each in found}
        lists: list[list[Reduce]] = []
        nbytes, read = math.inf, 0  # of the last list; the place where its shards are first read
        for collective in collectives(graph):
            each = known.get(collective.node)
            if each is None:
                if collective.node not in inner and not self._passes_over(collective.kind):
                    nbytes = math.inf
                continue
            if nbytes + each.nbytes > (self.mb or 0) * _MIB or not self._joins(
                lists[-1][0], each, read > place[each.all_reduce or each.start]
            ):
                lists.append([])
                nbytes, read = 0, len(place)
            lists[-1].append(each)
            nbytes += each.nbytes
            read = min([read, *(place[part] for part in each.parts)])
        return [each for each in lists if len(each) > 1]

    def _passes_over(self, kind: str) -> bool:
        return self.across and kind.startswith("all_gather")

    def _joins(self, first: Reduce, each: Reduce, unread: bool) -> bool:
        """Whether a reduction may be merged with an earlier one, none of whose shards is read before."""
        return unread and _kind(first) == _kind(each) and (self.rounding or _is_exact(each))


# -- analysis --------------------------------------------------------------------------------------


def _is_plain(each: Reduce) -> bool:
    """Whether a reduction is `_chunk_cat(grads, 0, world)`, at most one cast, and flat, without other readers."""
    pack = each.pack
    if pack is None or pack.target is not _PACK or tuple(pack.args[1:]) != (0, each.world):
        return False
    chain = [n for n in each.feed if n is not pack]
    casts = [n for n in chain if n.target is _CAST]
    flat = each.start.all_input_nodes[0].meta["val"].dim() == 1
    return flat and len(casts) < 2 and all(len(n.users) == 1 for n in each.feed)


def _kind(each: Reduce) -> tuple[Any, ...]:
    """The key that reductions must share to be merged."""
    again = each.all_reduce
    value = each.start.meta["val"]
    grads = {g.meta["val"].dtype for g in each.grads}
    cast = tuple(n.kwargs for n in each.feed if n.target is _CAST)
    and_then = None if again is None else tuple(again.args[1:])
    return (each.group, each.op, each.world, value.dtype, value.device, grads, cast, and_then)


def _is_exact(each: Reduce) -> bool:
    """Whether the result of an element does not depend on its position in the reduced buffer."""
    if each.op in ("min", "max") or not (each.dtype.is_floating_point or each.dtype.is_complex):
        return True
    again = each.all_reduce
    return each.world <= 2 and (again is None or _ranks(str(again.args[2])) <= 2)


def _ranks(group: str) -> float:
    """The size of a process group; infinity if this process has no such group."""
    try:
        return int(group_of_name(group).size())
    except (RuntimeError, ValueError):
        return math.inf


def _returned_shards(program: Program) -> set[fx.Node]:
    """The results of reductions whose memory is returned to the caller."""
    aliases, slots = Aliases(program.graph), results(program.graph)
    roles = [r.slot for each in program.outputs for r in results_of(each)]
    roles += [a.slot for a in program.epilogue if isinstance(a, Set) and a.slot is not None]
    returned = {aliases.of(slots[i]) for i in roles if isinstance(slots[i], fx.Node)}
    return {each.result for each in reduces(program.graph) if aliases.of(each.result) in returned}


def _is_view(each: Reduce) -> bool:
    """Whether the packed buffer is a single gradient whose elements are in the right order already."""
    if len(each.grads) != 1:
        return False
    value = each.grads[0].meta["val"]
    rows = value.shape[0] if value.dim() else 0
    return bool(value.is_contiguous() and rows and rows % each.world == 0)


# -- rewriting -------------------------------------------------------------------------------------


def _merge(
    graph: fx.Graph,
    bucket: list[Reduce],
    place: dict[fx.Node, int],
    returned: set[fx.Node],
    values: NewValues,
) -> None:
    """Insert one reduction at the last of the bucket, and a slice of its result for each of the others."""
    *_, last = bucket
    all_starts = [each.start for each in bucket]
    make = Maker(graph, last.start, others=all_starts, values=values)
    grads, starts = _with_pads(make, bucket)
    value = make(_PACK, grads, 0, last.world)
    for cast in (n for n in last.feed if n.target is _CAST):
        value = make(_CAST, value, **cast.kwargs)
    value = make(aten.view.default, value, [-1])
    value = make(REDUCE_SCATTER, value, last.op, last.world, last.group)
    if last.all_reduce is not None:
        make = Maker(graph, last.all_reduce, others=all_starts, values=values)
        value = make(ALL_REDUCE, make(WAIT, value), *last.all_reduce.args[1:])
    readers = [part for each in bucket for part in each.parts]
    anchor = min(readers, key=place.__getitem__) if readers else last.result
    make = Maker(graph, anchor, last.wait, all_starts, values)
    whole = make(WAIT, value)
    for each, start in zip(bucket, starts, strict=True):
        if each.parts:
            part = make(aten.slice.Tensor, whole, 0, start, start + _numel(each))
            part = make(aten.clone.default, part) if each.result in returned else part
            each.result.replace_all_uses_with(part)
        _erase(graph, each)


def _with_pads(make: Maker, bucket: list[Reduce]) -> tuple[list[fx.Node], list[int]]:
    """(all gradients, with padding where the next shard would not be aligned; the start of each shard)."""
    grads: list[fx.Node] = []
    starts: list[int] = []
    at, step = 0, max(1, _ALIGNMENT // bucket[0].dtype.itemsize)
    like = bucket[0].grads[0].meta["val"]
    for each in bucket:
        if pad := -at % step:
            size = [pad * each.world]
            grads.append(make(aten.full.default, size, 0, dtype=like.dtype, device=like.device))
            at += pad
        starts.append(at)
        grads += each.grads
        at += _numel(each)
    return grads, starts


def _unpack(graph: fx.Graph, each: Reduce) -> None:
    """Reduce a gradient itself, not a copy of it."""
    pack, *chain = each.feed
    pack.replace_all_uses_with(each.grads[0])
    graph.erase_node(pack)
    for node in chain:  # a cast, a view that makes it flat
        set_value(node)


def _erase(graph: fx.Graph, each: Reduce) -> None:
    chain = (each.all_reduce_wait, each.all_reduce, each.wait, each.start, *reversed(each.feed))
    for node in chain:
        if node is not None:
            graph.erase_node(node)


def _numel(each: Reduce) -> int:
    """Elements of the shard."""
    return int(each.start.meta["val"].numel())
