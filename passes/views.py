"""What a node of a graph is a view of, and nodes that nothing uses any more."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch import Tensor, fx

from functionalize.analysis.aliases import is_view
from functionalize.analysis.dead_code import is_impure
from passes.metadata import UNSAFE_VIEW

_AS_STRIDED = torch.ops.aten.as_strided.default


_CHAIN = 16  # as far as a pass looks up a chain of views: what is longer would cost quadratic time


def viewed(node: fx.Node) -> fx.Node | None:
    """The tensor that a node is a view of, past the tuple that it may be a part of; None if it is no view."""
    if node.target is UNSAFE_VIEW:  # whose schema denies it
        return node.all_input_nodes[0]
    if not is_view(node):
        return None
    source = node.all_input_nodes[0]
    return viewed(source) if node.target is operator.getitem else source


def chain(node: fx.Node, guarded: bool) -> Iterator[fx.Node]:
    """What a node is a view of, the nearest first, as far as its place there is known, at most 16 of them.

    guarded: whether inputs begin where their fake values do; else `as_strided`, which counts from the
    beginning of the storage, may find anything in an input.
    """
    absolute = False
    for _ in range(_CHAIN):
        absolute |= node.target is _AS_STRIDED and not guarded
        above = viewed(node)
        if above is None or (absolute and _may_be_lent(above)):
            return
        node = above
        yield node


def _may_be_lent(node: fx.Node) -> bool:
    """Whether a value is a view of an input or a constant, or of something too far away to tell."""
    for _ in range(_CHAIN):
        above = viewed(node)
        if above is None:
            return node.op != "call_function"
        node = above
    return True


def is_plain(node: fx.Node) -> bool:
    """Whether a value is a strided tensor of known sizes: comparing symbolic ones adds guards."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return False
    numbers = (*value.shape, *value.stride(), value.storage_offset())
    return all(type(n) is int for n in numbers)


def erase_unused(node: fx.Node) -> None:
    """Erase a node that nobody uses, and what was there for it alone; what is impure or writes stays."""
    dead, erased = [node], set[fx.Node]()
    while dead:
        node = dead.pop()
        if node in erased or node.users or node.op == "placeholder" or is_impure(node):
            continue
        above = node.all_input_nodes
        node.graph.erase_node(node)
        erased.add(node)
        dead += above
