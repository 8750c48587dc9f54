"""What every recorder of memory notes beside its ops: which module each belongs to, and when an optimizer steps.

    notes.calls        see `module_calls.py`
    notes.updates      the ops of each step of an optimizer
    notes.target       whose kernels the world takes, None outside of one

Invariant: when the context is left, whatever happened, the hooks and patches that it needs are gone.
"""

from __future__ import annotations

import threading
from typing import Any, Self

from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from functionalize.frontend.module_calls import ModuleCalls
from functionalize.frontend.watcher import Watcher
from functionalize.frontend.world import world_target


class StepNotes(Watcher):
    """A mode that records ops, and takes these notes. records: the ops so far."""

    records: Any  # a list

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.target = world_target()
        self.calls = ModuleCalls()
        self.updates: list[range] = []
        self._hooks: list[Any] = []
        self._thread, self._begun = 0, 0

    def _before_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if threading.get_ident() == self._thread:
            self._begun = len(self.records)

    def _after_update(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if threading.get_ident() == self._thread:
            self.updates.append(range(self._begun, len(self.records)))

    def __enter__(self) -> Self:
        if not self._entered:
            self._begin()
        try:
            return super().__enter__()
        except BaseException:
            self._end()
            raise

    def __exit__(self, *exc: Any) -> None:
        try:
            super().__exit__(*exc)
        finally:
            self._end()

    def _begin(self) -> None:
        self.calls.watch()
        self._thread = threading.get_ident()
        self._hooks = [
            register_optimizer_step_pre_hook(self._before_update),
            register_optimizer_step_post_hook(self._after_update),
        ]

    def _end(self) -> None:
        if not self._entered:
            self.calls.unwatch()
            for hook in self._hooks:
                hook.remove()
            self._hooks = []
