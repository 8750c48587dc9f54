"""The saved storages of a step: those that a forward creates and that are read after its end.

    mm = aten.mm(x, w)              forward
    relu = aten.relu(mm)            forward     saved: last read by `mm_1` in forward, next by `gt` in backward
    mm_1 = aten.mm(relu, w_1)       forward
    gt = aten.gt(relu, 0)           backward

A step of several microbatches has several forwards, each with a backward after it. Results of the graph do not
count as saved: they stay alive for the caller anyway. Linear in nodes and edges.
Invariant: a storage is listed once, for the forward that creates it, however many values are views of it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import fx

from functionalize.cost.liveness import Liveness, Storage
from functionalize.ir.phases import FORWARD, phase_of


@dataclass(frozen=True, slots=True)
class ForwardRegion:
    """The places [start, end) of one forward."""

    start: int
    end: int


@dataclass(slots=True, eq=False)
class SavedStorage:
    """One saved storage.

    region: the number of the forward that creates it.
    last: the place of its last use in that forward.
    first_later: the place of its first use after that forward.
    read: the values of that forward on this storage that are read after it.
    """

    storage: Storage
    region: int
    last: int
    first_later: int
    read: list[fx.Node] = field(default_factory=list)


def forwards(live: Liveness) -> list[ForwardRegion]:
    """The forwards of a step that nodes of another phase follow. A node without a phase counts to the current one."""
    found: list[ForwardRegion] = []
    start: int | None = None
    for place, node in enumerate(live.nodes):
        phase = phase_of(node)
        if phase == FORWARD and start is None:
            start = place
        elif phase not in (FORWARD, None) and start is not None:
            found.append(ForwardRegion(start, place))
            start = None
    return found


def saved_values(live: Liveness, regions: list[ForwardRegion]) -> list[SavedStorage]:
    """The saved storages of all forwards, in the order of their creation."""
    (output,) = (n for n in live.nodes if n.op == "output")
    returned = {s for node in output.all_input_nodes for s in live.of[node]}
    found: list[SavedStorage] = []
    uses: dict[fx.Node, list[int]] = {}
    for region, storage in made_in(live, regions):
        end = regions[region].end
        if storage.last < end or storage in returned:
            continue
        saved = SavedStorage(storage, region, storage.first, len(live.nodes))
        for node in storage.nodes:
            if node not in uses:  # computed once for a tuple, which has several storages
                uses[node] = sorted(live.place[user] for user in node.users)
            later = bisect_left(uses[node], end)
            if later:
                saved.last = max(saved.last, uses[node][later - 1])
            if later < len(uses[node]):
                saved.first_later = min(saved.first_later, uses[node][later])
                if live.place[node] < end:  # else it is a view that is created after the forward
                    saved.read.append(node)
        if saved.read:
            found.append(saved)
    return found


def made_in(live: Liveness, regions: list[ForwardRegion]) -> Iterator[tuple[int, Storage]]:
    """(number of a forward, storage that it creates), in the order of creation."""
    at = 0
    for storage in live.storages:
        while at < len(regions) and regions[at].end <= storage.first:
            at += 1
        if at == len(regions):
            return
        if regions[at].start <= storage.first:
            yield at, storage
