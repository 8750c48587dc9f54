"""`sink_waits`: a collective is waited for where its result is first read."""

from __future__ import annotations

import torch
from torch import fx

from functionalize.ir.waits import sink_waits
from functionalize.program.printer import node_text

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


def two_gathers() -> fx.Graph:
    graph = fx.Graph()
    x = graph.placeholder("x")
    waits = []
    for _ in range(2):
        gather = graph.call_function(c10d.all_gather_into_tensor.default, (x, 2, "0"))
        waits.append(graph.call_function(c10d.wait_tensor.default, (gather,)))
    sin = graph.call_function(aten.sin.default, (x,))
    graph.output((graph.call_function(aten.mm.default, (waits[1], sin)), waits[0]))
    return graph


def test_waits_move_to_their_first_user_and_collectives_stay(expect) -> None:
    graph = two_gathers()
    assert sink_waits(graph) == 2
    graph.lint()
    expect("two_gathers", "\n".join(node_text(n) for n in graph.nodes if n.op != "placeholder"))
    assert sink_waits(graph) == 0


def test_waits_for_one_reader_keep_their_order() -> None:
    graph = two_gathers()
    (mm,) = graph.find_nodes(op="call_function", target=aten.mm.default)
    waits = graph.find_nodes(op="call_function", target=c10d.wait_tensor.default)
    mm.args = tuple(reversed(waits))
    assert sink_waits(graph) == 2
    assert [mm.prev.prev, mm.prev] == waits
    assert sink_waits(graph) == 0


def test_a_wait_that_nobody_reads_stays() -> None:
    graph = fx.Graph()
    gather = graph.call_function(
        c10d.all_gather_into_tensor.default, (graph.placeholder("x"), 2, "0")
    )
    graph.call_function(c10d.wait_tensor.default, (gather,))
    graph.output(())
    assert sink_waits(graph) == 0
