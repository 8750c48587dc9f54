"""What torch and the engine compare of tensors on one storage, so that equal answers lead to equal decisions.

    relations([f32[4, 8], f32[8, 4]])      equal for f32[4, 12] and f32[12, 4] in their place
    relations([f32[4, 4], f32[4, 4]])      not equal to it: the two are one window now

Compared are, of each window: whether it is contiguous, dense, overlaps itself, which sizes are 0 or 1, the order of its
strides; of all: which windows are equal, and the order of their first and last bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from functionalize.ir.ops import Geometry


def relations(windows: Sequence[Geometry]) -> Any:
    """A value that is equal if all these comparisons are."""
    if len(windows) == 1:
        return _of_one(windows[0])
    bounds = [bound for window in windows for bound in (window.start, window.end)]
    return (
        tuple(map(_of_one, windows)),
        tuple(map(list(windows).index, windows)),
        _ranks(bounds),
    )


def _of_one(window: Geometry) -> Any:
    few = tuple([size if size < 2 else 2 for size in window.size])
    layout = (window.is_contiguous, window.is_dense, window.overlaps)
    return few, layout, _ranks(window.stride)


def _ranks(values: Sequence[int]) -> tuple[int, ...]:
    """For each value, how many different ones are smaller."""
    order = {value: rank for rank, value in enumerate(sorted(set(values)))}
    return tuple([order[value] for value in values])
