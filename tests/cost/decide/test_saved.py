"""What forwards save, where their layers begin, what can be computed again, and the search under a budget."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

import functionalize as fz
from functionalize.cost.costs import seconds
from functionalize.cost.decide.budget import within
from functionalize.cost.decide.recompute import Layers, Recomputation
from functionalize.cost.decide.saved import forwards, saved_values
from functionalize.cost.liveness import Liveness
from functionalize.cost.machines.presets import MACHINES
from functionalize.passes import run
from functionalize.passes.remat import Remat
from tests.laws.counting import SLACK, calls

CPU = MACHINES["cpu"]


def blocks(depth: int, rows: int = 64, microbatches: int = 1):
    """The gradients of residual blocks, `depth` deep, summed over microbatches."""
    weights = [torch.empty(8, 8) for _ in range(2 * depth)]

    def gradients(x, *given):
        ws = [w.detach().requires_grad_() for w in given]
        for part in x.chunk(microbatches):
            for up, down in zip(ws[::2], ws[1::2], strict=True):
                part = part + F.gelu(part @ up) @ down
            part.pow(2).sum().backward()
        return [w.grad for w in ws]

    program = fz.functions.trace(gradients, torch.empty(rows, 8), *weights)
    program.describe()
    return program


def saved_of(program):
    live = Liveness(program.graph)
    regions = forwards(live)
    return live, regions, saved_values(live, regions)


def test_every_forward_saves_its_own():
    _, regions, saved = saved_of(blocks(2, microbatches=2))
    assert len(regions) == 2
    assert len(saved) % 2 == 0
    assert {s.region for s in saved} == {0, 1}
    for each in saved:
        region = regions[each.region]
        assert region.start <= each.storage.first <= each.last < region.end <= each.first_later
        assert set(each.read) <= set(each.storage.nodes)
    names = {n.name for s in saved for n in s.storage.nodes}
    assert {"gelu", "gelu_1"} <= names


def test_what_the_caller_is_handed_is_not_saved():
    def step(x, w):
        w = w.detach().requires_grad_()
        h = F.relu(x @ w)
        (grad,) = torch.autograd.grad(h.sum(), [w])
        return grad, h.detach()

    program = fz.functions.trace(step, torch.empty(8, 8), torch.empty(8, 8))
    program.describe()
    live, _, saved = saved_of(program)
    (output,) = program.graph.find_nodes(op="output")
    given = {s for node in output.all_input_nodes for s in live.of[node]}
    assert given
    assert not given & {s.storage for s in saved}


def test_a_graph_without_phases_has_no_forward():
    program = blocks(1)
    for node in program.graph.nodes:
        node.meta.pop("phase", None)
    assert saved_of(program)[1:] == ([], [])


def test_a_program_without_gathers_is_cut_where_few_values_cross():
    live, (region,), saved = saved_of(blocks(16))
    layers = Layers(live, region)
    assert 5 <= len(layers) <= 8
    crossing = [s for s in saved if layers.crosses(s.storage)]
    assert len(crossing) == len(layers.boundaries)
    assert [layers.of(place) for place in layers.boundaries] == list(range(1, len(layers)))


def test_a_small_forward_is_one_layer():
    live, (region,), _ = saved_of(blocks(1))
    assert len(Layers(live, region)) == 1


def test_a_trial_tells_the_peak_of_the_graph_after_it():
    program = blocks(8)
    plan = Recomputation(program.graph, CPU)
    assert plan.without([]).peak == plan.live.peak
    trial = plan.without(plan.candidates)
    again = trial.steps
    after = run(program, [Remat()])
    assert trial.copies == int(after.history[-1].rpartition(" ")[2])
    assert Liveness(after.graph).peak <= trial.peak < plan.live.peak
    before = sum(seconds(n, CPU) for n in program.graph.nodes)
    spent = sum(seconds(s.value.node, CPU) for s in again if s.value.copied)
    assert trial.seconds == spent > 0
    assert before < sum(seconds(n, CPU) for n in after.graph.nodes) <= before + spent + 1e-9


def test_prices_are_of_what_lies_between_saved_values():
    program = blocks(4)
    plan = Recomputation(program.graph, CPU)
    price = {s.storage.nodes[0].name: plan.price(s) for s in plan.candidates}
    mm, gelu = (next(n for n in program.graph.nodes if n.name == name) for name in ("mm", "gelu"))
    assert price["gelu"] == seconds(gelu, CPU)
    assert price["mm"] == seconds(mm, CPU)


def test_random_values_stay_saved_and_what_follows_need_not():
    def step(x, w):
        w = w.detach().requires_grad_()
        for _ in range(4):
            x = x + F.dropout(F.gelu(x @ w), 0.5)
        (grad,) = torch.autograd.grad(x.pow(2).sum(), [w])
        return grad

    program = fz.functions.trace(step, torch.empty(64, 8), torch.empty(8, 8))
    program.describe()
    plan = Recomputation(program.graph, CPU)
    names = {n.name for s in plan.candidates for n in s.storage.nodes}
    assert "mm" in names
    assert not {n for n in names if n.startswith(("bernoulli", "div"))}
    copied = {s.value.node.name for s in plan.without(plan.candidates).steps if s.value.copied}
    assert not {n for n in copied if n.startswith(("bernoulli", "div", "empty"))}


def test_planning_is_linear():
    def per_node(depth: int) -> float:
        program = blocks(depth, rows=4)

        def work() -> None:
            plan = Recomputation(program.graph, CPU)
            plan.without(plan.candidates)

        return calls(work) / len(program.graph.nodes)

    assert per_node(80) < SLACK * per_node(16)


# -- budgets ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tried:
    measures: tuple[int, ...]
    peak: int


def tried(measures) -> Tried:
    return Tried(tuple(measures), 100 - sum(measures))


def test_the_shortest_beginning_that_fits():
    order = [10, 9, 8, 7, 6, 5, 4]
    assert within(order, tried, 80).measures == (10, 9, 8)
    assert within(order, tried, 73).measures == (10, 9, 8)
    assert within(order, tried, 91).measures == (10,)


def test_the_lowest_peak_if_none_fits():
    assert within([10, 9, 8], tried, 5).measures == (10, 9, 8)
    worse_at_the_end = [10, 9, -30, -1]
    assert within(worse_at_the_end, tried, 5).measures == (10, 9)
