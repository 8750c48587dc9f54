"""Waits of collectives, moved to where their result is first read.

    all_gather; wait; mm; view(wait)    ->    all_gather; mm; wait; view(wait)

The engine emits a wait with its collective, since c10d's own `Work.wait` does not dispatch. Eager waits late,
so that communication overlaps with what is between; so does the program. The order of the collectives, which
every rank must share, stays. Linear in nodes and edges.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

WAIT = torch.ops._c10d_functional.wait_tensor.default if torch.distributed.is_available() else None


def sink_waits(graph: fx.Graph, latest: Mapping[fx.Node, fx.Node] | None = None) -> int:
    """Move every wait before its first user; returns how many moved. Waits for one user keep their starts' order.

    latest: waits that go no further down than this node, whatever reads them.
    """
    place = {node: i for i, node in enumerate(graph.nodes)}
    latest = latest or {}
    settled: dict[fx.Node, fx.Node] = {}  # a node -> the first of the waits that stand before it
    moved = 0
    waits = graph.find_nodes(op="call_function", target=WAIT) if WAIT is not None else []
    waits.sort(key=lambda wait: place[wait.all_input_nodes[0]])
    for wait in reversed(waits):
        if wait.users:
            ends = [*wait.users, latest[wait]] if wait in latest else wait.users
            end = min(ends, key=place.__getitem__)
            before = settled.get(end, end)
            if wait.next is not before:
                before.prepend(wait)
                moved += 1
            settled[end] = wait
    return moved
