"""`step.memory`: the memory of a step over time, with the lifetimes of eager and of the program.

    step = fz.capture(train_step, memory=True)
    step.memory.eager          the recorded allocations and frees, and the scratch of ops
    step.memory.program        those of a replay, which frees at the last use
    step.memory.text(), ...    the report on both, see `planner/report/text.py`

Both are computed at their first use, from what `observer.py` has recorded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

from functionalize.cost.categories import Category
from functionalize.planner.allocator.alloc_conf import Settings
from functionalize.planner.lifetimes.eager_memory import EagerMemory
from functionalize.planner.lifetimes.input_categories import (
    categories_of_inputs,
    gradients,
    origins,
)
from functionalize.planner.lifetimes.lifetimes import Lifetimes
from functionalize.planner.lifetimes.observer import LifetimeObserver
from functionalize.planner.machines.constants import DeviceConstant
from functionalize.planner.timeline.program_memory import program_timeline
from functionalize.planner.timeline.timeline import Timeline
from functionalize.program.program import Program
from functionalize.recorder.recorder import Recorder
from functionalize.state.memory_reports import MemoryReports
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


REPORTS = MemoryReports(LifetimeObserver, StepMemory.of)
