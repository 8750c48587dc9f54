"""What a layer saves and recomputes: the solver's choices against all choices there are, and the recorded layer."""

from __future__ import annotations

import itertools
import os
import sys
from collections import Counter

import pytest
import scipy.optimize
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import functionalize as fz
from functionalize.cost.machines.presets import MACHINES
from functionalize.errors import TuneError
from functionalize.planner.tuning.applied import recompute, saving
from functionalize.planner.tuning.choices import frontier
from functionalize.planner.tuning.compose import Option, options, solved
from functionalize.planner.tuning.pieces import LayerPiece, PieceOp, recording
from functionalize.planner.tuning.policy import LayerPolicy
from functionalize.planner.tuning.solver import LinearRow, solve


def op(call: int, seconds: float, nbytes: int, random: bool = False, fixed: bool = False):
    return PieceOp("aten.mm.default", call, seconds, nbytes, random, fixed)


def subsets(ops):
    return itertools.chain.from_iterable(
        itertools.combinations(ops, count) for count in range(len(ops) + 1)
    )


def test_the_choices_are_the_best_of_all_subsets() -> None:
    costs = ((3.0, 40_000), (2.0, 30_000), (2.5, 20_000), (0.5, 25_000), (1.0, 10_000))
    ops = tuple(op(i, seconds, nbytes) for i, (seconds, nbytes) in enumerate(costs))
    found = frontier(LayerPiece(ops, 130_000, 0, True))
    assert found[0].saved is None and found[-1].saved == ()
    assert [c.nbytes for c in found] == sorted((c.nbytes for c in found), reverse=True)
    for choice in found[1:-1]:
        within = [each for each in subsets(ops) if sum(o.nbytes for o in each) <= choice.nbytes]
        best = max(sum(o.seconds for o in each) for each in within)
        assert choice.seconds == pytest.approx(9.0 - best)
    assert len(found) > 10


def test_random_ops_are_saved_together_and_ops_that_are_written_never() -> None:
    ops = (op(0, 1, 10, random=True), op(1, 1, 10, random=True), op(2, 9, 1, fixed=True))
    found = frontier(LayerPiece(ops, 100, 0, True))
    assert {c.saved for c in found[1:]} == {(("aten.mm.default", (0, 1)),), ()}
    ops = (op(0, 1, 10, random=True), op(1, 1, 10, random=True, fixed=True))
    assert {c.saved for c in frontier(LayerPiece(ops, 100, 0, True))} == {None, ()}


def test_layers_take_the_best_options_within_a_budget() -> None:
    none, full = LayerPolicy(None), LayerPolicy(())
    some = LayerPolicy((("aten.mm.default", (0,)),))
    each = [Option(none, 10, 0, 0, 0), Option(some, 4, 2, 2, 0), Option(full, 0, 5, 5, 0)]
    for budget in range(0, 31, 3):
        found = solved([each], [3], budget, 0)
        assert found is not None and found.peak(0, 0) <= budget
        best = min(
            sum(o.seconds for o in chosen)
            for chosen in itertools.product(each, repeat=3)
            if sum(o.nbytes for o in chosen) <= budget
        )
        assert found.seconds == best
        assert [o.nbytes for o in found.runs[0][:-1]] == sorted(
            o.nbytes for o in found.runs[0][:-1]
        )
    assert solved([each], [3], -1, 0) is None
    beside = solved([each], [3], 20, 13)  # 7 for the first two, beside which the last holds nothing
    assert beside is not None and beside.runs[0][-1].policy == none and beside.seconds == 7


def test_options_that_are_bettered_in_both_are_left_out() -> None:
    piece = LayerPiece((op(0, 1.0, 100), op(1, 2.0, 100)), 250, 0, True)
    found = options(frontier(piece), {True: (0.0, 0.0), 8: (10.0, 0.5)}, hidden=0.0)
    assert all(o.policy.reshard is True for o in found)
    assert [o.seconds for o in found] == sorted((o.seconds for o in found), reverse=True)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.dropout(torch.relu(self.up(x)), 0.5, self.training))


def test_a_recorded_layer() -> None:
    layer = Layer()
    with fz.world(1, target="cpu"):
        fake = Layer()
        x = torch.randn(4, 8, requires_grad=True)
        with recording({"layer": fake}, MACHINES["cpu"]) as pieces:
            fake(x * 2).sum().backward()
    assert "forward" not in vars(fake)
    piece = pieces["layer"]
    made = [(o.name, o.call) for o in piece.ops]
    assert ("aten.addmm.default", 0) in made and ("aten.relu.default", 0) in made
    assert made.index(("aten.addmm.default", 0)) < made.index(("aten.addmm.default", 1))
    # The last product and the sum are never run again: nothing is saved after them.
    assert [o.seconds for o in piece.ops if o.call == 1 or o.name == "aten.add.Tensor"] == [0, 0]
    seen = []

    def contexts():
        first, second = saving({})
        run = type(first).__torch_dispatch__

        class Seen(type(first)):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                seen.append(str(func))
                return run(self, func, types, args, kwargs)

        first.__class__ = Seen
        return first, second

    checkpoint(
        layer, torch.randn(4, 8, requires_grad=True), use_reentrant=False, context_fn=contexts
    )
    assert [name for name, _ in made] == [name for name in seen if name in dict(made)]
    assert piece.saved >= 4 * 32 * 4 * 2 and piece.selective


def test_a_policy_changes_no_gradient() -> None:
    torch.manual_seed(1)
    layer, x = Layer(), torch.randn(4, 8)
    grads = []
    for saved in (None, {}, {"aten.addmm.default": {0}, "aten.relu.default": {0}}):
        layer.zero_grad()
        vars(layer).pop("forward", None)
        if saved is not None:
            recompute(layer, saved)
        torch.manual_seed(2)
        layer(x).sum().backward()
        grads.append([p.grad.clone() for p in layer.parameters()])
    for other in grads[1:]:
        assert all(map(torch.equal, grads[0], other))


def test_ops_are_saved_by_the_number_of_their_call() -> None:
    layer, x = Layer(), torch.randn(4, 8)
    again = []
    for saved in ({}, {"aten.addmm.default": {0}}, {"aten.addmm.default": {1}}):
        vars(layer).pop("forward", None)
        recompute(layer, saved)
        loss = layer(x).sum()
        counts: Counter[str] = Counter()

        class Counting(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None, counts=counts):
                counts[str(func)] += 1
                return func(*args, **(kwargs or {}))

        with Counting():
            loss.backward()
        again.append(counts["aten.addmm.default"])
    assert again == [1, 0, 1]


def test_the_solver_is_refused_by_name_if_it_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(TuneError, match=r'pip install "functionalize\[tune\]"'):
        solve([1.0], [LinearRow([1.0], 0, 1)], [1])


def test_a_solver_that_finds_nothing_in_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("functionalize.planner.tuning.solver._SECONDS", 0.0)
    with pytest.raises(TuneError, match="the solver found nothing: Time limit reached"):
        solve([-1.0, -2.0, -3.0], [LinearRow([3, 5, 7], 0, 11)], [9, 9, 9])


def test_the_solver_prints_nothing(capfd, monkeypatch: pytest.MonkeyPatch) -> None:
    """HiGHS says on descriptor 1 what it does about a solution that is off by rounding."""

    def loud(*_: object, **__: object) -> object:
        os.write(1, b"HighsMipSolverData::transformNewIntegerFeasibleSolution\nof another thread\n")
        return scipy.optimize.OptimizeResult(status=0, x=[1.0], mip_gap=0.0)

    monkeypatch.setattr(scipy.optimize, "milp", loud)
    assert solve([1.0], [LinearRow([1.0], 0, 1)], [1]) is not None
    assert capfd.readouterr().out == "of another thread\n"
