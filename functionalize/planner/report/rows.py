"""A schedule as rows of rectangles, one row per stream, and its exposed communication.

    rows_of(spans)              {'compute': [...], 'all-gather 0': [...]}, each in order of time
    exposed(spans)              the intervals in which communication runs and compute is idle
    rectangles(row, width)      spans of one phase with less than `width` seconds between them, merged

Invariant: rectangles cover every span of the row, and are at most two per `width` of time. Linear after sorting.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from functionalize.planner.report.spans import Span

COMPUTE = "compute"
Interval = tuple[float, float]


class Rectangle(NamedTuple):
    """Merged spans of one phase, drawn as one rectangle."""

    phase: str
    start: float
    end: float


def rows_of(spans: Iterable[Span]) -> dict[str, list[Span]]:
    """The spans of each stream in order of time; compute first, then by name."""
    rows: dict[str, list[Span]] = {}
    for span in spans:
        rows.setdefault(span.stream, []).append(span)
    names = sorted(rows, key=lambda name: (name != COMPUTE, name))
    return {name: sorted(rows[name], key=lambda span: span.start) for name in names}


def rectangles(row: Sequence[Span], width: float) -> list[Rectangle]:
    """The rectangles of a row. Adjacent spans shorter than `width` are merged, whatever their phases."""
    found: list[Rectangle] = []
    for span in row:
        last = found[-1] if found else None
        if (
            last is not None
            and span.start - last.end < width
            and (span.phase == last.phase or span.end - last.start < width)
        ):
            found[-1] = last._replace(end=max(last.end, span.end))
        else:
            found.append(Rectangle(span.phase, span.start, span.end))
    return found


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of intervals as disjoint intervals in order, without empty ones."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def exposed(spans: Iterable[Span]) -> list[Interval]:
    """The intervals in which communication runs and compute is idle."""
    spans = list(spans)
    busy = merged((s.start, s.end) for s in spans if s.stream == COMPUTE)
    found: list[Interval] = []
    i = 0
    for start, end in merged((s.start, s.end) for s in spans if s.stream != COMPUTE):
        while i < len(busy) and busy[i][1] <= start:
            i += 1
        j = i
        while j < len(busy) and busy[j][0] < end:
            if busy[j][0] > start:
                found.append((start, busy[j][0]))
            start = max(start, busy[j][1])
            j += 1
        i = max(i, j - 1)
        if start < end:
            found.append((start, end))
    return found


def total(intervals: Iterable[Interval]) -> float:
    """The total length of disjoint intervals, in seconds."""
    return sum(end - start for start, end in intervals)
