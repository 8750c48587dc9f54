"""Curves of efficiency from measured seconds.

    found = rates([Sample(size, work, seconds), ...], overhead)
    curve_of(found, max(rate for _, rate in found), "measured")

The peak is the largest rate of all samples after the overhead of a call, and a share is a rate by the peak. Where a
larger sample took less time than a smaller one, as noise has it, it counts as just as long: time never falls with size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from functionalize.cost.machines.efficiency import Curve


class Sample(NamedTuple):
    """A measurement. size: what the curve is looked up by. work: FLOPs or bytes, done in so many seconds."""

    size: float
    work: float
    seconds: float


def rates(samples: Sequence[Sample], overhead: float) -> list[tuple[float, float]]:
    """(size, work per second) of samples after the overhead of one call, by size; seconds per size never fall."""
    found: list[tuple[float, float]] = []
    least = 0.0
    for each in sorted(samples):
        seconds = max(each.seconds - overhead, each.seconds / 20)
        per_size = each.work / each.size
        least = max(least, seconds / per_size)  # of work that is equal to the size
        found.append((each.size, each.size / least))
    return found


def curve_of(found: Sequence[tuple[float, float]], peak: float, source: str) -> Curve:
    """The curve of (size, rate) pairs under a peak."""
    return Curve(tuple((size, min(rate / peak, 1.0)) for size, rate in found), source=source)
