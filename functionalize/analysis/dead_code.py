"""Which nodes of a graph may be removed: those without users that have no side effect.

Invariant: a random op stays, so that replay consumes the generator as eager does; a collective
stays, so that every rank issues the same ones; so does an op that writes (at stage INPLACE), and a factorization that
is to raise for a singular matrix. A read of a generator's state without users may be removed.
Not by `fx.Graph.eliminate_dead_code`: it lints the whole graph first, which costs thirty times as much as the sweep.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from torch import Tensor, fx

from functionalize.analysis.aliases import written_nodes
from functionalize.ir.barrier import BARRIER
from functionalize.ir.commit import commit
from functionalize.ir.generators import GET_STATE, is_random, is_random_op
from functionalize.util.by_address import by_address

_COMMUNICATING = ("_c10d_functional", "_dtensor")  # namespaces


def is_impure(node: fx.Node) -> bool:
    """Whether a node has a side effect: it draws random numbers, sets a generator, communicates, writes, or checks."""
    if node.op != "call_function":
        return False
    if node.kwargs and node.kwargs.get("check_errors") is True:
        return True
    return _is_impure_op(node.target) or bool(written_nodes(node))


def keeps_its_place(node: fx.Node) -> bool:
    """Whether a node may not move past others of this kind: it has a side effect, or reads a generator's state."""
    return is_impure(node) or is_random(node)


@by_address
def _is_impure_op(target: Any) -> bool:
    """Whether every call of an op has a side effect, writes apart."""
    if is_random_op(target) and target is not GET_STATE:
        return True
    communicates = getattr(target, "namespace", "") in _COMMUNICATING
    return communicates or target is BARRIER or target is commit


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
