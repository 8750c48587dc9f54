"""The costs of the calls of a program; those of blocks that are alike are worked out once.

    costs = call_costs(program)
    costs[node]              Cost(free=False, flops=..., moved=..., dtype=..., message=None, on_host=False)

Invariant: equal to `cost_of(node)` of each node, one object for the nodes at one place of blocks that are alike.
Linear in nodes and edges.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from functionalize.cost.costs import Cost, cost_of
from functionalize.program.program import Program

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
            found.update((node, cost_of(node)) for node in here if node.op == "call_function")
        else:
            there = nodes[like.start : like.end]
            found.update(zip(here, map(found.__getitem__, there), strict=True))
    return found
