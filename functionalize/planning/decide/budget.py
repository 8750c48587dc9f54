"""The least of an ordered list of measures that brings a peak under a budget.

    within([a, b, c, d], trial, budget)      tries [a, b, c, d], then [a, b], then [a, b, c], ... by halves

Measures are ordered, the best first; a trial takes a beginning of the list and tells its peak. If none of those tried
fits, the one with the lowest peak is the answer. Trials: logarithmic in the measures.
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
    """The trial of the shortest beginning found whose peak is at most `budget` bytes, else the lowest peak found."""
    low, high = 0, len(order)  # `low` measures are too few; `high` may be enough
    best = trial(order)
    while high - low > 1:
        middle = (low + high) // 2
        tried = trial(order[:middle])
        enough = tried.peak <= budget
        low, high = (low, middle) if enough else (middle, high)
        if enough or (best.peak > budget and tried.peak < best.peak):
            best = tried
    return best
