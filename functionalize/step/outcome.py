"""Results of the stages that follow a recorded call: of one rank first, then of all ranks.

    record    NotYet | Refused              why there is no recording
    judge     Steady | WarmUp | Refused     whether the recording is the steady state
    build     Built  | WarmUp | Refused     the program of a steady recording: an `Outcome`
    agree     Agreed                        the outcome after the worst on any rank

Invariant: a result of a stage is an immutable value. The captured step changes only when it applies the last one.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from typing import ClassVar

from functionalize.errors import FunctionalizeError, UncapturableError
from functionalize.lengths.recorded_calls import RecordedCall
from functionalize.step.cache import FIRST, CachedProgram
from functionalize.step.recording import RecordingSummary, StepRecording
from functionalize.step.stats import ProgramCounts
from functionalize.step.vote import Level, RankVote
from functionalize.util.text import without_numbers
from functionalize.util.user_warning import warn_uncapturable

log = logging.getLogger("functionalize")


@dataclass(frozen=True, slots=True)
class Refused:
    """The step cannot be captured. error: what later calls raise.

    is_bug: `error` reports a bug of this package, which must not prevent the call from running.
    everywhere: calls with any key are refused, since all ranks decide alike.
    """

    error: FunctionalizeError
    is_bug: bool = False
    everywhere: bool = False
    level: ClassVar[Level] = Level.REFUSED

    @staticmethod
    def of(error: Exception) -> Refused:
        """The refusal for an error that a stage raised."""
        if isinstance(error, FunctionalizeError):
            return Refused(error)
        log.error("a bug in functionalize, please report it", exc_info=error)
        refusal = UncapturableError(f"a bug in functionalize: {type(error).__name__}: {error}")
        refusal.__cause__ = error
        return Refused(refusal, is_bug=True)


@dataclass(frozen=True, slots=True)
class NotYet:
    """The call runs eagerly, for it makes objects that a recording needs at its beginning; a later one is recorded.

    reason: what the step does, for messages.
    """

    reason: str
    level: ClassVar[Level] = Level.NOT_YET


@dataclass(frozen=True, slots=True)
class WarmUp:
    """The recording is not kept: the next call with the same key is recorded, too.

    summary: the part of this recording with which the next one is compared. reason: why this one is not kept.
    changes_arguments: whether that is a change of the arguments, for which no later one is kept, either.
    """

    summary: RecordingSummary
    reason: str
    changes_arguments: bool = False
    level: ClassVar[Level] = Level.NOT_YET


@dataclass(slots=True)
class Unkept:
    """The recordings of one kind of call that were not kept.

    reasons: the number of recordings for each reason, numbers left out. summary: that of the last recording.
    why: the last reason, for messages: what the step did.
    """

    summary: RecordingSummary
    reasons: Counter[str] = field(default_factory=Counter)
    why: str = ""


class UnsettledMisses:
    """Guards that missed, and for which the call was then recorded and not kept; by the kind of their message.

    A step that was captured once is not refused because calls of some kind do not settle: these run eagerly.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._kinds: dict[str, tuple[int, str]] = {}  # -> how many calls, why the last was not kept
        self._told: set[str] = set()
        self._for_good = 0

    def add(self, missed: str, why: str, for_good: bool = False) -> None:
        """A call that was recorded because of `missed` was not kept, since the step `why`.

        for_good: whether no call that does so is kept; the user is told at the second one.
        """
        kind = without_numbers(missed)
        self._kinds[kind] = self._kinds.get(kind, (0, ""))[0] + 1, why
        self._for_good += for_good
        if for_good and self._for_good > 1:
            self.tell(missed)

    def clear(self) -> None:
        """A recording was kept."""
        self._kinds.clear()
        self._told.clear()

    def skips(self, missed: str, most: int) -> bool:
        """Whether to run a call eagerly: `most` calls like it were not kept. It is tried again at powers of two."""
        kind = without_numbers(missed)
        count, why = self._kinds.get(kind, (0, ""))
        if count < most or not count & (count - 1):
            return False
        if count == most:
            self.tell(missed)
        self._kinds[kind] = count + 1, why
        return True

    def why(self, missed: str) -> str:
        """Why calls like this one are not kept, for messages; empty: the last recording was kept, or there was none."""
        count, why = self._kinds.get(without_numbers(missed), (0, ""))
        return f"recordings of such calls were not kept, since the step {why}" if count else ""

    def tell(self, missed: str) -> bool:
        """Warn, once, that calls like this one run eagerly; false: recordings of them were kept, or there were none."""
        kind = without_numbers(missed)
        count, why = self._kinds.get(kind, (0, ""))
        if count and kind not in self._told:
            self._told.add(kind)
            where = "" if missed == FIRST else f" where {missed}"
            warn_uncapturable(
                f"{self._name} runs eagerly{where}: {count} recordings of such calls were not kept, since the step "
                f"{why}"
            )
        return count > 0


@dataclass(frozen=True, slots=True)
class Steady:
    """The recording is of the steady state."""

    recording: StepRecording


@dataclass(frozen=True, slots=True)
class Built:
    """A program that later calls can replay. summary: that of its recording. counts: the figures for `step.stats`.

    reference: what programs of other sizes are predicted from, if they are. is_replayed: whether later calls find it.
    """

    cached: CachedProgram
    summary: RecordingSummary
    counts: ProgramCounts
    reference: RecordedCall | None = None
    is_replayed: bool = True
    level: ClassVar[Level] = Level.KEPT


Verdict = Steady | WarmUp | Refused
Outcome = Built | WarmUp | Refused


@dataclass(frozen=True, slots=True)
class Agreed:
    """The outcome on all ranks. vote: the vote of later calls; a new one only if all ranks keep their programs."""

    outcome: Outcome
    vote: RankVote | None
