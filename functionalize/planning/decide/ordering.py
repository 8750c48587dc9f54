"""Other orders of a graph's nodes that need less memory: what may pass what, and two greedy sweeps.

    order.earlier(start)    forwards: a node that frees more than it makes runs as soon as it can
    order.later(start)      backwards: a node that makes more than it frees runs as late as it can

    a = f(x); b = g(x); c = h(a); d = k(b)    ->    a = f(x); c = h(a); b = g(x); d = k(b)     h frees `a`

Everything else keeps its place. Both are list schedules with a heap, n log n in nodes and edges;
`passes/schedule_memory.py` tries several, one after the other. So that a try costs little, whatever is needed of the
nodes is read once (`Uses`); orders, what must follow what and lifetimes are numbers: nodes by their place in the graph.
Invariant: an order that comes out has every node once, after all that it must follow; its peak is what `Liveness`
finds for it.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torch import fx

from functionalize.analysis.aliases import is_view
from functionalize.planning.timeline.liveness import Liveness, held_before

# Tuples: the garbage collector does not come back to those that hold numbers only.
Rows = Sequence[tuple[int, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class Uses:
    """Which nodes use which storages, by number: a node's is its place in `nodes`, a storage's in `nbytes`.

    reads: per node, those it is given. holds: those that a wait frees (`held_before`). of: per node, the storages
    that it is a value on. touches: and those of what it reads or holds. users: per storage, the nodes that touch it.
    """

    nodes: Sequence[fx.Node]
    nbytes: list[int]
    reads: Rows
    holds: Rows
    of: Rows
    touches: Rows
    users: Rows

    @staticmethod
    def among(live: Liveness) -> Uses:
        """The uses of the storages that a graph makes."""
        number = {id(s): i for i, s in enumerate(live.storages)}
        place = live.place
        of = [tuple(number[id(s)] for s in live.of[n]) for n in live.nodes]
        reads = [tuple(place[n] for n in node.all_input_nodes) for node in live.nodes]
        holds = [tuple(place[n] for n in held_before(node)) for node in live.nodes]
        touches = []
        for i, node in enumerate(live.nodes):
            # A part of a list is on one storage: asking for the others, too, would be quadratic in its length.
            part = node.target is operator.getitem and not is_view(node)
            near = () if part else (*reads[i], *holds[i])
            touches.append(tuple(dict.fromkeys((*of[i], *(s for j in near for s in of[j])))))
        nbytes = [s.nbytes for s in live.storages]
        users = _transposed(touches, len(nbytes))
        return Uses(live.nodes, nbytes, reads, holds, of, touches, users)


def _transposed(rows: Rows, size: int) -> Rows:
    """For each of `size` numbers the rows that it is in."""
    found: list[list[int]] = [[] for _ in range(size)]
    for i, row in enumerate(rows):
        for j in row:
            found[j].append(i)
    return list(map(tuple, found))


class Schedule:
    """The nodes in some order, and what is live in it.

    order: the nodes' numbers. place: where each of them is. first: per storage, the place of the node that makes it.
    peak: bytes; total: the sum of what is live at each node.
    """

    def __init__(self, uses: Uses, order: Sequence[int]) -> None:
        self.uses, self.order = uses, order
        self.place = [0] * len(order)
        for at, i in enumerate(order):
            self.place[i] = at
        self.first = [-1] * len(uses.nbytes)
        last = [0] * len(uses.nbytes)
        used = self._last_uses()
        for at, i in enumerate(order):
            for storage in uses.of[i]:
                if self.first[storage] < 0:
                    self.first[storage] = at
                if last[storage] < used[i]:
                    last[storage] = used[i]
        steps = [0] * (len(order) + 1)
        for nbytes, begin, end in zip(uses.nbytes, self.first, last, strict=True):
            steps[begin] += nbytes
            steps[end + 1] -= nbytes
        timeline = list(accumulate(steps))
        self.peak, self.total = max(timeline), sum(timeline)

    def _last_uses(self) -> list[int]:
        """The place at which each value, itself, is used last, as `Liveness` counts it."""
        used = self.place.copy()
        reads, holds = self.uses.reads, self.uses.holds
        for at, i in enumerate(self.order):
            for j in reads[i]:
                used[j] = at
            for j in holds[i]:
                used[j] = max(used[j], at - 1)
        return used


class Order:
    """For each node of a graph those that it must follow: what it reads, and what it is told to."""

    def __init__(
        self,
        start: Schedule,
        chains: Iterable[Sequence[int]] = (),
        fixed: Iterable[int] = (),
        walls: Iterable[int] = (),
        late: Iterable[int] = (),
    ) -> None:
        """chains: of nodes that keep the order that they have in `start`. walls: nodes that no other passes there.

        fixed: nodes that are neither hastened nor put off. late: nodes that are put off whatever they make.
        """
        self.uses = start.uses
        nodes = self.uses.nodes
        self.follows = _follows(start, chains, walls)
        self.leads = _transposed(self.follows, len(nodes))
        pinned = set(fixed)
        self.free = [n.op == "call_function" and i not in pinned for i, n in enumerate(nodes)]
        self.given = [i for i, n in enumerate(nodes) if n.op == "placeholder"]
        self.late = set(late)
        self.views = [is_view(n) or n.target is operator.getitem for n in nodes]

    def earlier(self, start: Schedule) -> list[int]:
        """An order in which memory is freed earlier than in `start`, and no move goes beyond its peak."""
        uses, free, views = self.uses, self.free, self.views
        left = list(map(len, uses.users))
        last = list(map(sum, uses.users))  # the last user, once a single one is left
        needs = _made(start)
        delta = needs.copy()  # what is live after a node, less what was before
        for nbytes, users in zip(uses.nbytes, uses.users, strict=True):
            if len(users) == 1:
                delta[users[0]] -= nbytes
        ready = _Ready(start, self.follows)
        memory = 0

        def offer(i: int) -> None:
            if free[i] and (delta[i] < 0 or (views[i] and not needs[i])):
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

        for i in self.given:
            run(i)
        for i in ready.each(lambda i: memory + needs[i] <= start.peak):
            run(i)
        return ready.order

    def later(self, start: Schedule) -> list[int]:
        """An order in which memory is made later than in `start`."""
        uses, nbytes, free, views = self.uses, self.uses.nbytes, self.free, self.views
        is_live = [False] * len(nbytes)
        makes = _made(start)
        made = {start.order[at] for at in start.first}  # also what is empty
        # What is live before a node, less what is after.
        delta = [sum(nbytes[s] for s in row) - makes[i] for i, row in enumerate(uses.touches)]
        ready = _Ready(start, self.leads, -1)

        def offer(i: int) -> None:
            if free[i] and ((delta[i] <= 0 and (views[i] or i in made)) or i in self.late):
                ready.hasten(i)

        for i in ready.each(lambda _: True):
            for storage in uses.touches[i]:
                if not is_live[storage]:
                    is_live[storage] = True
                    for user in uses.users[storage]:
                        delta[user] -= nbytes[storage]
                        offer(user)
            for j in ready.done(i, self.follows[i]):
                offer(j)
        ready.order.reverse()
        return ready.order


def _follows(start: Schedule, chains: Iterable[Sequence[int]], walls: Iterable[int]) -> Rows:
    """What each node reads, and what else it must follow."""
    place, order = start.place, start.order
    others: dict[int, list[int]] = {}
    for chain in chains:
        for one, other in pairwise(sorted(chain, key=place.__getitem__)):
            others.setdefault(other, []).append(one)
    for wall in walls:
        others.setdefault(wall, []).extend(order[: place[wall]])
        for i in order[place[wall] + 1 :]:
            others.setdefault(i, []).append(wall)
    rows = list(start.uses.reads)
    for i, before in others.items():
        rows[i] = tuple(dict.fromkeys((*rows[i], *before)))
    return rows


def _made(start: Schedule) -> list[int]:
    """Per node, the bytes of the storages that it makes."""
    found = [0] * len(start.order)
    for nbytes, at in zip(start.uses.nbytes, start.first, strict=True):
        found[start.order[at]] += nbytes
    return found


class _Ready:
    """Which nodes can run, given what ran: those in haste first, then by place (`sign` -1: from the end)."""

    def __init__(
        self, start: Schedule, waits_for: Sequence[Collection[int]], sign: int = 1
    ) -> None:
        self.order: list[int] = []
        self._at, self._sign = start.order, sign
        self._rank = start.place if sign > 0 else [-at for at in start.place]
        self._missing = list(map(len, waits_for))
        self._ran = [False] * len(waits_for)
        self._hasty: list[int] = []
        self._waiting = sorted(self._rank[i] for i, n in enumerate(self._missing) if not n)

    def hasten(self, i: int) -> None:
        """Let a node run as soon as it can, if it can."""
        if not self._missing[i] and not self._ran[i]:
            heapq.heappush(self._hasty, self._rank[i])

    def done(self, i: int, others: Iterable[int]) -> list[int]:
        """Note that a node ran; returns which of the `others`, which wait for it, can run now."""
        self._ran[i] = True
        self.order.append(i)
        found = []
        for j in others:
            self._missing[j] -= 1
            if not self._missing[j]:
                heapq.heappush(self._waiting, self._rank[j])
                found.append(j)
        return found

    def each(self, fits: Callable[[int], bool]) -> Iterator[int]:
        """The next node, again and again; one in haste that does not fit now runs in its place."""
        while (i := self._next(fits)) is not None:
            yield i

    def _next(self, fits: Callable[[int], bool]) -> int | None:
        for heap in (self._hasty, self._waiting):
            while heap:
                i = self._at[self._sign * heapq.heappop(heap)]
                if not self._ran[i] and (heap is self._waiting or fits(i)):
                    return i
        return None
