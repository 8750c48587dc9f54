"""Where memory allows, collectives that run beside computation, in an order that waits for each where it starts.

    g = all_gather(b); w = wait(g)                     w = wait(g); h = all_gather(c)
    y = mm(x, w)                              ->       y = mm(x, w)
    h = all_gather(c); v = wait(h)                     v = wait(h)
    z = mm(y, v)                                       z = mm(y, v)

A collective starts, with the pack of what it sends, right after the wait of the collective before it: one is in flight
at a time, as on gloo. A wait moves to before the first reader of its result, or to before the next collective.

Invariant: the same nodes; the order of collectives stays; no more bytes are live than `limit` at any node, with what a
backend allocates for a collective that is in flight for longer. A wait stays before every op that writes what its
collective reads. Linear in nodes and edges.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import fx

from functionalize.analysis.aliases import is_view, written_nodes
from functionalize.cost.decide.ordering import Constraints, Schedule, Scratch
from functionalize.cost.liveness import Liveness, held_before
from functionalize.ir.waits import WAIT
from functionalize.passes.patterns import Gather, Reduce, gathers, is_collective, reduces


def overlapped(start: Schedule, order: Constraints, live: Liveness, limit: int) -> list[int]:
    """An order of the nodes of `live` with more overlap than `start`; `order` has its constraints."""
    if not any(map(is_collective, live.nodes)):
        return list(start.order)
    found = _Overlap(start, order, live, limit)
    result = Schedule(start.uses, found.order)
    return found.order if result.peak <= limit else list(start.order)


def scratch_in(live: Liveness) -> Scratch:
    """What gloo allocates for each collective of a graph, and the waits until which it is live; by number."""
    return {
        i: (scratch_of(node, live), [live.place[wait] for wait in _waits(node)])
        for i, node in enumerate(live.nodes)
        if is_collective(node)
    }


def scratch_of(started: fx.Node, live: Liveness) -> int:
    """What gloo allocates while a collective is in flight: as much as it sends, or receives."""
    read = {s for n in started.all_input_nodes for s in live.of[n]}
    return max(sum(s.nbytes for s in each) for each in (read, live.of[started]))


class _Overlap:
    """The order, decided one collective after the other. Places are those of the order to start from."""

    def __init__(self, start: Schedule, order: Constraints, live: Liveness, limit: int) -> None:
        self.start, self.constraints, self.limit = start, order, limit
        self.nodes, self.place = start.uses.nodes, start.place
        self.number = {node: i for i, node in enumerate(self.nodes)}
        ordered = live.reordered([self.nodes[i] for i in start.order])
        self.used = torch.tensor(ordered.timeline, dtype=torch.int64)
        for nbytes, begin, end in start.in_flight():
            self.used[begin:end] += nbytes
        self.live = ordered
        self.writers = _writers(ordered)
        known: list[Gather | Reduce] = [*gathers(live.graph), *reduces(live.graph)]
        self.chains = {each.start: (*each.feed, each.start) for each in known}
        self.before: dict[int, list[int]] = {}  # a place -> the nodes that move to before it
        self.moved: set[int] = set()
        self._decide()
        self.order = self._ordered()

    def _decide(self) -> None:
        started = [i for i in self.start.order if is_collective(self.nodes[i])]
        # The place after the wait of the collective before.
        free = sum(node.op == "placeholder" for node in self.nodes)
        for i, following in zip(started, [*started[1:], None], strict=True):
            node = self.nodes[i]
            begin = self.place[i]
            if node in self.chains:
                begin = self._hoist(self.chains[node], free)
            ends = len(self.nodes) if following is None else self._begin_of(following)
            free = max(begin, self.place[i]) + 1
            for wait in _waits(node):
                free = max(free, self._sink(node, wait, ends) + 1)

    def _begin_of(self, i: int) -> int:
        """The place of the first node that makes what a collective sends, inputs apart."""
        return min(
            self.place[self.number[n]] for n in self.chains.get(self.nodes[i], (self.nodes[i],))
        )

    def _hoist(self, nodes: Sequence[fx.Node], free: int) -> int:
        """Start a collective at the first place from `free` on that is allowed; returns where it starts."""
        chain = sorted({self.number[n] for n in nodes}, key=self.place.__getitem__)
        inside, here = set(chain), self.place[chain[-1]]
        above = (
            self.place[j] for i in chain for j in self.constraints.follows[i] if j not in inside
        )
        at = max(free, max(above, default=-1) + 1)
        chain = [i for i in chain if self.place[i] >= at and i not in self.moved]
        if not chain or at >= self.place[chain[0]]:
            return here
        spans = [*self._spans(chain, at), (scratch_of(nodes[-1], self.live), at, here)]
        if not self._take(spans):
            return here
        self.before.setdefault(at, []).extend(chain)
        self.moved.update(chain)
        return at

    def _spans(self, chain: list[int], at: int) -> Iterator[tuple[int, int, int]]:
        """The bytes that are live for longer, or (negative) shorter, if the nodes run at a place: bytes, begin, end."""
        places = {self.place[i] for i in chain}
        touched = dict.fromkeys(
            s
            for i in chain
            for n in (self.nodes[i], *self.nodes[i].all_input_nodes)
            for s in self.live.of[n]
        )
        for storage in touched:
            if storage.first in places:
                yield storage.nbytes, at, storage.first
            elif storage.last in places:
                users = (self.place[self.number[u]] for n in storage.nodes for u in n.users)
                last = max((p for p in users if p not in places), default=at)
                yield -storage.nbytes, max(at, last) + 1, storage.last + 1

    def _sink(self, started: fx.Node, wait: fx.Node, ends: int) -> int:
        """Wait, and take views of the result, as late before `ends` as is allowed; returns the place of the wait."""
        chain = sorted((self.number[n] for n in _with_views(wait)), key=self.place.__getitem__)
        inside, here = set(chain), self.place[self.number[wait]]
        below = [self.place[j] for i in chain for j in self.constraints.leads[i] if j not in inside]
        groups = {self.live.aliases.of(n) for n in started.all_input_nodes}
        below += [at for g in groups for at in self.writers.get(g, ()) if at > here]
        to = min([ends, *below])
        chain = [i for i in chain if self.place[i] < to and i not in self.moved]
        held = {s for n in held_before(wait) for s in self.live.of[n] if s.last == here - 1}
        spans = [(s.nbytes, here, to) for s in held]
        spans.append((scratch_of(started, self.live), here, to))
        if to <= here + len(chain) or not self._take(spans):
            return here
        self.before[to] = [*chain, *self.before.get(to, [])]
        self.moved.update(chain)
        return to - 1

    def _take(self, spans: list[tuple[int, int, int]]) -> bool:
        """Account for bytes that are live from a place to before another one, if they fit."""
        for nbytes, begin, end in spans:
            self.used[begin:end] += nbytes
        if all(int(self.used[b:e].max()) <= self.limit for _, b, e in spans if e > b):
            return True
        for nbytes, begin, end in spans:
            self.used[begin:end] -= nbytes
        return False

    def _ordered(self) -> list[int]:
        found: list[int] = []
        for at, i in enumerate(self.start.order):
            found += self.before.get(at, [])
            if i not in self.moved:
                found.append(i)
        return found + self.before.get(len(self.start.order), [])


def _waits(started: fx.Node) -> list[fx.Node]:
    """The waits of a collective, past the parts of its result."""
    found = []
    for user in started.users:
        found += [user] if user.target is WAIT else [n for n in user.users if n.target is WAIT]
    return found


def _with_views(node: fx.Node) -> Iterator[fx.Node]:
    """A node and the views of its value."""
    yield node
    for user in node.users:
        if is_view(user):
            yield from _with_views(user)


def _writers(live: Liveness) -> dict[fx.Node, list[int]]:
    """For each memory that an op writes, the places of these ops."""
    found: dict[fx.Node, list[int]] = {}
    for place, node in enumerate(live.nodes):
        for _, target in written_nodes(node):
            found.setdefault(live.aliases.of(target), []).append(place)
    return found
