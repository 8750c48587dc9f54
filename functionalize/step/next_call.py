"""The first lines of `explain`: what the next call would do if it is like the last one, and why.

    the next call like the last one replays program 2
    the next call like the last one is recorded: the last recording was not kept, since the step ...
    the next call like the last one runs eagerly: a recording costs 10 eager steps, and 3.2 are left; each adds 0.05

"Like the last one" is a call with the same kinds of arguments that finds the guards of the same program to hold.
Invariant: it reads, and counts nothing: the next call is what it would have been.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from functionalize.errors import FunctionalizeError
from functionalize.step.cache import CachedProgram
from functionalize.step.core import EVERY_CALL, StepCore
from functionalize.step.pace import Pace
from functionalize.step.plan import WAITS, Eager, LastPlan, Record
from functionalize.util.text import counted

_LIKE = "the next call like the last one"


@dataclass(frozen=True, slots=True)
class NextCall:
    """What decides what the next call does.

    last: the plan of the last call; None: there was none. is_due: whether the next call of a program is audited.
    why_waits: why the passes of a program that waits for them do not run at the next call; None: they do.
    pace: whether replays pay; None: nobody asks.
    """

    core: StepCore
    last: LastPlan | None
    is_due: Callable[[CachedProgram], bool]
    why_waits: Callable[[CachedProgram], str | None]
    pace: Pace | None = None

    @property
    def text(self) -> str:
        """One sentence."""
        core, last = self.core, self.last
        if core.options.is_off:
            return "the next call runs eagerly: FUNCTIONALIZE=off"
        error = core.refused.get(last.key if last is not None else None)
        error = error or core.refused.get(EVERY_CALL)
        if error is not None:
            return self._refused(error)
        if last is None:
            if len(core.cache):
                return "the next call replays the program whose guards hold, if there is one"
            return "the next call is recorded, as the first one"
        return (
            f"{_LIKE} {self._what(last)}{', if all ranks agree' if core.vote is not None else ''}"
        )

    def _refused(self, error: FunctionalizeError) -> str:
        if self.core.options.raises:
            return f"{_LIKE} raises {type(error).__name__}: {error}"
        return f"{_LIKE} runs eagerly: it could not be captured, see below, and is tried again ever more rarely"

    def _what(self, last: LastPlan) -> str:
        core, found = self.core, self._program_of(last)
        policy, cache, rest = core.policy, core.cache, core.policy.rest
        if self.pace is not None and self.pace.why:
            return self.pace.why
        if rest.left and (not len(cache) or last.kind is Eager):
            return f"runs eagerly: the step rests for {counted(rest.left, 'more call')}, {rest.why}"
        if found is not None:
            return self._with(found)
        unkept = core.unkept.get(last.key)
        is_known = unkept is not None or cache.has(last.key)
        missing = 0 if is_known else policy.kinds.missing(last.key)
        if missing > 1:
            return f"runs eagerly: calls of its kind came too seldom, {missing} more must come"
        if (why := policy.why_not_next) is not None:
            return f"runs eagerly: {why}"
        if missing:
            return "is recorded: calls of its kind have come often enough"
        if last.kind is Eager:
            return f"runs eagerly: {last.why}"
        if unkept is not None:
            return f"is recorded: the last recording was not kept, since the step {unkept.why}"
        if last.kind is Record:
            return f"is recorded: no program was kept of the last one, which was recorded because of {last.why}"
        return "is recorded: the program of the last one was dropped"

    def _program_of(self, last: LastPlan) -> CachedProgram | None:
        """The program that the last call has found, or that was made of it; the last used one stands first."""
        programs = self.core.cache.at(last.key)
        if last.kind is Eager and last.why != WAITS:
            return next((cached for cached in programs if cached.waits), None)
        return next(iter(programs), None) if last.kind is not Record or last.is_kept else None

    def _with(self, cached: CachedProgram) -> str:
        number = next(n for n, each in enumerate(self.core.cache, 1) if each is cached)
        if cached.prediction is not None:
            return f"runs eagerly, and is compared with program {number}, predicted for its sizes"
        if cached.waits and (why := self.why_waits(cached)):
            return f"runs eagerly: program {number} waits for its passes, which cost {why}"
        if self.is_due(cached):
            return f"is audited: it runs eagerly, and is compared with program {number}"
        return f"replays program {number}"
