"""`Memory`: the report on the memory of a step: the figures of `memory_figures.py` and the text of `memory_text.py`."""

from __future__ import annotations

from dataclasses import dataclass

from functionalize.planner.report.memory_figures import EAGER, MemoryFigures
from functionalize.planner.report.memory_text import memory_text
from functionalize.planner.report.partings import Partings


@dataclass(frozen=True, eq=False, repr=False)
class Memory(MemoryFigures):
    """The figures of a step's memory, and their report as text."""

    def __str__(self) -> str:
        return self.text() if self.timelines else repr(self)

    def text(self, k: int = 10) -> str:
        """The report; k: rows of each table. Raises `MemoryReportError` without a timeline."""
        return memory_text(self, k)

    def against(self, recorded: MemoryFigures) -> Partings:
        """This plan of a step beside the memory that `fz.record_memory` recorded: the ops where they part.

        Raises `MemoryReportError` if one of the reports has no timeline of eager.
        """
        return Partings.of(self.timeline(EAGER), recorded.timeline(EAGER))
