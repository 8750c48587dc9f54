"""Let nodes read other nodes, and move the fake values of views to the memory of their new sources.

    t = aten.t(gelu)      ->      t = aten.t(gelu_1)        the value of `t` was on the memory of `gelu`

Not a pass: a tool for passes that let later readers of a value read another node with an equal value. Only nodes that
share memory with their arguments get a new fake value. Call `settle` once, at the end; linear in nodes.
Invariant: `Aliases(graph)` is right after `settle`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, fx

from functionalize._compat.graphs import pytree, set_arguments
from functionalize.analysis.aliases import storage_key
from functionalize.passes.metadata import NewValues


class Rewiring:
    """The changes to one graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self._old_memory: dict[fx.Node, set[int]] = {}  # the memory that a node's arguments lay on

    def read(self, node: fx.Node, instead: Mapping[fx.Node, fx.Node]) -> None:
        """Replace the keys of `instead` by its values in the arguments of `node`."""
        lost = self._old_memory.setdefault(node, set())
        for used in node.all_input_nodes:
            if used in instead:
                lost.update(_memory(used))
        set_arguments(node, *fx.node.map_arg((node.args, node.kwargs), lambda n: instead.get(n, n)))

    def settle(self) -> None:
        """Remake the fake values of views whose source lies in other memory now."""
        values = NewValues()
        moved: dict[fx.Node, set[int]] = {}  # the memory that a node's value lay on
        for node in self.graph.nodes:
            if node.op != "call_function":
                continue
            lost = set(self._old_memory.get(node, ()))
            for used in node.all_input_nodes:
                lost |= moved.get(used, set())
            if lost and not lost.isdisjoint(_memory(node)):
                moved[node] = set(_memory(node))
                values.set(node)


def _memory(node: fx.Node) -> Iterator[int]:
    value: Any = node.meta.get("val")
    keys = (storage_key(leaf) for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))
    return (key for key in keys if key is not None)
