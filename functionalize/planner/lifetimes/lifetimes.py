"""When the storages of a recorded step are allocated, resized and freed: eager's memory, event by event.

    lifetimes = observer.lifetimes(storages, origins, gradients)      of a `LifetimeObserver`, or of a `MemoryRecorder`
    lifetimes.timeline()                                              a `planner.timeline.Timeline` named `eager`
    EagerMemory(lifetimes).peak                                       the report on it, computed at its first use

Every storage that the step allocates has a category, derived from the ops that create and use it:

    fsdp.all_gather_copy_in, c10d._allgather_base_      arguments and results: all-gather buffers
    fsdp.split_with_sizes_copy                          `out=` arguments: unsharded parameters
    fsdp.chunk_cat, chunk_cat_mixed_dtype               read unsharded gradients, write a reduce-scatter buffer
    c10d._reduce_scatter_base_                          reads a reduce-scatter buffer, writes sharded gradients
    a parameter's copy in a smaller dtype               cast parameters: autocast makes them, outside the optimizer
    created in a backward, read by the optimizer        sharded gradients
    created in a recomputation                          recomputed
    created in a forward, used or freed in a backward   saved activations
    any other                                           temporaries

Collectives on activations (tensor parallelism) are recorded as functional ops; their results are activations like any
other. `cost/categories.py` derives the same categories for a program, from the flow of values.

Note [Sums in place]
To accumulate two gradients, autograd adds one into the other in place if it holds the only reference to that tensor's
storage (a view of the tensor is a second reference: it holds its base). Under a dispatch mode autograd always allocates
a new tensor for the sum. Eager has no such buffer. So the timeline drops the allocation of the sum where one operand
is freed by the same op, and the sum reuses the operand's storage, as in eager.

Invariant: every storage has exactly one category. The categories are found in time linear in the number of ops.
Not recorded: what an op allocates and frees inside itself; see `planner/scratch/scratch.py`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch

from functionalize._compat.autograd import BACKWARD, RECOMPUTE
from functionalize._compat.fakes import HOST, accelerators
from functionalize.cost.categories import PARAMETERS, Category, is_narrower
from functionalize.discharge.rules.resizes import RESIZE_STORAGE
from functionalize.ir.generators import GET_STATE
from functionalize.ir.ops import Geometry, OpRecord, TensorRef, refs_in, storages_in
from functionalize.ir.phases import FORWARD, OPTIMIZER
from functionalize.planner.allocator.alloc_conf import Settings
from functionalize.planner.allocator.allocator import fsdp2_streams
from functionalize.planner.lifetimes.input_categories import Origin
from functionalize.planner.machines.constants import DeviceConstant
from functionalize.planner.report.text import Memory
from functionalize.planner.scratch.scratch import scratch_bytes, uncounted
from functionalize.planner.timeline.timeline import BEFORE, Allocation, Event, LateOps, Op, Timeline
from functionalize.util.gc_pause import only_young_collections
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
        phases = _phases_of(self.records, self.updates)
        payload = {serial: o.payload for serial, o in self.origins.items() if o.payload is not None}
        parameters = {s for s, o in self.origins.items() if o.category in PARAMETERS}
        categories = _OpCategories(self.records, phases, self.gradients, payload, parameters)
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
        categories: _OpCategories,
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


# -- the category of each storage ------------------------------------------------------------------

_BACKWARDS = (BACKWARD, RECOMPUTE)
_CAST = torch.ops.aten._to_copy.default


def _phases_of(records: Sequence[OpRecord], updates: Iterable[range]) -> list[str]:
    """The phase of every op, by the rules of `ir/phases.py` for nodes.

    updates: for each `optimizer.step()`, the range of its op indices.
    """
    updated = {i for each in updates for i in each if not records[i].meta.get("module")}
    phases: list[str] = []
    update, had_backward = 0, False
    for i, record in enumerate(records):
        if i in updated:
            update = i + 1
        elif record.phase is not None:
            _append_phases(phases, update, i, FORWARD)
            phases.append(record.phase)
            had_backward = True
    _append_phases(phases, update, len(records), OPTIMIZER if had_backward else FORWARD)
    return phases


def _append_phases(phases: list[str], update: int, end: int, rest: str) -> None:
    """Append a phase for each op from `len(phases)` to `end`: OPTIMIZER before index `update`, then `rest`."""
    phases += [OPTIMIZER] * max(update - len(phases), 0)
    phases += [rest] * (end - len(phases))


class _OpCategories:
    """The categories of one recording.

    gradients: the categories of storages that still hold a gradient when the step has ended.
    payload: the bytes of a storage that are not padding.
    parameters: the storages of parameters that existed before the step.
    uses: for each storage, the indices of the ops that read or write it, in ascending order.
    reused: for the storage of a gradient sum, the operand's storage that eager adds into: Note [Sums in place].
    """

    def __init__(
        self,
        records: Sequence[OpRecord],
        phases: Sequence[str],
        gradients: Mapping[int, Category],
        payload: Mapping[int, int],
        parameters: Collection[int] = (),
    ) -> None:
        self.phases, self.payload = phases, dict(payload)
        self.uses: dict[int, list[int]] = {}
        self._records, self._gradients = records, dict(gradients)
        self.reused: dict[int, int] = {}
        self._assigned: dict[int, Category] = {}
        self._parameters, self._casts = frozenset(parameters), set[int]()
        self._read: dict[str, set[int]] = {phase: set() for phase in (*_BACKWARDS, OPTIMIZER)}
        for i, record in enumerate(records):
            target = record.target
            if target is not RESIZE_STORAGE:
                self._note(i, record)
            if target is GET_STATE:
                self._assign(refs_in(record.outputs), Category.RNG_STATE)
            elif getattr(target, "namespace", "") in ("c10d", "fsdp"):
                self._assign_by_communication(record, phases[i])
            elif target is _CAST and phases[i] != OPTIMIZER:
                self._note_cast(refs_in([record.args, record.kwargs]), refs_in(record.outputs))

    def _note(self, i: int, record: OpRecord) -> None:
        storages, outputs = storages_in((record,)), record.outputs
        read = self._read.get(self.phases[i])
        if read is not None:
            read |= storages
        if type(outputs) is TensorRef:  # nearly all
            storages.add(outputs[0])
        elif outputs is not None:
            storages.update([ref[0] for ref in refs_in(outputs)])
        for storage in storages:
            self.uses.setdefault(storage, []).append(i)

    def _note_cast(self, inputs: list[TensorRef], outputs: list[TensorRef]) -> None:
        """Note a copy of a parameter in a smaller dtype, unless a collective sends it later."""
        for source, made in zip(inputs, outputs, strict=False):
            category = self._assigned.get(source.storage)
            known = source.storage in self._parameters or category is Category.UNSHARDED_PARAMETERS
            if known and is_narrower(made.geometry.dtype, source.geometry.dtype):
                self._casts.add(made.storage)

    def _assign(self, refs: Iterable[TensorRef], category: Category) -> None:
        for ref in refs:
            self._assigned.setdefault(ref.storage, category)

    def _assign_by_communication(self, record: OpRecord, phase: str) -> None:
        """Assign categories to the arguments of an `fsdp::` op or of a collective."""
        name = record.target.overloadpacket.__name__
        if name == "record_grad_output_stream":
            return  # it marks a stream and allocates nothing
        first, rest = refs_in(record.args[:1]), refs_in([record.args[1:], record.kwargs])
        if name == "split_with_sizes_copy":
            self._assign(rest, Category.UNSHARDED_PARAMETERS)
            self._note_gathered_bytes(first, rest)
        elif name in ("chunk_cat", "chunk_cat_mixed_dtype"):
            self._assign(first, Category.UNSHARDED_GRADIENTS)
            self._assign(rest, Category.REDUCE_SCATTER_BUFFERS)
            # `chunk_cat` pads every gradient to a multiple of the ranks; the gradients alone are payload.
            elements = sum(ref.geometry.numel for ref in first)
            self.payload.update({r.storage: elements * r.geometry.dtype.itemsize for r in rest})
        elif "gather" in name:
            outputs = refs_in(record.outputs)
            self._assign([*first, *rest, *outputs], Category.ALL_GATHER_BUFFERS)
        elif "reduce_scatter" in name:
            self._assign(first, Category.SHARDED_GRADIENTS)
            self._assign(rest, Category.REDUCE_SCATTER_BUFFERS)
        elif phase == BACKWARD:  # an all-reduce of FSDP2 between replicas (HSDP)
            self._assign([*first, *rest], Category.REDUCE_SCATTER_BUFFERS)

    def _note_gathered_bytes(self, buffers: list[TensorRef], parameters: list[TensorRef]) -> None:
        """The payload of an all-gather buffer is that of the parameters that it is split into."""
        if len(buffers) == 1 and all(ref.storage in self.payload for ref in parameters):
            item = buffers[0].geometry.dtype.itemsize
            elements = [self.payload[r.storage] // r.geometry.dtype.itemsize for r in parameters]
            self.payload[buffers[0].storage] = sum(elements) * item

    # -- sums ----------------------------------------------------------------------------------

    def summed_by_autograd(self, op: int, unviewed: Collection[int]) -> list[int]:
        """The operands' storages of an op by which autograd accumulates two gradients; empty for any other op.

        An addition of the engine differs from one in a backward formula in its first operand: an earlier autograd node
        computed it, and no op of the current node has used it.
        unviewed: the storages of those operands that are no views.
        """
        if not unviewed:
            return []
        record = self._records[op]
        a, b = (record.args[0], record.args[1]) if len(record.args) == 2 else (None, None)
        if type(a) is not TensorRef or type(b) is not TensorRef or record.autograd_node is None:
            return []
        same = a.geometry.size == b.geometry.size and a.geometry.dtype == b.geometry.dtype
        if (
            record.kwargs
            or a.storage == b.storage
            or not same
            or self._read_by_same_node(op, a.storage)
        ):
            return []
        return [ref.storage for ref in (a, b) if ref.geometry.is_dense and ref.storage in unviewed]

    def _read_by_same_node(self, op: int, storage: int) -> bool:
        """Whether an earlier op of the autograd node that runs `op` has used the storage."""
        uses = self.uses[self.reused.get(storage, storage)]
        at = bisect_left(uses, op) - 1
        return at >= 0 and self._records[uses[at]].seq_nr == self._records[op].seq_nr

    def merge_sum(self, storage: int, total: int) -> None:
        """Merge facts about `total`, a gradient sum's output, into `storage`, which eager reuses for it."""
        self.reused[total] = storage
        self.uses.setdefault(storage, []).extend(self.uses.pop(total, []))
        for known in (self._assigned, self._gradients):
            if total in known:
                known[storage] = known[total]
        for read in self._read.values():
            if total in read:
                read.add(storage)

    # -- queries -------------------------------------------------------------------------------

    def of_existing(self, storage: int, known: Category) -> Category:
        """The category of a storage that existed before the step; `known`: by its places."""
        if known is not Category.UNKNOWN:
            return known
        return self._assigned.get(storage, Category.BUFFERS)

    def of_made(self, storage: int, made: int, freed: int | None) -> Category:
        """The category of a storage that op `made` allocates and op `freed` frees (None: it outlives the step)."""
        found = self._assigned.get(storage) or self._gradients.get(storage)
        if found is not None:
            return found
        if storage in self._casts:
            return Category.CAST_PARAMETERS
        phase = self.phases[made] if made < len(self.phases) else FORWARD
        if phase == RECOMPUTE:
            return Category.RECOMPUTED
        if phase == BACKWARD and storage in self._read[OPTIMIZER]:
            return Category.SHARDED_GRADIENTS
        if phase == FORWARD and self._is_saved(storage, freed):
            return Category.SAVED_ACTIVATIONS
        return Category.TEMPORARIES

    def _is_saved(self, storage: int, freed: int | None) -> bool:
        return any(storage in self._read[phase] for phase in _BACKWARDS) or (
            freed is not None and self.phases[freed] in _BACKWARDS
        )

    def last_use(self, allocation: Allocation, storage: int) -> int:
        """The last op that reads or writes an allocation; the op that creates it if there is none."""
        end = allocation.freed if allocation.freed is not None else len(self._records)
        uses = self.uses.get(storage, [])
        at = bisect_right(uses, end) - 1
        return max(uses[at], allocation.made) if at >= 0 else allocation.made


# -- the report on eager ---------------------------------------------------------------------------


class EagerMemory(Memory):
    """The memory of one recorded step, as eager ran it."""

    lifetimes: Lifetimes

    def __init__(self, lifetimes: Lifetimes) -> None:
        on_device = lifetimes.target != "cpu"
        streams = fsdp2_streams if on_device else None
        vars(self).update(lifetimes=lifetimes, caching=on_device, stream_of=streams)

    def on(self, constants: tuple[DeviceConstant, ...], settings: Settings) -> EagerMemory:
        """The memory with declared constants and an allocator's settings."""
        new = EagerMemory(self.lifetimes)
        vars(new).update(eager=self.eager, constants=constants, settings=settings)
        return new

    @cached_property
    def host_peak(self) -> int:
        """The most requested bytes that are live at once in host memory, of a step in a fake world."""
        if all(seen.device != HOST.type for seen in self.lifetimes.seen):
            return 0
        return self.lifetimes.timeline(device=HOST.type).peak

    @cached_property
    def eager(self) -> Timeline:
        """The memory of the step as eager ran it."""
        with only_young_collections():  # the events made here live as long as the report
            return self.lifetimes.timeline(self.lifetimes.target)
