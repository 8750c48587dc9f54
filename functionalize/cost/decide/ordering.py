"""Reorder a graph's nodes to need less memory: the constraints on the order, and two greedy list schedules.

    order.earlier(start)    from the start: a node that frees more than it allocates runs as early as possible
    order.later(start)      from the end: a node that allocates more than it frees runs as late as possible

    a = f(x); b = g(x); c = h(a); d = k(b)    ->    a = f(x); c = h(a); b = g(x); d = k(b)     h frees `a`

All other nodes keep their relative order. Both are list schedules with a heap, n log n in nodes and edges;
`passes/schedule_memory.py` tries several in turn. To make a try cheap, the facts about the nodes are read once
(`Uses`), and orders, dependencies and lifetimes refer to nodes by number: their index in the graph.
Invariant: a resulting order has every node once, after all its dependencies; `Schedule.peak` of it equals the peak that
`Liveness` computes, with the scratch memory of nodes.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import MappingProxyType

from torch import fx

from functionalize._compat.graphs import input_nodes
from functionalize.analysis.aliases import is_view
from functionalize.cost.liveness import Liveness, held_before

# Tuples: the garbage collector stops tracking tuples that hold only numbers, which keeps collections short.
Rows = Sequence[tuple[int, ...]]
Scratch = Mapping[int, tuple[int, Sequence[int]]]
_NONE = 0, ()


@dataclass(frozen=True, slots=True, eq=False)
class Uses:
    """Which nodes use which storages. Numbers are indices: of a node in `nodes`, of a storage in `nbytes`.

    nbytes: per storage, its size.
    reads: per node, the nodes that are its arguments.
    holds: per node, the nodes whose storages it keeps alive until it runs, as a wait does (`held_before`).
    of: per node, the storages of its value.
    touches: per node, the storages of its value and of the nodes that it reads or holds. touched: their bytes.
    users: per storage, the nodes that touch it.
    scratch: what a backend allocates for a collective, by node: its size, and the waits until which it is live.
    """

    nodes: Sequence[fx.Node]
    nbytes: list[int]
    reads: Rows
    holds: Rows
    of: Rows
    touches: Rows
    touched: list[int]
    users: Rows
    scratch: Scratch

    @staticmethod
    def among(live: Liveness, scratch: Scratch = MappingProxyType({})) -> Uses:
        """The uses of the storages that a graph creates."""
        number = {id(s): i for i, s in enumerate(live.storages)}
        place = live.place
        of = [tuple(number[id(s)] for s in live.of[n]) for n in live.nodes]
        reads = [tuple(map(place.__getitem__, input_nodes(node))) for node in live.nodes]
        holds = [tuple(map(place.__getitem__, held_before(node))) for node in live.nodes]
        touches = []
        for i, node in enumerate(live.nodes):
            # A `getitem` result is on one storage of the list: touching the others too would be quadratic in its
            # length.
            part = node.target is operator.getitem and not is_view(node)
            near = () if part else (*reads[i], *holds[i])
            touches.append(tuple(dict.fromkeys((*of[i], *(s for j in near for s in of[j])))))
        nbytes = [s.nbytes for s in live.storages]
        touched = [sum(map(nbytes.__getitem__, row)) for row in touches]
        users = _transposed(touches, len(nbytes))
        return Uses(live.nodes, nbytes, reads, holds, of, touches, touched, users, scratch)


def _transposed(rows: Rows, size: int) -> Rows:
    """For each number below `size`, the indices of the rows that contain it."""
    found: list[list[int]] = [[] for _ in range(size)]
    for i, row in enumerate(rows):
        for j in row:
            found[j].append(i)
    return list(map(tuple, found))


class Schedule:
    """An order of the nodes, and its memory.

    order: the numbers of the nodes in this order. place: per node, its position in `order`.
    first: per storage, the position of the node that creates it.
    peak: the most bytes live at a node. total: the sum over all nodes of the bytes live there.
    """

    def __init__(self, uses: Uses, order: Sequence[int]) -> None:
        self.uses, self.order = uses, order
        self.place = [0] * len(order)
        for at, i in enumerate(order):
            self.place[i] = at
        self.first = [-1] * len(uses.nbytes)
        last = [0] * len(uses.nbytes)
        used, of, first = self._last_uses(), uses.of, self.first
        for at, i in enumerate(order):
            for storage in of[i]:
                if first[storage] < 0:
                    first[storage] = at
                if last[storage] < used[i]:
                    last[storage] = used[i]
        steps = [0] * (len(order) + 1)
        for nbytes, begin, end in zip(uses.nbytes, first, last, strict=True):
            steps[begin] += nbytes
            steps[end + 1] -= nbytes
        for nbytes, begin, end in self.in_flight():
            steps[begin] += nbytes
            steps[end] -= nbytes
        timeline = list(accumulate(steps))
        self.peak, self.total = max(timeline), sum(timeline)

    def in_flight(self) -> Iterator[tuple[int, int, int]]:
        """The scratch memory of each collective: bytes, the position from which it is live, the first after that."""
        for i, (nbytes, waits) in self.uses.scratch.items():
            yield (
                nbytes,
                self.place[i],
                max((self.place[w] for w in waits), default=self.place[i] + 1),
            )

    def _last_uses(self) -> list[int]:
        """Per node, the position of the last use of its value (not of views of it), as `Liveness` defines it."""
        used = self.place.copy()
        reads, holds = self.uses.reads, self.uses.holds
        for at, i in enumerate(self.order):
            for j in reads[i]:
                used[j] = at
            for j in holds[i]:
                used[j] = max(used[j], at - 1)
        return used


class Constraints:
    """The constraints on an order: for each node the nodes that it must follow.

    follows: per node, the nodes that must run before it. leads: the transpose. free: whether a node may move.
    inputs: the placeholders. views: whether a node is a view or a `getitem`, which allocates nothing.
    """

    def __init__(
        self,
        start: Schedule,
        chains: Iterable[Sequence[int]] = (),
        fixed: Iterable[int] = (),
        walls: Iterable[int] = (),
        late: Iterable[int] = (),
    ) -> None:
        """Constraints beyond data dependencies.

        chains: nodes of one chain keep the order that they have in `start`.
        fixed: nodes that are moved neither forward nor back.
        walls: nodes that no other node may move across.
        late: nodes to run as late as possible whatever they allocate.
        """
        self.uses = start.uses
        nodes = self.uses.nodes
        self.follows = _follows(start, chains, walls)
        self.leads = _transposed(self.follows, len(nodes))
        pinned = set(fixed)
        self.free = [n.op == "call_function" and i not in pinned for i, n in enumerate(nodes)]
        self.inputs = [i for i, n in enumerate(nodes) if n.op == "placeholder"]
        self.late = set(late)
        self.views = [is_view(n) or n.target is operator.getitem for n in nodes]

    def earlier(self, start: Schedule) -> list[int]:
        """An order that frees memory earlier than `start` does; no move exceeds the peak of `start`."""
        uses, free, views = self.uses, self.free, self.views
        left = list(map(len, uses.users))  # per storage, how many of its users have not run
        # Per storage, the sum of the users that have not run: once one is left, that is its number.
        last = list(map(sum, uses.users))
        needs = _allocated(start)
        delta = needs.copy()  # per node, by how much the live bytes would grow if it ran next
        for nbytes, users in zip(uses.nbytes, uses.users, strict=True):
            if len(users) == 1:
                delta[users[0]] -= nbytes
        ready = _Ready(start, self.follows)
        memory, touches = 0, uses.touches

        def offer(i: int) -> None:
            if free[i] and (delta[i] < 0 or (views[i] and not needs[i])):
                ready.hasten(i)

        def run(i: int) -> None:
            nonlocal memory
            memory += delta[i]
            for storage in touches[i]:
                left[storage] -= 1
                last[storage] -= i
                if left[storage] == 1:
                    delta[last[storage]] -= uses.nbytes[storage]
                    offer(last[storage])
            for j in ready.done(i, self.leads[i]):
                offer(j)

        for i in self.inputs:
            run(i)
        scratch = uses.scratch
        for i in ready.each(lambda i: memory + needs[i] + scratch.get(i, _NONE)[0] <= start.peak):
            run(i)
        return ready.order

    def later(self, start: Schedule) -> list[int]:
        """An order that allocates memory later than `start` does. It is built from the end."""
        uses, nbytes, free, views = self.uses, self.uses.nbytes, self.free, self.views
        is_live = [False] * len(nbytes)
        makes = _allocated(start)
        made = {start.order[at] for at in start.first}  # includes creators of empty storages
        # Per node, live bytes before it minus live bytes after it, if it ran last of the nodes not yet placed.
        delta = list(map(operator.sub, uses.touched, makes))
        ready = _Ready(start, self.leads, -1)

        def offer(i: int) -> None:
            if free[i] and ((delta[i] <= 0 and (views[i] or i in made)) or i in self.late):
                ready.hasten(i)

        for i in ready.each(lambda _: True):
            for storage in uses.touches[i]:
                if not is_live[storage]:
                    is_live[storage] = True
                    freed = nbytes[storage]
                    for user in uses.users[storage]:
                        delta[user] -= freed
                        offer(user)
            for j in ready.done(i, self.follows[i]):
                offer(j)
        ready.order.reverse()
        return ready.order


def _follows(start: Schedule, chains: Iterable[Sequence[int]], walls: Iterable[int]) -> Rows:
    """Per node, the nodes that it reads and those that chains and walls put before it."""
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


def _allocated(start: Schedule) -> list[int]:
    """Per node, the bytes of the storages that it creates."""
    found = [0] * len(start.order)
    for nbytes, at in zip(start.uses.nbytes, start.first, strict=True):
        found[start.order[at]] += nbytes
    return found


class _Ready:
    """The nodes whose dependencies have run: hastened ones first, then by position (`sign` -1: from the end).

    waits_for: per node, the nodes that must run before it.
    """

    def __init__(
        self, start: Schedule, waits_for: Sequence[Collection[int]], sign: int = 1
    ) -> None:
        self.order: list[int] = []
        self._at, self._sign = start.order, sign
        self._rank = start.place if sign > 0 else [-at for at in start.place]
        self._missing = list(map(len, waits_for))
        self._ran = [False] * len(waits_for)
        self._hastened: list[int] = []
        self._waiting = sorted(self._rank[i] for i, n in enumerate(self._missing) if not n)

    def hasten(self, i: int) -> None:
        """Run a node before those that are not hastened, if its dependencies have run."""
        if not self._missing[i] and not self._ran[i]:
            heapq.heappush(self._hastened, self._rank[i])

    def done(self, i: int, others: Iterable[int]) -> list[int]:
        """Record that a node ran; return which of `others`, the nodes that wait for it, can run now."""
        self._ran[i] = True
        self.order.append(i)
        missing, found = self._missing, []
        for j in others:
            missing[j] -= 1
            if not missing[j]:
                heapq.heappush(self._waiting, self._rank[j])
                found.append(j)
        return found

    def each(self, fits: Callable[[int], bool]) -> Iterator[int]:
        """Yield the next node until none is left. A hastened node that does not fit runs at its original position."""
        at, sign, ran, pop = self._at, self._sign, self._ran, heapq.heappop
        hastened, waiting = self._hastened, self._waiting
        while hastened or waiting:
            if hastened:
                i = at[sign * pop(hastened)]
                if ran[i] or not fits(i):
                    continue
            else:
                i = at[sign * pop(waiting)]
                if ran[i]:
                    continue
            yield i
