"""Which calls are audited."""

from __future__ import annotations

from typing import Any

import pytest

import functionalize as fz
from functionalize.audit.schedule import AuditSchedule


def due(option: Any, calls: int, is_pair: bool = False) -> list[int]:
    schedule = AuditSchedule.of(option)
    return [call for call in range(1, calls + 1) if schedule.is_due(call, is_pair)]


@pytest.mark.parametrize("option", ["auto", "raise", True])
def test_the_default_doubles_and_then_keeps_its_distance(option: Any) -> None:
    assert due(option, 9000) == [8, 17, 34, 67, 132, 261, 518, 1031, 2056, 4001, 8002]


@pytest.mark.parametrize("period", range(2, 17))
def test_no_short_period_hides_a_change(period: int) -> None:
    """A value that is as it was recorded in one of `period` calls only is seen with another value."""
    calls = due("auto", 16 * 4001)
    assert {call % period for call in calls} == set(range(period))


def test_audits_that_take_eight_replays_and_early_ones_thirteen_are_less_than_0_3_percent() -> None:
    calls, schedule = due("auto", 100_000), AuditSchedule.of("auto")
    thorough = [call for call in calls if schedule.is_thorough(call)]
    assert thorough == calls[:9]
    assert (len(calls) - 9) * (8 - 1) + 9 * (13 - 1) < 0.003 * 100_000
    assert all(map(AuditSchedule.of(3).is_thorough, due(3, 9000)))


def test_late_audits_of_a_forward_and_its_backward_are_half_as_frequent() -> None:
    calls = due("auto", 100_000, is_pair=True)
    assert calls[:11] == [8, 17, 34, 67, 132, 261, 518, 1031, 2056, 8009, 16018]
    assert (len(calls) - 9) * (14 - 1) + 9 * (16 - 1) < 0.003 * 100_000
    assert due(5, 16, is_pair=True) == [5, 10, 15]


def test_a_number_is_a_distance() -> None:
    assert due(1, 3) == [1, 2, 3]
    assert due(5, 16) == [5, 10, 15]


@pytest.mark.parametrize("option", [False, None])
def test_off(option: Any) -> None:
    assert due(option, 3000) == []


@pytest.mark.parametrize("option", [0, -1, 2.5, "always"])
def test_another_option_is_refused(option: Any) -> None:
    with pytest.raises(ValueError, match=r"audit is 'auto', 'raise', False, or a number n >= 1"):
        fz.capture(lambda x: x, audit=option)


def test_only_raise_raises() -> None:
    assert [AuditSchedule.of(o).raises for o in ("raise", "auto", 1)] == [True, False, False]
