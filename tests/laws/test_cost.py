"""What an op of a capture costs, in calls that Python makes: recorded, and discharged.

The bounds are what it cost when they were written, the same on all tested releases of torch. A change that needs more
has to raise them and to say why. Times are measured by `benchmarks/capture.py`.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from functionalize.recorder import effects
from functionalize.recorder.builder import Builder
from functionalize.recorder.effects import CallWatch
from functionalize.recorder.recorder import Recorder
from functionalize.recorder.watched_recorder import WatchedRecorder
from functionalize.util.patching import Patches
from tests.laws.counting import calls

FEW, MANY = 10, 110
RECORDED, DISCHARGED = 157, 201  # calls of one round of three ops
WATCHED = 14  # events of a round that the profile function sees


def ops(rounds: int) -> None:
    """In each round a pure op, a view, and a write through the view."""
    x = torch.ones(4)
    for _ in range(rounds):
        torch.add(x, x, alpha=2).view(2, 2).mul_(3)


def recorded(rounds: int) -> Recorder:
    with Recorder(for_real=True) as recorder:
        ops(rounds)
    return recorder


def per_round(work: Callable[[int], Any]) -> float:
    """The calls for each round by which `MANY` exceeds `FEW`; without finalizers of earlier garbage."""
    work(FEW)  # caches by op are filled
    gc.collect()
    gc.disable()
    try:
        return (calls(lambda: work(MANY)) - calls(lambda: work(FEW))) / (MANY - FEW)
    finally:
        gc.enable()


def test_an_op_is_recorded_by_no_more_calls_than_before() -> None:
    assert per_round(recorded) <= RECORDED


@pytest.mark.skipif(not CallWatch.pauses, reason="a switch costs more than it saves")
def test_the_watch_sees_no_more_of_an_op_than_before() -> None:
    def watched(rounds: int) -> int:
        recorder, seen = WatchedRecorder(for_real=True), [0]
        profile = recorder._calls.profile

        def counting(*args: Any) -> None:
            seen[0] += 1
            profile(*args)

        recorder._calls.profile = counting
        with recorder:
            ops(rounds)
        assert sys.getprofile() is None
        return seen[0]

    watched(FEW)
    gc.collect()
    gc.disable()
    try:
        assert watched(MANY) - watched(FEW) <= WATCHED * (MANY - FEW)
    finally:
        gc.enable()


def test_the_watch_sees_no_patch_being_made() -> None:
    recorder, seen = WatchedRecorder(for_real=True), set()
    recorder._calls.profile = lambda frame, *_: seen.add(frame.f_code)
    with recorder:
        torch.ones(1)
    assert sys.getprofile() is None
    assert seen and not seen & {Patches._replace.__code__, Patches._restore.__code__}


def test_the_watch_raises_no_audit_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the code of a frame raises one, which takes longer than all else at a call of a function."""
    events: Counter[str] = Counter()

    class Events:
        def __contains__(self, event: str) -> bool:
            events[event] += 1
            return False

    def function() -> None:
        return None

    with WatchedRecorder(for_real=True):
        monkeypatch.setattr(effects, "_EVENTS", Events())
        for _ in range(MANY):
            function()
        found = dict(events)
    assert sum(found.values()) < MANY


def test_an_op_is_discharged_by_no_more_calls_than_before() -> None:
    recorders = {rounds: recorded(rounds) for rounds in (FEW, MANY)}
    assert per_round(lambda rounds: Builder(recorders[rounds]).discharge()) <= DISCHARGED
