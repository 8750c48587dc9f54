"""Other orders of a graph's nodes that need less memory: what may pass what, and two greedy sweeps.

    earlier(...)    forwards: a node that frees more than it makes runs as soon as it can
    later(...)      backwards: a node that makes more than it frees runs as late as it can

    a = f(x); b = g(x); c = h(a); d = k(b)    ->    a = f(x); c = h(a); b = g(x); d = k(b)     h frees `a`

Everything else keeps its place. Both are list schedules with a heap, n log n in nodes and edges;
`passes/schedule_memory.py` tries several, one after the other.
Invariant: an order that comes out has every node once, after all that it must follow.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import fx

from functionalize.core.aliases import is_view
from functionalize.planning.liveness import Liveness, held_before


@dataclass(frozen=True, slots=True, eq=False)
class Uses:
    """Who touches which storage. makes, touches: per node, storages by number; left: per storage, its nodes."""

    nbytes: list[int]
    makes: list[list[int]]
    touches: list[list[int]]
    users: list[list[int]]

    @staticmethod
    def of(live: Liveness) -> Uses:
        """The uses of the storages that a graph makes; nodes are numbered as `live.nodes`."""
        number = {id(s): i for i, s in enumerate(live.storages)}
        makes: list[list[int]] = [[] for _ in live.nodes]
        touches: list[list[int]] = []
        users: list[list[int]] = [[] for _ in live.storages]
        for i, storage in enumerate(live.storages):
            makes[storage.first].append(i)
        for place, node in enumerate(live.nodes):
            # A part of a list is on one storage: asking for the others, too, would be quadratic in its length.
            part = node.target is operator.getitem and not is_view(node)
            near = (node,) if part else (node, *node.all_input_nodes, *held_before(node))
            found = dict.fromkeys(number[id(s)] for n in near for s in live.of[n])
            touches.append(list(found))
            for storage_number in found:
                users[storage_number].append(place)
        return Uses([s.nbytes for s in live.storages], makes, touches, users)


class Order:
    """A graph's nodes in some order, and for each the nodes that it must follow (by place in that order)."""

    def __init__(
        self,
        live: Liveness,
        chains: Iterable[Sequence[fx.Node]] = (),
        fixed: Iterable[fx.Node] = (),
        walls: Iterable[fx.Node] = (),
        late: Iterable[fx.Node] = (),
    ) -> None:
        """chains: of nodes that keep their order. walls: nodes that no other passes.

        fixed: nodes that are neither hastened nor put off. late: nodes that are put off whatever they make.
        """
        self.live, self.uses = live, Uses.of(live)
        place = live.place
        self.follows = [{place[n] for n in node.all_input_nodes} for node in live.nodes]
        for chain in chains:
            places = sorted(place[node] for node in chain)
            for one, other in pairwise(places):
                self.follows[other].add(one)
        for wall in map(place.__getitem__, walls):
            self.follows[wall].update(range(wall))
            for after in self.follows[wall + 1 :]:
                after.add(wall)
        self.leads: list[list[int]] = [[] for _ in self.follows]
        for i, before in enumerate(self.follows):
            for j in before:
                self.leads[j].append(i)
        pinned = {place[n] for n in fixed}
        self.free = [n.op == "call_function" and i not in pinned for i, n in enumerate(live.nodes)]
        self.late = {place[n] for n in late}
        self.views = [is_view(n) or n.target is operator.getitem for n in live.nodes]

    def earlier(self) -> list[fx.Node]:
        """The nodes in an order in which memory is freed earlier, and no move goes beyond the peak so far."""
        uses = self.uses
        left = [len(users) for users in uses.users]
        last = [sum(users) for users in uses.users]  # the last user, once a single one is left
        needs = [sum(uses.nbytes[s] for s in made) for made in uses.makes]
        delta = list(needs)  # what is live after a node, less what was before
        for storage, users in enumerate(uses.users):
            if len(users) == 1:
                delta[users[0]] -= uses.nbytes[storage]
        ready = _Ready(self.follows)
        memory = 0

        def offer(i: int) -> None:
            if self.free[i] and (delta[i] < 0 or (self.views[i] and not needs[i])):
                ready.hasten(i)

        def run(i: int) -> None:
            nonlocal memory
            memory += delta[i]
            for storage in uses.touches[i]:
                left[storage] -= 1
                last[storage] -= i
                if left[storage] == 1:
                    delta[last[storage]] -= uses.nbytes[storage]
                    offer(last[storage])
            for j in ready.done(i, self.leads[i]):
                offer(j)

        for each in self.live.graph.find_nodes(op="placeholder"):
            run(self.live.place[each])
        while (node := ready.next(lambda i: memory + needs[i] <= self.live.peak)) is not None:
            run(node)
        return [self.live.nodes[i] for i in ready.order]

    def later(self) -> list[fx.Node]:
        """The nodes in an order in which memory is made later."""
        uses = self.uses
        is_live = [False] * len(uses.nbytes)
        delta = [  # what is live before a node, less what is after
            sum(uses.nbytes[s] for s in touched) - sum(uses.nbytes[s] for s in made)
            for touched, made in zip(uses.touches, uses.makes, strict=True)
        ]
        ready = _Ready(self.leads, -1)

        def offer(i: int) -> None:
            light = delta[i] <= 0 and (bool(uses.makes[i]) or self.views[i])
            if self.free[i] and (light or i in self.late):
                ready.hasten(i)

        while (node := ready.next(lambda _: True)) is not None:
            for storage in uses.touches[node]:
                if not is_live[storage]:
                    is_live[storage] = True
                    for user in uses.users[storage]:
                        delta[user] -= uses.nbytes[storage]
                        offer(user)
            for j in ready.done(node, self.follows[node]):
                offer(j)
        return [self.live.nodes[i] for i in reversed(ready.order)]


class _Ready:
    """Which nodes can run, given what ran: those in haste first, then by place (`sign` -1: from the end)."""

    def __init__(self, waits_for: Sequence[Collection[int]], sign: int = 1) -> None:
        self.order: list[int] = []
        self._sign = sign
        self._missing = [len(others) for others in waits_for]
        self._ran = [False] * len(waits_for)
        self._hasty: list[int] = []
        self._waiting = sorted(sign * i for i, n in enumerate(self._missing) if not n)

    def hasten(self, i: int) -> None:
        """Let a node run as soon as it can, if it can."""
        if not self._missing[i] and not self._ran[i]:
            heapq.heappush(self._hasty, self._sign * i)

    def done(self, i: int, others: Iterable[int]) -> list[int]:
        """Note that a node ran; returns which of the `others`, which wait for it, can run now."""
        self._ran[i] = True
        self.order.append(i)
        found = []
        for j in others:
            self._missing[j] -= 1
            if not self._missing[j]:
                heapq.heappush(self._waiting, self._sign * j)
                found.append(j)
        return found

    def next(self, fits: Callable[[int], bool]) -> int | None:
        """The next node; one in haste that does not fit now runs in its place."""
        for heap in (self._hasty, self._waiting):
            while heap:
                i = self._sign * heapq.heappop(heap)
                if not self._ran[i] and (heap is self._waiting or fits(i)):
                    return i
        return None
