"""A captured forward whose programs for other sizes are predicted, each with that of its backward.

    predictions.take(prediction, call)       replay the call, or compare it
    predictions.compared(call)               the call, with what it is compared with
    predictions.learn(key, reference, call)  the class of a recorded call; here a compared one is judged

A first call that is compared is recorded as any call without a program is, and the two programs that are made of it are
compared with the predicted ones, integer by integer. So ranks take part in it as in a recording.
A forward has programs of their own for the state in which it begins: the backward of a later microbatch adds to
gradients, evaluation goes another way than training. Programs for other sizes are made from recordings that began in
the same state (`EntryStates`).
Invariant: a predicted forward is followed by the backward that was recorded. Once autograd has asked for another one,
no more programs are predicted: ranks run their forwards again together, and one with a predicted program would do so
alone.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

from functionalize.audit.signature import Signature
from functionalize.fsdp.python_state import FSDPStateGuard
from functionalize.ir.guards import Guard
from functionalize.ir.inputs import Call
from functionalize.lengths.length_class import LengthClass, Prediction
from functionalize.lengths.recorded_calls import RecordedCall, difference
from functionalize.state.mode_guard import ModeGuard
from functionalize.state.step_guards import ModuleGuard, SlotGuard
from functionalize.step.predictions import Predictions
from functionalize.step.stages import Invocation
from functionalize.step_backward.joint_recording import Pair
from functionalize.step_backward.pair import ForwardProgram
from functionalize.templates.call_keys import has_made_sizes

log = logging.getLogger("functionalize")
_NOTHING = None, None
_MOVED = (SlotGuard, FSDPStateGuard, ModeGuard, ModuleGuard)  # what a training loop moves
_MOST = 8  # states that have a number each


class EntryStates:
    """The states in which calls begin, as numbers: by the guards that hold in each.

    A number is only where a program is looked for, which has guards on the state.
    """

    def __init__(self) -> None:
        self._known: list[Sequence[Guard]] = []
        self._last = 0

    def of(self, leaves: Sequence[Any]) -> int:
        """The number of the state now; of one that is not known, the next number."""
        call, known = Call(leaves, []), self._known
        for number in dict.fromkeys((self._last, *range(len(known)))):
            if number < len(known) and _hold(known[number], call):
                self._last = number
                return number
        return len(known)

    def learn(self, number: int, facts: Sequence[Guard]) -> None:
        """Take note of the state in which a recorded call began. number: what `of` gave."""
        if number == len(self._known) < _MOST:
            self._known.append([each for each in facts if isinstance(each, _MOVED)])


def _hold(guards: Sequence[Guard], call: Call) -> bool:
    try:
        return all(guard.failure(call) is None for guard in guards)
    except (LookupError, AttributeError):  # what they compare is not there any more
        return False


class ForwardPredictions(Predictions):
    """What a captured forward predicts: programs in pairs, compared as recordings."""

    def __init__(self, states: EntryStates, *parts: Any) -> None:
        super().__init__(*parts)
        self._states = states
        self._expected: tuple[Hashable, Prediction | None] = _NOTHING

    def take(self, found: Prediction, call: Invocation) -> None:
        if found.why is None:
            super().take(found, call)
        else:
            self._expected = call.key, found

    def compared(self, call: Invocation) -> Invocation:
        """A call that is to be recorded, with what it is compared with."""
        (key, expected), self._expected = self._expected, _NOTHING
        if expected is None or key is not call.key:
            return call
        return replace(call, expected=expected, observer=expected.observer())

    def reference_of_pair(
        self,
        call: Invocation,
        names: Sequence[str],
        pair: Pair,
        cached: ForwardProgram,
        whole: Signature,
    ) -> RecordedCall | None:
        """What programs for other sizes are made from. names: of the arguments. whole: the op stream of both."""
        if not self.compares(call.key):
            return None
        key, backward = self._core.key_with_sizes(call.key, pair.forward), (pair.backward, whole)
        return RecordedCall.of(key, names, call.leaves, pair.forward, cached, backward)

    def learn(self, key: Hashable, reference: RecordedCall, call: Invocation) -> LengthClass | None:
        """The class of a recorded call that is kept; one that was to be compared is judged."""
        self._states.learn(
            reference.key[-1 - has_made_sizes(reference.key)], reference.program.facts
        )
        expected, stats = call.expected, self._core.stats
        if expected is None:
            return super().learn(key, reference, call)
        stats.audits += 1
        why = difference(reference, expected.programs, expected.rest)
        if why is not None:
            self.mispredicted(expected, call.key, why)
            return super().learn(key, reference, call)
        observer: Any = call.observer
        expected.found_right(observer, was_watched=True)
        expected.group.references[:] = [reference]  # with guards on the state as it is now
        reference.cached.found = 1  # it has been of use
        stats.predictions += 1
        stats.captures -= 1  # what is counted next is a comparison
        return expected.group
