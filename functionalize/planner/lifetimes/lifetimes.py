"""When the storages of a recorded step are allocated, resized and freed: eager's memory, event by event.

    lifetimes = observer.lifetimes(storages, origins, gradients)      of a `LifetimeObserver`, or of a `MemoryRecorder`
    lifetimes.timeline()                                              a `planner.timeline.Timeline` named `eager`

Note [Sums in place]
To accumulate two gradients, autograd adds one into the other in place if it holds the only reference to that tensor's
storage (a view of the tensor is a second reference: it holds its base). Under a dispatch mode autograd always allocates
a new tensor for the sum. Eager has no such buffer. So the timeline drops the allocation of the sum where one operand
is freed by the same op, and the sum reuses the operand's storage, as in eager.

Not recorded: what an op allocates and frees inside itself; see `planner/scratch/scratch.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from functionalize._compat.fakes import accelerators
from functionalize.cost.categories import PARAMETERS, Category
from functionalize.discharge.rules.resizes import RESIZE_STORAGE
from functionalize.ir.ops import Geometry, OpRecord
from functionalize.planner.lifetimes.input_categories import Origin
from functionalize.planner.lifetimes.op_categories import OpCategories, phases_of
from functionalize.planner.scratch.scratch import scratch_bytes, uncounted
from functionalize.planner.timeline.timeline import BEFORE, Allocation, Event, LateOps, Op, Timeline
from functionalize.util.user_stack import line_or_empty


class SizeChange(NamedTuple):
    """A storage changed its size to `nbytes` (0: freed) while op `op` ran; -1: before the first op."""

    op: int
    storage: int
    nbytes: int


class LastSeen(NamedTuple):
    """The geometry of the last tensor that the recorder saw on a storage, and the type of its device."""

    geometry: Geometry
    device: str


@dataclass(frozen=True, eq=False, repr=False)
class Lifetimes:
    """One recorded step: its ops, and when its storages were allocated, resized and freed. Holds no tensor of the step.

    records: the ops, in order.
    changes: the changes of storage sizes, in order.
    seen: by number of the storage, the last geometry and the device.
    origins: the storages that existed before the step.
    gradients: the storages that the step allocated and that hold a gradient (`.grad` and FSDP2's slots) at its end.
    updates: for each `optimizer.step()`, the range of its op indices.
    sums: for each addition in a backward, the storages of operands that are no views: Note [Sums in place].
    target: the device type or GPU model whose kernels ran.
    """

    records: Sequence[OpRecord]
    changes: Sequence[SizeChange]
    seen: Sequence[LastSeen]
    origins: Mapping[int, Origin]
    gradients: Mapping[int, Category]
    updates: Sequence[range]
    sums: Mapping[int, frozenset[int]]
    target: str

    def __repr__(self) -> str:
        return f"<Lifetimes: {len(self.records)} ops, {len(self.seen)} storages>"

    def timeline(
        self,
        target: str | None = None,
        device: str | None = None,
    ) -> Timeline:
        """The memory of the step as eager ran it, on a kind of device; None: on the one that it computes on.

        target: whose kernels run, to count what they allocate and free inside themselves; None: this is not counted.
        """
        phases = phases_of(self.records, self.updates)
        payload = {serial: o.payload for serial, o in self.origins.items() if o.payload is not None}
        parameters = {s for s, o in self.origins.items() if o.category in PARAMETERS}
        categories = OpCategories(self.records, phases, self.gradients, payload, parameters)
        found = _TimelineBuilder(self, categories, target).timeline(device or self.device)
        if target is None:
            return found
        return replace(found, uncounted=uncounted((r.target for r in self.records), target))

    def by_op(self) -> Iterator[tuple[int, list[SizeChange]]]:
        """For each op, the changes from its start to the start of the next.

        The first change of a storage that existed before the step is left out: it notes its discovery.
        """
        last, unseen = max(len(self.records) - 1, 0), set(self.origins)
        found: list[list[SizeChange]] = [[] for _ in range(last + 1)]
        for change in self.changes:
            if change.storage in unseen:
                unseen.discard(change.storage)
            else:
                found[min(change.op, last)].append(change)
        return iter(enumerate(found))

    @property
    def device(self) -> str:
        """The kind of device that the step computes on: the accelerator, if any storage is on one."""
        kinds = {seen.device for seen in self.seen}
        others = accelerators(kinds)
        return others[0] if others else "cpu" if "cpu" in kinds else "meta"


class _TimelineBuilder:
    """Turns changes into allocations and events, in op order."""

    def __init__(
        self,
        lifetimes: Lifetimes,
        categories: OpCategories,
        target: str | None,
    ) -> None:
        self._lifetimes, self._categories, self._target = lifetimes, categories, target
        self._events: list[Event] = []
        self._made: list[tuple[int, Allocation]] = []
        self._live: dict[int, Allocation] = {}

    def timeline(self, device: str) -> Timeline:
        records = self._lifetimes.records
        counted = [seen.device == device for seen in self._lifetimes.seen]
        for serial, origin in self._lifetimes.origins.items():
            if counted[serial]:
                self._change(BEFORE, serial, origin.nbytes)
        for op, changes in self._lifetimes.by_op():
            inside = self._scratch_bytes(records[op]) if records else 0
            if op in self._lifetimes.sums:
                changes = self._without_reused_sum(op, changes)
            # Scratch is live after the op has allocated its results and before frees that follow the op.
            made = [i for i, change in enumerate(changes) if change.nbytes] if inside else []
            at = max(made, default=-1) + 1 if inside else -1
            for i, change in enumerate(changes):
                if i == at:
                    self._add_scratch(op, inside)
                if counted[change.storage]:
                    self._change(op, change.storage, change.nbytes)
            if at == len(changes):
                self._add_scratch(op, inside)
        for serial, allocation in self._made:
            self._describe(serial, allocation)
        ops = LateOps(len(records), self._op)
        return Timeline("eager", ops, [a for _, a in self._made], self._events)

    def _without_reused_sum(self, op: int, changes: list[SizeChange]) -> list[SizeChange]:
        """The changes of an op without the allocation of a sum that eager computes in place: Note [Sums in place]."""
        operands = self._categories.summed_by_autograd(op, self._lifetimes.sums[op])
        made = next((c for c in changes if c.nbytes), None) if operands else None
        if made is None:
            return changes
        for operand in operands:
            serial = self._categories.reused.get(operand, operand)
            freed = next((c for c in changes if c.storage == operand and not c.nbytes), None)
            allocation = self._live.get(serial)
            if freed is not None and allocation is not None and allocation.nbytes == made.nbytes:
                self._categories.merge_sum(serial, made.storage)
                return [c for c in changes if c is not freed and c is not made]
        return changes

    def _scratch_bytes(self, record: OpRecord) -> int:
        if self._target is None or record.target is RESIZE_STORAGE:
            return 0
        return scratch_bytes(record, self._target)

    def _change(self, op: int, serial: int, nbytes: int) -> None:
        """Record a new size. A resize allocates the new bytes before it frees the old ones, to copy them."""
        serial = self._categories.reused.get(serial, serial)
        before = self._live.pop(serial, None)
        if nbytes:
            new = self._live[serial] = self._make(op, serial, nbytes, Category.UNKNOWN)
            self._events.append(Event(op, new, True))
        if before is not None:
            before.freed = op
            self._events.append(Event(op, before, False))

    def _add_scratch(self, op: int, nbytes: int) -> None:
        """Add the scratch of an op: allocated and freed while the op runs."""
        scratch = self._make(op, -1, nbytes, Category.SCRATCH)
        scratch.freed = op
        self._events += [Event(op, scratch, True), Event(op, scratch, False)]

    def _make(self, op: int, serial: int, nbytes: int, category: Category) -> Allocation:
        made = Allocation(nbytes, category, "", op, None, op)
        self._made.append((serial, made))
        return made

    def _describe(self, serial: int, allocation: Allocation) -> None:
        """Fill in name, category, padding and last use: they depend on the whole life of the allocation."""
        categories, origin = self._categories, self._lifetimes.origins.get(serial)
        if origin is None:
            allocation.name = self._name_of_creator(allocation.made)
        if serial < 0:
            return
        allocation.last_use = categories.last_use(allocation, serial)
        payload = categories.payload.get(serial, allocation.nbytes)
        allocation.padding = max(allocation.nbytes - payload, 0) if payload else 0
        if origin is None:
            allocation.shape = str(self._lifetimes.seen[serial].geometry)
            allocation.category = categories.of_made(serial, allocation.made, allocation.freed)
        else:
            allocation.name, allocation.shape = origin.name, str(origin.geometry)
            allocation.category = categories.of_existing(serial, origin.category)

    def _name_of_creator(self, op: int) -> str:
        if not 0 <= op < len(self._lifetimes.records):
            return "made by no op"
        record = self._lifetimes.records[op]
        return f"{record.target} {record.meta.get('module', '')}".rstrip()

    def _op(self, index: int) -> Op:
        record = self._lifetimes.records[index]
        module, line = record.meta.get("module", ""), line_or_empty(record.traceback)
        return Op(str(record.target), self._categories.phases[index], module, line)
