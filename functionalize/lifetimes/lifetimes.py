"""When the storages of a recorded step are made, resized and freed: what eager's memory looks like, event by event.

    lifetimes = observer.lifetimes(storages, found, left)      of a `LifetimeObserver`, or of a `MemoryRecorder`
    lifetimes.timeline()                                      a `planning.timeline.Timeline` named `eager`

Note [Sums in place]
Where two gradients meet, autograd adds one into the other if nobody else holds its storage (a view of it does: it
holds its base). Under a dispatch mode it does not dare to, and makes a sum beside them. Eager has no such buffer, so
here the sum takes over the storage of the gradient that dies with the op, as eager's does.

Not seen: what an op allocates and frees inside itself; see `planning/scratch/scratch.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import NamedTuple, overload

from functionalize.discharge.rules.resizes import RESIZE_STORAGE
from functionalize.ir.ops import Geometry, OpRecord, refs_in
from functionalize.lifetimes.input_categories import Origin
from functionalize.lifetimes.op_categories import Purposes, phases_of
from functionalize.planning.timeline.timeline import (
    BEFORE,
    Allocation,
    Category,
    Event,
    Op,
    Timeline,
)
from functionalize.util.user_stack import line_or_empty

Bytes = Callable[[OpRecord], int]


class Change(NamedTuple):
    """A storage has another size: 0 bytes when it is freed. op: the one that ran, -1 before the first."""

    op: int
    storage: int
    nbytes: int


class Seen(NamedTuple):
    """A storage as the recorder knew it last."""

    geometry: Geometry
    device: str


@dataclass(frozen=True, eq=False)
class Lifetimes:
    """One recorded step: its ops, and how its storages came and went. Holds no tensor of the step.

    origins: the storages that existed before. gradients: those of the others that are left in the places of gradients.
    target: whose kernels ran.
    """

    records: Sequence[OpRecord]
    changes: Sequence[Change]
    seen: Sequence[Seen]
    origins: Mapping[int, Origin]
    gradients: Mapping[int, Category]
    updates: Sequence[range]
    sums: Mapping[int, frozenset[int]]
    target: str

    @staticmethod
    def of(
        records: Sequence[OpRecord],
        changes: Iterable[tuple[int, int, int]],
        seen: Sequence[Seen],
        origins: Mapping[int, Origin],
        gradients: Mapping[int, Category],
        updates: Sequence[range],
        sums: Mapping[int, frozenset[int]],
        planned_for: str | None,
    ) -> Lifetimes:
        """The same. planned_for: the target of the world, if it was recorded in one."""
        made, target = list(starmap(Change, changes)), _target(planned_for, seen)
        return Lifetimes(records, made, seen, origins, gradients, updates, sums, target)

    def timeline(self, scratch: Bytes | None = None, unseen: Bytes | None = None) -> Timeline:
        """The memory of the step as eager ran it, on the device that it computes on.

        scratch: the bytes that an op allocates and frees inside itself. unseen: those of its last output that fakes
        leave out.
        """
        phases = phases_of(self.records, self.updates)
        own = {serial: o.own for serial, o in self.origins.items() if o.own is not None}
        purposes = Purposes(self.records, phases, self.gradients, own)
        return _Maker(self, purposes, scratch, self._unseen(unseen)).timeline()

    def _unseen(self, unseen: Bytes | None) -> dict[int, int]:
        """The bytes of storages that fakes leave out."""
        found = ((r, unseen(r)) for r in self.records) if unseen is not None else ()
        return {refs_in(record.outputs)[-1].storage: nbytes for record, nbytes in found if nbytes}

    def by_op(self) -> Iterator[tuple[int, list[Change]]]:
        """The changes while each op runs, and after it; those of storages that existed before come with the first.

        What is freed when the last op has run comes with the last.
        """
        last, unseen = max(len(self.records) - 1, 0), set(self.origins)
        found: list[list[Change]] = [[] for _ in range(last + 1)]
        for change in self.changes:
            if change.storage in unseen:  # it was seen, not made
                unseen.discard(change.storage)
            else:
                found[min(change.op, last)].append(change)
        return iter(enumerate(found))

    @property
    def device(self) -> str:
        """The kind of device that the step computes on: the accelerator, if any storage is on one."""
        kinds = {seen.device for seen in self.seen}
        others = sorted(kinds - {"cpu", "meta"})
        return others[0] if others else "cpu" if "cpu" in kinds else "meta"


def _target(planned: str | None, seen: Sequence[Seen]) -> str:
    """Whose kernels ran: those of the world's target, else of the accelerator if a storage is on one."""
    others = {each.device for each in seen} - {"cpu", "meta"}
    return planned if planned is not None else min(others, default="cpu")


class _Maker:
    """Makes allocations of changes, one op after the other."""

    def __init__(
        self,
        of: Lifetimes,
        purposes: Purposes,
        scratch: Bytes | None,
        unseen: dict[int, int],
    ) -> None:
        self._of, self._purposes, self._scratch, self._unseen = of, purposes, scratch, unseen
        self._events: list[Event] = []
        self._made: list[tuple[int, Allocation]] = []
        self._live: dict[int, Allocation] = {}

    def timeline(self) -> Timeline:
        device, records = self._of.device, self._of.records
        counted = [seen.device == device for seen in self._of.seen]
        for serial, origin in self._of.origins.items():
            if counted[serial]:
                self._change(BEFORE, serial, origin.nbytes)
        for op, changes in self._of.by_op():
            inside = self._inside(records[op]) if self._scratch and records else 0
            changes = self._without_sum(op, changes)
            last = max((i for i, c in enumerate(changes) if c.nbytes), default=-1)
            for i, change in enumerate(changes):
                if i == last + 1:
                    self._pass(op, inside)
                if counted[change.storage]:
                    unseen = self._unseen.pop(change.storage, 0)  # when it is made
                    self._change(op, change.storage, unseen or change.nbytes)
            if last + 1 == len(changes):
                self._pass(op, inside)
        for serial, allocation in self._made:
            self._describe(serial, allocation)
        ops = RecordedOps(records, self._purposes.phases)
        return Timeline("eager", ops, [a for _, a in self._made], self._events)

    def _without_sum(self, op: int, changes: list[Change]) -> list[Change]:
        """The changes of an op as eager makes them: Note [Sums in place]."""
        operands = self._purposes.summed_by_autograd(op, self._of.sums.get(op, frozenset()))
        made = next((c for c in changes if c.nbytes), None)
        if not operands or made is None:
            return changes
        for operand in operands:
            serial = self._purposes.heirs.get(operand, operand)
            gone = next((c for c in changes if c.storage == operand and not c.nbytes), None)
            allocation = self._live.get(serial)
            if gone is not None and allocation is not None and allocation.nbytes == made.nbytes:
                self._purposes.unite(serial, made.storage)
                return [c for c in changes if c is not gone and c is not made]
        return changes

    def _inside(self, record: OpRecord) -> int:
        return 0 if record.target is RESIZE_STORAGE or not self._scratch else self._scratch(record)

    def _change(self, op: int, serial: int, nbytes: int) -> None:
        """A storage grows before it lets its old bytes go: they are copied."""
        serial = self._purposes.heirs.get(serial, serial)
        before = self._live.pop(serial, None)
        if nbytes:
            new = self._live[serial] = self._make(op, serial, nbytes, Category.UNKNOWN)
            self._events.append(Event(op, new, True))
        if before is not None:
            before.freed = op
            self._events.append(Event(op, before, False))

    def _pass(self, op: int, nbytes: int) -> None:
        """Scratch is there when an op has made its results, and gone when it ends."""
        if nbytes:
            passing = self._make(op, -1, nbytes, Category.SCRATCH)
            passing.freed = op
            self._events += [Event(op, passing, True), Event(op, passing, False)]

    def _make(self, op: int, serial: int, nbytes: int, category: Category) -> Allocation:
        made = Allocation(nbytes, category, "", op, None, op)
        self._made.append((serial, made))
        return made

    def _describe(self, serial: int, allocation: Allocation) -> None:
        """Say what an allocation is, now that all of its life is known."""
        purposes, origin = self._purposes, self._of.origins.get(serial)
        if origin is None:
            allocation.name = self._maker_of(allocation.made)
        if serial < 0:
            return
        allocation.last_use = purposes.last_use(allocation, serial)
        own = purposes.own.get(serial, allocation.nbytes)
        allocation.padding = max(allocation.nbytes - own, 0) if own else 0
        if origin is None:
            allocation.shape = str(self._of.seen[serial].geometry)
            allocation.category = purposes.of_made(serial, allocation.made, allocation.freed)
        else:
            allocation.name, allocation.shape = origin.name, str(origin.geometry)
            allocation.category = purposes.of_given(serial, origin.category)

    def _maker_of(self, op: int) -> str:
        if not 0 <= op < len(self._of.records):
            return "made by no op"
        record = self._of.records[op]
        return f"{record.target} {record.meta.get('module', '')}".rstrip()


class RecordedOps(Sequence[Op]):
    """The ops of a recording. A stack is symbolised when its op is first asked for: that costs more than the rest."""

    def __init__(self, records: Sequence[OpRecord], phases: Sequence[str]) -> None:
        self._records, self._phases = records, phases
        self._known: dict[int, Op] = {}

    def __len__(self) -> int:
        return len(self._records)

    @overload
    def __getitem__(self, index: int) -> Op: ...
    @overload
    def __getitem__(self, index: slice) -> list[Op]: ...
    def __getitem__(self, index: int | slice) -> Op | list[Op]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if index not in self._known:
            record = self._records[index]
            module, line = record.meta.get("module", ""), line_or_empty(record.traceback)
            self._known[index] = Op(str(record.target), self._phases[index], module, line)
        return self._known[index]
