"""Waits of collectives, moved to where their result is first read.

    all_gather; wait; mm; view(wait)    ->    all_gather; mm; wait; view(wait)

The engine emits a wait directly after its collective, since c10d's own `Work.wait` does not dispatch. Eager waits
late, so that communication overlaps with the ops in between; so does the program. The order of the collectives, which
must be the same on every rank, stays. Linear in nodes and edges.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from functionalize.ir.point_to_point import RECEIVE, is_message
from functionalize.util.by_address import by_address

WAIT = torch.ops._c10d_functional.wait_tensor.default if torch.distributed.is_available() else None


@by_address
def is_functional_collective(target: Any) -> bool:
    """Whether an op is a functional collective or its wait."""
    return getattr(target, "namespace", "") == "_c10d_functional"


def is_wait_of_message(node: fx.Node) -> bool:
    """Whether a node waits for a message between two ranks, so that its place matters: see `point_to_point.py`."""
    return node.target is WAIT and is_message(node.all_input_nodes[0].target)


def sink_waits(graph: fx.Graph, latest: Mapping[fx.Node, fx.Node] | None = None) -> int:
    """Move every wait to before its first user, that of a receive without one to the end; returns how many moved.

    Waits with the same first user are in the order of their collectives.
    latest: for some waits, a node that they must stay before even if no user is.
    """
    waits = graph.find_nodes(op="call_function", target=WAIT) if WAIT is not None else []
    if not waits:  # no walk over the nodes of a program of one rank
        return 0
    place = {node: i for i, node in enumerate(graph.nodes)}
    latest = latest or {}
    (output,) = graph.find_nodes(op="output")
    placed: dict[
        fx.Node, fx.Node
    ] = {}  # a node -> the first of the waits placed directly before it
    moved = 0
    waits.sort(key=lambda wait: place[wait.all_input_nodes[0]])
    for wait in reversed(waits):
        # What is received and not read has ended when the step has, at the latest.
        users = wait.users or ([output] if wait.all_input_nodes[0].target is RECEIVE else ())
        if users:
            ends = [*users, latest[wait]] if wait in latest else users
            end = min(ends, key=place.__getitem__)
            before = placed.get(end, end)
            if wait.next is not before:
                before.prepend(wait)
                moved += 1
            placed[end] = wait
    return moved
