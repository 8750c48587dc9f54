"""The recorded step of a script: the input of every command but `plan`, and the content of a file.

found.program, found.timeline()         the graph, and the memory of its replay
found.after("default", say)             the recorded step after passes
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from functionalize.cost.categories import Category
from functionalize.planner.sweep.training import Items
from functionalize.planner.timeline.program_memory import program_timeline
from functionalize.planner.timeline.timeline import Timeline
from functionalize.program.program import Program

Say = Callable[[str], None]  # shows a status text


@dataclass(frozen=True, eq=False)
class Recorded:
    """A step's program and the facts recorded with it.

    made: the program; None for a step that cannot be captured, of which the memory that eager has is known.
    input_categories: name of an input -> its category (parameter, optimizer state, ...).
    world, target: as text, for headlines.
    stats: counts of recorded ops, nodes, inputs, guards, and the time that recording needed.
    groups: name of a process group -> its ranks.
    notes: the kernels that the target is assumed to run, and other assumptions.
    eager: the memory of the eager step; None for a step that was read from a file.
    items: what a rank trains on in the step; None if that is not known.
    host: the most bytes of offloaded tensors in host memory as eager runs; 0 of a step that was read from a file.
    """

    name: str
    made: Program | None
    input_categories: Mapping[str, Category]
    world: str
    target: str
    stats: Mapping[str, Any]
    groups: Mapping[str, tuple[int, ...]]
    notes: tuple[str, ...] = ()
    eager: Timeline | None = None
    items: Items | None = None
    host: int = 0

    @property
    def program(self) -> Program:
        """The program of a step that has one."""
        assert self.made is not None
        return self.made

    def timeline(self) -> Timeline:
        """The memory of a replay of the program."""
        return program_timeline(self.program, self.input_categories, self.target)

    def after(self, pipeline: str | None, say: Say) -> Recorded:
        """The recorded step after the passes of a pipeline."""
        if not pipeline or self.made is None:
            return self
        from functionalize import passes  # lazy: the package `passes` imports this one

        say(f"running {pipeline}")
        return replace(self, made=passes.run(self.program, pipeline))
