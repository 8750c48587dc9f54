"""The `default` pipeline on the whole catalogue: a replay is bit for bit what eager does."""

from __future__ import annotations

import pytest

import functionalize as fz
import passes
from examples.compare import assert_bitwise_equal, run_eager, run_trace
from examples.programs import PROGRAMS


def traced(fn, *args):
    return passes.run(fz.trace(fn, *args), "default")


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)
def test_replay_is_eager(program):
    assert_bitwise_equal(run_trace(program, traced), run_eager(program), grads=False)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)
def test_second_run_changes_nothing(program):
    once = traced(program.fns[0], *program.make_args())
    twice = passes.run(once, "default")
    assert twice.history == (*once.history, "elide_copies: 0")
    assert twice.print_readable(False) == once.print_readable(False)
