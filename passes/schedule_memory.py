"""Run nodes in another order, so that less memory is live at once. No value changes.

    wait_0 = wait_tensor(reduce_scatter_0)     used by the optimizer only, holds its input until then

    pack_1 = _chunk_cat([..])                              wait_0 = wait_tensor(reduce_scatter_0)
    reduce_scatter_1 = reduce_scatter_tensor(pack_1)       pack_1 = _chunk_cat([..])
    big = aten.mm(x, y)                              ->    reduce_scatter_1 = reduce_scatter_tensor(pack_1)
    small = aten.sum(z)       the last use of z            small = aten.sum(z)
    wait_0 = wait_tensor(reduce_scatter_0)                 big = aten.mm(x, y)
    out = aten.add(big, small)                             out = aten.add(big, small)

What frees more than it makes runs earlier, what makes more than it frees later (`planning/ordering.py`), the rest
stays where it was. With `overlap`, communication keeps what it runs beside: a wait stays, but that one reduction is
in flight at a time, as FSDP2 has it on a GPU; an all-gather starts no later than the wait before it. Without, a
collective is waited for at once, and starts right before that, as FSDP2 does on the CPU. By default it is as FSDP2's.
torch/_inductor/memory.py has three such orders (lpmf, bfs, dfs), over Inductor's scheduler nodes; they know neither
what a collective holds nor an order between collectives, and one is quadratic.

Invariant: nodes and their arguments are the same. Collectives, random ops, barriers and whatever has a side effect
keep their order; where ops write, so does everything on that memory, and nothing passes the `commit`.
Refuses to touch a graph whose peak (`planning/liveness.py`) would not become lower by at least 1/256.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from torch import fx

from functionalize.core.aliases import Aliases, written_nodes
from functionalize.core.commit import is_commit
from functionalize.core.dead_code import is_impure
from functionalize.core.generators import is_random
from functionalize.core.program import Program
from functionalize.planning.liveness import Liveness
from functionalize.planning.ordering import Order
from passes.infra import FUNCTIONAL, INPLACE, Pass, on_graph_module

_WORTH = 1 / 256


@dataclass(frozen=True)
class ScheduleMemory(Pass):
    """Reorder nodes for a smaller peak.

    overlap: keep communication beside the compute that it was beside (None: where tensors are not the CPU's).
    """

    name: ClassVar[str] = "schedule_memory"
    accepts: ClassVar[tuple[str, ...]] = (FUNCTIONAL, INPLACE)
    overlap: bool | None = None

    def apply(self, program: Program) -> int:
        """Returns the number of nodes that moved."""
        overlap = _is_on_device(program.graph) if self.overlap is None else self.overlap
        best = first = Liveness(program.graph)
        chains = _chains(program.graph)
        while (found := _better(best, chains, overlap)).peak < best.peak * (1 - _WORTH):
            best = found
        return _reorder(best.nodes) if best is not first else 0


schedule_memory = on_graph_module(ScheduleMemory())


def _better(live: Liveness, chains: list[list[fx.Node]], overlap: bool) -> Liveness:
    """The best of a few orders that start from one."""
    start = Liveness(live.graph, _one_reduction_in_flight(live)) if overlap else live
    found = [start]
    for sweeps in ((Order.later, Order.earlier), (Order.earlier, Order.later)):
        each = start
        for sweep in sweeps:
            each = Liveness(live.graph, sweep(_order(each, chains, overlap)))
            found.append(each)
    return min(found, key=lambda each: (each.peak, sum(each.timeline)))


def _order(live: Liveness, chains: list[list[fx.Node]], overlap: bool) -> Order:
    effects = [n for n in live.nodes if _is_effect(n) or (overlap and _is_wait(n))]
    fixed = [n for n in effects if not (_is_gather(n) or is_commit(n))]
    late = () if overlap else (n for n in live.nodes if _is_wait_of_gather(n))
    return Order(live, [effects, *chains], fixed, filter(is_commit, effects), late)


def _is_on_device(graph: fx.Graph) -> bool:
    """Whether a collective is on something else than the CPU."""
    sent = (t for n in graph.nodes if _kind(n) for t in n.all_input_nodes)
    return any(t.meta["val"].device.type != "cpu" for t in sent if hasattr(t.meta["val"], "device"))


# -- what must stay in order -----------------------------------------------------------------------


def _is_effect(node: fx.Node) -> bool:
    """Whether a node must stay in order with its like, wherever its value is used. A wait need not."""
    if node.op != "call_function" or _is_wait(node):
        return False
    return is_random(node) or is_impure(node) or node.is_impure()


def _is_wait(node: fx.Node) -> bool:
    return _kind(node) == "wait_tensor"


def _is_gather(node: fx.Node) -> bool:
    return _kind(node).startswith("all_gather")


def _is_wait_of_gather(node: fx.Node) -> bool:
    return _is_wait(node) and any(_is_gather(n) for n in node.all_input_nodes)


def _kind(node: fx.Node) -> str:
    """The name of a collective's op, or of a wait; else empty."""
    if getattr(node.target, "namespace", "") != "_c10d_functional":
        return ""
    return str(node.target).split(".")[1]


def _chains(graph: fx.Graph) -> list[list[fx.Node]]:
    """For each memory that an op writes, everything on it."""
    aliases = Aliases(graph)
    written: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        for _, target in written_nodes(node):
            written.setdefault(aliases.of(target), [])
    if written:
        for node in graph.nodes:
            for group in dict.fromkeys(aliases.of(n) for n in (node, *node.all_input_nodes)):
                if group in written:
                    written[group].append(node)
    return list(written.values())


# -- one reduction in flight -----------------------------------------------------------------------


def _one_reduction_in_flight(live: Liveness) -> list[fx.Node]:
    """The nodes with every reduction waited for before the next one of its kind is packed."""
    moved: set[fx.Node] = set()
    before: dict[fx.Node, list[fx.Node]] = {}
    latest: dict[tuple[str, object], fx.Node] = {}
    for node in live.nodes:
        if "reduce" not in _kind(node):
            continue
        key = (_kind(node), node.args[-1])  # which ends in the group
        start = latest.get(key)
        latest[key] = node
        if start is None:
            continue
        pack = _pack_of(live, node)
        to = pack if live.place[pack] > live.place[start] else node
        for late in _waits(start):
            if live.place[late] > live.place[to] and late not in moved:
                moved.add(late)
                before.setdefault(to, []).append(late)
    found = []
    for node in live.nodes:
        found += before.get(node, [])
        if node not in moved:
            found.append(node)
    return found


def _pack_of(live: Liveness, start: fx.Node) -> fx.Node:
    """The last node that makes what a collective reads; the collective itself if that is the caller's."""
    made = [storage.first for n in start.all_input_nodes for storage in live.of[n]]
    return live.nodes[max(made)] if made else start


def _waits(start: fx.Node) -> Iterator[fx.Node]:
    """The waits of a collective, each after the node that takes its result out of a list."""
    for user in start.users:
        if _is_wait(user):
            yield user
        elif len(user.all_input_nodes) == 1:
            yield user
            yield from (n for n in user.users if _is_wait(n))


# -- rewriting -------------------------------------------------------------------------------------


def _reorder(nodes: list[fx.Node]) -> int:
    """Put the nodes of a graph in this order; returns how many had to move."""
    moved = 0
    for last, node in pairwise(nodes):
        if last.next is not node:
            last.append(node)
            moved += 1
    return moved
