"""Calls that take longer than the step itself: what `Pace` makes of their times, and a step that has such calls."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functionalize as fz
from functionalize.step import pace as pace_of_steps
from functionalize.step.pace import Pace


@pytest.fixture(autouse=True)
def _a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests have no such limit."""
    monkeypatch.setattr(pace_of_steps, "most_seconds", 1.0)


def called(pace: Pace, count: int, looked: float, acted: float, eager: float) -> list[int]:
    """The numbers of the calls that run eagerly."""
    found = []
    for number in range(count):
        if pace.asks and pace.runs_eagerly():
            found.append(number)
            pace.ran(eager)
        elif pace.is_timing:
            pace.looked(looked, acted)
        elif looked > acted / 2:  # as a step does
            pace.seconds += looked
            pace.is_timing = pace.asks = pace.seconds > pace.limit
    return found


def test_slow_calls_rest_twice_as_long_each_time():
    told: list[float] = []
    pace = Pace(told.append)
    eager = called(pace, 1500, looked=0.125, acted=0.125, eager=0.125)
    first = 9  # a second of guards
    timed = [first + 1, first + 3, first + 5, first + 7]
    assert eager[:4] == timed and eager[4 : 4 + 64] == [*range(first + 8, first + 72)]
    assert told == [2.0]
    asking = [i for i in range(1500) if i not in eager]
    assert len(asking) == 9 + 5 * 4  # rests of 64, 128, 256, 512, 1024


def test_calls_that_pay_are_timed_ever_more_rarely():
    told: list[float] = []
    pace = Pace(told.append)
    eager = called(pace, 1000, looked=0.125, acted=0.125, eager=0.5)
    assert len(eager) == 4 * 4 and not told  # after 1, 4, 16 and 64 seconds of guards
    assert not pace.why


def test_guards_that_take_little_are_never_timed():
    pace = Pace(lambda slower: None)
    assert called(pace, 5000, looked=0.4, acted=1.0, eager=0.1) == []


class Clock:
    """Each look at it takes its time."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.1
        return self.now


def losses(wrap: Callable[[Any], Any]) -> tuple[list[float], Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    called = wrap(step)
    return [called(torch.full((3, 4), i / 100)).item() for i in range(120)], called


def test_a_step_whose_replays_are_slower_runs_eagerly():
    def wrap(step: Any) -> Any:
        captured = fz.capture(step, audit=False)
        captured._pace.clock = Clock()
        return captured

    eager, _ = losses(lambda step: step)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found, step = losses(wrap)
    assert found == eager
    assert step.stats.eager > 64 and step.stats.replays < 50, step.stats
    texts = [str(each.message) for each in caught]
    assert [text for text in texts if "2.0 times as long where programs are asked" in text] == texts
    assert len(texts) == 1
    assert "the next call like the last one runs eagerly, as will" in step.explain()


def test_what_the_user_asks_for_is_not_timed():
    assert fz.capture(lambda x: x, allowance=None)._pace is None
    assert fz.capture(lambda x: x, backward=True)._pace is None
