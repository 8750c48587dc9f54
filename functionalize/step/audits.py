"""Audited calls of a step: the step runs for real, and what it does is compared with the program.

    audits.is_due(cached)                     whether the next call of a program is audited
    audits.run(audited, cached, call)         the result of eager, whatever is found
    audits.settle(verdict, cached)            a program that differs is dropped, on all ranks

Invariant: ranks that vote audit in the same call, and drop their programs together. After `_MOST_FAILURES` differences
the step is refused.
"""

from __future__ import annotations

from typing import Any

from functionalize.audit.audited_call import AuditedCall, log_bug
from functionalize.audit.left_state import LeftState
from functionalize.audit.verdict import AuditVerdict
from functionalize.errors import AuditError, UncapturableError
from functionalize.step.cache import CachedProgram
from functionalize.step.core import EVERY_CALL, StepCore
from functionalize.step.policy import AUDIT
from functionalize.step.stages import Invocation
from functionalize.step.vote import Level
from functionalize.util.switches import AUDITS

_OF_USE = 32  # replays
_MOST_FAILURES = 3  # of audits, before the step is refused


class Audits:
    """The audits of one step."""

    def __init__(self, core: StepCore) -> None:
        self._core = core

    def is_due(self, cached: CachedProgram) -> bool:
        """Whether the next call of this program is audited."""
        call, audit = cached.replays + cached.audits + 1, self._core.options.audit
        if cached.op_stream is None or not audit.is_due(call):
            return False
        if (
            audit.every is not None
        ):  # those that were asked for are outside of what the step may cost
            return True
        core = self._core
        if not core.policy.ledger.can_pay(AUDIT):
            return False
        # A step that saves for a program replays more once it has it: audits of each position of a ring would keep it
        # from that for long. One of them is audited, once it has been of use.
        alike = core.cache.at(core.cache.key_of(cached))
        is_first = cached.replays >= _OF_USE and not any(each.audits for each in alike)
        return is_first or not core.saves

    def run(self, audited: AuditedCall, cached: CachedProgram, call: Invocation) -> Any:
        """Run the step for real, and compare it with its program: the result is eager's, whatever is found."""
        core, is_thorough = self._core, self.begin(cached)
        try:
            if is_thorough and cached.signature is not None:
                before = core.state_before(call, cached.signature)
                audited.also = LeftState(before, cached.effects).difference
        except Exception as error:  # the op stream and the results are compared alone
            log_bug(error)
        try:
            result = audited.run(core.fn, call.args, call.kwargs, call.spec)
        except Exception:
            self.note_difference(audited.verdict, cached)
            raise
        self.end(audited.verdict, cached)
        return result

    def begin(self, cached: CachedProgram) -> bool:
        """Count an audited call of a program; whether what it changes in Python, and all its effects, are looked at."""
        cached.audits += 1
        core, audit = self._core, self._core.options.audit
        core.cache.used(cached)
        if audit.every is None:  # else they were asked for
            core.policy.ledger.pay(AUDIT)
        core.policy.replayed(core.cache.key_of(cached))
        return audit.is_thorough(cached.replays + cached.audits)

    def end(self, verdict: AuditVerdict | None, cached: CachedProgram) -> None:
        """Count the verdict, None if the audit itself has failed, and settle it."""
        if verdict is None or verdict.missed is None:
            self._core.stats.audits += 1
        else:  # the program would not have been replayed
            self._core.stats.eager += 1
            self._core.note_miss(verdict.missed)
        self.settle(verdict, cached)

    def settle(self, verdict: AuditVerdict | None, cached: CachedProgram) -> None:
        """Drop a program that differs from eager, on all ranks; raises `AuditError` where that is the option."""
        message = self.note_difference(verdict, cached)
        if message is None:
            AUDITS.debug("%s: a call was as its program is", self._core.name)
        self.agree(message, cached)
        if message is not None and self._core.options.audit.raises:
            raise AuditError(message)

    def agree(self, message: str | None, cached: CachedProgram) -> None:
        """Drop a program on all ranks if one of them differs from eager. message: how this one differs."""
        core = self._core
        failed = Level.NOT_YET if core.stats.audit_failures < _MOST_FAILURES else Level.REFUSED
        level = Level.KEPT if message is None else failed
        worst = core.vote.worst(level) if core.vote is not None else level
        if worst is not Level.KEPT:
            core.cache.drop(cached)  # all ranks record again
        if worst is Level.REFUSED:
            why = f"replays differ from eager again and again: {message or 'on another rank'}"
            core.refuse(EVERY_CALL, UncapturableError(why))

    def note_difference(self, verdict: AuditVerdict | None, cached: CachedProgram) -> str | None:
        """Drop a program that differs from eager; returns the message, None if it does not differ."""
        core = self._core
        message = (verdict or AuditVerdict()).message(core.name, cached.replays + cached.audits)
        if message is not None:
            AUDITS.error("%s", message)
            core.stats.differed(message)
            core.cache.drop(cached)
        return message
