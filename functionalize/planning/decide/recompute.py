"""What the backward of a step can compute again instead of keeping, and what that does to memory and time.

    plan = Recomputation(graph)
    plan.candidates                       the saved storages that can be dropped
    trial = plan.without(candidates)      what happens if these are dropped: trial.peak, trial.seconds
    trial.steps                           the new order: every node, and each copy right before its first reader

A dropped storage is computed again from what is there anyway: inputs and views of them, what stays saved, what
crosses from layer to layer, and values that the backward has of its own. The last are found by value: a second
all-gather of the same shards (FSDP2 reshards after forward) has the parameters of the first one, so that a
recomputed layer reads those of the backward, and those of the forward are freed as before.

Never computed again: random ops and states of generators, collectives, ops whose result may differ from run to run,
what the caller is handed. If one is needed and not there, whatever needs it stays saved.
Invariant: copies compute the same ops on the same values, each after all that it reads. Linear in nodes and edges.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, fx

from functionalize.analysis.dead_code import is_impure
from functionalize.ir.generators import is_random
from functionalize.ir.waits import WAIT
from functionalize.planning.decide.layers import Layers
from functionalize.planning.decide.saved import Saved, forwards, made_in, saved_values
from functionalize.planning.time.costs import Machine, is_collective, seconds
from functionalize.planning.timeline.liveness import Liveness, Storage

_NEVER = 1 << 62
# On accelerators these add in the order in which threads arrive.
_ATOMIC = frozenset(
    (
        *("bincount", "cumsum", "histc", "index_add", "index_put", "index_reduce", "put"),
        *("scatter_add", "scatter_reduce"),
    )
)


Held = tuple[Storage, bool]  # a storage of the graph as it is, or of a copy


@dataclass(frozen=True, slots=True)
class Value:
    """What a node makes, or what its copy makes."""

    node: fx.Node
    copied: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """A node of the new order, or a copy of one. reads: the arguments that it reads elsewhere than before."""

    value: Value
    reads: dict[fx.Node, Value]


@dataclass(frozen=True, slots=True)
class Trial:
    """What happens if some storages are dropped. peak: bytes; seconds: of all copies."""

    dropped: frozenset[Storage]
    steps: tuple[Step, ...]
    peak: int
    seconds: float

    @property
    def copies(self) -> int:
        """How many ops run again."""
        return sum(step.value.copied for step in self.steps)


class Recomputation:
    """The saved storages of a graph, and what it takes to do without some of them."""

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
        self._ready = self._decide(frozenset())[1]  # if nothing is dropped
        able, _ = self._decide(frozenset(self.saved))
        self.candidates = [s for s in saved if s.storage in able]

    def layer_of(self, saved: Saved) -> int:
        """The number of the layer that makes a saved storage, in its forward."""
        return self.layers[saved.region].of(saved.storage.first)

    def price(self, saved: Saved) -> float:
        """Seconds to compute one storage again if all others stay saved."""
        found = set(saved.read)
        todo = list(found)
        while todo:
            for node in todo.pop().all_input_nodes:
                of_saved = saved.storage in self.live.of[node]
                gone = of_saved or (node not in self._twins and self._ready.get(node, -1) >= 0)
                if gone and node not in found:
                    found.add(node)
                    todo.append(node)
        return sum(seconds(node, self.machine) for node in found)

    def without(self, drop: Iterable[Saved]) -> Trial:
        """The trial of dropping as many of these as can be dropped together."""
        dropped, ready = self._decide(frozenset(s.storage for s in drop))
        steps = tuple(self._walk(ready))
        time = sum(seconds(s.value.node, self.machine) for s in steps if s.value.copied)
        return Trial(dropped, steps, self._peak(steps, dropped), time)

    # -- what is there -----------------------------------------------------------------------------

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

    # -- what can be made again --------------------------------------------------------------------

    def _decide(self, drop: frozenset[Storage]) -> tuple[frozenset[Storage], dict[fx.Node, int]]:
        """(what of `drop` can be dropped; for each node of a forward, the place where it can be had again).

        That place is -1 for a value that is there anyway.
        """
        ready: dict[fx.Node, int] = {}
        there: dict[Storage, bool] = {}
        for region in self.regions:
            for node in self.live.nodes[region.start : region.end]:
                storages = self.live.of[node]
                if node.op != "call_function" or not storages:
                    continue
                again = self._again(node, ready)
                if isinstance(node.meta.get("val"), Tensor):
                    (storage,) = storages
                    if storage not in there:
                        there[storage] = self._stays(storage, drop, again)
                    again = -1 if there[storage] else again
                ready[node] = again
        return frozenset(s for s in drop if not there.get(s, True)), ready

    def _stays(self, storage: Storage, drop: frozenset[Storage], again: int) -> bool:
        saved = self.saved.get(storage)
        if saved is None:
            return storage in self._crossing or storage in self._results
        return storage not in drop or storage in self._crossing or again > saved.first_later

    def _again(self, node: fx.Node, ready: dict[fx.Node, int]) -> int:
        """The first place before which a value can be had again."""
        twin = self._twins.get(node)
        place = _NEVER if twin is None else self.live.place[twin] + 1
        if _is_repeatable(node):
            place = min(place, max((ready.get(n, 0) for n in node.all_input_nodes), default=0))
        return max(place, 0)

    # -- the new order -----------------------------------------------------------------------------

    def _walk(self, ready: dict[fx.Node, int]) -> Iterator[Step]:
        """Every node in its order, and before it the copies that it is the first to read."""
        copied: set[fx.Node] = set()
        ends = {region.end for region in self.regions}
        past = 0  # nodes before this place are of forwards that have ended
        for place, node in enumerate(self.live.nodes):
            past = place if place in ends else past
            gone = [
                n
                for n in node.all_input_nodes
                if self.live.place[n] < past and ready.get(n, -1) >= 0
            ]
            for each in self._missing(gone, place, ready, copied):
                copied.add(each)
                above = [n for n in each.all_input_nodes if ready.get(n, -1) >= 0]
                yield Step(Value(each, True), {n: self._source(n, copied) for n in above})
            yield Step(Value(node), {n: self._source(n, copied) for n in gone})

    def _missing(
        self, gone: list[fx.Node], place: int, ready: dict[fx.Node, int], copied: set[fx.Node]
    ) -> list[fx.Node]:
        """What must be copied before `place` so that these are there, in the order of the graph."""
        found: set[fx.Node] = set()
        todo = list(gone)
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
        return Value(node, True) if node in copied else Value(self._twins[node])

    def _peak(self, steps: Sequence[Step], dropped: frozenset[Storage]) -> int:
        """The most bytes live in an order with copies; what is not dropped lives as long as before, or longer."""
        index = [i for i, step in enumerate(steps) if not step.value.copied]  # of each place
        of: dict[Value, tuple[Held, ...]] = {}  # the storages of each value
        first: dict[Held, int] = {}
        last: dict[Held, int] = {}
        used: dict[Value, int] = {}
        moved: set[Value] = set()  # values whose storages are not those of the graph
        for i, step in enumerate(steps):
            of[step.value] = self._held(step, of, moved)
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

    def _held(
        self, step: Step, of: dict[Value, tuple[Held, ...]], moved: set[Value]
    ) -> tuple[Held, ...]:
        """The storages of a value: a copy has its own; a view has those of what it is now a view of."""
        node, copied = step.value.node, step.value.copied
        mine = self.live.of[node]
        found: dict[Storage, Held] = {}
        for above in node.all_input_nodes:
            source = step.reads.get(above, Value(above))
            if source in moved or above in step.reads:
                pairs = zip(self.live.of[above], of[source], strict=False)
                found.update((s, held) for s, held in pairs if s in mine)
        if found or copied:
            moved.add(step.value)
        return tuple(found.get(s, (s, copied)) for s in mine)


def _is_repeatable(node: fx.Node) -> bool:
    """Whether running a node again gives the same bits and does nothing else."""
    if node.op != "call_function" or is_impure(node) or is_random(node) or node.is_impure():
        return False
    if torch.Tag.nondeterministic_bitwise in getattr(node.target, "tags", ()):
        return False
    name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
    value = node.meta.get("val")
    return name not in _ATOMIC or (isinstance(value, Tensor) and value.device.type == "cpu")


def _value_key(node: fx.Node, of: dict[fx.Node, int]) -> Hashable:
    """Equal for nodes of equal value; an all-gather of the same shards counts as one."""
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
