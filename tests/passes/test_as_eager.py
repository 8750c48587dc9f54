"""The memory of a graph as eager runs it, which `reshard` compares with, and passes get to."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

import functionalize as fz
from functionalize import passes
from functionalize.cost.liveness import Liveness
from functionalize.passes.as_eager import live_as_eager
from functionalize.passes.constraints import is_wait
from functionalize.passes.patterns import gathers, reduces
from tests.fsdp import steps
from tests.fsdp.models import Net, wrapped
from tests.passes.layers import traced_step
from tests.ranks import run_on_ranks


def test_an_op_that_was_recorded_in_place_makes_no_memory() -> None:
    def scaled(x: Tensor) -> Tensor:
        y = x * 2
        y.add_(1)
        return y + 3

    graph = fz.functions.trace(scaled, torch.ones(16)).graph_module.graph
    assert len(Liveness(graph).storages) == 3
    live = live_as_eager(graph)
    assert [(s.nbytes, len(s.nodes)) for s in live.storages] == [(64, 2), (64, 1)]
    assert live.peak == 128


def test_the_lists_of_an_optimizer_make_no_memory_either() -> None:
    def update(x: Tensor, y: Tensor, g: Tensor) -> None:
        torch._foreach_add_([x, y], [g, g], alpha=-0.1)

    graph = fz.functions.trace(update, *(torch.ones(4) for _ in range(3))).graph_module.graph
    assert Liveness(graph).peak == 32
    assert live_as_eager(graph).peak == 0


def test_a_gather_runs_before_its_first_reader_and_a_reduction_is_waited_for_at_once() -> None:
    graph = traced_step(4, twice=True).graph_module.graph
    before = list(graph.nodes)
    live = live_as_eager(graph)
    assert list(graph.nodes) == before
    assert sorted(map(str, live.nodes)) == sorted(map(str, before))
    assert all(live.place[n] < live.place[node] for node in before for n in node.all_input_nodes)
    for gather in gathers(graph):
        made = {*gather.waits, *gather.unpack}
        readers = [live.place[u] for n in made for u in n.users if u not in made]
        assert min(readers) - live.place[gather.start] == 1 + len(made)
    for reduce in reduces(graph):
        assert is_wait(live.nodes[live.place[reduce.start] + 1])


def peaks_of_steps() -> list[tuple[int, int]]:
    """Bytes after `default`, and as eager runs the step."""
    found = []
    for optimizer in (torch.optim.AdamW, partial(torch.optim.SGD, momentum=0.9)):
        build = wrapped(
            make=partial(Net, blocks=6, hidden=64), optimizer=partial(optimizer, lr=0.1)
        )
        captured = fz.capture(steps.plain(*build()))
        for batch in steps.pairs(3):
            captured(*batch)
        assert captured.program is not None
        after = passes.run(captured.program, "default")
        found.append((Liveness(after.graph).peak, live_as_eager(captured.program.graph).peak))
    return found


def test_the_peak_of_a_step_is_that_of_the_passes() -> None:
    for after_passes, as_eager in run_on_ranks(peaks_of_steps)[0]:
        assert after_passes * 0.95 <= as_eager <= after_passes * 1.05
