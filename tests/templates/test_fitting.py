"""Integers as functions of sizes: each form, what is ambiguous, what has none."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from functionalize.templates.fitting import Formula, Sizes, evaluator, fit, line

ONE = [(8,), (12,), (20,), (33,), (47,)]
OF_ONE_REST = [(8,), (16,), (24,), (64,), (96,)]
IMAGES = [(2, 32, 64), (3, 64, 32), (2, 96, 96), (5, 64, 128), (7, 32, 96)]
TWO = [(2, 8), (3, 8), (2, 12), (5, 20), (7, 9)]


@pytest.mark.parametrize(
    ("sizes", "function", "text"),
    [
        (ONE, lambda s: 7, "7"),
        (ONE, lambda s: 32 * s, "32*s0"),
        (ONE, lambda s: s * s, "s0*s0"),
        (ONE, lambda s: 2 * s - 1, "2*s0 - 1"),
        (ONE, lambda s: 3 * s * s + 5, "3*s0*s0 + 5"),
        (ONE, lambda s: s * s - 3 * s + 2, "-3*s0 + s0*s0 + 2"),
        (ONE, lambda s: (s + 1) // 2, "(s0 + 1)//2"),
        (ONE, lambda s: s // 4, "s0//4"),
        (ONE, lambda s: 12 * ((s - 3) // 2) + 5, "12*((s0 - 3)//2) + 5"),
        (ONE, lambda s: s % 5, "s0%5"),
        (ONE, lambda s: -s % 8, None),  # also (-s0 + 8)%8 is the same: told by its value below
        (TWO, lambda b, s: 4 * b * s, "4*s0*s1"),
        (TWO, lambda b, s: b + s + 1, "s0 + s1 + 1"),
    ],
)
def test_a_function_is_found(sizes: Any, function: Any, text: str | None) -> None:
    found = fit(sizes, [function(*s) for s in sizes])
    assert found is not None
    assert text is None or str(found) == text
    for more in [(64,), (65,), (96,)] if sizes is ONE else [(4, 30), (9, 11)]:
        assert found.value(more) == function(*more)
        assert evaluator([found, found], len(more))(*more) == (function(*more),) * 2


@pytest.mark.parametrize(
    ("sizes", "function", "text", "other"),
    [
        (IMAGES, lambda b, h, w: 3 * b * h * w, "3*s0*s1*s2", (4, 33, 21)),
        (IMAGES, lambda b, h, w: b * h * w + 1, "s0*s1*s2 + 1", (4, 33, 21)),
        (IMAGES, lambda b, h, w: b * h * w // 256, "s0*s1*s2//256", (4, 160, 96)),
        (IMAGES, lambda b, h, w: h * 3 // 32, "3*s1//32", (4, 160, 96)),
        (OF_ONE_REST, lambda n: n // 4 + 3, "(s0 + 12)//4", (40,)),
        (OF_ONE_REST, lambda n: (n - 1) // 2 + 1, "s0//2", (40,)),  # of even ones
        (OF_ONE_REST, lambda n: n * n // 64, "s0*s0//64", (40,)),
    ],
)
def test_sizes_that_all_leave_one_remainder(
    sizes: Any, function: Any, text: str, other: tuple[int, ...]
) -> None:
    found = fit(sizes, [function(*s) for s in sizes])
    assert str(found) == text
    assert found is not None and found.value(other) == function(*other)
    assert found.rest(other) == found.rest(sizes[0])
    assert evaluator([found], len(other))(*other) == (function(*other),)


@given(
    st.lists(st.integers(2, 200), min_size=5, max_size=5, unique=True),
    st.integers(-50, 50),
    st.integers(1, 64),
    st.integers(2, 400),
)
def test_affine_functions_are_found_from_any_lengths(
    lengths: list[int], a: int, c: int, other: int
) -> None:
    found = fit([(s,) for s in lengths], [a + c * s for s in lengths])
    assert found is not None and found.value((other,)) == a + c * other


def test_too_few_recordings_determine_nothing() -> None:
    assert fit([(8,), (12,)], [17, 25]) is None  # a line through two points is no evidence
    assert str(fit([(8,), (12,)], [16, 24])) == "2*s0"
    assert fit([(8,), (12,), (20,)], [65, 145, 401]) == Formula(1, ((1, (0, 0)),))
    assert fit([(8,), (12,), (20,)], [66, 146, 403]) is None


def test_of_many_recordings_the_smallest_divisor_counts() -> None:
    lengths = [22, 19, 24, 18, 20, 23]  # (4*s0 - 9)//7, too
    assert str(fit([(s,) for s in lengths], [s // 2 for s in lengths])) == "s0//2"
    assert fit([(s,) for s in lengths[:5]], [s // 2 for s in lengths[:5]]) is None


def test_what_several_functions_give_is_not_guessed() -> None:
    assert fit([(8,), (12,), (20,), (32,)], [5, 7, 11, 17]) is None  # (s0 + 2)//2 or (s0 + 3)//2
    assert fit([(8,), (12,), (20,), (32,)], [1, 1, 2, 4]) is None  # by 7, 8 or 9, and so on
    assert fit([(2, 4), (3, 6), (5, 10)], [4, 6, 10]) is None  # 2*s0 or s1


def test_four_recordings_of_one_remainder_wait_for_another_one() -> None:
    assert fit(OF_ONE_REST[:4], [n // 4 + 3 for (n,) in OF_ONE_REST[:4]]) is None


def test_no_function() -> None:
    assert fit([(8 * n,) for n in range(1, 6)], [1, 1, 1, 1, 2]) is None
    assert fit([(s,) for s in (8, 12, 20, 33)], [8, 12, 20, 20]) is None  # min(s, 20)
    assert fit([(s,) for s in (8, 12, 20, 33)], [1, 2, 1, 2]) is None


MANY = [tuple(random.Random(i).sample(range(2, 90), 7)) for i in range(6)]


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda s: 3 * s[5] + 2, "3*s5 + 2"),
        (lambda s: 9 - 2 * s[4], "-2*s4 + 9"),
        (lambda s: 4 * (s[1] + s[2] + s[3]), "4*s1 + 4*s2 + 4*s3"),
        (lambda s: s[0] * s[6] - 1, "s0*s6 - 1"),
        (lambda s: 12, "12"),
    ],
)
def test_functions_of_many_sizes(function: Callable[[Sizes], int], text: str) -> None:
    assert str(fit(MANY, list(map(function, MANY)))) == text


def test_of_many_sizes_that_vary_alike_none_is_chosen() -> None:
    alike = [(*sizes, sizes[3] + 1) for sizes in MANY]
    assert fit(alike, [sizes[3] for sizes in alike]) is None
    assert fit(MANY, [sizes[3] // 2 for sizes in MANY]) is None


def test_of_very_many_sizes_multiples_of_one_are_found() -> None:
    sizes = [tuple(random.Random(i).choices(range(2, 900), k=2000)) for i in range(9)]
    assert str(fit(sizes, [5 * each[1234] + 1 for each in sizes])) == "5*s1234 + 1"
    assert fit(sizes, [each[4] + each[5] for each in sizes]) is None


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((3, 3), "3"),
        ((16, 24), "2*s0"),
        ((64, 144), "s0*s0"),
        ((1024, 3456), "2*s0*s0*s0"),
        ((17, 25), "2*s0 + 1"),
        ((-8, -12), "-1*s0"),
        ((20, 16), "-1*s0 + 28"),
        ((4, 6), None),
    ],
    ids=str,
)
def test_two_recordings_give_a_multiple_or_a_line(
    values: tuple[int, int], expected: str | None
) -> None:
    found = line([(8,), (12,)], values)
    assert (found and str(found)) == expected
    assert line([(8,), (8,)], (1, 2)) is None
