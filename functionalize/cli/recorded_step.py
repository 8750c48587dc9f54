"""What is recorded of a script's step: what every command but `plan` looks at, and what a file has.

found.program, found.timeline()         the graph, and the memory of its replay
found.after("default", say)             the same after passes
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from functionalize.planning.timeline.program_memory import program_timeline
from functionalize.planning.timeline.timeline import Category, Timeline
from functionalize.program.program import Program

Say = Callable[[str], None]  # shows what goes on


@dataclass(frozen=True, eq=False)
class Recorded:
    """A step's program. given: what its inputs are for, by name. eager: the memory as recorded, where it was.

    stats: what was recorded, in numbers. groups: the ranks of the process groups. notes: what the target was taken
    to run, and numbers that were assumed.
    """

    name: str
    program: Program
    given: Mapping[str, Category]
    world: str
    target: str
    stats: Mapping[str, Any]
    groups: Mapping[str, tuple[int, ...]]
    notes: tuple[str, ...] = ()
    eager: Timeline | None = None

    def timeline(self) -> Timeline:
        """The memory of a replay of the program."""
        return program_timeline(self.program, self.given)

    def after(self, pipeline: str | None, say: Say) -> Recorded:
        """The same after the passes of a pipeline."""
        if not pipeline:
            return self
        import passes  # the arrow of imports points from passes to the rest of this package

        say(f"running {pipeline}")
        return replace(self, program=passes.run(self.program, pipeline))
