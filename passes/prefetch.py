"""Issue all-gathers before they are needed, reduce-scatters as soon as they can be, and wait as late as possible.

    w = wait(all_gather(cat(a)))                 g = all_gather(cat(a)); h = all_gather(cat(b))
    y = mm(x, w)                                 w = wait(g); y = mm(x, w)
    v = wait(all_gather(cat(b)))                 v = wait(h); z = mm(y, v)
    z = mm(y, v)

A gather is issued, with the pack of its shards, before the wait of the gather `depth` positions earlier, so that
`depth` gathers are in flight while the model computes. A reduce-scatter is issued after the last of its gradients.
Waits move down to the first reader of their result. Until its wait, the backend holds the operand of a
reduce-scatter, which is whole gradients: with `reduces`, a reduce-scatter is waited for before the pack of the one
`reduces` positions later (eager FSDP2: 1).

Invariant: the same nodes, in another order. The order of collectives, of all groups together, does not change, so
ranks whose other nodes are ordered differently still issue equal sequences. `reorder` lets gathers pass
reduce-scatters; then all ranks must run this pass with equal options. budget_mb bounds the peak
(`cost/liveness.py`) in MiB: reduce-scatters are waited for earlier and gathers issued later until it
fits; the history says if the program still exceeds the budget.
Refuses to move
- a gather past what its shards are computed from, past another collective, a barrier, or a gather of its own group;
- a collective that `passes/patterns.py` does not know.

torch's `overlap_scheduling` reorders collectives by times that the ranks agree on while compiling, and asks Triton for
the bandwidth of the device; `raise_comms` and `sink_waits` work on Inductor's scheduler nodes, not on a graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

import torch
from torch import fx

from functionalize.cost.liveness import Liveness, held_before
from functionalize.errors import PassError
from functionalize.ir.waits import WAIT, sink_waits
from functionalize.passes.base import Pass
from functionalize.passes.patterns import Gather, Reduce, gathers, is_collective, reduces
from functionalize.program.program import Program

_MB = 2**20
_BOUNDS = (None, 8, 4, 2, 1)
_ROUNDS = 16  # two usually suffice; the graph is correct after any number of rounds


@dataclass(frozen=True)
class Prefetch(Pass):
    """Issue collectives early, wait for them late.

    depth: how many gathers are in flight besides the one that is waited for.
    reduces: how many reduce-scatters are in flight (None: as many as the budget allows).
    budget_mb: the highest allowed peak in MiB. reorder: gathers may be issued before reduce-scatters that were
    recorded before them.
    """

    name: ClassVar[str] = "prefetch"
    depth: int = 1
    reduces: int | None = None
    budget_mb: float | None = None
    reorder: bool = False

    def __post_init__(self) -> None:
        for name, count in (("depth", self.depth), ("reduces", self.reduces)):
            if count is not None and count < 1:
                raise PassError(
                    f"`prefetch`: {name} says how many are under way, at least 1, not {count}"
                )

    @property
    def changes_collectives(self) -> bool:  # type: ignore[override]
        """Whether gathers may pass reduce-scatters."""
        return self.reorder

    def apply(self, program: Program) -> int:
        graph, before = program.graph, list(program.graph.nodes)
        bound = self._bound(graph)
        for _ in range(_ROUNDS):
            if not _settle_waits(graph, bound) + self._hoist(graph, bound):
                break
        if self.budget_mb is not None:
            peak = Liveness(graph).peak / _MB
            if peak > self.budget_mb:
                text = f"a peak of {peak:.3f} MiB, above the budget of {self.budget_mb:.3f} MiB"
                program.history = (*program.history, f"{self.name}: {text}")
        return _moved(before, list(graph.nodes))

    def _bound(self, graph: fx.Graph) -> int | None:
        """How many reduce-scatters may be in flight."""
        if self.reduces is not None or self.budget_mb is None:
            return self.reduces
        for bound in _BOUNDS:
            _settle_waits(graph, bound)
            if Liveness(graph).peak <= self.budget_mb * _MB:
                return bound
        return 1

    def _hoist(self, graph: fx.Graph, bound: int | None) -> int:
        """Issue every collective as early as allowed, without reordering them; returns how many moved."""
        room = None if self.budget_mb is None else _BudgetRoom(graph, int(self.budget_mb * _MB))
        order = _Order(graph, bound)
        for node in list(graph.nodes):
            if is_collective(node):
                wanted = order.anchors(node, self.depth, self.reorder)
                at = next((at for at in wanted if room is None or room.take(node, order, at)), None)
                order.settle(node, at)
        return order.move()


def _settle_waits(graph: fx.Graph, bound: int | None) -> int:
    """Move waits to the first reader of their result, or as far as the bound allows; returns how many moved."""
    if bound is None:
        return sink_waits(graph)
    place = {node: i for i, node in enumerate(graph.nodes)}
    return sink_waits(graph, _last(graph, place, bound))


def _last(graph: fx.Graph, place: dict[fx.Node, int], bound: int | None) -> dict[fx.Node, fx.Node]:
    """(the wait of a reduce-scatter, the pack of a later one that it must precede), for all of them."""
    found: dict[fx.Node, fx.Node] = {}
    every = reduces(graph) if bound is not None else []
    for each, later in zip(every, every[bound:], strict=False):
        pack = later.pack if later.pack is not None else later.start
        found[each.wait] = pack if place[pack] > place[each.start] else later.start
    return found


def _moved(before: list[fx.Node], after: list[fx.Node]) -> int:
    """How many collectives and waits have another last preceding op than before, collectives and waits excluded."""
    if before == after:
        return 0
    places: list[dict[fx.Node, int]] = []
    fixed = {n for n in before if not is_collective(n) and n.target is not WAIT}
    for nodes in (before, after):
        count = list(accumulate(node in fixed for node in nodes))
        places.append({n: at for n, at in zip(nodes, count, strict=True) if n not in fixed})
    return max(1, sum(places[0][node] != at for node, at in places[1].items()))


class _Order:
    """The new positions of a graph's collectives, decided one after the other."""

    def __init__(self, graph: fx.Graph, bound: int | None) -> None:
        self.nodes = list(graph.nodes)
        self.place = {node: i for i, node in enumerate(self.nodes)}
        last = _last(graph, self.place, bound)
        self.awaited = {pack: self.place[wait] + 1 for wait, pack in last.items()}
        self.inputs = sum(node.op == "placeholder" for node in self.nodes)
        self.gathers = gathers(graph)
        self.number = {gather.start: i for i, gather in enumerate(self.gathers)}
        known: list[Gather | Reduce] = [*self.gathers, *reduces(graph)]
        self.chain = {
            each.start: [*each.feed, each.start] for each in known
        }  # what is moved with it
        self.passable = {each.start for each in known if isinstance(each, Reduce)}
        self.passable |= {r.all_reduce for r in known if isinstance(r, Reduce) and r.all_reduce}
        self.moves: list[tuple[fx.Node, fx.Node]] = []
        self.moved: set[fx.Node] = set()
        self.floor = self.gather_floor = (
            self.inputs
        )  # the next collective cannot be moved before these places

    def anchors(self, node: fx.Node, depth: int, reorder: bool) -> Iterator[int]:
        """The places before which a collective may be issued, the earliest first."""
        chain, here = self.chain.get(node), self.place[node]
        if chain is None:
            return
        above = (self.place[n] for each in chain for n in each.all_input_nodes if n not in chain)
        ready = max((at + 1 for at in above), default=0)
        if node not in self.number:
            awaited = max((self.awaited.get(n, 0) for n in chain), default=0)
            at = self._free(max(ready, self.floor, awaited), chain)
            if at < here:
                yield at
            return
        floor = max(ready, self.gather_floor if reorder else self.floor)
        last, number = -1, self.number[node]
        for ahead in range(min(depth, number + 1), 0, -1):
            first = [*self.gathers[number - ahead].waits] if ahead <= number else []
            at = self._free(max(floor, min((self.place[n] for n in first), default=0)), chain)
            if last < at < here:
                yield at
            last = at

    def _free(self, at: int, chain: list[fx.Node]) -> int:
        """The first place from `at` on whose node stays: neither moved already nor in the chain to be moved."""
        while at < len(self.nodes) and (self.nodes[at] in chain or self.nodes[at] in self.moved):
            at += 1
        return at

    def settle(self, node: fx.Node, at: int | None) -> None:
        """Record that a collective moves before the node at a place, or stays."""
        if at is None:
            floor = self.place[node] + 1
        else:
            floor = at
            self.moves.append((self.nodes[at], node))
            self.moved.update(n for n in self.chain[node] if self.place[n] > at)
        self.floor = max(self.floor, floor)
        if node not in self.passable:
            self.gather_floor = max(self.gather_floor, floor)

    def move(self) -> int:
        """Move the nodes as decided."""
        for before, node in self.moves:
            for each in self.chain[node]:
                if self.place[each] > self.place[before]:
                    before.prepend(each)
                    self.place[each] = self.place[before]  # the node may be in a later chain, too
        return len(self.moves)


class _BudgetRoom:
    """The memory in use at each place, and the limit."""

    def __init__(self, graph: fx.Graph, limit: int) -> None:
        self.live = Liveness(graph)
        self.limit = max(limit, self.live.peak)
        self.used = torch.tensor(self.live.timeline, dtype=torch.int64)

    def take(self, node: fx.Node, order: _Order, at: int) -> bool:
        """Account for a collective before another place, if it fits there."""
        made = {s for n in order.chain[node] for s in self.live.of[n] if order.nodes[s.first] is n}
        for storage in made:
            self.used[at : max(at, storage.first)] += storage.nbytes
        held = {
            s for n in held_before(order.nodes[at]) for s in self.live.of[n] if s.last == at - 1
        }
        peak = int(self.used[at : order.place[node]].max())
        if max(peak, int(self.used[at]) + sum(s.nbytes for s in held)) <= self.limit:
            return True
        for storage in made:
            self.used[at : max(at, storage.first)] -= storage.nbytes
        return False
