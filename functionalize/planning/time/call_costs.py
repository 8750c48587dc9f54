"""The costs of the calls of a program; those of blocks that are alike are worked out once.

    costs = call_costs(program)
    costs[node]              Cost(free=False, flops=..., moved=..., dtype=..., message=None, on_host=False)

Invariant: equal to `is_free`, `flops`, `moved`, `dtype_of`, `message_of` and `on_host` of each node, one object for the
nodes at one place of blocks that are alike. Linear in nodes and edges.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import fx

from functionalize.planning.time.costs import dtype_of, flops, is_collective, is_free, moved
from functionalize.planning.time.host_work import on_host
from functionalize.planning.time.messages import Message, message_of
from functionalize.program.program import Program


class Cost(NamedTuple):
    """free: see `is_free`. flops, moved: 0 of a free call. dtype: that an op computes in. message: of a collective."""

    free: bool
    flops: int = 0
    moved: int = 0
    dtype: torch.dtype | None = None
    message: Message | None = None
    on_host: bool = False


Costs = Mapping[fx.Node, Cost]
"""The cost of each call of a graph."""


def call_costs(program: Program) -> Costs:
    """The costs of the calls of a program's graph."""
    program.evaluate_for_costs()
    repeats = program.repeats
    nodes = repeats.nodes
    found: dict[fx.Node, Cost] = {}
    for block, like in repeats.likes():
        here = nodes[block.start : block.end]
        if like is None:
            found.update((node, _cost(node)) for node in here if node.op == "call_function")
        else:
            there = nodes[like.start : like.end]
            found.update(zip(here, map(found.__getitem__, there), strict=True))
    return found


_FREE = Cost(True)


def _cost(node: fx.Node) -> Cost:
    message = message_of(node) if is_collective(node) else None
    if is_free(node):
        return _FREE if message is None else Cost(True, message=message)
    return Cost(False, flops(node), moved(node), dtype_of(node), message, on_host(node))
