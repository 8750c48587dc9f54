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
from functionalize.templates.fitting import Factors, Formula

_ONE: tuple[int, Factors] = (1, ())  # as a product


def relations(windows: Sequence[Geometry], layouts: Sequence[Any] = ()) -> Any:
    """A value that is equal if all these comparisons are. layouts: of each window, if they are known."""
    layouts = layouts or list(map(layout_of, windows))
    if len(windows) == 1:
        return layouts[0]
    bounds = [bound for window in windows for bound in (window.start, window.end)]
    return tuple(layouts), tuple(map(list(windows).index, windows)), _ranks(bounds)


def has_one_layout(sizes: Sequence[Formula], strides: Sequence[Formula]) -> bool:
    """Whether `layout_of` is equal for all sizes of arguments, none of which is 0 or 1.

    That is known of a window without gaps, in any order of its dimensions.
    """
    left = [(_product(stride), _product(size)) for size, stride in zip(sizes, strides, strict=True)]
    expected: tuple[int, Factors] = _ONE
    while left:
        inner = [each for each in left if each[0] == expected]
        found = next((each for each in inner if each[1] == _ONE), inner[0] if inner else None)
        if found is None or found[1] is None or found[1][0] < 1:
            return False
        left.remove(found)
        coefficient, factors = found[1]
        expected = expected[0] * coefficient, tuple(sorted(expected[1] + factors))
    return True


def layout_of(window: Geometry) -> Any:
    """What is compared of one window."""
    few = tuple([size if size < 2 else 2 for size in window.size])
    layout = (window.is_contiguous, window.is_dense, window.overlaps)
    return few, layout, _ranks(window.stride)


def _ranks(values: Sequence[int]) -> tuple[int, ...]:
    """For each value, how many different ones are smaller."""
    order = {value: rank for rank, value in enumerate(sorted(set(values)))}
    return tuple([order[value] for value in values])


def _product(formula: Formula) -> tuple[int, Factors] | None:
    """A coefficient and the sizes that it is multiplied by; None: the function is not of that form."""
    if formula.operator or len(formula.terms) + bool(formula.constant) > 1:
        return None
    return formula.terms[0] if formula.terms else (formula.constant, ())
