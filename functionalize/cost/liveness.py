"""When the storages of a graph are live, if every value is freed after its last use, as the boxed runner does.

    live = Liveness(program.graph)
    live.peak, live.peak_at          bytes, and the place (the index of the node) at which they are live
    live.timeline[i]                 bytes live while node i runs: its inputs, its outputs, values that are used later
    live.storages                    a record per storage that the graph makes: nbytes, first, last, nodes

Inputs and constants belong to the caller and are not counted: they are live throughout. Results are live to the end.
The input of a collective is live until its wait: the backend holds it, or a copy of the same size (gloo's
reduce-scatter).
Sizes are those of the fake values in `node.meta["val"]`. Linear in nodes and edges.
Invariant: a storage counts once, however many values are views of it.
Not counted: memory that an op, or the backend of a collective, allocates and frees while it runs.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from torch import Tensor, fx

from functionalize._compat.graphs import first_input, input_nodes
from functionalize._compat.references import address
from functionalize.analysis.aliases import Aliases, storage_key
from functionalize.ir.waits import is_functional_collective
from functionalize.program.metadata import tensors_of


@dataclass(slots=True, eq=False)
class Storage:
    """One storage that a graph makes.

    first: the place of the node that makes it. last: the place of its last use. nodes: the values on it.
    """

    nbytes: int
    first: int
    last: int
    nodes: list[fx.Node] = field(default_factory=list)


class Liveness:
    """The lifetimes of the storages that a graph makes, in the order of its nodes, or in another `order`."""

    def __init__(
        self,
        graph: fx.Graph,
        order: Sequence[fx.Node] | None = None,
        aliases: Aliases | None = None,
    ) -> None:
        """aliases: those of the graph, if they are known."""
        self.graph = graph
        self.nodes = list(graph.nodes) if order is None else list(order)
        self.place = {node: i for i, node in enumerate(self.nodes)}
        self.of: dict[fx.Node, tuple[Storage, ...]] = {}
        self.storages: list[Storage] = []
        self.aliases = Aliases(graph) if aliases is None else aliases
        self._find(self.aliases)
        steps = [0] * (len(self.nodes) + 1)
        for storage in self.storages:
            steps[storage.first] += storage.nbytes
            steps[storage.last + 1] -= storage.nbytes
        self.timeline = list(accumulate(steps))[:-1]
        self.peak = max(self.timeline, default=0)
        self.peak_at = self.timeline.index(self.peak) if self.timeline else 0

    def reordered(self, order: Sequence[fx.Node]) -> Liveness:
        """The lifetimes in another order of the nodes."""
        return Liveness(self.graph, order, self.aliases)

    def _find(self, aliases: Aliases) -> None:
        """A storage per group of aliases, and per storage of a list's items that no node aliases."""
        of_key: dict[Any, tuple[Storage, ...]] = {}  # none: the caller's

        def storage_of(key: Any, node: fx.Node, value: Tensor, place: int) -> tuple[Storage, ...]:
            found = of_key.get(key)
            if found is None:
                found = ()
                if node.op not in ("placeholder", "get_attr"):  # else it is the caller's
                    found = (Storage(int(value.untyped_storage().nbytes()), place, place),)
                    self.storages += found
                of_key[key] = found
            return found

        of = self.of
        for place, node in enumerate(self.nodes):
            value = node.meta.get("val")
            if isinstance(value, Tensor):
                row = of[node] = storage_of(aliases.of(node), node, value, place)
            elif value is None:
                row = of[node] = ()
            else:
                found: dict[int, Storage] = {}
                for each in tensors_of(value):
                    fake = storage_key(each)
                    for storage in storage_of(aliases.on(fake) or fake, node, each, place):
                        found[address(storage)] = storage
                row = of[node] = tuple(found.values())
            for storage in row:
                storage.nodes.append(node)
        self._use()

    def _use(self) -> None:
        """Extend each storage to its last use. Last uses are merged per node first, for lists with many parts."""
        last: dict[fx.Node, int] = {}
        for place, node in enumerate(self.nodes):
            last[node] = place  # no place before it is later
            for read in input_nodes(node):
                last[read] = place
            if is_functional_collective(node.target):
                for held in held_before(node):
                    last[held] = max(place - 1, last.get(held, 0))
        of = self.of
        for node, place in last.items():
            for storage in of[node]:
                if place > storage.last:
                    storage.last = place


def held_before(node: fx.Node) -> list[fx.Node]:
    """The inputs of the collective whose wait this node is: the backend releases them at the wait."""
    if not is_functional_collective(node.target) or not input_nodes(node):
        return []
    source = first_input(node)
    if source.target is operator.getitem:  # a coalesced collective returns a list
        source = source.all_input_nodes[0]
    return source.all_input_nodes if is_functional_collective(source.target) else []
