"""What is compared of the windows on one storage, and which of it holds for all sizes."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from functionalize.ir.ops import Geometry
from functionalize.lengths.relations import has_one_layout, layout_of, relations
from functionalize.templates.fitting import Formula

S0, S1 = Formula(0, ((1, (0,)),)), Formula(0, ((1, (1,)),))
SIZES = st.sampled_from([S0, S1, Formula(0, ((3, (0,)),)), *map(Formula, (1, 2, 4))])
NUMBERS = st.integers(2, 9)


def window(sizes: list[Formula], strides: list[Formula], now: tuple[int, int]) -> Geometry:
    """A window at some sizes of arguments."""
    size, stride = (tuple(f.value(now) for f in several) for several in (sizes, strides))
    return Geometry(size, stride, 0, torch.float32)


def times(one: Formula, other: Formula) -> Formula:
    """The product of two monomials."""
    (a, f), (b, g) = [each.terms[0] if each.terms else (each.constant, ()) for each in (one, other)]
    factors = tuple(sorted(f + g))
    return Formula(0, ((a * b, factors),)) if factors else Formula(a * b)


@st.composite
def without_gaps(draw: st.DrawFn) -> tuple[list[Formula], list[Formula]]:
    """Sizes and strides of a window, its dimensions in any order in memory."""
    sizes = draw(st.lists(SIZES, min_size=1, max_size=4))
    strides, expected = [Formula(1)] * len(sizes), Formula(1)
    for at in draw(st.permutations(range(len(sizes)))):
        strides[at], expected = expected, times(expected, sizes[at])
    return sizes, strides


@given(without_gaps(), st.lists(st.tuples(NUMBERS, NUMBERS), min_size=2, max_size=6))
def test_a_window_without_gaps_has_one_layout_at_all_sizes(
    formulas: tuple[list[Formula], list[Formula]], calls: list[tuple[int, int]]
) -> None:
    assert has_one_layout(*formulas)
    first, *others = [layout_of(window(*formulas, now)) for now in calls]
    assert all(each == first for each in others)


def test_a_window_with_gaps_or_that_overlaps_itself_is_looked_at_each_time() -> None:
    assert not has_one_layout([S0, S1], [Formula(8), Formula(1)])  # contiguous for s1 = 8 alone
    assert not has_one_layout([S0, S1], [Formula(0), Formula(1)])
    assert not has_one_layout([S0, S0], [Formula(1), Formula(1)])
    assert not has_one_layout([Formula(2, S0.terms)], [Formula(1)])  # a sum


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 4), max_size=3), st.integers(0, 5), st.data()), min_size=2
    )
)
def test_windows_are_ordered_by_their_first_and_last_bytes(several: list) -> None:
    windows = [
        Geometry(
            tuple(size), tuple(data.draw(st.integers(0, 6)) for _ in size), offset, torch.float64
        )
        for size, offset, data in several
    ]
    bounds = [bound for each in windows for bound in (each.start, each.end)]
    assert relations(windows)[2] == tuple(sorted(set(bounds)).index(each) for each in bounds)
