"""`step.memory`: the memory of a step over time, with the lifetimes of eager and of the program.

    step = fz.capture(train_step, memory=True)
    step.memory.eager          the recorded allocations and frees, and the scratch of ops
    step.memory.program        those of a replay, which frees at the last use
    step.memory.text(), ...    the report on both, see `planner/report/text.py`

Both are computed at their first use, from what the observer of the step's recorder has noted:

    observer = LifetimeObserver()
    with Recorder(..., observer=observer) as recorder: fn(*args)
    observer.lifetimes(recorder.storages, origins, gradients)

A storage is noted when the recorder first sees it, when its size changes (FSDP2 frees by a resize to 0 bytes), and
when it is freed: a weak reference on the storage's Python object, which lives as long as the storage, on fake tensors
as on real ones. The index of a change is that of the op that runs at that moment, else of the last op.
Invariant: changes are in the order of the run. The observer keeps no tensor alive, not even a gradient that existed
before the step and that `zero_grad()` frees.
`record_memory.py` notes the same at less cost, for a step of which no program is built.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor

from functionalize._compat.autograd import BACKWARD
from functionalize.cost.categories import Category
from functionalize.ir.ops import OpRecord
from functionalize.planner.allocator.alloc_conf import Settings
from functionalize.planner.lifetimes.input_categories import (
    Origin,
    categories_of_inputs,
    gradients,
    origins,
)
from functionalize.planner.lifetimes.lifetimes import EagerMemory, LastSeen, Lifetimes
from functionalize.planner.lifetimes.notes import ADD, StepNotes
from functionalize.planner.machines.constants import DeviceConstant
from functionalize.planner.timeline.program_memory import program_timeline
from functionalize.planner.timeline.timeline import Timeline
from functionalize.program.program import Program
from functionalize.recorder.recorder import Recorder
from functionalize.recorder.storage_table import StorageInfo, StorageTable
from functionalize.state.memory_reports import MemoryReports
from functionalize.state.module_calls import ModuleCalls
from functionalize.state.sources import Slot
from functionalize.state.storage_places import Places
from functionalize.util.gc_pause import only_young_collections


class StepInputs(Protocol):
    """The state before a step, as `step/step_state.py` finds it."""

    places: Places

    @property
    def leaves(self) -> Sequence[Any]:
        """The flattened arguments."""
        ...

    @property
    def slots(self) -> list[tuple[str, Slot]]:
        """The places of gradients."""
        ...


class RecordedStep(Protocol):
    """A recording of a step, and the state before it."""

    @property
    def recorder(self) -> Recorder:
        """The recorder of the run."""
        ...

    @property
    def entry(self) -> StepInputs:
        """The state before the run."""
        ...


class StepMemory(EagerMemory):
    """The memory of one recorded step and of its program.

    replayed: the program. input_categories: input name -> category.
    """

    replayed: Program
    input_categories: Mapping[str, Category]

    def __init__(
        self, lifetimes: Lifetimes, replayed: Program, input_categories: Mapping[str, Category]
    ) -> None:
        super().__init__(lifetimes)
        vars(self).update(replayed=replayed, input_categories=input_categories)

    @staticmethod
    def of(recording: RecordedStep, recorded: Program, program: Program) -> StepMemory | None:
        """The memory of a recording and of its program; None if the recorder did not observe lifetimes.

        recorded, program: the program before and after the passes.
        """
        recorder, entry = recording.recorder, recording.entry
        observer, storages = recorder.observer, recorder.storages
        if not isinstance(observer, LifetimeObserver):
            return None
        found = origins(entry.places, storages)
        left = gradients(entry.slots, entry.leaves, storages.serial_of)
        lifetimes = observer.lifetimes(storages, found, left)
        return StepMemory(lifetimes, program, categories_of_inputs(recorded, entry.places, found))

    @cached_property
    def program(self) -> Timeline:
        """The memory of a replay."""
        with only_young_collections():  # the events made here live as long as the report
            return program_timeline(self.replayed, self.input_categories, self.lifetimes.target)

    def after(
        self,
        program: Program,
        constants: tuple[DeviceConstant, ...] = (),
        settings: Settings | None = None,
    ) -> StepMemory:
        """The memory with another program in place of the recorded one, declared constants, an allocator's settings."""
        new = StepMemory(self.lifetimes, program, self.input_categories)
        vars(new).update(eager=self.eager, constants=constants, settings=settings)
        return new


# -- what observes a recorder ----------------------------------------------------------------------


class LifetimeObserver:
    """Observes one recorder. See `RecordingObserver` in `recorder/storage_table.py`."""

    notes: StepNotes

    def __init__(self) -> None:
        self._records: list[OpRecord] = []
        self._recorder: Recorder | None = (
            None  # set while it is active only: a cycle would keep its tensors alive
        )

    @property
    def module_calls(self) -> ModuleCalls:
        return self.notes.calls

    def attach(self, records: list[OpRecord]) -> None:
        self._records, self.notes = records, StepNotes(records)

    def start(self, recorder: Recorder) -> None:
        self.notes.start()
        self._recorder, recorder.module_calls = recorder, self.notes.calls

    def stop(self) -> None:
        self.notes.stop()
        if self._recorder is not None:
            self._recorder.module_calls = None
        self._recorder = None

    def storage_seen(self, info: StorageInfo, storage: torch.UntypedStorage) -> None:
        self.notes.changes.append((len(self._records), info.serial, info.nbytes))
        self.notes.alive.append(weakref.ref(storage, partial(self._freed, info.serial)))

    def storage_resized(self, serial: int, nbytes: int) -> None:
        self.notes.changes.append((len(self._records), serial, nbytes))

    def _freed(self, serial: int, _: Any) -> None:
        running = self._recorder is not None and self._recorder.suspended
        at = len(self._records) if running else len(self._records) - 1
        self.notes.changes.append((at, serial, 0))

    def recorded(self, record: OpRecord, args: tuple[Any, ...]) -> None:
        record.meta["module"] = self.notes.calls.module_of(record)
        if record.target is ADD and record.phase == BACKWARD and not torch.is_grad_enabled():
            self.notes.sums[len(self._records) - 1] = frozenset(
                ref.storage
                for ref, tensor in zip(record.args[:2], args, strict=False)
                if isinstance(tensor, Tensor) and tensor._base is None
            )

    def lifetimes(
        self,
        storages: StorageTable,
        origins: Mapping[int, Origin],
        gradients: Mapping[int, Category],
    ) -> Lifetimes:
        """The lifetimes of the step, once it has ended. Arguments: see the fields of `Lifetimes`."""
        seen = [LastSeen(info.seen.geometry, info.device.type) for info in storages.infos]
        return self.notes.lifetimes(self._records, seen, origins, gradients)


REPORTS = MemoryReports(LifetimeObserver, StepMemory.of)
