"""What must stay in order when a pass moves nodes, and how it moves them. Not a pass: a tool for passes.

    chain of effects      collectives, random ops, barriers, whatever has a side effect: in the order of the graph
    chains of memory      where ops write, everything on that memory, and the waits of collectives that read it
    wall                  the `commit`: no node passes it

Waits of collectives are no effects: they may pass each other. `cost/decide/ordering.py` combines these with data
dependencies.
Invariant: an order with these constraints computes the same bits as that of the graph. Linear in nodes and edges.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise
from typing import Any

from torch import fx

from functionalize._compat.dispatch import OpOverload
from functionalize._compat.graphs import input_nodes
from functionalize._compat.references import address
from functionalize.analysis.aliases import is_view, written_nodes
from functionalize.analysis.dead_code import is_impure
from functionalize.cost.decide.ordering import Constraints, Schedule, Uses
from functionalize.cost.liveness import Liveness, held_before
from functionalize.ir.barrier import BARRIER
from functionalize.ir.commit import is_commit
from functionalize.ir.generators import is_random
from functionalize.ir.phases import FORWARD, in_backward, phase_of
from functionalize.ir.waits import is_wait_of_message
from functionalize.util.by_address import by_address


def constraints_of(live: Liveness, apart: Collection[fx.Node] = ()) -> Constraints:
    """The constraints of a graph. apart: collectives that pass other effects, barriers and the commit excepted."""
    effects = effects_of(live)
    others = [n for n in effects if n not in apart]
    own = [n for n in effects if n in apart or n.target is BARRIER or is_commit(n)] if apart else []
    chains = [[live.place[n] for n in c] for c in (others, own, *memory_chains(live))]
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


def effects_of(live: Liveness) -> list[fx.Node]:
    """The nodes that must stay in order with one another, wherever their values are used.

    A wait need not, but that of a message (`ir/point_to_point.py`), nor an op that writes memory of the graph alone: it
    stays in order with all on that memory.
    """
    known: dict[int, bool] = {}

    def is_impure_for_torch(node: fx.Node) -> bool:
        if not isinstance(node.target, OpOverload):
            return node.is_impure()
        at = address(node.target)
        if at not in known:  # this does not depend on the arguments, and takes long
            known[at] = node.is_impure()
        return known[at]

    def is_effect(node: fx.Node) -> bool:
        if node.op != "call_function" or is_wait(node):
            return is_wait_of_message(node)
        written = written_nodes(node)
        is_own = bool(written) and all(live.of[target] for _, target in written)
        if is_own and not is_random(node) and getattr(node.target, "namespace", "") == "aten":
            return False
        return is_impure(node) or is_impure_for_torch(node) or is_random(node)

    return [node for node in live.nodes if is_effect(node)]


def is_wait(node: fx.Node) -> bool:
    """Whether a node waits for a collective."""
    return kind_of(node) == "wait_tensor"


def kind_of(node: fx.Node) -> str:
    """The name of a collective's op, or of a wait; else empty."""
    return _kind_of_op(node.target)


@by_address
def _kind_of_op(target: Any) -> str:
    if getattr(target, "namespace", "") != "_c10d_functional":
        return ""
    return str(target).split(".")[1]


def memory_chains(live: Liveness) -> list[list[fx.Node]]:
    """For each memory that an op writes, everything on it, and the waits of collectives that read it."""
    group_of = live.aliases.of
    written: dict[fx.Node, list[fx.Node]] = {}
    for node in live.graph.nodes:
        for _, target in written_nodes(node):
            written.setdefault(group_of(target), [])
    if written:
        for node in live.graph.nodes:
            near = (node, *input_nodes(node), *held_before(node))
            for group in dict.fromkeys(map(group_of, near)):
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
