"""Rows are summed up by the keys that are asked for; a key that rows agree in stays."""

from __future__ import annotations

import pytest

from functionalize.planner.time.compute import Work, summed

ROWS = [
    Work("aten.mm", "forward", "a", 1, 10, 100),
    Work("aten.mm", "backward", "a", 2, 20, 200),
    Work("aten.add", "backward", "b", 3, 0, 300),
]


def test_rows_are_in_the_order_of_the_first() -> None:
    assert summed(ROWS, "op") == [Work("aten.mm", "", "a", 3, 30, 300), ROWS[2]]
    assert [row.phase for row in summed(ROWS, "phase")] == ["forward", "backward"]
    assert summed(ROWS, "op", "phase", "module") == ROWS


def test_one_row_for_everything() -> None:
    assert summed(ROWS) == [Work("", "", "", 6, 30, 600)]
    assert summed([]) == []


def test_keys_have_names() -> None:
    with pytest.raises(ValueError, match=r"no key `flops`; theirs are op, phase, module$"):
        summed(ROWS, "flops")
