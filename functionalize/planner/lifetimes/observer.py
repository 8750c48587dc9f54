"""An observer of a `Recorder` that notes when storages are allocated, resized and freed, for eager's memory.

    observer = LifetimeObserver()
    with Recorder(..., observer=observer) as recorder: fn(*args)
    observer.lifetimes(recorder.storages, origins, gradients)

A storage is noted when the recorder first sees it, when its size changes (FSDP2 frees by a resize to 0 bytes), and
when it is freed: a weak reference on the storage's Python object, which lives as long as the storage, on fake tensors
as on real ones. The index of a change is that of the op that runs at that moment, else of the last op.
Invariant: changes are in the order of the run. The observer keeps no tensor alive, not even a gradient that existed
before the step and that `zero_grad()` frees.
`light_recorder.py` notes the same at less cost, for a step of which no program is built.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from functionalize._compat.autograd import BACKWARD
from functionalize.cost.categories import Category
from functionalize.ir.ops import OpRecord
from functionalize.planner.lifetimes.input_categories import Origin
from functionalize.planner.lifetimes.lifetimes import LastSeen, Lifetimes
from functionalize.planner.lifetimes.notes import ADD, StepNotes
from functionalize.recorder.recorder import Recorder
from functionalize.recorder.storage_table import StorageInfo, StorageTable
from functionalize.state.module_calls import ModuleCalls


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
