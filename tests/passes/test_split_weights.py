"""`split_weights`: gradients of weights are computed late; sums keep their order, so every bit is eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import functionalize as fz
import passes
from functionalize.analysis.aliases import is_view
from functionalize.errors import PassError
from functionalize.ir.phases import in_backward
from functionalize.planning.timeline.liveness import Liveness
from functionalize.program.collective_order import sequences
from passes import SplitWeights
from tests.passes import experts
from tests.passes.helpers import count
from tests.ranks import run_on_ranks
from tests.steps import make_loss_step, make_step, program_of

aten = torch.ops.aten
MB = 2**20


class Tied(nn.Module):
    """A weight that is used twice, with others before, between and after."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.middle = (nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.middle(self.twice(self.first(x).tanh()).tanh()).tanh()
        return F.linear(y, self.twice.weight).tanh()


def layers() -> nn.Module:
    """Three layers."""
    return nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(8, 8, bias=False), nn.Tanh())))


def built(model: Callable[[], nn.Module]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    found = model()
    return found, torch.optim.SGD(found.parameters(), lr=0.1)


def recorded(model: Callable[[], nn.Module]) -> fz.Program:
    found = program_of(*built(model), torch.randn(4, 8))
    found.describe()
    return found


def split(program: fz.Program, budget_mb: float | None = None) -> tuple[int, fz.Program]:
    """The nodes that moved, and the program after it; a second run finds nothing."""
    after = passes.run(program, [SplitWeights(budget_mb)])
    again = passes.run(after, [SplitWeights(budget_mb)])
    assert count(again) == 0, again.history
    assert sequences(after.graph) == sequences(program.graph)
    return count(after), after


def products(program: fz.Program) -> str:
    """The products of the backward in their order: W for a weight's gradient, else B."""
    weights = {
        n for n in program.graph.nodes if any("weight" in p for p in n.meta.get("gradient_of", ()))
    }
    found = ""
    for n in program.graph.nodes:
        if n.target is aten.mm.default and in_backward(n):
            found += "W" if not weights.isdisjoint({n, *n.users}) else "B"
    return found


def held(program: fz.Program) -> int:
    """The most bytes that are live at a node because only W still reads them, by another count than the pass has."""
    live = Liveness(program.graph)
    weights = {n for n in live.nodes if any(m.meta.get("gradient_of") for m in (n, *n.users))}
    weights |= {n for n in live.nodes if n.users and set(n.users) <= weights and is_view(n)}
    worst = 0
    for at in range(len(live.nodes)):
        kept = [s for s in live.storages if s.first < at <= s.last]
        read = {
            s: {live.place[u] for n in s.nodes for u in n.users if u not in weights} for s in kept
        }
        worst = max(worst, sum(s.nbytes for s in kept if max(read[s], default=s.first) < at))
    return worst


# -- fires -----------------------------------------------------------------------------------------


def test_what_a_backward_passes_on_is_computed_first() -> None:
    before = recorded(layers)
    assert products(before) == "WBWBW"
    moved, after = split(before)
    assert moved > 0 and products(after) == "BBWWW"


def test_a_shared_weight_has_one_gradient_whose_sum_keeps_its_order() -> None:
    before = recorded(Tied)
    assert sorted(products(before)) == list("BBBWWWW") and "WB" in products(before)
    _, after = split(before)
    assert products(after) == "BBBWWWW"
    sums = [
        [(str(n), *map(str, n.args)) for n in p.graph.nodes if n.target is aten.add.Tensor]
        for p in (before, after)
    ]
    assert sorted(sums[0]) == sorted(sums[1])


@pytest.mark.parametrize("pipeline", ["split_weights", "default,split_weights"])
@pytest.mark.parametrize("model", [layers, Tied])
def test_a_step_keeps_every_bit(model: Callable[[], nn.Module], pipeline: str) -> None:
    (eager, first), (captured, second) = built(model), built(model)
    run = make_step(eager, first)
    step = fz.capture(make_step(captured, second), passes=pipeline, record_after=1)
    for i in range(6):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(i))
        assert torch.equal(run(x), step(x))
    assert step.stats.replays >= 3
    assert step.program is not None and count(step.program) > 0
    for mine, theirs in zip(captured.parameters(), eager.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_a_gradient_sinks_to_its_reduction() -> None:
    before = experts.program()
    moved, after = split(before)
    assert moved > 0
    place = {n.name: i for i, n in enumerate(after.graph.nodes)}
    first, last = (n.name for n in after.graph.nodes if "reduce_scatter" in n.name)
    of = {p: n.name for n in after.graph.nodes for p in n.meta.get("gradient_of", ())}
    assert place[of["model.1.dense.weight"]] < place[first] < place[of["model.0.dense.weight"]]
    # Those of experts are not reduced: they go to the end of the backward.
    assert place[of["model.1.moe.up.weight"]] > place[last]


# -- budgets ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [layers, Tied])
def test_a_budget_bounds_what_is_held(model: Callable[[], nn.Module]) -> None:
    before = recorded(model)
    high = held(split(before)[1])
    assert held(before) < high
    orders = []
    for budget in range(0, 2 * high + 1, 64):
        moved, after = split(before, budget / MB)
        assert moved == 0 or held(after) <= max(budget, held(before))
        orders.append(products(after))
    assert len(set(orders)) > 1
    assert orders[0] == products(before) and orders[-1] == products(split(before)[1])


def test_gradients_that_do_not_fit_stay() -> None:
    assert split(recorded(layers), 0.0)[0] == 0


# -- refuses ---------------------------------------------------------------------------------------


def test_what_leads_to_two_parameters_stays() -> None:
    """The sum of a bias is also what an earlier layer gets."""

    class Biases(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Parameter(torch.ones(4, 8)), nn.Parameter(torch.ones(4, 8))

        def forward(self, x: Tensor) -> Tensor:
            return ((x * self.one) + self.two).tanh()

    assert split(recorded(Biases))[0] == 0


def test_without_names_of_gradients_nothing_moves() -> None:
    def fn(x: Tensor, w: Tensor) -> Any:
        w = w.detach().requires_grad_()
        (grad,) = torch.autograd.grad((x @ w).tanh() @ w.sum(1), w, torch.ones(4))
        return grad

    assert split(fz.trace(fn, torch.ones(4, 8), torch.ones(8, 8)))[0] == 0


def test_it_stays_in_its_backward() -> None:
    """Gradients of a first microbatch are not computed in the forward of the second."""
    model, optimizer = built(layers)

    def loss_of(x: Tensor) -> Tensor:
        model(x).sum().backward()
        return model(x * 2).square().sum()

    step = fz.capture(make_loss_step(loss_of, optimizer))
    for _ in range(3):
        step(torch.randn(4, 8))
    assert step.program is not None
    step.program.describe()
    _, after = split(step.program)
    assert products(after) == "BBWWW" * 2
    phases = [n.meta["phase"] for n in after.graph.nodes if n.target is aten.mm.default]
    assert phases == [
        n.meta["phase"] for n in step.program.graph.nodes if n.target is aten.mm.default
    ]


def test_refuses_a_wrong_budget() -> None:
    with pytest.raises(PassError, match=r"^`split_weights`: a budget is 0 MiB or more, not -1$"):
        SplitWeights(-1)


def test_on_a_graph_module() -> None:
    gm = recorded(layers).graph_module
    assert passes.split_weights(gm) is gm


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("pipeline", ["split_weights", "default,split_weights{budget_mb=0.001}"])
def test_on_ranks(pipeline: str, checkpointed: bool) -> None:
    before = "default" if pipeline.startswith("default") else "verify"
    first, second = run_on_ranks(experts.trained, pipeline, checkpointed)
    assert first[0] == second[0] == [] and first[1] == second[1] >= 3
    assert first[2] != experts.trained_program(before, checkpointed)
