"""Let nodes read other nodes, and keep the fake values of views on the memory that they now lie on.

    t = aten.t(gelu)      ->      t = aten.t(gelu_1)        the value of `t` lay on that of `gelu`

Not a pass: what passes use that give later readers of a value another node of the same value. Only what shares memory
with what it reads gets a new value; kernels make the rest as before. `settle` once, at the end; linear in nodes.
Invariant: `Aliases(graph)` is right after `settle`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, fx

from functionalize._compat.graphs import pytree
from functionalize.analysis.aliases import storage_key
from passes.metadata import set_value


class Rewiring:
    """The changes to one graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self._gone: dict[fx.Node, set[int]] = {}  # the memory that a node's arguments lay on

    def read(self, node: fx.Node, instead: Mapping[fx.Node, fx.Node]) -> None:
        """Let `node` read the values of `instead` where it read its keys."""
        lost = self._gone.setdefault(node, set())
        for used in node.all_input_nodes:
            if used in instead:
                lost.update(_memory(used))
        node.args = fx.node.map_arg(node.args, lambda n: instead.get(n, n))
        node.kwargs = fx.node.map_arg(node.kwargs, lambda n: instead.get(n, n))

    def settle(self) -> None:
        """Make the values of views anew whose memory is elsewhere now."""
        moved: dict[fx.Node, set[int]] = {}  # the memory that a node's value lay on
        for node in self.graph.nodes:
            if node.op != "call_function":
                continue
            lost = set(self._gone.get(node, ()))
            for used in node.all_input_nodes:
                lost |= moved.get(used, set())
            if lost and not lost.isdisjoint(_memory(node)):
                moved[node] = set(_memory(node))
                set_value(node)


def _memory(node: fx.Node) -> Iterator[int]:
    value: Any = node.meta.get("val")
    keys = (storage_key(leaf) for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))
    return (key for key in keys if key is not None)
