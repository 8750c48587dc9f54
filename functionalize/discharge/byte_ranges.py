"""Sets of bytes of a storage, and the checks on which tensors may be read and written.

    extent = Extent((0, 8))     extent.add(12, 16)     extent.covers(4, 13)   -> False

Invariant: the intervals are disjoint, ascending, and never touch.
"""

from __future__ import annotations

from bisect import bisect_left

from functionalize.errors import (
    EmptyStorageError,
    OutOfBoundsError,
    OverlappingMutationError,
    UnorderedMutationError,
)
from functionalize.ir.ops import Geometry


class Extent:
    """The bytes of a storage with defined contents, as disjoint ascending [start, end) intervals."""

    __slots__ = ("spans",)

    def __init__(self, *spans: tuple[int, int]) -> None:
        self.spans: list[tuple[int, int]] = []
        for span in spans:
            if span[0] < span[1]:
                self.spans.append(span)

    def add(self, start: int, end: int) -> None:
        """Mark [start, end), merging adjacent intervals; the look-up is O(log n), the insertion at worst O(n)."""
        if start >= end:
            return
        spans = self.spans
        lo = bisect_left(spans, (start,))
        if lo and spans[lo - 1][1] >= start:
            lo -= 1
            start = spans[lo][0]
        hi = lo
        while hi < len(spans) and spans[hi][0] <= end:
            end = max(end, spans[hi][1])
            hi += 1
        spans[lo:hi] = [(start, end)]

    def truncate(self, end: int) -> None:
        """Unmark every byte from `end` on."""
        self.spans = [(s, min(e, end)) for s, e in self.spans if s < end]

    def add_view(self, geometry: Geometry) -> None:
        """Mark the bytes of a geometry's elements, without the gaps between them."""
        if not self.covers(geometry.start, geometry.end):
            for start, end in geometry.runs():
                self.add(start, end)

    def covers_view(self, geometry: Geometry) -> bool:
        """Whether the bytes of all elements of a geometry are marked; gaps need not be."""
        return self.covers(geometry.start, geometry.end) or all(
            self.covers(start, end) for start, end in geometry.runs()
        )

    def covers(self, start: int, end: int) -> bool:
        """Whether every byte of [start, end) is marked."""
        spans = self.spans
        if len(spans) == 1:
            return start >= end or (spans[0][0] <= start and end <= spans[0][1])
        at = bisect_left(spans, (start + 1,)) - 1
        return start >= end or (at >= 0 and spans[at][1] >= end)


def check_bounds(name: str, geometry: Geometry, nbytes: int, original: int, verb: str) -> None:
    """Raise unless every element of `geometry` lies inside a storage of `nbytes` bytes."""
    if geometry.end <= nbytes:
        return
    if nbytes == 0:
        raise EmptyStorageError(
            f"{verb} `{name}` ({geometry}), whose storage holds 0 bytes here and would need "
            f"{geometry.end}: grow it and write to it first"
        )
    raise OutOfBoundsError(
        f"{verb} `{name}` ({geometry}), which reaches to byte {geometry.end} of a storage that holds "
        f"{nbytes} bytes here (it held {original} on entry): grow it first, or look at what is left"
    )


def undefined_text(name: str, geometry: Geometry, nbytes: int) -> str:
    """The message of a read of bytes that were not written since the storage was grown to `nbytes`."""
    return (
        f"reads `{name}` ({geometry}), whose storage was grown to {nbytes} bytes and some of these "
        "bytes were not written since: write to all of them first"
    )


def check_overlap(name: str, geometry: Geometry) -> None:
    """Raise if several elements of a tensor that is written share one memory location."""
    if geometry.overlaps:
        raise OverlappingMutationError(
            f"writes `{name}` ({geometry}), in which several elements share one memory location: "
            "clone() it before writing"
        )


def check_order(name: str, written: Geometry, read: Geometry, copies: bool) -> None:
    """Raise if an op writes a tensor and reads another one on its storage whose elements share memory locations.

    What it reads then depends on the order in which it writes. Torch refuses other tensors that overlap, not these.
    copies: whether the op only copies. An element that is copied to itself, as well as to others, is the same before
    and after.
    """
    apart = written.end <= read.start or read.end <= written.start
    if apart or not (written.numel and read.numel):
        return
    pairs = list(zip(reversed(read.stride), reversed(written.stride), strict=False))
    if copies and all(mine in (0, theirs) for mine, theirs in pairs):
        return
    raise UnorderedMutationError(
        f"writes `{name}` ({written}) and reads an expanded view of it ({read}), whose elements may be written before "
        "they are read: clone() the view before"
    )
