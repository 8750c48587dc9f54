"""What both recorders of memory note beside ops: modules, optimizer steps, allocations and frees of storages.

    notes = StepNotes(records)
    notes.start(); ...; notes.stop()
    notes.calls        which module each op belongs to, see `module_calls.py`
    notes.updates      for each `optimizer.step()`, the range of its op indices
    notes.changes      [(3, 17, 4096), (5, 17, 0), ...]: op index, number of the storage, its bytes from then on
    notes.sums         additions in a backward: Note [Sums in place] in `lifetimes.py`
    notes.target       the target of the fake world that the step runs in, None for real tensors

Invariant: `stop` removes the hooks and weak references of the run, also when the step has raised.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence, Sized
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from functionalize._compat.fakes import accelerators
from functionalize.cost.categories import Category
from functionalize.ir.ops import OpRecord
from functionalize.ir.worlds import world_target
from functionalize.planner.lifetimes.input_categories import Origin
from functionalize.planner.lifetimes.lifetimes import LastSeen, Lifetimes, SizeChange
from functionalize.state.module_calls import ModuleCalls

ADD = torch.ops.aten.add.Tensor


class StepNotes:
    """The notes of one recording.

    alive: a weak reference to each live storage; its callback appends the free to `changes`.
    """

    def __init__(self, records: Sized) -> None:
        self.target = world_target()
        self.calls = ModuleCalls()
        self.updates: list[range] = []
        self.changes: list[tuple[int, int, int]] = []
        self.sums: dict[int, frozenset[int]] = {}
        self.alive: list[weakref.ref[torch.UntypedStorage]] = []
        self._records = records
        self._hooks: list[Any] = []
        self._thread, self._begun = 0, 0

    def start(self) -> None:
        """The step begins, in this thread."""
        self.calls.watch()
        self._thread = threading.get_ident()
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_update),
            register_optimizer_step_post_hook(self._after_update),
        ]

    def stop(self) -> None:
        """The step has ended: later frees are not part of it."""
        self.calls.unwatch()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.alive.clear()

    def lifetimes(
        self,
        records: Sequence[OpRecord],
        seen: Sequence[LastSeen],
        origins: Mapping[int, Origin],
        gradients: Mapping[int, Category],
    ) -> Lifetimes:
        """The lifetimes of the step, once it has ended. Arguments: see the fields of `Lifetimes`."""
        changes = [SizeChange(max(op, 0), serial, nbytes) for op, serial, nbytes in self.changes]
        target = self.target  # without a fake world: the accelerator if any storage is on one
        if target is None:
            target = next(iter(accelerators(each.device for each in seen)), "cpu")
        updates, sums = self.updates, dict(self.sums)
        return Lifetimes(records, changes, seen, origins, gradients, updates, sums, target)

    def _before_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if threading.get_ident() == self._thread:
            self._begun = len(self._records)

    def _after_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if threading.get_ident() == self._thread:
            self.updates.append(range(self._begun, len(self._records)))
