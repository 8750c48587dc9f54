"""`record_memory`: the bytes that a step holds at every moment, noted while it runs eagerly.

    step = fz.record_memory(train_step)
    step(batch)                 runs eagerly, and notes when storages come and go
    step.memory.peak            of that call; the report of `planning/report/memory.py`, with eager's lifetimes alone

Any call can be recorded: a first step, a step that no program can hold, one that fails half-way, a captured step that
replays. It costs less than half of `capture(memory=True)`, which also reports what the program holds.
Invariant: recording does not change what the step does; what it raises passes through, and `memory` ends there.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from functionalize.fake_world.world import in_world
from functionalize.lifetimes.eager_memory import EagerMemory
from functionalize.lifetimes.input_categories import gradients, own_bytes, parameter_names
from functionalize.lifetimes.lifetimes import Lifetimes
from functionalize.lifetimes.light_recorder import MemoryRecorder
from functionalize.state import arguments
from functionalize.state.argument_names import leaf_names
from functionalize.state.discovery import Roots, reachable
from functionalize.state.sources import Slot, candidates, parameters, slots
from functionalize.util.gc_pause import only_young_collections

log = logging.getLogger("functionalize")


def record_memory(train_step: Callable[..., Any]) -> RecordedMemory:
    """Note the memory of every call of `train_step` (any callable; also a decorator), for `.memory`.

    The calls run eagerly, on real tensors or in an `fz.world`, and return what `train_step` returns. Bytes are as
    requested from the allocator.
    Raises `UnsupportedTensorError`, before anything runs, if the step can reach a tensor that has no storage (a sparse
    gradient); those that come up while it runs are left out, and a warning says so.
    """
    return RecordedMemory(train_step)


class RecordedMemory:
    """A step that runs eagerly; `memory` is that of its last call."""

    def __init__(self, train_step: Callable[..., Any]) -> None:
        functools.update_wrapper(self, train_step)
        self._fn = train_step
        self._memory: EagerMemory | None = None
        self._take: Callable[[], Lifetimes] | None = None

    @property
    def memory(self) -> EagerMemory | None:
        """The bytes that the last call held at every moment; None before the first call."""
        if self._take is not None:
            self._memory, self._take = EagerMemory(self._take()), None
        return self._memory

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step, run eagerly."""
        recorder = MemoryRecorder(in_world())
        leaves, spec = arguments.flatten(args, kwargs)
        with only_young_collections():
            roots = reachable(self._fn, leaves, leaf_names(self._fn, spec))
            held = list(slots(roots, list(parameters(roots, leaves))))
            for name, source, tensor in candidates(roots, leaves, held):
                recorder.there_is(name, source, tensor)
            recorder.step_notes.calls.know(roots)
            try:
                with recorder:
                    return self._fn(*args, **kwargs)
            finally:
                self._conclude(recorder, roots, held, leaves)

    def _conclude(
        self,
        recorder: MemoryRecorder,
        roots: Roots,
        held: Sequence[tuple[str, Slot]],
        leaves: Sequence[Any],
    ) -> None:
        """Keep what the report needs, and no tensor of the call."""
        own = own_bytes(roots, recorder.serial_of)
        left = gradients(held, leaves, recorder.serial_of)
        self._take = partial(recorder.lifetimes, own, left, parameter_names(roots))
        if recorder.strange:
            log.warning(
                "the memory of %s leaves out tensors without a storage of their own: %s",
                getattr(self._fn, "__name__", "the step"),
                ", ".join(sorted(recorder.strange)),
            )
