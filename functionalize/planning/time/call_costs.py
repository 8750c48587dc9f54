"""The costs of the nodes of a graph; those of blocks that are alike are worked out once.

    costs = call_costs(graph)
    costs[node]              Cost(free=False, flops=..., moved=..., dtype=...)

Invariant: equal to `is_free`, `flops`, `moved` and `dtype_of` of each node. Linear in nodes and edges.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import fx

from functionalize.planning.time.costs import dtype_of, flops, is_free, moved
from functionalize.repeats import Repeats


class Cost(NamedTuple):
    """free: see `is_free`. flops, moved: 0 of a free call. dtype: that an op computes in."""

    free: bool
    flops: int = 0
    moved: int = 0
    dtype: torch.dtype | None = None


Costs = Mapping[fx.Node, Cost]
"""The cost of each call of a graph."""


def call_costs(graph: fx.Graph, repeats: Repeats | None = None) -> Costs:
    """The costs of the calls of a graph whose nodes have their `val`. repeats: of the graph, if they are known."""
    repeats = repeats or Repeats(graph)
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
    if is_free(node):
        return _FREE
    return Cost(False, flops(node), moved(node), dtype_of(node))
