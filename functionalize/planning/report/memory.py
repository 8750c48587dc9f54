"""`Memory`: the report on a step's memory: its figures (`memory_figures.py`) and its text (`memory_text.py`)."""

from __future__ import annotations

from dataclasses import dataclass

from functionalize.planning.report.memory_figures import MemoryFigures
from functionalize.planning.report.memory_text import memory_text


@dataclass(frozen=True, eq=False)
class Memory(MemoryFigures):
    """The figures, and a report of them."""

    def text(self, k: int = 10) -> str:
        """The report; k: rows of each table. Raises `MemoryReportError` without a timeline."""
        return memory_text(self, k)
