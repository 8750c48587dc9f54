"""Which saved storages the backward of a step can recompute, and the memory and time that this costs.

    plan = Recomputation(graph, machine)
    plan.candidates                       the saved storages that can be dropped
    trial = plan.without(candidates)      the effect of dropping these: trial.peak, trial.seconds
    trial.steps                           the new order: every node, and each copy right before its first reader

A dropped storage is recomputed from values that are alive anyway: graph inputs and their views, storages that stay
saved, storages that cross from layer to layer, and equal values that the backward computes itself. The last are found
by value numbering: a second all-gather of the same shards (FSDP2 reshards after forward) has the same value as the
first, so that a recomputed layer reads the parameters gathered in the backward, and those of the forward are freed as
before.

    x ──▶ [ gather 0 ─▶ norm, addmm, gelu, addmm, add ] ──▶ x_1 ──▶ [ gather 1 ─▶ norm, ... ] ──▶ x_2
                                                          boundary                             boundary

A layer is the ops that compute with the parameters of one all-gather: it begins at the first op that reads them, and
ends at the first op that reads parameters of another one. Only values that cross a boundary must outlive a layer. A
program without all-gathers (one rank, DDP) with n values is cut where few values cross, into about sqrt(n) layers of
about sqrt(n) values.

Never recomputed: random ops and generator states, collectives, nondeterministic ops, results returned to the caller. If
recomputing a storage needs such a value and it is not alive, the storage stays saved.
Invariants: copies run the same ops on the same values, each after its arguments; boundaries depend on the program
alone. Linear in nodes and edges.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, fx

from functionalize.analysis.dead_code import is_impure
from functionalize.cost.costs import is_collective, seconds
from functionalize.cost.decide.saved import (
    ForwardRegion,
    SavedStorage,
    forwards,
    made_in,
    saved_values,
)
from functionalize.cost.liveness import Liveness, Storage
from functionalize.cost.machines.machine import Machine
from functionalize.ir.generators import is_random
from functionalize.ir.waits import WAIT

_NEVER = 1 << 62  # a place after every node
# On accelerators these ops add atomically, in an order that varies from run to run.
_ATOMIC = frozenset(
    (
        *("bincount", "cumsum", "histc", "index_add", "index_put", "index_reduce", "put"),
        *("scatter_add", "scatter_reduce"),
    )
)


StorageCopy = tuple[Storage, bool]  # (a storage of the graph, whether this is the copy of it)


@dataclass(frozen=True, slots=True)
class Value:
    """The result of a node, or (copied) of its copy."""

    node: fx.Node
    copied: bool = False


@dataclass(frozen=True, slots=True)
class PlannedNode:
    """A node of the new order, or a copy of one. reads: for arguments that are replaced, the new argument."""

    value: Value
    reads: dict[fx.Node, Value]


@dataclass(frozen=True, slots=True)
class RecomputeTrial:
    """The effect of dropping some storages. peak: bytes; seconds: modelled time of all copies."""

    dropped: frozenset[Storage]
    steps: tuple[PlannedNode, ...]
    peak: int
    seconds: float

    @property
    def copies(self) -> int:
        """The number of recomputed nodes."""
        return sum(step.value.copied for step in self.steps)


class Recomputation:
    """The saved storages of a graph, and the recomputation that replaces some of them."""

    def __init__(self, graph: fx.Graph, machine: Machine) -> None:
        self.machine = machine
        self.live = Liveness(graph)
        self.regions = forwards(self.live)
        saved = saved_values(self.live, self.regions)
        self.saved = {s.storage: s for s in saved}
        self.layers = [Layers(self.live, region) for region in self.regions]
        (output,) = graph.find_nodes(op="output")
        self._results = {s for node in output.all_input_nodes for s in self.live.of[node]}
        self._twins = self._find_twins()
        made = made_in(self.live, self.regions)
        self._crossing = {s for region, s in made if self.layers[region].crosses(s)}
        self._ready = self._droppable(frozenset())[1]  # if nothing is dropped
        able, _ = self._droppable(frozenset(self.saved))
        self.candidates = [s for s in saved if s.storage in able]

    def layer_of(self, saved: SavedStorage) -> int:
        """The number of the layer, in its forward, that creates a saved storage."""
        return self.layers[saved.region].of(saved.storage.first)

    def price(self, saved: SavedStorage) -> float:
        """Modelled seconds to recompute one storage if all others stay saved."""
        found = set(saved.read)
        todo = list(found)
        while todo:
            for node in todo.pop().all_input_nodes:
                of_saved = saved.storage in self.live.of[node]
                freed = of_saved or (node not in self._twins and self._ready.get(node, -1) >= 0)
                if freed and node not in found:
                    found.add(node)
                    todo.append(node)
        return sum(seconds(node, self.machine) for node in found)

    def without(self, drop: Iterable[SavedStorage]) -> RecomputeTrial:
        """Drop as many of these storages as can be dropped together."""
        dropped, ready = self._droppable(frozenset(s.storage for s in drop))
        steps = tuple(self._new_order(ready))
        time = sum(seconds(s.value.node, self.machine) for s in steps if s.value.copied)
        return RecomputeTrial(dropped, steps, self._peak(steps, dropped), time)

    # -- equal values ------------------------------------------------------------------------------

    def _find_twins(self) -> dict[fx.Node, fx.Node]:
        """Node of a forward -> the first node after that forward with the same value."""
        numbers: dict[Hashable, int] = {}
        of: dict[fx.Node, int] = {}
        for node in self.live.nodes:
            of[node] = numbers.setdefault(_value_key(node, of), len(numbers))
        found: dict[fx.Node, fx.Node] = {}
        later: dict[int, fx.Node] = {}
        ends = {region.end: region for region in self.regions}
        for place in reversed(range(len(self.live.nodes))):
            if (region := ends.get(place + 1)) is not None:
                for node in self.live.nodes[region.start : region.end]:
                    if of[node] in later:
                        found[node] = later[of[node]]
            later[of[self.live.nodes[place]]] = self.live.nodes[place]
        return found

    # -- which values can be recomputed ------------------------------------------------------------

    def _droppable(self, drop: frozenset[Storage]) -> tuple[frozenset[Storage], dict[fx.Node, int]]:
        """Decide which storages can be dropped together.

        Returns (the storages of `drop` that can be dropped; node of a forward -> the first place before which its
        value can be recomputed, -1 if the value stays alive anyway).
        """
        ready: dict[fx.Node, int] = {}
        there: dict[Storage, bool] = {}
        for region in self.regions:
            for node in self.live.nodes[region.start : region.end]:
                storages = self.live.of[node]
                if node.op != "call_function" or not storages:
                    continue
                again = self._available_from(node, ready)
                if isinstance(node.meta.get("val"), Tensor):
                    (storage,) = storages
                    if storage not in there:
                        there[storage] = self._stays(storage, drop, again)
                    again = -1 if there[storage] else again
                ready[node] = again
        return frozenset(s for s in drop if not there.get(s, True)), ready

    def _stays(self, storage: Storage, drop: frozenset[Storage], again: int) -> bool:
        """Whether a storage stays alive. again: the first place before which it can be recomputed."""
        saved = self.saved.get(storage)
        if saved is None:
            return storage in self._crossing or storage in self._results
        return storage not in drop or storage in self._crossing or again > saved.first_later

    def _available_from(self, node: fx.Node, ready: dict[fx.Node, int]) -> int:
        """The first place before which a value can be recomputed, or read from its twin."""
        twin = self._twins.get(node)
        place = _NEVER if twin is None else self.live.place[twin] + 1
        if _is_repeatable(node):
            place = min(place, max((ready.get(n, 0) for n in node.all_input_nodes), default=0))
        return max(place, 0)

    # -- the new order -----------------------------------------------------------------------------

    def _new_order(self, ready: dict[fx.Node, int]) -> Iterator[PlannedNode]:
        """Every node in the order of the graph, each preceded by the copies of which it is the first reader."""
        copied: set[fx.Node] = set()
        ends = {region.end for region in self.regions}
        past = 0  # nodes before this place belong to forwards that have ended
        for place, node in enumerate(self.live.nodes):
            past = place if place in ends else past
            freed = [
                n
                for n in node.all_input_nodes
                if self.live.place[n] < past and ready.get(n, -1) >= 0
            ]
            for each in self._missing(freed, place, ready, copied):
                copied.add(each)
                above = [n for n in each.all_input_nodes if ready.get(n, -1) >= 0]
                yield PlannedNode(Value(each, True), {n: self._source(n, copied) for n in above})
            yield PlannedNode(Value(node), {n: self._source(n, copied) for n in freed})

    def _missing(
        self, freed: list[fx.Node], place: int, ready: dict[fx.Node, int], copied: set[fx.Node]
    ) -> list[fx.Node]:
        """The nodes to copy before `place` so that the values of `freed` are available, in the order of the graph."""
        found: set[fx.Node] = set()
        todo = list(freed)
        while todo:
            node = todo.pop()
            if node in copied or node in found or self._has_twin(node, place):
                continue
            found.add(node)
            todo += [n for n in node.all_input_nodes if ready.get(n, -1) >= 0]
        return sorted(found, key=self.live.place.__getitem__)

    def _has_twin(self, node: fx.Node, place: int) -> bool:
        return node in self._twins and self.live.place[self._twins[node]] < place

    def _source(self, node: fx.Node, copied: set[fx.Node]) -> Value:
        """The value to read instead of a freed one: its copy or its twin."""
        return Value(node, True) if node in copied else Value(self._twins[node])

    def _peak(self, steps: Sequence[PlannedNode], dropped: frozenset[Storage]) -> int:
        """The most bytes live in an order with copies; other storages live at least as long as before."""
        # place -> index in `steps`
        index = [i for i, step in enumerate(steps) if not step.value.copied]
        of: dict[Value, tuple[StorageCopy, ...]] = {}  # the storages of each value
        first: dict[StorageCopy, int] = {}
        last: dict[StorageCopy, int] = {}
        used: dict[Value, int] = {}
        moved: set[Value] = set()  # values whose storages are copies
        for i, step in enumerate(steps):
            of[step.value] = self._storages_of(step, of, moved)
            for held in of[step.value]:
                first.setdefault(held, i)
            read = (step.reads.get(n, Value(n)) for n in step.value.node.all_input_nodes)
            used.update(dict.fromkeys((step.value, *read), i))
        for value, i in used.items():
            last.update((held, max(last.get(held, 0), i)) for held in of[value])
        for storage in self.live.storages:
            if storage not in dropped and (storage, False) in last:
                last[storage, False] = max(last[storage, False], index[storage.last])
        change = [0] * (len(steps) + 1)
        for held, i in first.items():
            change[i] += held[0].nbytes
            change[last[held] + 1] -= held[0].nbytes
        return max(accumulate(change))

    def _storages_of(
        self, step: PlannedNode, of: dict[Value, tuple[StorageCopy, ...]], moved: set[Value]
    ) -> tuple[StorageCopy, ...]:
        """The storages of a value: a copy has new ones; a view has those of the value it is now a view of."""
        node, copied = step.value.node, step.value.copied
        mine = self.live.of[node]
        found: dict[Storage, StorageCopy] = {}
        for above in node.all_input_nodes:
            source = step.reads.get(above, Value(above))
            if source in moved or above in step.reads:
                pairs = zip(self.live.of[above], of[source], strict=False)
                found.update((s, held) for s, held in pairs if s in mine)
        if found or copied:
            moved.add(step.value)
        return tuple(found.get(s, (s, copied)) for s in mine)


def _is_repeatable(node: fx.Node) -> bool:
    """Whether running a node again computes the same bits and has no side effects."""
    if node.op != "call_function" or is_impure(node) or is_random(node) or node.is_impure():
        return False
    if torch.Tag.nondeterministic_bitwise in getattr(node.target, "tags", ()):
        return False
    name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
    value = node.meta.get("val")
    return name not in _ATOMIC or (isinstance(value, Tensor) and value.device.type == "cpu")


def _value_key(node: fx.Node, of: dict[fx.Node, int]) -> Hashable:
    """A key that is equal for nodes of equal value (value numbering), all-gathers of the same shards included."""
    gathers = is_collective(node) and "all_gather" in str(node.target)
    waits = node.target is WAIT
    if node.op != "call_function" or not (gathers or waits or _is_repeatable(node)):
        return node
    return (node.target, _frozen(node.args, of), _frozen(node.kwargs, of))


def _frozen(arg: Any, of: dict[fx.Node, int]) -> Hashable:
    if isinstance(arg, fx.Node):
        return ("node", of[arg])
    if isinstance(arg, (list, tuple)):
        return tuple(_frozen(each, of) for each in arg)
    if isinstance(arg, dict):
        return tuple((key, _frozen(each, of)) for key, each in arg.items())
    return (type(arg).__name__, repr(arg))


# -- the layers of a forward -----------------------------------------------------------------------

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
