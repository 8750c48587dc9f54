"""What came of a recorded call, before it is acted on: a program, a refusal, or a warm-up.

Invariant: an outcome is decided on one rank and changes nothing; where ranks must agree, the worst of theirs
counts (see agreement.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from functionalize.errors import FunctionalizeError, UncapturableError
from functionalize.frontend.agreement import Level, Vote
from functionalize.frontend.programs import Kept
from functionalize.frontend.recording import Remains


@dataclass(slots=True)
class Warmup:
    """Calls of one kind that were recorded and not kept; `remains` of the last one."""

    calls: int = 0
    remains: Remains | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a recording: a program, a refusal (`everywhere`: for calls of any kind), or neither yet."""

    remains: Remains | None = None
    kept: Kept | None = None
    refused: FunctionalizeError | None = None
    everywhere: bool = False

    @property
    def level(self) -> Level:
        """How it counts in a vote."""
        if self.refused is not None:
            return Level.REFUSED
        return Level.KEPT if self.kept is not None else Level.NOT_YET

    def unless(self, worst: Level) -> Outcome:
        """This, or not yet if another rank does not keep its recording."""
        return self if worst is Level.KEPT or self.kept is None else Outcome(self.remains)


def agreed(mine: Outcome, vote: Vote) -> Outcome:
    """`mine` itself if every rank keeps its recording, else what the worst outcome on any of them makes of it."""
    worst = vote.worst(mine.level)
    if worst is Level.REFUSED:
        error = mine.refused or UncapturableError("another rank cannot capture this step")
        return Outcome(refused=error, everywhere=True)
    return mine if worst is Level.KEPT else Outcome(mine.remains)
