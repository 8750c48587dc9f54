"""Which nodes of a graph may be removed: those without users that have no side effect.

Invariant: a random op stays, so that replay consumes the generator as eager does; a collective
stays, so that every rank issues the same ones; so does an op that writes (at stage INPLACE), and a factorization that
is to raise for a singular matrix. A read of a generator's state without users may be removed.
Not by `fx.Graph.eliminate_dead_code`: it lints the whole graph first, which costs thirty times as much as the sweep.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

from torch import Tensor, fx

from functionalize.analysis.aliases import written_nodes
from functionalize.ir.barrier import BARRIER
from functionalize.ir.commit import is_commit
from functionalize.ir.generators import GET_STATE, is_random

_COMMUNICATING = ("_c10d_functional", "_dtensor")  # namespaces


def is_impure(node: fx.Node) -> bool:
    """Whether a node has a side effect: it draws random numbers, sets a generator, communicates, writes, or checks."""
    if is_random(node) and node.target is not GET_STATE:
        return True
    if node.kwargs and node.kwargs.get("check_errors") is True:
        return True
    if getattr(node.target, "namespace", "") in _COMMUNICATING or node.target is BARRIER:
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
    """Whether a node computes a number for Python, which may raise (`1 / 0`)."""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    return not isinstance(node.meta.get("val"), (Tensor, list, tuple, type(None)))
