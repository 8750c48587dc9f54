"""The cleanup passes together, on real FSDP2 steps: replays stay bit for bit eager's, and need no more memory."""

from __future__ import annotations

import pytest
import torch
from torch import fx

import functionalize as fz
import functionalize.passes.views as views
from examples.compare import assert_bitwise_equal, run_eager, run_trace
from examples.programs import PROGRAMS
from functionalize import passes
from functionalize.cost.liveness import Liveness
from functionalize.passes.graph_modules import program_of
from tests.fsdp import models, steps
from tests.fsdp.twins import compare_twins
from tests.ranks import run_on_ranks

aten = torch.ops.aten
CLEANUP = "remove_noops,elide_copies,fold_views,merge_duplicates,drop_dead_code"

ROWS = {
    "plain": (models.wrapped(), steps.plain),
    "kept": (models.wrapped(reshard_after_forward=False), steps.plain),
    "nested": (models.nested, steps.plain),
    "uneven": (models.wrapped(make=models.uneven), steps.clipped),
    "tied": (models.tied(True), steps.plain),
    "momentum": (models.wrapped(optimizer=models.momentum), steps.reading_parameters),
}


def _row(name: str) -> tuple[list[str], int, tuple[str, ...], list[int]]:
    """What differs from eager; replays; what each pass did; nodes and peak bytes before and after."""
    build, make_step = ROWS[name]
    verdict = compare_twins(build, make_step, steps.pairs(), passes=CLEANUP)
    step = fz.capture(make_step(*build()))
    for batch in steps.pairs(4):
        step(*batch)
    before = passes.run(step.program, [])
    after = passes.run(before, CLEANUP)
    numbers = [
        before.nodes(),
        after.nodes(),
        Liveness(before.graph).peak,
        Liveness(after.graph).peak,
    ]
    again = passes.run(after, CLEANUP).history[len(after.history) :]
    assert all(each.endswith(": 0") for each in again), again
    return verdict.differences, verdict.replays, after.history, numbers


def _tidied(fn, *args):
    return passes.run(fz.functions.trace(fn, *args), CLEANUP)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)
def test_replay_is_eager(program):
    assert_bitwise_equal(run_trace(program, _tidied), run_eager(program), grads=False)
    once = _tidied(program.fns[0], *program.make_args())
    twice = passes.run(once, CLEANUP)
    assert twice.print_readable(False) == once.print_readable(False)


def test_long_chains_of_views_are_walked_a_little_way(monkeypatch):
    """Whoever walks a chain to its beginning takes the square of its length."""
    graph = fx.Graph()
    view = graph.placeholder("x")
    for i in range(500):
        view = graph.call_function(aten.as_strided.default, (view, [2, 3], [1 + i % 2, 1], i % 3))
    graph.output((graph.call_function(aten.add.Tensor, (view, 1)),))
    gm = fx.GraphModule(torch.nn.Module(), graph)
    program = program_of(gm, [torch.randn(4, 4)])
    viewed, calls = views.viewed, []
    monkeypatch.setattr(views, "viewed", lambda node: calls.append(node) or viewed(node))
    for each in passes.parse("remove_noops,fold_views,merge_duplicates"):
        each.apply(program)
    assert len(calls) < 100 * 500


@pytest.mark.parametrize("name", ROWS)
def test_an_fsdp_step_replays_bit_for_bit(name):
    ranks = run_on_ranks(_row, name, world=2)
    for differences, replays, history, (nodes, fewer, peak, lower) in ranks:
        assert differences == [] and replays > 0
        assert fewer < nodes and lower <= peak, (history, nodes, fewer, peak, lower)
    assert ranks[0][2] == ranks[1][2]
