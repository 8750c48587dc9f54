"""What a step saves for later: the storages that a forward makes and that are read after it ended.

    mm = aten.mm(x, w)              forward
    relu = aten.relu(mm)            forward     saved: last read by `mm_1` in forward, next by `gt` in backward
    mm_1 = aten.mm(relu, w_1)       forward
    gt = aten.gt(relu, 0)           backward

A step of several microbatches has several forwards, each with a backward after it. Results of the graph are not
saved values: they are kept for the caller. Linear in nodes and edges.
Invariant: a storage is saved once, by the forward that makes it, however many values are views of it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import fx

from functionalize.ir.phases import FORWARD, phase_of
from functionalize.planning.timeline.liveness import Liveness, Storage


@dataclass(frozen=True, slots=True)
class Region:
    """The places [start, end) of one forward."""

    start: int
    end: int


@dataclass(slots=True, eq=False)
class Saved:
    """One saved storage. region: which forward. last: the place of its last use in there.

    first_later: the place of its first use after that forward. read: the values of that forward that are read then.
    """

    storage: Storage
    region: int
    last: int
    first_later: int
    read: list[fx.Node] = field(default_factory=list)


def forwards(live: Liveness) -> list[Region]:
    """The forwards of a step that something follows. A node without a phase is of the phase it lies in."""
    found: list[Region] = []
    start: int | None = None
    for place, node in enumerate(live.nodes):
        phase = phase_of(node)
        if phase == FORWARD and start is None:
            start = place
        elif phase not in (FORWARD, None) and start is not None:
            found.append(Region(start, place))
            start = None
    return found


def saved_values(live: Liveness, regions: list[Region]) -> list[Saved]:
    """The storages that each forward saves, in the order in which they are made."""
    (output,) = (n for n in live.nodes if n.op == "output")
    given = {s for node in output.all_input_nodes for s in live.of[node]}
    found: list[Saved] = []
    uses: dict[fx.Node, list[int]] = {}
    for region, storage in made_in(live, regions):
        end = regions[region].end
        if storage.last < end or storage in given:
            continue
        saved = Saved(storage, region, storage.first, len(live.nodes))
        for node in storage.nodes:
            if node not in uses:  # once for a tuple, however many storages are in it
                uses[node] = sorted(live.place[user] for user in node.users)
            later = bisect_left(uses[node], end)
            if later:
                saved.last = max(saved.last, uses[node][later - 1])
            if later < len(uses[node]):
                saved.first_later = min(saved.first_later, uses[node][later])
                if live.place[node] < end:  # else it is a view that was taken later
                    saved.read.append(node)
        if saved.read:
            found.append(saved)
    return found


def made_in(live: Liveness, regions: list[Region]) -> Iterator[tuple[int, Storage]]:
    """(number of the forward, storage that it makes), in the order in which they are made."""
    at = 0
    for storage in live.storages:
        while at < len(regions) and regions[at].end <= storage.first:
            at += 1
        if at == len(regions):
            return
        if regions[at].start <= storage.first:
            yield at, storage
