"""`record_memory`: what a step holds at every moment, noted while it runs as it is.

    step = fz.record_memory(train_step)
    step(batch)                 runs eagerly, and notes when storages come and go
    step.memory.peak            of that call; the report of `planning/memory.py`, with eager's lifetimes alone

Nothing has to repeat: first steps, steps that no program can hold, steps that fail half-way, captured steps that
replay. It costs less than half of what `capture(memory=True)` does, which also tells what the program holds.
Invariant: the step does what it does without, and what it raises passes through; `memory` then ends there.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from functionalize.core.collector import only_young_collections
from functionalize.frontend import arguments
from functionalize.frontend.lifetimes import Lifetimes
from functionalize.frontend.memory import EagerMemory
from functionalize.frontend.memory_recorder import MemoryRecorder
from functionalize.frontend.names import leaf_names
from functionalize.frontend.origins import gradients, own_bytes, parameter_names
from functionalize.frontend.reach import Roots, reachable
from functionalize.frontend.sources import Slot, candidates, parameters, slots
from functionalize.frontend.world import in_world

log = logging.getLogger("functionalize")


def record_memory(train_step: Callable[..., Any]) -> RecordedMemory:
    """Note the memory of every call of `train_step` (any callable; also a decorator), for `.memory`.

    The calls run eagerly, on real tensors or in an `fz.world`, and give what they give. Bytes are as requested.
    Raises `UnsupportedTensorError`, before anything runs, if the step can reach a tensor that has no storage (a sparse
    gradient); those that come up while it runs are left out, and a warning says so.
    """
    return RecordedMemory(train_step)


class RecordedMemory:
    """A step that runs as it is, and of whose last call the memory is known."""

    def __init__(self, train_step: Callable[..., Any]) -> None:
        functools.update_wrapper(self, train_step)
        self._fn = train_step
        self._memory: EagerMemory | None = None
        self._take: Callable[[], Lifetimes] | None = None

    @property
    def memory(self) -> EagerMemory | None:
        """What the last call held at every moment; None before the first."""
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
            recorder.calls.know(roots)
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
        """Keep what explains the call, and no tensor of it."""
        own = own_bytes(roots, recorder.serial_of)
        left = gradients(held, leaves, recorder.serial_of)
        self._take = partial(recorder.lifetimes, own, left, parameter_names(roots))
        if recorder.strange:
            log.warning(
                "the memory of %s leaves out tensors without a storage of their own: %s",
                getattr(self._fn, "__name__", "the step"),
                ", ".join(sorted(recorder.strange)),
            )
