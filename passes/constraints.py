"""What must stay in order when a pass moves nodes, and how it moves them. Not a pass: a tool for passes.

    chain of effects      collectives, random ops, barriers, whatever has a side effect: in the order of the graph
    chains of memory      where ops write, everything on that memory, and the waits of collectives that read it
    wall                  the `commit`: no node passes it

Waits are no effects: they may pass each other. `cost/decide/ordering.py` combines these with data dependencies.
Invariant: an order with these constraints computes the same bits as that of the graph. Linear in nodes and edges.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise

from torch import fx

from functionalize.analysis.aliases import Aliases, is_view, written_nodes
from functionalize.analysis.dead_code import is_impure
from functionalize.cost.decide.ordering import Constraints, Schedule, Uses
from functionalize.cost.liveness import Liveness, held_before
from functionalize.ir.barrier import BARRIER
from functionalize.ir.commit import is_commit
from functionalize.ir.generators import is_random
from functionalize.ir.phases import FORWARD, in_backward, phase_of


def constraints_of(live: Liveness, apart: Collection[fx.Node] = ()) -> Constraints:
    """The constraints of a graph. apart: collectives that pass other effects, barriers and the commit excepted."""
    effects = [n for n in live.nodes if is_effect(n, live)]
    others = [n for n in effects if n not in apart]
    own = [n for n in effects if n in apart or n.target is BARRIER or is_commit(n)] if apart else []
    chains = [[live.place[n] for n in c] for c in (others, own, *memory_chains(live.graph))]
    walls = [live.place[n] for n in effects if is_commit(n)]
    return Constraints(Schedule(Uses.among(live), range(len(live.nodes))), chains, walls=walls)


def backwards(live: Liveness) -> list[range]:
    """For each backward, the places from its first to its last op; an op of a forward between two ends the first.

    A wait may be far below: where the optimizer reads the result.
    """
    found: list[range] = []
    ended = True
    for place, node in enumerate(live.nodes):
        if in_backward(node) and not is_wait(node):
            found.append(range(place if ended else found.pop().start, place + 1))
            ended = False
        elif phase_of(node) == FORWARD and not is_view(node):
            ended = True
    return found


def is_effect(node: fx.Node, live: Liveness) -> bool:
    """Whether a node must stay in order with its like, wherever its value is used.

    A wait need not, nor an op that writes memory of the graph alone: it stays in order with all on that memory.
    """
    if node.op != "call_function" or is_wait(node):
        return False
    if is_random(node):
        return True
    written = written_nodes(node) if getattr(node.target, "namespace", "") == "aten" else []
    if written and all(live.of[target] for _, target in written):
        return False
    return is_impure(node) or node.is_impure()


def is_wait(node: fx.Node) -> bool:
    """Whether a node waits for a collective."""
    return kind_of(node) == "wait_tensor"


def kind_of(node: fx.Node) -> str:
    """The name of a collective's op, or of a wait; else empty."""
    if getattr(node.target, "namespace", "") != "_c10d_functional":
        return ""
    return str(node.target).split(".")[1]


def memory_chains(graph: fx.Graph) -> list[list[fx.Node]]:
    """For each memory that an op writes, everything on it, and the waits of collectives that read it."""
    aliases = Aliases(graph)
    written: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        for _, target in written_nodes(node):
            written.setdefault(aliases.of(target), [])
    if written:
        for node in graph.nodes:
            near = (node, *node.all_input_nodes, *held_before(node))
            for group in dict.fromkeys(map(aliases.of, near)):
                if group in written:
                    written[group].append(node)
    return list(written.values())


def reorder(nodes: list[fx.Node]) -> int:
    """Put the nodes of a graph in this order; returns how many had to move."""
    moved = 0
    for last, node in pairwise(nodes):
        if last.next is not node:
            last.append(node)
            moved += 1
    return moved
