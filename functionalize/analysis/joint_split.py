"""A joint graph, split at a boundary into a forward and a backward graph, and the values saved in between.

    joint      a, w, g -> h = mm(a, w); out = relu(h) | d = threshold_backward(g, h); mm(t(a), d)
    forward    a, w -> h, out; returns out, h
    backward   a, g, h -> d, ...

A value made before the boundary and used after it is saved: the forward returns it, and the backward has a placeholder
of the same name. Inputs and constants are not saved: the backward has placeholders for the inputs too.
Invariant: no node but `getitem` changes sides, and each side keeps its order; both graphs have a placeholder
for every input of the joint one, so that an input has the same position in both until unused ones are removed.
Linear in nodes and edges.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from functionalize.analysis.dead_code import drop_dead_code
from functionalize.ir.waits import sink_waits

_Copies = dict[fx.Node, fx.Node]


@dataclass(frozen=True, slots=True)
class Split:
    """The two graphs.

    saved: the values that the forward returns after its results, as nodes of the joint graph.
    used: those of `saved` that the backward reads: its last placeholders.
    """

    forward: fx.Graph
    backward: fx.Graph
    saved: tuple[fx.Node, ...]
    used: tuple[fx.Node, ...]


def split(
    joint: fx.Graph,
    early: Collection[fx.Node],
    results: Sequence[fx.Node],
    late_results: Sequence[fx.Node],
    keep: Collection[str] = (),
    names: Mapping[fx.Node, str] | None = None,
) -> Split:
    """Split `joint`, which has no output node: the ops `early` make the forward.

    results, late_results: the results of the forward and of the backward.
    keep: names of further values that the forward must return (another backward of the same forward uses them).
    names: the names of inputs in the backward, where they differ from those in `joint`.
    """
    before = dict.fromkeys(early)
    # An output of an early multi-output op is moved to the forward, which then saves this output and not all of them.
    for node in joint.nodes:
        if node.target is operator.getitem and node.args[0] in before:
            before[node] = None
    backward, used = _backward(joint, before, late_results, names or {})
    kept = [n for n in before if n.name in set(keep)]
    saved = tuple(dict.fromkeys((*kept, *used)))
    return Split(_forward(joint, before, results, saved), backward, saved, tuple(used))


def _forward(
    joint: fx.Graph,
    before: Collection[fx.Node],
    results: Sequence[fx.Node],
    saved: Sequence[fx.Node],
) -> fx.Graph:
    graph, copies = fx.Graph(), _Copies()
    for node in joint.nodes:
        if node.op != "call_function" or node in before:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[n] for n in (*results, *saved)))
    drop_dead_code(graph)
    sink_waits(graph)
    return graph


def _backward(
    joint: fx.Graph,
    before: Collection[fx.Node],
    results: Sequence[fx.Node],
    names: Mapping[fx.Node, str],
) -> tuple[fx.Graph, list[fx.Node]]:
    """The graph after the boundary, and the early values that it uses, one placeholder each."""
    graph, copies = fx.Graph(), _Copies()
    crossing = dict.fromkeys(n for n in results if n in before)
    for node in joint.nodes:
        if node.op == "call_function" and node not in before:
            crossing |= dict.fromkeys(n for n in node.all_input_nodes if n in before)
    for node in joint.nodes:
        if node.op == "placeholder":
            name = names.get(node, node.name)
            copies[node] = graph.create_node("placeholder", name, name=name)
    for node in before:
        if node in crossing:
            copies[node] = graph.create_node("placeholder", node.name, name=node.name)
    for node in joint.nodes:
        if node.op == "get_attr" or (node.op == "call_function" and node not in before):
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[n] for n in results))
    drop_dead_code(graph)
    used = [n for n in before if n in crossing and copies[n].users]
    for node in before:
        if node in crossing and not copies[node].users:
            graph.erase_node(copies[node])
    sink_waits(graph)
    return graph, used
