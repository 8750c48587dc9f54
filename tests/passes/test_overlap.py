"""Collectives beside computation in an order that waits for each at once: how far they move, and what stops them."""

from __future__ import annotations

import torch
from torch import fx
from torch._subclasses import FakeTensorMode

from functionalize.cost.decide.ordering import Constraints, Schedule, Uses
from functionalize.cost.liveness import Liveness
from functionalize.ir.waits import WAIT
from functionalize.passes.metadata import set_value
from functionalize.passes.overlap import overlapped
from functionalize.passes.patterns import is_collective
from tests.passes.layers import traced_step

aten, functional = torch.ops.aten, torch.ops._c10d_functional


def at_once(graph: fx.Graph) -> Liveness:
    """The lifetimes of a graph after every wait moved to directly behind its collective."""
    for node in graph.find_nodes(op="call_function", target=WAIT):
        node.all_input_nodes[0].append(node)
    return Liveness(graph)


def changed(live: Liveness, limit: int) -> list[fx.Node]:
    """The nodes in the new order."""
    start = Schedule(Uses.among(live), list(range(len(live.nodes))))
    return [live.nodes[i] for i in overlapped(start, Constraints(start), live, limit)]


def beside(nodes: list[fx.Node]) -> list[int]:
    """For each collective, how many products run while it is in flight."""
    found = []
    for at, node in enumerate(nodes):
        if is_collective(node):
            end = next(i for i, n in enumerate(nodes) if n.target is WAIT and node in n.args)
            found.append(sum(n.target is aten.mm.default for n in nodes[at:end]))
    return found


def test_collectives_run_beside_products_with_room() -> None:
    live = at_once(traced_step(layers=4, twice=True).graph)
    assert set(beside(live.nodes)) == {0}
    nodes = changed(live, 10 * live.peak)
    assert sum(map(bool, beside(nodes))) >= len(beside(nodes)) // 2
    order = list(filter(is_collective, live.nodes))
    assert list(filter(is_collective, nodes)) == order
    in_flight = 0  # one at a time
    for node in nodes:
        in_flight += is_collective(node) - (node.target is WAIT)
        assert in_flight in (0, 1)
    place = {node: i for i, node in enumerate(nodes)}
    assert all(place[read] < at for node, at in place.items() for read in node.all_input_nodes)


def test_the_peak_stays() -> None:
    live = at_once(traced_step(layers=4, twice=True).graph)
    nodes = changed(live, live.peak)
    assert Liveness(live.graph, nodes).peak <= live.peak
    assert sum(beside(nodes)) < sum(beside(changed(live, 10 * live.peak)))
    assert changed(live, 0) == live.nodes


def summed(writes: bool) -> fx.Graph:
    """An all-reduce of `x + x`, whose memory an op behind the wait writes (or another one), and a late reader."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    sent = graph.call_function(aten.add.Tensor, (x, x))
    other = graph.call_function(aten.add.Tensor, (x, x))
    start = graph.call_function(functional.all_reduce.default, (sent, "sum", "0"))
    wait = graph.call_function(WAIT, (start,))
    written = graph.call_function(aten.mul_.Tensor, (sent if writes else other, 2))
    late = graph.call_function(aten.mm.default, (x, x))
    graph.output((graph.call_function(aten.add.Tensor, (wait, late)), written))
    with FakeTensorMode() as mode:
        x.meta["val"] = mode.from_tensor(torch.ones(4, 4))
    for node in graph.nodes:
        if node.op == "call_function":
            set_value(node)
    return graph


def test_a_wait_stays_before_a_write_of_what_is_sent() -> None:
    for writes in (False, True):
        live = Liveness(summed(writes))
        names = [n.name for n in changed(live, 10 * live.peak)]
        assert (names.index("wait_tensor_default") < names.index("mul__tensor")) == writes
        assert names.index("wait_tensor_default") < names.index("add_tensor_2")
