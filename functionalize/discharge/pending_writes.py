"""What was written to parts of a storage and is not in its base yet, see Note [Parts to come].

    parts.put(Part(view, value, 3))      parts.newer(0, 16, 2)  -> whether [0, 16) was written after version 2
    joined(emit, root, parts, old)       cat([p0, p1, p2, p3])

Invariant: the bytes between the first and last of a part meet no other part; parts are kept in their order.
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
_FEW = 4  # as many parts are written one by one if they leave gaps


@dataclass(slots=True)
class Part:
    """A write of `view`; `record`: the op that did it."""

    view: View
    value: Any
    version: int
    record: OpRecord | None

    @property
    def geometry(self) -> Geometry:
        """Where it was written."""
        return self.view.geometry


class Parts:
    """Parts by their place; O(log n) to find one, O(n) to shift at worst."""

    __slots__ = ("_parts", "_starts")

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._starts: list[int] = []

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[Part]:
        return iter(self._parts)

    def _meeting(self, start: int, end: int) -> tuple[int, int]:
        lo = bisect_left(self._starts, start)
        if lo and self._parts[lo - 1].geometry.end > start:
            lo -= 1
        return lo, bisect_left(self._starts, end)

    def newer(self, start: int, end: int, version: int) -> bool:
        """Whether a part that meets [start, end) was written after `version`."""
        lo, hi = self._meeting(start, end)
        return any(self._parts[i].version > version for i in range(lo, hi))

    def put(self, part: Part) -> bool:
        """Add a part in place of those that it covers; False, and nothing done, if it runs into another."""
        g = part.geometry
        lo, hi = self._meeting(g.start, g.end)
        for old in self._parts[lo:hi]:
            covers = g.is_dense and g.start <= old.geometry.start and old.geometry.end <= g.end
            if not covers and old.geometry != g:
                return False
        self._parts[lo:hi] = [part]
        self._starts[lo:hi] = [g.start]
        return True


def joined(emit: Emitter, root: Geometry, parts: Sequence[Part], old: Callable[[], Any]) -> Any:
    """The base as one `cat` of parts and of what is between them; None where that is not it."""
    if len(parts) < 2 or not all(_is_run(g, root) for g in (root, *(p.geometry for p in parts))):
        return None
    edges = [root.start, *(e for p in parts for e in (p.geometry.start, p.geometry.end)), root.end]
    gaps = [(edges[i], edges[i + 1]) for i in range(0, len(edges), 2)]
    flat = None
    if any(start < end for start, end in gaps):
        if len(parts) < _FEW:
            return None
        flat = _flat(emit, old(), root)
    pieces: list[Any] = []
    for i, (start, end) in enumerate(gaps):
        if start < end:
            at, to = ((b - root.start) // root.dtype.itemsize for b in (start, end))
            pieces.append(emit.call(aten.slice.Tensor, flat, 0, at, to))
        if i < len(parts):
            pieces.append(_flat(emit, parts[i].value, parts[i].geometry))
    whole = emit.call(aten.cat.default, pieces)
    return whole if len(root.size) == 1 else emit.call(aten.view.default, whole, list(root.size))


def _is_run(g: Geometry, root: Geometry) -> bool:
    """Whether `g` is elements of the root one after the other."""
    inside = root.start <= g.start and g.end <= root.end
    return g.is_contiguous and g.dtype == root.dtype and inside and not g.conj and not g.neg


def _flat(emit: Emitter, value: Any, g: Geometry) -> Any:
    return value if len(g.size) == 1 else emit.call(aten.view.default, value, [g.numel])
