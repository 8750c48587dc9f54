"""The `default` pipeline on the whole catalogue: a replay is bit for bit what eager does."""

from __future__ import annotations

import pytest

import functionalize as fz
from examples.compare import assert_bitwise_equal, run_eager, run_trace
from examples.programs import PROGRAMS
from functionalize import passes
from functionalize.errors import PassError
from functionalize.passes.base import INPLACE


def traced(fn, *args):
    return passes.run(fz.functions.trace(fn, *args), "default")


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)
def test_replay_is_eager(program):
    assert_bitwise_equal(run_trace(program, traced), run_eager(program), grads=False)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)
def test_second_run_changes_nothing(program):
    once = passes.run(fz.functions.trace(program.fns[0], *program.make_args()), "cleanup")
    twice = passes.run(once, "cleanup")
    again = twice.history[len(once.history) :]
    assert [each.partition(": ")[2] for each in again] == ["0"] * len(passes.parse("cleanup")), (
        again
    )
    assert twice.print_readable(False) == once.print_readable(False)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)
def test_in_place_or_not_a_second_run_of_the_end_changes_nothing(program):
    once = traced(program.fns[0], *program.make_args())
    if once.stage == INPLACE:
        with pytest.raises(
            PassError, match="accepts a program at stage FUNCTIONAL, this one is at INPLACE"
        ):
            passes.run(once, "default")
    twice = passes.run(once, "schedule_memory")
    assert twice.history == (*once.history, "schedule_memory: 0")
    assert twice.print_readable(False) == once.print_readable(False)
