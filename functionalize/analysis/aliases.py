"""Which values of a graph may share memory. Not a pass: an analysis that passes query.

    t = aten.t(w); mm = aten.mm(x, t)        of(t) == of(w): a view; of(mm) is a group of its own

Two sources are combined, since each alone misses aliases: the storages of the fake values in
`node.meta["val"]` (`_unsafe_view` aliases its argument, which its schema does not say) and the ops
(`wait_tensor` returns its argument itself, but its fake kernel returns a new tensor). Linear in
nodes and edges.

Invariant: nodes of different groups never share memory; nodes of one group may.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from functionalize._compat.dispatch import OpOverload
from functionalize._compat.graphs import first_input, input_nodes
from functionalize.discharge.rules import mutations
from functionalize.discharge.rules.mutations import written_arguments
from functionalize.discharge.rules.resizes import RESIZE_STORAGE
from functionalize.ir.guards import AliasGuard
from functionalize.ir.outputs import OutputRole, Result, Wrapped
from functionalize.ir.waits import WAIT
from functionalize.program.executable import Executable
from functionalize.util.by_address import by_address

aten = torch.ops.aten


def is_view(node: fx.Node) -> bool:
    """Whether a node is a view of its first argument, or a part of a tuple of such views."""
    target = node.target
    if target is operator.getitem and node.op == "call_function":
        parent = node.args[0]
        return isinstance(parent, fx.Node) and is_view(parent)
    return _is_view_op(target) and bool(input_nodes(node))


@by_address
def _is_view_op(target: Any) -> bool:
    return isinstance(target, OpOverload) and bool(target.is_view)


def written_nodes(node: fx.Node) -> list[tuple[str, fx.Node]]:
    """(argument name, node) of every argument that a node writes to or resizes.

    The gradients of a fused optimizer are left out unless it unscales them, although its schema marks them as written.
    """
    places = _written_places(node.target)
    if not places:
        return []
    found: list[tuple[str, fx.Node]] = []
    for at, name in places:
        if name == "grads" and leaves_gradients(node):
            continue
        value = node.kwargs.get(name)
        if value is None and at is not None and at < len(node.args):
            value = node.args[at]
        found += [(name, each) for each in _nodes_in(value)]
    return found


@by_address
def _written_places(target: Any) -> tuple[tuple[int | None, str], ...]:
    if target is RESIZE_STORAGE:
        return ((0, "variable"),)
    return written_arguments(target) if hasattr(target, "_schema") else ()


def leaves_gradients(node: fx.Node) -> bool:
    """Whether a node is a fused optimizer step that does not unscale, and so does not write, the gradients."""
    return node.op == "call_function" and mutations.leaves_gradients(node.target, node.kwargs)


def results(graph: fx.Graph) -> tuple[Any, ...]:
    """The results of a graph, flat: the node (or constant) of every slot."""
    (output,) = graph.find_nodes(op="output")
    return tuple(_leaves(output.args[0]))


def results_of(role: OutputRole) -> Iterator[Result]:
    """The results of the graph that an output consists of: itself, or those inside a wrapper subclass."""
    if isinstance(role, Result):
        yield role
    elif isinstance(role, Wrapped):
        for inner in role.inner.values():
            yield from results_of(inner)


def storage_classes(program: Executable) -> tuple[int, ...]:
    """A number per input, equal for inputs that may be on one storage.

    Without an `AliasGuard` any inputs may share a storage: all have the same number.
    """
    return guarded_storages(program) or (0,) * len(program.inputs)


def guarded_storages(program: Executable) -> tuple[int, ...] | None:
    """A number per input, equal for inputs on one storage; None if no guard says which share one."""
    for guard in program.guards:
        if isinstance(guard, AliasGuard) and len(guard.groups) == len(program.inputs):
            return guard.groups
    return None


class Aliases:
    """The groups of nodes of a graph that may share memory; every node needs its `val`."""

    def __init__(self, graph: fx.Graph) -> None:
        self._parent: dict[fx.Node, fx.Node] = {}
        self._first: dict[int, fx.Node] = {}  # key of a storage -> the first tensor on it
        keys: dict[fx.Node, int | None] = {}
        first, parent = self._first, self._parent
        for node in graph.nodes:
            value = node.meta.get("val")
            key = keys[node] = storage_key(value) if isinstance(value, Tensor) else None
            if key is not None:
                same = first.setdefault(key, node)
                if same is not node:  # on the memory of a group, whose representative is known
                    parent[node] = self.of(same)
            # A wait returns its argument, although its schema does not say so.
            if node.target is WAIT or is_view(node):
                source = first_input(node)
                if key is None or keys[source] != key:  # else they are in one group already
                    self.unite(source, node)

    def of(self, node: fx.Node) -> fx.Node:
        """The representative node of the group of `node`."""
        root = self._parent.get(node)
        if root is None:
            return node
        while (above := self._parent.get(root)) is not None:
            root = above
        while node is not root:
            self._parent[node], node = root, self._parent[node]
        return root

    def on(self, key: int | None) -> fx.Node | None:
        """The representative of the nodes whose tensor is on the storage of a key; None if there is none."""
        first = self._first.get(key) if key is not None else None
        return None if first is None else self.of(first)

    def put_on(self, key: int | None, node: fx.Node) -> None:
        """Say that the tensors on the storage of a key are on the memory of a node."""
        if key is not None:
            self.unite(node, self._first.setdefault(key, node))

    def unite(self, kept: fx.Node, joins: fx.Node) -> None:
        """Merge two groups; the representative of `kept` becomes that of both."""
        kept, joins = self.of(kept), self.of(joins)
        if kept is not joins:
            self._parent[joins] = kept


def storage_key(value: Any) -> int | None:
    """A key that is equal for tensors on one storage; for a list, that of its first tensor; None for other values."""
    if not isinstance(value, Tensor):
        return storage_key(value[0]) if isinstance(value, (list, tuple)) and value else None
    try:
        return value.untyped_storage()._cdata
    except NotImplementedError:  # a sparse or wrapped tensor
        return None


def _leaves(arg: Any) -> Iterator[Any]:
    if isinstance(arg, (list, tuple)):
        for each in arg:
            yield from _leaves(each)
    elif isinstance(arg, dict):
        for each in arg.values():
            yield from _leaves(each)
    else:
        yield arg


def _nodes_in(arg: Any) -> Sequence[fx.Node]:
    return [each for each in _leaves(arg) if isinstance(each, fx.Node)]
