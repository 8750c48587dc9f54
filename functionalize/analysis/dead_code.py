"""Which nodes of a graph may go: those whose value nobody uses and that do nothing else.

Invariant: a random op stays, so that replay consumes the generator as eager does; a collective
stays, so that every rank issues the same ones; so does what writes (at stage INPLACE). The state of a
generator that nobody reads may go.
`fx.Graph.eliminate_dead_code` lints the whole graph first, thirty times the work of the sweep, at every capture.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

from torch import Tensor, fx

from functionalize.analysis.aliases import written_nodes
from functionalize.ir.barrier import BARRIER
from functionalize.ir.commit import is_commit
from functionalize.ir.generators import GET_STATE, is_random

_TALKING = ("_c10d_functional", "_dtensor")


def is_impure(node: fx.Node) -> bool:
    """Whether a node does more than make its value: draws random numbers, sets a generator, talks to
    other ranks, writes."""
    if is_random(node) and node.target is not GET_STATE:
        return True
    if getattr(node.target, "namespace", "") in _TALKING or node.target is BARRIER:
        return True
    return is_commit(node) or bool(written_nodes(node))


def drop_dead_code(graph: fx.Graph, stays: Callable[[fx.Node], bool] = is_impure) -> int:
    """Erase nodes without users for which `stays` is false, in one backward sweep; returns how many."""
    erased = 0
    for node in reversed(graph.nodes):
        if node.op in ("call_function", "get_attr") and not node.users and not stays(node):
            graph.erase_node(node)
            erased += 1
    return erased


def is_number(node: fx.Node) -> bool:
    """Whether a node's value is a number for Python, whose making may fail (`1 / 0`)."""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    return not isinstance(node.meta.get("val"), (Tensor, list, tuple, type(None)))
