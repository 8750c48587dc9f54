"""Waits of collectives, moved to where their result is first read.

    all_gather; wait; mm; view(wait)    ->    all_gather; mm; wait; view(wait)

The engine emits a wait with its collective, since c10d's own `Work.wait` does not dispatch. Eager waits late,
so that communication overlaps with what is between; so does the program. The order of the collectives, which
every rank must share, stays. Linear in nodes and edges.
"""

from __future__ import annotations

import torch
from torch import fx

_WAIT = torch.ops._c10d_functional.wait_tensor.default


def sink_waits(graph: fx.Graph) -> int:
    """Move every wait before its first user; returns how many moved."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    settled: dict[fx.Node, fx.Node] = {}  # a user -> the first of the waits that stand before it
    moved = 0
    for node in reversed(graph.find_nodes(op="call_function", target=_WAIT)):
        if node.users:
            first = min(node.users, key=place.__getitem__)
            before = settled.get(first, first)
            if node.next is not before:
                before.prepend(node)
                moved += 1
            settled[first] = node
    return moved
