"""Programs for sizes that were not recorded: which first calls are replayed, which are compared.

    predictions.stays_eager(call)      whether a call without a program runs eagerly; else its program may be made now
    predictions.compare(...)           a first call that runs for real, and is compared
    predictions.learn(key, ...)        the class of a recorded call, from which programs are predicted

A step has none with `dynamic=False`, `memory=True` or `compile=`.
Invariant: a predicted program is replayed only if its first call was as predicted, or `lengths/coverage.py` says why it
would be.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

from functionalize.audit.audited_call import AuditedCall
from functionalize.audit.verdict import AuditVerdict
from functionalize.lengths.coverage import EQUAL, NEAR
from functionalize.lengths.first_call import FirstCall
from functionalize.lengths.length_class import LengthClass, Prediction
from functionalize.lengths.length_classes import LengthClasses
from functionalize.lengths.recorded_calls import RecordedCall
from functionalize.program.program import Program
from functionalize.step.audits import Audits
from functionalize.step.cache import CachedProgram
from functionalize.step.core import StepCore
from functionalize.step.pass_schedule import PassSchedule
from functionalize.step.policy import COMPARISON
from functionalize.step.stages import MAX_WARMUPS, Invocation
from functionalize.templates.call_keys import shapes_of
from functionalize.util.switches import SIZES

# A first call that is compared takes as long as some five eager ones, which some ten replays return: as many as these,
# then one for so many replays, and at each size that has come as many times.
_FIRST_COMPARISONS, _REPLAYS = 8, 16
# A comparison takes as long as some eight replays return: one at a length that equals a width, of use for this length
# alone, is made when the length has come as often.
_EQUAL_CALLS = 8


class Predictions:
    """What one step predicts. lengths: the classes of its calls that differ in sizes only."""

    def __init__(
        self, core: StepCore, passes: PassSchedule, audits: Audits, lengths: LengthClasses
    ) -> None:
        self._core, self._passes, self._audits, self.lengths = core, passes, audits, lengths
        self._wrong: set[Hashable] = set()  # keys of calls that were not as predicted

    def forget(self, lengths: LengthClasses | None) -> None:
        """Begin again with other classes."""
        assert lengths is not None
        self.lengths = lengths

    @property
    def is_on(self) -> bool:
        """Whether programs may be predicted; not where ranks vote on a forward apart from its backward."""
        return self._core.vote is None or not self._core.hooks_run_outside

    def compares(self, key: Hashable) -> bool:
        """Whether programs for other sizes may be made from recordings of this kind of call."""
        return self.is_on and self.lengths.recorded.are_compared(key)

    def wants(self, call: Invocation) -> bool:
        """Whether they may be made once this call is recorded, too."""
        return self.is_on and self.lengths.wants(call.key, call.leaves)

    @property
    def text(self) -> str:
        """For `explain`: whether programs for other sizes are predicted."""
        if not self.is_on:
            return "programs for other sizes are not predicted: the ranks vote on each call of a forward"
        return f"programs for other sizes are predicted {self.lengths.recorded.text}"

    # -- calls without a program -----------------------------------------------------------------

    def is_rare(self, call: Invocation) -> bool:
        """Whether calls of this kind, which was never recorded, came too seldom to be recorded; counts one."""
        core = self._core
        has_begun = core.has_settled or 0 < core.stats.warmups < MAX_WARMUPS
        return not (has_begun and self.wants(call)) and core.is_rare(call.key)

    def stays_eager(self, call: Invocation) -> bool:
        """Whether a call without a program runs eagerly, as its kind is rare; else its program may be predicted."""
        core, lengths = self._core, self.lengths
        if not self.is_on or call.key in core.unkept:
            return self.is_rare(call)
        if core.vote is not None and core.cache.has(call.key):
            return self.is_rare(call)
        classes = lengths.candidates(call.key, call.leaves)
        if not lengths.can_predict(classes):
            return self.is_rare(call)
        if call.key in self._wrong:
            return False
        shapes, coverage, may_be_known = shapes_of(call.key), classes[0].coverage, False
        why: str | None = "all first calls are compared"
        if coverage is not None and not coverage.is_hopeless:
            why, may_be_known = lengths.why_compared(call.key, classes), True
            if why is not None and self._learns_of_others(classes[0], call, why):
                why = lengths.why_compared(call.key, classes)
        if why is not None:
            if not may_be_known:
                is_rare = self.is_rare(call)
            elif why == NEAR and coverage is not None and self._may_compare():
                sizes = classes[0].sizes_of(shapes)
                is_rare = isinstance(sizes, str) or not coverage.has_come_near(sizes)
            else:
                seldom = _EQUAL_CALLS if why == EQUAL else 1
                enough = seldom if self._may_compare() else _REPLAYS
                is_rare = not core.policy.kinds.returns(call.key, enough)
            if is_rare:
                return True
        if why is not None and not core.policy.ledger.can_pay(COMPARISON):
            return True
        proven = classes[:1] if why is None else classes
        if core.must_issue_alike:
            proven = [each for each in proven if self._passes.issued(each, shapes) is not None]
            if not proven:
                return not core.policy.kinds.returns(call.key, _REPLAYS)
        expected = (each.predicted(shapes, is_passed=why is None) for each in proven)
        found = next((each for each in expected if each is not None), None)
        if found is None:
            return self.is_rare(call)
        if not may_be_known:
            core.policy.kinds.recorded(call.key)
        self.take(replace(found, why=why), call)
        return False

    def is_of_another_class(self, call: Invocation) -> bool:
        """Whether a class predicts a call, and the programs with its key are of others: Python read other numbers."""
        if self._core.vote is not None:
            return False
        classes = self.lengths.candidates(call.key, call.leaves)
        groups = [cached.group for cached in self._core.cache.at(call.key)]
        return self.lengths.can_predict(classes) and classes[0] not in groups

    def take(self, found: Prediction, call: Invocation) -> None:
        """The call is replayed by a predicted program, or compared with it."""
        core = self._core
        if core.must_issue_alike:
            cached = found.cached(False, False)
            cached.fingerprints = found.group.issued or {}
        else:
            cached = found.cached(core.options.rewrites, found.group.is_lean)
        if found.why is None:
            cached.prediction, cached.is_unseen = None, True
            core.stats.instances += 1
        core.cache.add(call.key, cached)

    def _learns_of_others(self, group: LengthClass, call: Invocation, why: str) -> bool:
        """Whether other ranks have compared sizes that this one has not, where that is of use for these."""
        sizes, coverage = group.sizes_of(shapes_of(call.key)), group.coverage
        if coverage is None or isinstance(sizes, str) or why == EQUAL:
            return False
        is_shared = why == coverage.due or coverage.knows_python(sizes, why)
        return is_shared and group.sharing.teach(coverage)

    def _may_compare(self) -> bool:
        """Whether the time of another comparison has been saved by replays."""
        stats = self._core.stats
        compared = stats.predictions + stats.mispredictions
        return compared < _FIRST_COMPARISONS + stats.replays // _REPLAYS

    # -- recordings ------------------------------------------------------------------------------

    def reference(
        self, call: Invocation, names: Sequence[str], recorded: Program, cached: CachedProgram
    ) -> RecordedCall | None:
        """What programs for other sizes are made from. names: of the arguments. recorded: before the passes."""
        if not self.compares(call.key):
            return None
        key = self._core.key_with_sizes(call.key, recorded)
        return RecordedCall.of(key, names, call.leaves, recorded, cached)

    def learn(self, key: Hashable, reference: RecordedCall, call: Invocation) -> LengthClass | None:
        """The class of a recorded call that is kept. key: of its program."""
        lengths = self.lengths
        if not lengths.candidates(
            key, call.leaves
        ):  # earlier recordings of one size only were not made ready for it
            for other, cached in list(self._core.cache.items()):
                if (earlier := reference.like(other, cached)) is not None:
                    cached.group = lengths.learn(other, earlier)
        return lengths.learn(key, reference)

    # -- first calls -----------------------------------------------------------------------------

    def compare(
        self, audited: AuditedCall, cached: CachedProgram, call: Invocation, is_alone: bool
    ) -> Any:
        """The first call of a predicted program: it runs for real; if it is another one, the program is dropped.

        is_alone: whether the other ranks run eagerly, and do not vote after it.
        """
        core, signature, prediction = self._core, cached.signature, cached.prediction
        assert signature is not None and prediction is not None
        sizes, coverage = prediction.sizes, prediction.group.coverage
        is_known = coverage is not None and coverage.knows_python(sizes, prediction.why)
        core.cache.drop(cached)
        core.stats.audits += 1
        core.policy.ledger.pay(COMPARISON)
        try:
            before = None if is_known else core.state_before(call, signature)
        except Exception as error:  # recordings refuse such objects by name
            result = core.fn(*call.args, **call.kwargs)
            self.mispredicted(prediction, call.key, f"its state cannot be read: {error}")
        else:
            audited.also = FirstCall(before, cached, signature).difference
            audited.watches = coverage is None or coverage.wants_watch(sizes)
            audited.observer = prediction.observer()
            result = audited.run(core.fn, call.args, call.kwargs, call.spec)
            self._judge(audited, cached, call)
        if not is_alone:
            self._audits.agree(None, cached)
        return result

    def _judge(self, audited: AuditedCall, cached: CachedProgram, call: Invocation) -> None:
        prediction, verdict = cached.prediction, audited.verdict
        assert prediction is not None
        if verdict == AuditVerdict():
            is_due = prediction.is_due  # what is found moves the next one
            observer: Any = audited.observer
            if not prediction.found_right(observer, audited.watches):
                return
            self._core.stats.predictions += 1
            prediction.group.sharing.publish(prediction.sizes, is_due)
            cached.prediction, cached.audits = None, 1
            # Made again at the next audit: it is as large as the program.
            cached.op_stream = prediction.op_stream
            self._core.cache.add(call.key, cached)
            if prediction.group.passed:
                self._passes.share(call.key, cached)
        elif verdict is None or verdict.missed is None:
            why = "the comparison failed" if verdict is None else str(verdict.difference)
            self.mispredicted(prediction, call.key, why)

    def mispredicted(self, prediction: Prediction, key: Hashable, why: str) -> None:
        """A first call was another one than predicted: such calls are recorded."""
        stats = self._core.stats
        stats.mispredictions += not prediction.group.is_early
        prediction.found_wrong(why)
        coverage = prediction.group.coverage
        if coverage is not None and coverage.lost is not None:
            prediction.group.sharing.publish(None)
        self._wrong.add(key)
        text = f"a call of {self._core.name} is not as predicted from calls of other sizes: {why}"
        SIZES.info("%s", text)
        stats.missed(text)

    def failed_unseen(self, cached: CachedProgram, call: Invocation, error: Exception) -> None:
        """The first replay of a program that was not compared has failed, with nothing changed."""
        assert cached.group is not None
        core = self._core
        core.cache.drop(cached)
        shapes, why = shapes_of(call.key), f"{type(error).__name__}: {error}"
        cached.group.failed(why, shapes, was_known=True)
        self._wrong.add(call.key)
        core.stats.instances -= 1
        core.stats.mispredictions += 1
        core.stats.missed(f"a replay of {core.name} at a size that was not compared fails: {error}")
