"""The sizes of one replay: what fits, what is put in the place of what does not, and what the guard says."""

from __future__ import annotations

import torch

from functionalize.late_sizes.late_instances import Admission, LateSizeGuard, SizedOp
from functionalize.templates.fitting import Formula, Sizes

LENGTH, COUNT = Formula(0, ((1, (0,)),)), Formula(0, ((1, (1,)),))
OPS = (
    SizedOp("`count`", (), lambda length, count: (), COUNT, 1),
    SizedOp("`index`", (2,), lambda length, count: (count, 3)),
    SizedOp("`again`", (), lambda length, count: (), COUNT),
)


class Known:
    """Sizes from 4 to 9; not more than half of the length."""

    def why_refused(self, symbol: int, size: int) -> str | None:
        return None if 4 <= size <= 9 else "is not between compared ones, 4 and 9"

    def compared_size(self, symbol: int, arguments: Sizes) -> int:
        return 5

    def why_not(self, sizes: Sizes) -> str | None:
        return "more than half" if 2 * sizes[1] > sizes[0] else None


def admission(length: int = 20) -> Admission:
    return Admission(OPS, Known(), (length,), 2)


def test_a_size_that_fits_is_the_one_that_was_counted() -> None:
    found, rows = admission(), torch.ones(6, 3)
    assert found.define(0, 6) == 6
    assert found.admit(1, rows) is rows
    assert found.admit(2, 6) == 6
    assert found.fits and found.failure() is None


def test_a_size_that_does_not_fit_is_replaced_and_so_is_the_result() -> None:
    found, rows = admission(), torch.arange(6.0).view(2, 3)
    assert found.define(0, 2) == 5
    assert torch.equal(found.admit(1, rows), rows[[0, 1, 0, 1, 0]])
    assert not found.fits
    assert found.failure() == (
        "the result of `count`: its size 2 is not between compared ones, 4 and 9"
    )
    found.begin()
    assert found.fits and found.define(0, 4) == 4


def test_a_result_without_elements_is_replaced_by_zeros() -> None:
    found = admission()
    found.define(0, 0)
    assert torch.equal(found.admit(1, torch.ones(0, 3)), torch.zeros(5, 3))


def test_several_results_are_replaced_each_by_itself() -> None:
    ops = (OPS[0], SizedOp("`unique`", (1, 1), lambda length, count: (count, length)))
    found = Admission(ops, Known(), (3,), 2)
    found.define(0, 12)
    values, inverse = torch.arange(12), torch.arange(3)
    first, second = found.admit(1, (values, inverse))
    assert torch.equal(first, values[:5]) and second is inverse


def test_another_size_than_expected_fails() -> None:
    found = admission()
    found.define(0, 6)
    assert found.admit(1, torch.ones(7, 3)).shape == (6, 3)
    assert found.failure() == ("the result of `index`: its size is [(7, 3)], expected was [(6, 3)]")
    found.begin()
    found.define(0, 6)
    found.admit(2, 7)
    assert found.failure() == "the result of `again`: it is 7, expected was another size"


def test_the_last_guard_asks_for_all_sizes_together() -> None:
    found = admission(length=10)
    found.define(0, 6)
    first, last = (LateSizeGuard(0, "at step.py:1", found, is_last) for is_last in (False, True))
    assert first.failure_of({}) is None
    assert last.failure_of({}) == "more than half"
    assert (last.what, last.value) == ("the size of a result", "any size that fits")
