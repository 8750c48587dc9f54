"""Move activations to the host between forward and backward.

    relu = aten.relu(mm)                       relu = aten.relu(mm)
    mm_1 = aten.mm(relu, t)                    mm_1 = aten.mm(relu, t)
                                               relu_host = aten._to_copy(relu, device=cpu, non_blocking=True)
    ... the rest of forward ...                ... the rest of forward ...
                                               relu_back = aten._to_copy(relu_host, device=cuda:0, non_blocking=True)
    t_1 = aten.t(relu)                         t_1 = aten.t(relu_back)

A saved storage is copied to the host right after its last use in forward, and back before its first use in
backward, or `ahead` nodes earlier. Host memory is pinned (`_to_copy` does this). A replay runs on one stream, whose
order makes the copies safe; they do not overlap with compute. `ao.offload` of torch 2.13 overlaps them, but it keeps
events by address in a global table, and its wait frees its argument, which a functional program cannot express.

    offload{min_mb=4}                          everything saved of at least 4 MiB
    offload{budget_mb=2000}                    the values with the longest time to their next use, until the peak fits

The budget limits the memory that the graph allocates on the accelerator. If it cannot be met, the pass chooses the
lowest peak that it found.

Invariant: values in backward have the same bits and layout as before.
Refuses a storage
- in host memory: a program without an accelerator is not changed (0 rewrites);
- smaller than `min_mb`, or returned to the caller, or whose values are not all views of one dense tensor.
Refuses (0 rewrites): a graph without phases; an offload that would not lower the accelerator's peak.
Refuses (`PassError`): a negative option.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor, fx

from functionalize._compat.autograd import BACKWARD
from functionalize.analysis.aliases import is_view
from functionalize.cost.decide.budget import within
from functionalize.cost.decide.saved import ForwardRegion, SavedStorage, forwards, saved_values
from functionalize.cost.liveness import Liveness, Storage
from functionalize.errors import PassError
from functionalize.ir.ops import geometry_of
from functionalize.ir.phases import FORWARD
from functionalize.passes.base import Pass
from functionalize.passes.metadata import origin_meta, set_value
from functionalize.passes.rewiring import Rewiring
from functionalize.program.program import Program

aten = torch.ops.aten
_MB = 1 << 20
_HOST = torch.device("cpu")


@dataclass(frozen=True)
class Offload(Pass):
    """Move activations to the host between forward and backward.

    min_mb: the least MiB that are worth a copy. budget_mb: stop once the peak on the accelerator is at most this
    many MiB (None: move all). ahead: how many nodes before its first use in backward a value is fetched.
    """

    name: ClassVar[str] = "offload"
    min_mb: float = 1.0
    budget_mb: float | None = None
    ahead: int = 0

    def apply(self, program: Program) -> int:
        for option in ("min_mb", "budget_mb", "ahead"):
            if (getattr(self, option) or 0) < 0:
                raise PassError(f"`offload`: {option} is at least 0, not {getattr(self, option)}")
        live = Liveness(program.graph)
        regions = forwards(live)
        plan = Journeys(live, regions, self.ahead)
        able = [
            journey
            for saved in saved_values(live, regions)
            if _on_accelerator(saved.storage) and saved.storage.nbytes >= self.min_mb * _MB
            if (journey := plan.of(saved)) is not None
        ]
        before = plan.without([]).peak
        budget = None if self.budget_mb is None else int(self.budget_mb * _MB)
        if not able or (budget is not None and before <= budget):
            return 0
        able.sort(key=lambda j: j.leaves - j.returns)
        trial = plan.without(able) if budget is None else within(able, plan.without, budget)
        if trial.peak >= before:
            return 0
        send(program.graph, live, trial.journeys)
        return len(trial.journeys)


# -- analysis --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Journey:
    """A storage that can be offloaded.

    base: the dense tensor that covers it. leaves: the place of the node after which it is copied to the host.
    returns: the place of the node before which it is copied back. later: its readers after that; read: the values
    that they read.
    """

    storage: Storage
    base: fx.Node
    leaves: int
    returns: int
    later: tuple[fx.Node, ...]
    read: frozenset[fx.Node]


@dataclass(frozen=True, slots=True)
class Trial:
    """The peak on the accelerator, in bytes, if these storages are offloaded."""

    journeys: tuple[Journey, ...]
    peak: int


class Journeys:
    """The storages that can be offloaded, and the accelerator's memory in use without them."""

    def __init__(self, live: Liveness, regions: list[ForwardRegion], ahead: int) -> None:
        self.live, self.regions, self.ahead = live, regions, ahead
        self._change = [0] * (len(live.nodes) + 1)
        for storage in live.storages:
            if _on_accelerator(storage):
                self._change[storage.first] += storage.nbytes
                self._change[storage.last + 1] -= storage.nbytes

    def of(self, saved: SavedStorage) -> Journey | None:
        """The journey of a saved storage; None if it cannot be offloaded, or is never idle long enough."""
        base = next((n for n in saved.storage.nodes if isinstance(n.meta.get("val"), Tensor)), None)
        if base is None or not _is_whole(base, saved.storage):
            return None
        if any(_path(node, base) is None for node in saved.read):
            return None
        leaves = max(saved.last, self.live.place[base])
        returns = max(self.regions[saved.region].end, saved.first_later - self.ahead)
        if returns <= leaves + 1:
            return None
        return Journey(
            saved.storage, base, leaves, returns, self._readers(saved), frozenset(saved.read)
        )

    def _readers(self, saved: SavedStorage) -> tuple[fx.Node, ...]:
        """The readers of a storage after its forward, in order."""
        end, place = self.regions[saved.region].end, self.live.place
        users = {user for node in saved.read for user in node.users if place[user] >= end}
        return tuple(sorted(users, key=place.__getitem__))

    def without(self, journeys: Iterable[Journey]) -> Trial:
        """The trial of offloading these."""
        chosen = tuple(journeys)
        change = list(self._change)
        for journey in chosen:
            change[journey.leaves + 1] -= journey.storage.nbytes
            change[journey.returns] += journey.storage.nbytes
        return Trial(chosen, max(accumulate(change)))


def _on_accelerator(storage: Storage) -> bool:
    values = storage.nodes[0].meta["val"]
    value = values if isinstance(values, Tensor) else next(iter(values))
    return isinstance(value, Tensor) and value.device.type not in ("cpu", "meta")


def _is_whole(base: fx.Node, storage: Storage) -> bool:
    """Whether a dense tensor covers its whole storage, so that a copy has the same layout."""
    value = base.meta["val"]
    geometry = geometry_of(value)
    plain = value.layout == torch.strided and not geometry.conj and not geometry.neg
    dense = geometry.is_dense and geometry.offset == 0
    return bool(plain and dense and geometry.nbytes == storage.nbytes)


def _path(node: fx.Node, base: fx.Node) -> list[fx.Node] | None:
    """The view ops that lead from a base to a node, the last one first; None if others do."""
    path: list[fx.Node] = []
    while node is not base:
        if not is_view(node) and node.target is not aten._unsafe_view.default:
            return None
        path.append(node)
        node = node.all_input_nodes[0]
    return path


# -- rewriting -------------------------------------------------------------------------------------


def send(graph: fx.Graph, live: Liveness, journeys: Iterable[Journey]) -> None:
    """Insert the copies of these journeys; later readers of the storage read the copy on the accelerator."""
    wiring = Rewiring(graph)
    for journey in journeys:
        base, device = journey.base, journey.base.meta["val"].device
        with graph.inserting_after(live.nodes[journey.leaves]):
            host = _copy_to(base, _HOST, f"{base.name}_host", FORWARD)
        with graph.inserting_before(live.nodes[journey.returns]):
            back = _copy_to(host, device, f"{base.name}_back", BACKWARD)
        returned = {base: back}
        for user in journey.later:
            for node in user.all_input_nodes:
                if node in journey.read:
                    _retake(node, returned)
            wiring.read(user, returned)
    wiring.settle()


def _copy_to(node: fx.Node, device: torch.device, name: str, phase: str) -> fx.Node:
    copy = node.graph.create_node(
        "call_function",
        aten._to_copy.default,
        (node,),
        {"device": device, "non_blocking": True},
        name,
    )
    copy.meta.update(origin_meta(node), phase=phase)
    set_value(copy)
    return copy


def _retake(node: fx.Node, returned: dict[fx.Node, fx.Node]) -> None:
    """Make the views that lead to a node again, of the copy on the accelerator."""
    path: list[fx.Node] = []
    while node not in returned:
        path.append(node)
        node = node.all_input_nodes[0]
    after = returned[node]
    for view in reversed(path):
        with view.graph.inserting_after(after):
            after = view.graph.node_copy(view, lambda n: returned.get(n, n))
        after.meta["phase"] = BACKWARD
        set_value(after)
        returned[view] = after
