"""Nodes that the engine appends are those that `graph.create_node` makes: names, order, what `find_nodes` finds."""

from __future__ import annotations

import operator

import torch
from torch import fx

from functionalize._compat.graphs import NodeWriter

aten = torch.ops.aten
CALLS = [
    (aten.view.default, "view"),
    (aten.view.default, "view"),
    (operator.getitem, "getitem"),
    (aten.sum.default, "sum"),  # a builtin's name
    (aten.view.default, "view"),
    (operator.getitem, "getitem"),
]
INPUTS = [
    *("x", "input", "weight_0", "weight_0", "weight", "weight_00", "a__3", "_3", "__4"),
    *("class", "sum_1", "None", "é_1", "m²", "a.b", "1a", "x_٣", "x", "_", "sum"),
]


def described(graph: fx.Graph) -> list[tuple[object, ...]]:
    return [
        (n.op, n.name, n.target, str(n.args), n.kwargs, n.type, n.meta, str([*n.users]))
        for n in graph.nodes
    ]


def test_a_written_node_is_the_one_that_a_graph_creates() -> None:
    made, written = fx.Graph(), fx.Graph()
    writer = NodeWriter(written)
    for name in INPUTS:
        a, b = made.create_node("placeholder", name, name=name), writer.placeholder(name)
    for target, base in CALLS:
        a = made.create_node("call_function", target, (a, 0), {}, name=base)
        b = writer.caller(target, base)((b, 0), {})
    assert described(written) == described(made)
    assert len(written.nodes) == len(made.nodes)
    for op, target in (("placeholder", None), ("call_function", aten.view.default)):
        names = [n.name for n in made.find_nodes(op=op, target=target)]
        assert [n.name for n in written.find_nodes(op=op, target=target)] == names
    written.lint()


def test_nodes_made_by_both_have_names_of_their_own() -> None:
    graph = fx.Graph()
    writer = NodeWriter(graph)
    x = writer.placeholder("x")
    call = writer.caller(aten.view.default, "view")
    for _ in range(3):
        call((x, [1]), {})
        graph.create_node("call_function", aten.view.default, (x, [1]), name="view")
    names = [node.name for node in graph.nodes]
    assert len(set(names)) == len(names) == 7
