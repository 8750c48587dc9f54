"""Partial writes of a storage that are not in its base yet.

    writes.put(PendingWrite(view, value, 3))
    writes.newer(0, 16, 2)                     whether a byte of [0, 16) was written after version 2
    joined(emit, root, writes, old)            cat([w0, w1, w2, w3])

Note [Pending writes]
A partial write makes a new base by copying all of it: N partial writes one by one would copy it N times. So a
partial write is kept pending until an op needs the base (see `FunctionalStorage._flush`), often never, or not before
the writes make up the whole. Until then a view is current if no later pending write overlaps its bytes. Pending
writes are disjoint; a write that overlaps one of them without covering it flushes all of them first.

Invariant: the byte ranges of pending writes, each from its first to its last byte, are disjoint; they are kept in
ascending order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from functionalize.discharge.values import Emitter, View
from functionalize.ir.ops import Geometry, OpRecord

aten = torch.ops.aten
# With gaps between them, fewer writes than this are scattered one by one: a `cat` would slice the old base per gap.
_FEW = 4


@dataclass(slots=True)
class PendingWrite:
    """A write of `value` to `view`, which made version `version` of the storage; `record`: the op that wrote."""

    view: View
    value: Any
    version: int
    record: OpRecord | None

    @property
    def geometry(self) -> Geometry:
        """The geometry that was written."""
        return self.view.geometry


class PendingWrites:
    """Pending writes ordered by first byte; a look-up is O(log n), an insertion at worst O(n)."""

    __slots__ = ("_starts", "_writes")

    def __init__(self) -> None:
        self._writes: list[PendingWrite] = []
        self._starts: list[int] = []

    def __len__(self) -> int:
        return len(self._writes)

    def __iter__(self) -> Iterator[PendingWrite]:
        return iter(self._writes)

    def _overlapping(self, start: int, end: int) -> tuple[int, int]:
        lo = bisect_left(self._starts, start)
        if lo and self._writes[lo - 1].geometry.end > start:
            lo -= 1
        return lo, bisect_left(self._starts, end)

    def newer(self, start: int, end: int, version: int) -> bool:
        """Whether a pending write that overlaps [start, end) came after `version`."""
        lo, hi = self._overlapping(start, end)
        return any(self._writes[i].version > version for i in range(lo, hi))

    def put(self, write: PendingWrite) -> bool:
        """Add a write in place of those that it covers; False, with nothing changed, if it overlaps one in part."""
        g = write.geometry
        lo, hi = self._overlapping(g.start, g.end)
        for old in self._writes[lo:hi]:
            covers = g.is_dense and g.start <= old.geometry.start and old.geometry.end <= g.end
            if not covers and old.geometry != g:
                return False
        self._writes[lo:hi] = [write]
        self._starts[lo:hi] = [g.start]
        return True


def joined(
    emit: Emitter, root: Geometry, writes: Sequence[PendingWrite], old: Callable[[], Any]
) -> Any:
    """The base as one `cat` of the written values and of the slices of `old()` between them.

    None if that is impossible (a write is no contiguous run of the root) or not worthwhile (fewer than `_FEW` writes,
    with gaps).
    """
    if len(writes) < 2 or not all(_is_run(g, root) for g in (root, *(w.geometry for w in writes))):
        return None
    edges = [root.start, *(e for w in writes for e in (w.geometry.start, w.geometry.end)), root.end]
    gaps = [(edges[i], edges[i + 1]) for i in range(0, len(edges), 2)]
    flat = None
    if any(start < end for start, end in gaps):
        if len(writes) < _FEW:
            return None
        flat = _flat(emit, old(), root)
    pieces: list[Any] = []
    for i, (start, end) in enumerate(gaps):
        if start < end:
            at, to = ((b - root.start) // root.dtype.itemsize for b in (start, end))
            pieces.append(emit.call(aten.slice.Tensor, flat, 0, at, to))
        if i < len(writes):
            pieces.append(_flat(emit, writes[i].value, writes[i].geometry))
    whole = emit.call(aten.cat.default, pieces)
    return whole if len(root.size) == 1 else emit.call(aten.view.default, whole, list(root.size))


def _is_run(g: Geometry, root: Geometry) -> bool:
    """Whether `g` is a run of consecutive elements of the root."""
    inside = root.start <= g.start and g.end <= root.end
    return g.is_contiguous and g.dtype == root.dtype and inside and not g.conj and not g.neg


def _flat(emit: Emitter, value: Any, g: Geometry) -> Any:
    return value if len(g.size) == 1 else emit.call(aten.view.default, value, [g.numel])
