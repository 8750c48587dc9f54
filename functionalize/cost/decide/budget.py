"""Find the shortest prefix of an ordered list of measures that brings a peak under a budget.

    within([a, b, c, d], trial, budget)      tries [a, b, c, d], then [a, b], then [a, b, c], ... by halves

Measures are ordered, best first; a trial applies a prefix of the list and has a `peak`. If no trial fits, the one with
the lowest peak is returned. The number of trials is logarithmic in that of the measures (binary search).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar


class HasPeak(Protocol):
    """Anything with a peak in bytes."""

    @property
    def peak(self) -> int:
        """Bytes."""
        ...


M = TypeVar("M")
T = TypeVar("T", bound=HasPeak)


def within(order: Sequence[M], trial: Callable[[Sequence[M]], T], budget: int) -> T:
    """The trial of the shortest prefix found whose peak is at most `budget` bytes, else that of the lowest peak."""
    # `low` measures are too few; `high` is the shortest prefix that may be enough.
    low, high = 0, len(order)
    best = trial(order)
    while high - low > 1:
        middle = (low + high) // 2
        tried = trial(order[:middle])
        enough = tried.peak <= budget
        low, high = (low, middle) if enough else (middle, high)
        if enough or (best.peak > budget and tried.peak < best.peak):
            best = tried
    return best
