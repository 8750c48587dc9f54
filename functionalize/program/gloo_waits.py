"""Waits that a runner adds where the backend is gloo: one collective of a process group at a time.

    all_gather; reduce_scatter; wait(all_gather)  ->  all_gather; wait(all_gather); reduce_scatter; wait(all_gather)

Two collectives of one gloo group that end at the same time can corrupt the heap of the process. Torch alone does it:
`all_gather_into_tensor` beside `all_reduce` and `reduce_scatter_tensor` on two ranks crashes within some ten thousand
rounds on torch 2.11 to 2.15. The two worker threads of a group write the name of the collective that has ended into one
`std::string` without a lock (`ProcessGroupGloo::runLoop`, `pgStatus_->lastCompletedWorkName`). Eager FSDP2 on gloo
waits for a collective before it starts the next, so a replay that overlapped them would break a step that eager can
run. Computation still overlaps with the one collective in flight. A second wait for the same collective does nothing.

What is left is what eager has, too: a worker writes after it has woken those who wait, so the next collective may end
on the other worker before it has written.

Other backends queue the collectives of a group by themselves: nothing is added.

Not changed: the graph; its order of collectives; a graph module that is called without a runner of this library.
Linear in the nodes.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

from torch import Tensor, fx

from functionalize._compat.distributed import backend_of_group
from functionalize.ir.barrier import BARRIER
from functionalize.ir.point_to_point import is_message
from functionalize.ir.waits import WAIT
from functionalize.program.collective_order import groups_of


def added_waits(nodes: Iterable[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """For a node, the collectives that must have ended before it runs; nodes that wait for none are left out.

    These nodes are collectives, and the output: no collective of a program runs beside what its caller does next. The
    value of a collective is a tensor or a list of tensors.
    """
    added: dict[fx.Node, list[fx.Node]] = {}
    in_flight: dict[str, fx.Node] = {}  # per group
    for node in nodes:
        if node.target is WAIT:
            started = _whole(node.all_input_nodes[0])
            in_flight = {g: other for g, other in in_flight.items() if other is not started}
            continue
        groups = list(in_flight) if node.op == "output" else _groups(node)
        for group in groups:
            if group in in_flight:
                added.setdefault(node, []).append(in_flight.pop(group))
            if _stays_in_flight(group, node):
                in_flight[group] = node
    return added


def _groups(node: fx.Node) -> list[str]:
    """The process groups that a node communicates in, DTensor's own ops included."""
    if node.op != "call_function":
        return []
    # No worker thread takes part in a message, and another one may have to start before it ends.
    if is_message(node.target):
        return []
    if getattr(node.target, "namespace", "") == "_dtensor":
        return [a for a in node.args if isinstance(a, str)]
    return groups_of(node.target, node.args)


def _whole(result: fx.Node) -> fx.Node:
    """The collective whose result, or part of a result, this is."""
    while result.target is operator.getitem:
        result = result.all_input_nodes[0]
    return result


def _stays_in_flight(group: str, node: fx.Node) -> bool:
    """Whether a node starts a collective on gloo and does not wait for it, as a barrier does."""
    if node.op == "output" or node.target is BARRIER:
        return False
    value = node.meta.get("val")
    first = value[0] if isinstance(value, (list, tuple)) and value else value
    device = first.device.type if isinstance(first, Tensor) else "cpu"
    return backend_of_group(group, device) == "gloo"
