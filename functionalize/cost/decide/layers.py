"""Where the layers of a forward begin: the only values that must outlive a layer are those that cross a boundary.

    x ──▶ [ gather 0 ─▶ norm, addmm, gelu, addmm, add ] ──▶ x_1 ──▶ [ gather 1 ─▶ norm, ... ] ──▶ x_2
                                                          boundary                             boundary

A layer is the ops that compute with the parameters of one all-gather: it begins at the first op that reads them, and
ends at the first op that reads parameters of another one. A program without all-gathers (one rank, DDP) with n values
is cut where few values cross, into about sqrt(n) layers of about sqrt(n) values.
Invariant: boundaries depend on the program alone. Linear in nodes and edges.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import accumulate

from torch import Tensor, fx

from functionalize.cost.decide.saved import ForwardRegion
from functionalize.cost.liveness import Liveness, Storage

_MIN_VALUES = 16  # a forward with fewer values is one layer
_GATHERS = ("all_gather_into_tensor", "all_gather_into_tensor_coalesced")


class Layers:
    """The layers of one forward. boundaries: the places at which the layers after the first one begin."""

    def __init__(self, live: Liveness, region: ForwardRegion) -> None:
        self.live, self.region = live, region
        self.unsharded = _unsharded(live, region)
        self._last = _last_uses(live, region)
        self.boundaries = self._parameter_switches() or self._narrow_places()

    def of(self, place: int) -> int:
        """The number of the layer that contains a place."""
        return bisect_right(self.boundaries, place)

    def __len__(self) -> int:
        return len(self.boundaries) + 1

    def crosses(self, storage: Storage) -> bool:
        """Whether a storage is created in one layer and read in a later one; False for unsharded parameters."""
        if any(node in self.unsharded for node in storage.nodes):
            return False
        return self.of(storage.first) < self.of(self._last.get(storage, storage.first))

    def _parameter_switches(self) -> list[int]:
        """The places of ops that read parameters of another all-gather than the ops before."""
        found: list[int] = []
        current: fx.Node | None = None
        for place in range(self.region.start, self.region.end):
            node = self.live.nodes[place]
            read = [self.unsharded[n] for n in node.all_input_nodes if n in self.unsharded]
            if not read or node in self.unsharded:
                continue
            latest = max(read, key=self.live.place.__getitem__)
            if current is not None and latest is not current:
                found.append(place)
            current = latest
        return found

    def _narrow_places(self) -> list[int]:
        """Places that few values cross, about equally spaced.

        Only reads in the forward count: `remat` can drop what the backward alone reads.
        """
        start, end = self.region.start, self.region.end
        read = [s for s, last in self._last.items() if last > s.first]
        if len(read) < _MIN_VALUES:
            return []
        steps = [0] * (end - start + 1)
        for storage in read:
            steps[storage.first + 1 - start] += 1
            steps[self._last[storage] + 1 - start] -= 1
        width = list(accumulate(steps))  # per place, how many storages are live across it
        places = sorted(s.first for s in read)
        middle = sorted(width[p - start] for p in places[len(places) // 4 : -len(places) // 4])
        # The lower eighth, not the minimum, which a few odd places may have.
        narrow = middle[len(middle) // 8]
        parts = math.isqrt(len(places))
        found: list[int] = []
        for i, place in enumerate(places):
            due = i * parts // len(places) > len(found)
            if due and width[place - start] <= narrow:
                found.append(place)
        return found


def _last_uses(live: Liveness, region: ForwardRegion) -> dict[Storage, int]:
    """Storage created in a forward -> the place of its last use in that forward."""
    used: dict[fx.Node, int] = {}
    for place in range(region.start, region.end):
        used.update(dict.fromkeys((live.nodes[place], *live.nodes[place].all_input_nodes), place))
    last: dict[Storage, int] = {}
    for node, place in used.items():
        for storage in live.of[node]:
            if storage.first >= region.start:
                last[storage] = max(last.get(storage, 0), place)
    return last


def _unsharded(live: Liveness, region: ForwardRegion) -> dict[fx.Node, fx.Node]:
    """Node that depends on graph inputs only through one all-gather of shards -> that all-gather."""
    found: dict[fx.Node, fx.Node] = {}
    from_inputs = {n for n in live.nodes if n.op in ("placeholder", "get_attr")}
    for place in range(region.end):
        node = live.nodes[place]
        inputs = node.all_input_nodes
        if node.op != "call_function" or not inputs:
            continue
        packet = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
        if all(n in from_inputs for n in inputs):
            if packet in _GATHERS:
                found[node] = node
            else:
                from_inputs.add(node)
        elif all(
            n in found for n in inputs if isinstance(n.meta.get("val"), (Tensor, list, tuple))
        ):
            gathers = {found[n] for n in inputs if n in found}
            if len(gathers) == 1:
                found[node] = gathers.pop()
    return found
