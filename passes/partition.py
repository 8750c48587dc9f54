"""Partition a step into forward and backward, so that the saved values are explicit.

    t = aten.t(w)                        forward     t = aten.t(w)
    mm = aten.mm(x, t)                   forward     mm = aten.mm(x, t)
    relu = aten.relu(mm)                 forward     relu = aten.relu(mm)         saved: relu
    full = aten.full([], 1)              forward     full = aten.full([], 1)      moved: nothing of the forward reads it
    mm_1 = aten.mm(full, relu)           backward    mm_1 = aten.mm(full, relu)
    mm_2 = aten.mm(mm_1, t)              backward    t_1 = aten.t(w); mm_2 = aten.mm(mm_1, t_1)

The boundary is the first op that ran in a backward (`node.meta["phase"]`, set by the recorder); the optimizer comes
after it. Every op is tagged (`node.meta["partitioner_tag"]`, as torch's partitioners do), the forward's ops come
first, and backward recomputes its views: an unsharded parameter is saved, or an input read
again, and not its transpose. The program replays as before; `Partitioned.of(program)` makes two graphs of it. For a
joint graph of AOTAutograd, which has no phases, `partitioner` of `recompute_views.py` drives torch's partitioners.

Invariant: no op runs twice but views; random ops and collectives keep their order; each graph computes the same bits.

Refuses (`PassError`) a program in which nothing ran in a backward, and one in which a forward follows a backward, as
with several microbatches: there is no single boundary.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from functionalize.analysis.aliases import is_view
from functionalize.analysis.dead_code import keeps_its_place
from functionalize.errors import PassError
from functionalize.ir.phases import FORWARD, in_backward, phase_of
from functionalize.ir.waits import WAIT
from functionalize.passes.base import FUNCTIONAL, PARTITIONED, Pass
from functionalize.passes.recompute_views import recompute
from functionalize.program.program import Program

TAG, EARLY, LATE = "partitioner_tag", "is_forward", "is_backward"


@dataclass(frozen=True)
class Partition(Pass):
    """Tag every op as the forward's or the backward's, and put the forward first."""

    name: ClassVar[str] = "partition"
    accepts: ClassVar[tuple[str, ...]] = (FUNCTIONAL,)
    produces: ClassVar[str | None] = PARTITIONED

    def apply(self, program: Program) -> int:
        program.describe()
        graph = program.graph
        early, late = _sides(graph)
        for node in graph.nodes:
            if node.op == "call_function":
                node.meta[TAG] = EARLY if node in early else LATE
        moved = _separate(graph, early, late)
        origins = [n for n in graph.nodes if n.op != "output" and n not in late and not is_view(n)]
        views = recompute(graph, origins, None)
        for node in (*moved, *reversed(views)):
            if node not in early:
                node.meta["phase"] = phase_of(next(iter(node.users)))
        return 1 + len(moved) + len(views)


def _sides(graph: fx.Graph) -> tuple[set[fx.Node], set[fx.Node]]:
    """The ops before and after the boundary."""
    ops = [n for n in graph.nodes if n.op == "call_function"]
    first = next((i for i, n in enumerate(ops) if in_backward(n)), None)
    if first is None:
        raise PassError(
            "nothing in this program ran in a backward, so there is no boundary to partition it at: capture or "
            "trace a function that calls `backward()` or `torch.autograd.grad`"
        )
    early, late = set(ops[:first]), set(ops[first:])
    for node in ops[first:]:
        if node.target is WAIT and node.args[0] in early:  # it was issued in forward
            early.add(node)
            late.remove(node)
        elif phase_of(node) == FORWARD:
            raise PassError(
                f"`{node.name}` runs in a forward after `{ops[first].name}` ran in a backward: forwards and backwards "
                "alternate, as with several microbatches, and there is no one boundary to partition at; partition "
                "a step with one forward and one backward"
            )
    for node in reversed(
        ops[:first]
    ):  # made for backward alone, and of nothing: the gradient of the loss
        if (
            not node.all_input_nodes
            and node.users
            and not keeps_its_place(node)
            and node.users.keys() <= late
        ):
            early.remove(node)
            late.add(node)
    return early, late


def _separate(
    graph: fx.Graph, early: Collection[fx.Node], late: Collection[fx.Node]
) -> list[fx.Node]:
    """Put the forward before the backward, each in its order; the ops that moved."""
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    boundary = next(i for i, n in enumerate(nodes) if in_backward(n))
    at = nodes[boundary]
    moved = [n for n in nodes[:boundary] if n in late] + [n for n in nodes[boundary:] if n in early]
    for node in (n for n in moved if n in early):
        at.prepend(node)
    for node in (n for n in moved if n in late):
        at.prepend(node)
    return moved
