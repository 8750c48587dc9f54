"""Chains of views, and erasing nodes without users."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, TypeGuard

import torch
from torch import Tensor, fx

from functionalize._compat.fakes import has_symbolic_sizes
from functionalize._compat.graphs import first_input
from functionalize._compat.references import address
from functionalize.analysis.aliases import is_view
from functionalize.analysis.dead_code import is_impure
from functionalize.ir.ops import Geometry, geometry_of
from functionalize.passes.metadata import UNSAFE_VIEW
from functionalize.program.program import Program

_AS_STRIDED = torch.ops.aten.as_strided.default


_CHAIN = (
    16  # the length of a chain that passes follow; without a limit they would need quadratic time
)


def viewed(node: fx.Node) -> fx.Node | None:
    """The tensor that a node is a view of, past the tuple that it may be a part of; None if it is no view."""
    if node.target is UNSAFE_VIEW:  # a view, although its schema declares no alias
        return first_input(node)
    if not is_view(node):
        return None
    source = first_input(node)
    return viewed(source) if node.target is operator.getitem else source


def chain(node: fx.Node, guarded: bool) -> Iterator[fx.Node]:
    """The values that a node is a view of, the nearest first, at most 16, as far as its offset in them is known.

    guarded: whether guards fix the storage offsets of inputs to those of their fake values. If not, an
    `as_strided`, which counts from the beginning of the storage, has an unknown position in an input.
    """
    absolute = False
    for _ in range(_CHAIN):
        absolute |= node.target is _AS_STRIDED and not guarded
        above = viewed(node)
        if above is None or (absolute and _may_be_external(above)):
            return
        node = above
        yield node


def _may_be_external(node: fx.Node) -> bool:
    """Whether a value may be a view of an input or a constant: True if its chain is too long to follow."""
    for _ in range(_CHAIN):
        above = viewed(node)
        if above is None:
            return node.op != "call_function"
        node = above
    return True


class Geometries(dict[fx.Node, Geometry | None]):
    """The geometry of each value that is plain (`is_plain`), None of any other; read once, when it is first asked for.

    For use while no node gets another value: a chain of views asks for each of its values many times. What is read of a
    value, which never changes, is known to all passes over a program.
    """

    def __init__(self, program: Program) -> None:
        super().__init__()
        self._program = program

    def __missing__(self, node: fx.Node) -> Geometry | None:
        found = self[node] = geometry_in(self._program, node.meta.get("val"))
        return found


def geometry_in(program: Program, value: Any) -> Geometry | None:
    """The geometry of a value of a program that is plain, None of any other; read once."""
    known = program.geometries.get(address(value))
    if known is None:
        found = geometry_of(value) if is_plain(value) else None
        known = program.geometries[address(value)] = value, found
    return known[1]


def same_above(node: fx.Node, guarded: bool, known: Geometries) -> fx.Node | None:
    """The farthest value up a view's chain that has the view's geometry and may replace it; guarded: see `chain`.

    None for a value that is no view or is not plain. A view that is returned is replaced by no input, constant or
    output: it would be another tensor of the caller's.
    """
    if node.op != "call_function" or not node.users or viewed(node) is None:
        return None
    wanted, found = known[node], None
    if wanted is None:
        return None
    returned = any(user.op == "output" for user in node.users)
    for above in chain(node, guarded):
        if known[above] == wanted and not (returned and _is_spoken_for(above)):
            found = above
    return found


def _is_spoken_for(node: fx.Node) -> bool:
    """Whether the caller owns a value: an input, a constant or an output."""
    return node.op != "call_function" or any(user.op == "output" for user in node.users)


def is_plain(value: Any) -> TypeGuard[Tensor]:
    """Whether a value is a strided tensor of known sizes: comparing symbolic ones adds guards."""
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return False
    return not has_symbolic_sizes(value)


def erase_unused(node: fx.Node) -> None:
    """Erase a node without users, then the nodes that only it used; impure and writing nodes stay."""
    dead, erased = [node], set[fx.Node]()
    while dead:
        node = dead.pop()
        if node in erased or node.users or node.op == "placeholder" or is_impure(node):
            continue
        above = node.all_input_nodes
        node.graph.erase_node(node)
        erased.add(node)
        dead += above
