"""The first call of a predicted program runs for real: what must be as predicted beside the ops and the results.

    audited.also = FirstCall(entry, expected).difference      entry: the state before the step ran
    audited.run(...)                                          compares the op stream with that of the prediction

An audit of a recorded program compares ops, results and gradients: the program was recorded at these very sizes, so
its guards are those of this path through the code. Of a predicted program this is not known, so compared are, too:
numbers that the code learned, calls that a replay makes again, FSDP2's state, and what every audit compares. Where
Python is known to take a compared path (`coverage.py`), as for a program that is replayed at once, its state is not
read: that takes a third of the time of a comparison.
Invariant: it reads, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from functionalize.audit.left_state import GuardedBefore, LeftState
from functionalize.audit.signature import Signature
from functionalize.fsdp.python_state import FSDPEffects, FSDPState
from functionalize.ir.scalars import expression_text
from functionalize.program.program import Program
from functionalize.recorder.recorder import Recorder
from functionalize.templates.leaves import identity
from functionalize.walk.roots import Roots


class StateBefore(GuardedBefore, Protocol):
    """The state when the step began: `EntryState`."""

    fsdp: FSDPState

    @property
    def roots(self) -> Roots: ...


class Expected(Protocol):
    """What a replay would do: `CachedProgram`."""

    program: Program
    effects: FSDPEffects
    python_effects: Sequence[Any]


@dataclass(frozen=True, slots=True)
class FirstCall:
    """One first call. before: the state when it began; None: Python's path is known. expected: the program."""

    before: StateBefore | None
    expected: Expected
    signature: Signature

    def difference(
        self, recorder: Recorder, effects: Sequence[Any], explained: Container[int]
    ) -> str | None:
        """The first thing that is not as predicted, as text.

        effects: of the step in Python. explained: ids of the generators from which it draws, too.
        """
        learned = sorted(_learned(recorder))
        expected = sorted(_fact(f.expression, f.value) for f in self.signature.facts)
        if learned != expected:
            other = next((f for f in learned if f not in expected), "fewer")
            return f"the step relies on other numbers than recorded calls did: {other}"
        if identity(tuple(effects)) != identity(tuple(self.expected.python_effects)):
            return "the step makes other calls that a replay would repeat than recorded calls did"
        if recorder.checks.once or self._has_other_facts(recorder.calls.facts):
            return "the step makes calls on which other guards stand than in recorded calls"
        if self.before is None:
            return None
        left = LeftState(self.before, self.expected.effects)
        return left.difference(recorder, effects, explained) or self._fsdp(self.before)

    def _has_other_facts(self, facts: Sequence[Any]) -> bool:
        if not facts:
            return False
        known = {identity(fact) for fact in self.expected.program.facts}
        return any(identity(fact) not in known for fact in facts)

    def _fsdp(self, before: StateBefore) -> str | None:
        after = FSDPState.now(list(before.roots.modules.values()))
        effects = FSDPEffects.between(before.fsdp, after)
        if isinstance(effects, str):
            return effects
        effects = effects.with_modes(before.modules.changed_modes())
        if identity(effects) != identity(self.expected.effects):
            return "the step leaves FSDP2, or modes of modules, in another state than recorded calls did"
        return None


def _learned(recorder: Recorder) -> list[str]:
    found = [_fact(None, scalar.value) for scalar in recorder.scalars]
    log = recorder.scalar_log
    return found + [_fact(f.expression, f.value) for f in (log.facts.values() if log else ())]


def _fact(expression: Any, value: Any) -> str:
    return f"`{'item' if expression is None else expression_text(expression)}` is {value!r}"
