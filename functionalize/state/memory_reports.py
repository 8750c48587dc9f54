"""What `capture(step, memory=True)` needs of the planner: it observes a recording, and reports on the step's memory.

    reports = memory_reports()
    recorder = Recorder(..., observer=reports.observer())
    reports.of(recording, recorded, program)                `step.memory`

Nothing but the planner itself imports the planner: the package says how it is imported (`util/upper_parts.py`), which
happens when the first such step is made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from functionalize.recorder.storage_table import RecordingObserver
from functionalize.util.upper_parts import part


@dataclass(frozen=True)
class MemoryReports:
    """observer: makes the observer of one recording.

    of: the memory of a recording, from its program before and after the passes; None if it was not observed.
    """

    observer: Callable[[], RecordingObserver]
    of: Callable[[Any, Any, Any], Any]


def memory_reports() -> MemoryReports:
    """The planner's reports; imports the planner."""
    found: MemoryReports = part("memory reports")
    return found
