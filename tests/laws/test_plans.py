"""The plan of every call is the intended one: random streams of calls against a model of the policy, written here.

The model knows the words of `docs/capture/recording.md`: kinds of calls that come too seldom, answers that return, the
ledger, rests. It takes from the step only whether a call has looked at all guards, which takes time, and, of a step
that rests, whether a program could be asked without a look.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import functionalize as fz
from functionalize.step.captured_step import CapturedStep
from functionalize.step.plan import Plan, Record
from tests.ranks import run_on_ranks

EVERY = 6  # calls of a program from audit to audit
REPLAY, AUDIT, RECORD, EAGER = "Replay", "Audit", "Record", "Eager"


@dataclass(frozen=True)
class Case:
    """One call. rows: of the argument, its kind. number: what Python keeps, and a guard asks. fails: it raises."""

    rows: int
    number: int
    fails: bool = False


class World:
    """A step whose program depends on a number that Python keeps."""

    number = 0
    factors = (1.0, 2.0, 3.0, 4.0)

    def step(self, x: Tensor, fails: bool) -> Tensor:
        if fails:
            raise KeyError("no such batch")
        return x * self.factors[self.number]


@contextmanager
def acts_noted() -> Iterator[list[str]]:
    """A context that notes the plan of each call that has one."""
    found: list[str] = []
    act: Any = CapturedStep._act

    def noted(self: CapturedStep, plan: Plan, call: Any) -> Any:
        found.append(type(plan).__name__)
        return act(self, plan, call)

    CapturedStep._act = noted  # type: ignore[method-assign]
    try:
        yield found
    finally:
        CapturedStep._act = act  # type: ignore[method-assign]


# -- the model -------------------------------------------------------------------------------------


@dataclass
class Kind:
    """Calls with equal shapes and numbers of the arguments."""

    came: int = 0  # calls without a program
    waits: bool = False  # recorded, and no program replayed since
    programs: dict[int, int] = field(default_factory=dict)  # number -> calls of the program
    answers: Counter[int] = field(default_factory=Counter)  # numbers without a program
    recorded: Counter[int] = field(default_factory=Counter)  # of these, those that were recorded
    recorded_in_a_row: int = 0  # such calls since the last replay


class Model:
    """What a step with `dynamic=False` and `audit=EVERY` does."""

    def __init__(self) -> None:
        self.saved = 30.0  # eager steps
        self.kinds: dict[tuple[int, bool], Kind] = {}
        self.in_vain, self.rest, self.next_rest, self.was_of_use = 0, 0, 32, False

    def plan(self, case: Case, found: str, looked_slowly: bool) -> str:
        """The plan of a call. found: the one that the step had, of use in a rest alone."""
        kind = self.kinds.setdefault((case.rows, case.fails), Kind())
        self._earn(0.05)
        if self.rest:
            self.rest -= 1
            if not self.was_of_use:
                return EAGER
            if case.number in kind.programs and found != EAGER:
                return self._use(kind, case)
            if not kind.programs:
                self._is_rare(kind)
            return EAGER
        if case.number in kind.programs:
            return self._use(kind, case)
        can_pay = self.saved >= 11.8
        if not kind.programs:
            if self._is_rare(kind) or not can_pay:
                return EAGER
        else:
            self.saved -= 0.5 if looked_slowly else 0.04
            if not self._is_worth(kind, case.number):
                self._left_eager(looked_slowly)
                return EAGER
            if not can_pay:
                self._left_eager(looked_slowly)
                return EAGER
            kind.recorded[case.number] += 1
            kind.recorded_in_a_row += 1
        self.saved -= 4.5
        kind.waits = True
        if not case.fails:
            self.saved -= 2.5
            kind.programs[case.number] = 0
        return RECORD

    def _use(self, kind: Kind, case: Case) -> str:
        kind.programs[case.number] += 1
        kind.waits, kind.recorded_in_a_row = False, 0
        self.in_vain, self.next_rest, self.was_of_use, self.rest = 0, 32, True, 0
        if kind.programs[case.number] % EVERY == 0:
            return AUDIT
        self._earn(0.65)
        return REPLAY

    def _earn(self, steps: float) -> None:
        self.saved = min(self.saved + steps, 60.0)

    def _is_rare(self, kind: Kind) -> bool:
        waiting = sum(each.waits for each in self.kinds.values())
        kind.came += 1
        return waiting > 0 and kind.came < 2 << max(waiting - 2, 0)

    def _is_worth(self, kind: Kind, number: int) -> bool:
        kind.answers[number] += 1
        if kind.answers[number] == 1:
            return kind.recorded_in_a_row < 3
        vain = max(kind.recorded_in_a_row - 2, kind.recorded[number] - 2, 0)
        return kind.answers[number] > 1 << vain

    def _left_eager(self, looked_slowly: bool) -> None:
        self.in_vain += 8 if looked_slowly else 1
        if self.in_vain >= 32:
            self.in_vain, self.rest, self.next_rest = 31, self.next_rest, 2 * self.next_rest


# -- one rank --------------------------------------------------------------------------------------


def check(stream: list[Case]) -> Counter[str]:
    """Compare the plans of a stream of calls, and its results; returns how many plans there were of each kind."""
    world, eager, model, found = World(), World(), Model(), Counter[str]()
    step = fz.capture(world.step, dynamic=False, audit=EVERY)
    with acts_noted() as plans, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i, case in enumerate(stream):
            x = torch.full((case.rows, 2), float(i))
            world.number = eager.number = case.number
            plans.clear()
            if case.fails:
                with pytest.raises(KeyError):
                    step(x, True)
            else:
                assert torch.equal(step(x, False), eager.step(x, False)), (i, stream)
            plan = plans[0] if plans else EAGER  # it rests
            expected = model.plan(case, plan, step.core.cache.looked_slowly)
            assert plan == expected, (i, case, plan, expected, stream[: i + 1], step.explain())
            found[plan] += 1
    return found


cases = st.builds(Case, st.integers(2, 4), st.integers(0, 3), st.sampled_from([False] * 4 + [True]))
streams = st.lists(
    st.tuples(st.lists(cases, min_size=1, max_size=4), st.integers(1, 10)), min_size=1, max_size=8
)


@settings(max_examples=30, deadline=None)
@given(streams)
def test_any_stream_of_calls(parts: list[tuple[list[Case], int]]) -> None:
    check([case for cycle, times in parts for _ in range(times) for case in cycle])


def test_a_long_stream_has_plans_of_all_kinds() -> None:
    blocks = [
        Case(2, 0),
        Case(3, 0),
        Case(2, 1),
        Case(3, 2),
        Case(2, 0),
        Case(4, 3, True),
        Case(3, 0),
    ]
    tail = [Case(2, i % 4) for i in range(40)]
    found = check([case for case in blocks for _ in range(14)] + tail)
    assert all(found[kind] for kind in (REPLAY, AUDIT, RECORD, EAGER)), found


def test_numbers_that_run_end_in_rests() -> None:
    found = check([Case(2, 0)] + [Case(3, i % 4) for i in range(90)])
    assert found[REPLAY] and found[RECORD], found


# -- two ranks -------------------------------------------------------------------------------------


class Shared:
    """A step that reads a number of all ranks in its middle, so that they vote."""

    number = 0

    def step(self, x: Tensor) -> Tensor:
        total = x.sum().reshape(1)
        dist.all_reduce(total)
        scale = 2.0 if total.item() > 0 else 3.0
        return x * scale * World.factors[self.number] + total


def on_a_rank(stream: list[tuple[tuple[int, int, int], tuple[int, int, int]]]) -> list[str]:
    """The plans of one rank. stream: for each call and rank (rows, number, sign of the argument)."""
    world, eager, found = Shared(), Shared(), []
    step = fz.capture(world.step, dynamic=False, audit=EVERY)
    with acts_noted() as plans, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i, each in enumerate(stream):
            rows, number, sign = each[dist.get_rank()]
            x = torch.full((rows, 2), float(sign * (i + 1)))
            world.number = eager.number = number
            for _ in range(
                5
            ):  # until it is kept: a thread of gloo may hold a tensor when a recording has ended
                plans.clear()
                assert torch.equal(step(x), eager.step(x)), i
                last: Any = step._last_plan
                if last.kind is not Record or last.is_kept:
                    break
            then = "" if last.kind.__name__ == plans[0] else f", then {last.kind.__name__}"
            found.append(plans[0] + then)
    return found


SAME = ((2, 0, 1), (2, 0, 1))
OTHER_NUMBER, OTHER_LENGTH = ((2, 0, 1), (2, 1, 1)), ((2, 0, 1), (3, 0, 1))
NEGATIVE = ((2, 0, -1), (2, 0, -1))
FIRST = [RECORD, REPLAY, REPLAY, REPLAY, REPLAY]
STREAMS = {
    "all alike": ([SAME] * 14, [*FIRST, REPLAY, AUDIT, *[REPLAY] * 5, AUDIT, REPLAY]),
    # One rank that must record lets all of them record.
    "one has another number": (
        [*[SAME] * 5, OTHER_NUMBER, *[SAME] * 3],
        [*FIRST, RECORD, REPLAY, AUDIT, REPLAY],
    ),
    "one has another length": (
        [*[SAME] * 5, OTHER_LENGTH, OTHER_LENGTH, SAME],
        [*FIRST, RECORD, REPLAY, REPLAY],
    ),
    # The number is known when the graph has run: then all record, and later all replay the other program.
    "all branch otherwise": (
        [*[SAME] * 5, NEGATIVE, *[SAME, NEGATIVE] * 3],
        [*FIRST, "Replay, then Record", REPLAY, AUDIT, *[REPLAY] * 4],
    ),
}


@pytest.mark.parametrize("name", STREAMS)
def test_all_ranks_have_the_intended_plan(name: str) -> None:
    stream, expected = STREAMS[name]
    assert run_on_ranks(on_a_rank, stream, world=2) == [expected, expected]
