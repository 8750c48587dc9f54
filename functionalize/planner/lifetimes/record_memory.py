"""`record_memory`: the bytes that a step holds at every moment, recorded while it runs eagerly.

    step = fz.record_memory(train_step)
    step(batch)                 runs eagerly, and records when storages are allocated and freed
    step.memory.peak            of that call; see `planner/report/text.py`: eager's lifetimes, without a program's

Any call can be recorded: a first step, a step that cannot be captured, one that fails half-way, a captured step that
replays. It costs less than half of `capture(memory=True)`, which also reports the memory of the program.
Invariant: recording does not change what the step does. An exception of the step propagates, and `memory` ends at it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from functionalize.ir.worlds import in_world
from functionalize.planner.lifetimes.eager_memory import EagerMemory
from functionalize.planner.lifetimes.input_categories import (
    gradients,
    parameter_names,
    payload_bytes,
)
from functionalize.planner.lifetimes.lifetimes import Lifetimes
from functionalize.planner.lifetimes.light_recorder import MemoryRecorder
from functionalize.state import arguments
from functionalize.state.arguments import leaf_names
from functionalize.state.sources import Slot, candidates, parameters, slots
from functionalize.util.gc_pause import only_young_collections
from functionalize.walk.roots import Roots
from functionalize.walk.walker import reachable

log = logging.getLogger("functionalize")


def record_memory(train_step: Callable[..., Any]) -> RecordedMemory:
    """Record the memory of every call of `train_step` (any callable; also a decorator), for `.memory`.

    The calls run eagerly, on real tensors or in an `fz.world`, and return what `train_step` returns. Bytes are as
    requested from the allocator.
    Raises `UnsupportedTensorError`, before anything runs, if the step can reach a tensor that has no storage (a sparse
    gradient). Such tensors that the step itself makes are left out, and a warning lists their layouts.
    """
    return RecordedMemory(train_step)


class RecordedMemory:
    """A step that runs eagerly; `memory` is that of its last call."""

    def __init__(self, train_step: Callable[..., Any]) -> None:
        functools.update_wrapper(self, train_step)
        self._fn, self._name = train_step, getattr(train_step, "__name__", "the step")
        self._memory: EagerMemory | None = None
        self._lifetimes: Callable[[], Lifetimes] | None = (
            None  # of the last call, not yet in `_memory`
        )

    def __repr__(self) -> str:
        return f"<record_memory of {self._name}: {self.memory!r}>"

    @property
    def memory(self) -> EagerMemory | None:
        """The bytes that the last call held at every moment; None before the first call."""
        if self._lifetimes is not None:
            self._memory, self._lifetimes = EagerMemory(self._lifetimes()), None
        return self._memory

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step, run eagerly."""
        recorder = MemoryRecorder(in_world())
        leaves, spec = arguments.flatten(args, kwargs)
        with only_young_collections():
            roots = reachable(self._fn, leaves, leaf_names(self._fn, spec))
            gradient_slots = list(slots(roots, list(parameters(roots, leaves))))
            for name, source, tensor in candidates(roots, leaves, gradient_slots):
                recorder.add_place(name, source, tensor)
            recorder.step_notes.calls.register(roots)
            try:
                with recorder:
                    return self._fn(*args, **kwargs)
            finally:
                self._keep_report(recorder, roots, gradient_slots, leaves)

    def _keep_report(
        self,
        recorder: MemoryRecorder,
        roots: Roots,
        gradient_slots: Sequence[tuple[str, Slot]],
        leaves: Sequence[Any],
    ) -> None:
        """Keep what `memory` is computed from, and no tensor of the call."""
        payload = payload_bytes(roots, recorder.serial_of)
        remaining = gradients(gradient_slots, leaves, recorder.serial_of)
        self._lifetimes = partial(recorder.lifetimes, payload, remaining, parameter_names(roots))
        if recorder.without_storage:
            log.warning(
                "the memory of %s leaves out tensors without a storage of their own: %s",
                self._name,
                ", ".join(sorted(recorder.without_storage)),
            )
