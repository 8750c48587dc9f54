"""A recorder that also notes when storages come and go: for a program, and for what eager's memory looked like.

    with LifetimeRecorder(...) as recorder: fn(*args)
    recorder.changes      [(3, 17, 4096), (5, 17, 0), ...]: the op, the storage, its bytes from there on

A storage is noted when the recorder first sees it, when its size changes (FSDP2 frees by a resize to nothing), and
when it dies: a weak reference on the storage's Python object, which lives as long as the storage, on fake tensors
as on real ones. The index of a change is that of the op that runs then, else of the one that ran last.
Invariant: the order of changes is that of the run. No tensor is kept that the step would let go: not even a gradient
that existed before, which `zero_grad()` frees.
`memory_recorder.py` notes the same for less, where no program is asked for.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from functionalize._compat import BACKWARD, autograd_position
from functionalize.core.ops import OpRecord, TensorRef
from functionalize.frontend.dispatch import Recorder
from functionalize.frontend.known_storages import StorageInfo
from functionalize.frontend.lifetimes import Lifetimes, Seen
from functionalize.frontend.op_kinds import OpKind
from functionalize.frontend.origins import Origin
from functionalize.frontend.step_notes import StepNotes
from functionalize.planning.timeline import Category

ADD = torch.ops.aten.add.Tensor
LET_GO = torch.empty(0)  # in the place of a tensor that is not held


class LifetimeRecorder(StepNotes, Recorder):
    """sums: additions in a backward, and the storages they are given that no view is on: Note [Sums in place]."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.changes: list[tuple[int, int, int]] = []
        self.sums: dict[int, frozenset[int]] = {}
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    # -- storages ------------------------------------------------------------------------------

    def _new(self, tensor: Tensor, storage: torch.UntypedStorage) -> StorageInfo:
        info = super()._new(tensor, storage)
        self.changes.append((len(self.records), info.serial, info.nbytes))
        self._alive[info.serial] = weakref.ref(storage, partial(self._freed, info.serial))
        return info

    def bring_in(self, tensor: Tensor, name: str, literal: Tensor | None = None) -> TensorRef:
        """What was found at a place before the step began is there to be found again: it is not held."""
        count = len(self.externals)
        ref = super().bring_in(tensor, name, literal)
        if len(self.externals) > count and not self._entered:
            self.externals[-1].tensor = LET_GO
        return ref

    def note_size(self, storage: torch.UntypedStorage) -> tuple[int, int] | None:
        size = super().note_size(storage)
        if size is not None:
            self.changes.append((len(self.records), *size))
        return size

    def _freed(self, serial: int, _: Any) -> None:
        at = len(self.records) if self.suspended else len(self.records) - 1
        self.changes.append((max(at, 0), serial, 0))

    def _end(self) -> None:
        super()._end()
        if not self._entered:
            self._alive.clear()  # what dies from here on is no part of the step

    # -- ops -----------------------------------------------------------------------------------

    def _finish(self, op: OpKind, record: OpRecord, args: Any, kwargs: Any, out: Any) -> None:
        super()._finish(op, record, args, kwargs, out)
        record.meta["module"] = self.calls.module_of(record)
        if record.target is ADD and record.phase == BACKWARD and not torch.is_grad_enabled():
            whole = [t for t in args[:2] if isinstance(t, Tensor) and t._base is None]
            self.sums[len(self.records) - 1] = frozenset(self.ref(t).storage for t in whole)

    def resize_storage(self, storage: torch.UntypedStorage, size: Any, original: Any) -> Any:
        count = len(self.records)
        result = super().resize_storage(storage, size, original)
        for record in self.records[count:]:
            record.seq_nr, record.autograd_node, record.phase = autograd_position()
            record.meta["module"] = self.calls.module_of(record)
        return result

    # -- what is left --------------------------------------------------------------------------

    def lifetimes(self, found: Mapping[int, Origin], left: Mapping[int, Category]) -> Lifetimes:
        """What the step was like, once it has ended. found: what was there before; left: the gradients it left."""
        seen = [Seen(info.seen.geometry, info.device.type) for info in self.infos]
        changes, updates, sums = self.changes.copy(), self.updates.copy(), dict(self.sums)
        return Lifetimes.of(self.records, changes, seen, found, left, updates, sums, self.target)
