"""`step.memory`: what a step holds at every moment, with eager's lifetimes and with the program's.

    step = fz.capture(train_step, memory=True)
    step.memory.eager          as it was recorded, with what ops allocate inside themselves
    step.memory.program        as a replay frees it: at the last use
    step.memory.text(), ...    the report on both, see `planning/report/memory.py`

Both are computed at their first use: a recording notes no more than `observer.py` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, partial

from functionalize.lifetimes.eager_memory import EagerMemory
from functionalize.lifetimes.input_categories import given, gradients, origins
from functionalize.lifetimes.lifetimes import Lifetimes
from functionalize.lifetimes.observer import LifetimeObserver
from functionalize.planning.scratch.scratch import scratch_of
from functionalize.planning.timeline.constants import DeviceConstant
from functionalize.planning.timeline.program_memory import program_timeline
from functionalize.planning.timeline.timeline import Category, Timeline
from functionalize.program.program import Program
from functionalize.step.recording import StepRecording


class StepMemory(EagerMemory):
    """The memory of one recorded step and of its program. given: the category of each input, by its name."""

    replayed: Program
    given: Mapping[str, Category]

    def __init__(
        self, lifetimes: Lifetimes, replayed: Program, given: Mapping[str, Category]
    ) -> None:
        super().__init__(lifetimes)
        vars(self).update(replayed=replayed, given=given)

    @staticmethod
    def of(recording: StepRecording, recorded: Program, program: Program) -> StepMemory | None:
        """The memory of a recording and of its program; None if the recorder noted no lifetimes.

        recorded, program: before and after the passes.
        """
        recorder, entry = recording.recorder, recording.entry
        observer, storages = recorder.observer, recorder.storages
        if not isinstance(observer, LifetimeObserver):
            return None
        found = origins(entry.places, storages)
        left = gradients(entry.slots, entry.leaves, storages.serial_of)
        lifetimes = observer.lifetimes(storages, found, left)
        return StepMemory(lifetimes, program, given(recorded, entry.places, found))

    @cached_property
    def program(self) -> Timeline:
        """The memory of a replay."""
        scratch = partial(scratch_of, device=self.lifetimes.target)
        return program_timeline(self.replayed, self.given, scratch=scratch)

    def after(self, program: Program, constants: tuple[DeviceConstant, ...] = ()) -> StepMemory:
        """The memory with another program in place of the recorded one, and with declared constants."""
        new = StepMemory(self.lifetimes, program, self.given)
        vars(new).update(eager=self.eager, constants=constants)
        return new
