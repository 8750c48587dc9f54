"""Guards on Python state switched off: what an audit finds, it finds alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from functionalize.fsdp.python_state import FSDPStateGuard
from functionalize.ir.guards import ConstantGuard, NumberGuard
from functionalize.program.executable import Executable
from functionalize.state.moving_state import MovingState
from functionalize.state.python_state import SurroundingsGuard
from functionalize.state.step_guards import SlotGuard
from functionalize.step.stages import RecordedRun
from functionalize.step.step_state import EntryState, ExitState

_KEPT = (SlotGuard, FSDPStateGuard, ConstantGuard, NumberGuard)


@contextmanager
def unguarded() -> Iterator[None]:
    """No guard on Python state prevents a replay, and no change of Python state refuses a recording."""
    resolve = Executable.resolve_anew

    def without_facts(self: Any, leaves: Any) -> Any:
        facts = self.facts
        self.facts = tuple(fact for fact in facts if isinstance(fact, _KEPT))
        try:
            return resolve(self, leaves)
        finally:
            self.facts = facts

    exit_now = ExitState.now

    def exit_unchanged(*args: Any, **kwargs: Any) -> ExitState:
        """What a recording leaves, without a look at what it has changed. Audits look."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(EntryState, "changed", lambda self, modes=True, explained=(): None)
            return exit_now(*args, **kwargs)

    recording = RecordedRun.recording

    def with_draws(self: Any) -> Any:
        """A recording, whatever has moved a generator."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MovingState, "unexplained", None)
            return recording(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Executable, "resolve_anew", without_facts)
        patch.setattr(RecordedRun, "recording", with_draws)
        patch.setattr(ExitState, "now", staticmethod(exit_unchanged))
        patch.setattr(SurroundingsGuard, "refusal", None)
        yield
