"""A step whose programs for new sizes are predicted: which first calls are replayed, which are compared.

    step._is_skipped(call)       whether a call without a program runs eagerly; else its program may be predicted now
    step._run_first(...)         a first call that runs for real, and is compared
    step._optimise(...)          the passes of a class, which run once for all its sizes

Programs of calls that differ in sizes are replayed without their passes until these would take a small share of the
time of all replays (`is_bare`). A program that then needs more memory than eager waits: its calls run eagerly, and the
passes run as soon as they can for all sizes. Those of a class without a template run for each size.
Invariant: a predicted program is replayed only if its first call was as predicted, or `lengths/proofs.py` says why it
would be. The passes change which bytes and how much time a replay takes, never what is compared.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch

from functionalize._compat.dispatch import disable_current_modes
from functionalize.audit.audited_call import AuditedCall
from functionalize.audit.verdict import AuditVerdict
from functionalize.ir.inputs import Call
from functionalize.lengths.first_call import FirstCall
from functionalize.lengths.length_class import LengthClass, Prediction
from functionalize.lengths.proofs import EQUAL, NEAR
from functionalize.lengths.references import Reference
from functionalize.lengths.shared_passes import needs_no_copies
from functionalize.program.program import Program
from functionalize.step.cache import (
    CALLS_BEFORE_FIRST_PASSES,
    CALLS_BEFORE_PASSES,
    LARGE,
    CachedProgram,
)
from functionalize.step.policy import COMPARISON, RECORDING
from functionalize.step.recording import RecordingSummary
from functionalize.step.replayed_step import ReplayedStep
from functionalize.step.stages import Invocation
from functionalize.step.vote import RARE, Fingerprints, collectives
from functionalize.templates.call_keys import open_key, shapes_of
from functionalize.templates.symbols import Shapes

log = logging.getLogger("functionalize")
# A first call that is compared takes as long as some five eager ones, which some ten replays return: as many as these,
# then one for so many replays, and at each size that has come as many times.
_FIRST_COMPARISONS, _REPLAYS = 8, 16
# A comparison takes as long as some eight replays return: one at a length that equals a width, of use for this length
# alone, is made when the length has come as often.
_EQUAL_CALLS = 8
# The passes of a class run twice, each time as long as some 20 eager steps (`cache.py`), and return little time: after
# as many replays that is less than a sixth of the run. Eager calls in between need the memory of these programs.
REPLAYS_BEFORE_PASSES = 256
_REPLAYS_ALONE = 64  # of one size at which the passes of its class do not hold, with the same sum


class PredictedStep(ReplayedStep):
    """A step with programs, recorded and predicted."""

    def _is_skipped(self, call: Invocation) -> bool:
        """Whether to run a call without a program eagerly, as its recording waits or its kind is rare."""
        unkept = self._warmups.get(call.key)
        if unkept is not None and unkept.waits:
            unkept.waits -= 1
            self.stats.waiting += 1
            return True
        is_rare = self._is_unpredicted(call)
        self.stats.rare += is_rare
        return is_rare or (not self._cache.has(call.key) and not self._may_record(call.key))

    def _is_unpredicted(self, call: Invocation) -> bool:
        """Whether the kind of a call without a program is rare; else its program may be predicted."""
        lengths = self._lengths
        if lengths is None or not self._predicts or call.key in self._warmups:
            return self._is_rare(call)
        if self._vote is not None and self._cache.has(call.key):
            return self._is_rare(call)
        classes = lengths.candidates(call.key, call.leaves)
        if not lengths.can_predict(classes):
            return self._is_rare(call)
        if call.key in self._unpredicted:
            return False
        shapes, proof, may_be_known = shapes_of(call.key), classes[0].proof, False
        why: str | None = "all first calls are compared"
        if proof is not None and not proof.is_hopeless:
            why, may_be_known = lengths.why_compared(call.key, classes), True
            if why is not None and self._learns_of_others(classes[0], call, why):
                why = lengths.why_compared(call.key, classes)
        if why is not None:
            if not may_be_known:
                is_rare = self._is_rare(call)
            elif why == NEAR and proof is not None and self._may_compare():
                sizes = classes[0].sizes_of(shapes)
                is_rare = isinstance(sizes, str) or not proof.has_come_near(sizes)
            else:
                seldom = _EQUAL_CALLS if why == EQUAL else 1
                enough = seldom if self._may_compare() else _REPLAYS
                is_rare = not self._policy.kinds.returns(call.key, enough)
            if is_rare:
                return True
        if why is not None and not self._policy.ledger.can_pay(COMPARISON):
            return True
        proven = classes[:1] if why is None else classes
        if self._must_issue_alike:
            proven = [each for each in proven if self._issued(each, shapes) is not None]
            if not proven:
                return not self._policy.kinds.returns(call.key, _REPLAYS)
        expected = (each.predicted(shapes, is_passed=why is None) for each in proven)
        found = next((each for each in expected if each is not None), None)
        if found is None:
            return self._is_rare(call)
        if not may_be_known:
            self._policy.kinds.recorded(call.key)
        self._take(replace(found, why=why), call)
        return False

    def _try_replay(self, call: Invocation) -> tuple[bool | None, Any]:
        had_programs = self._cache.has(call.key)
        is_done, result = super()._try_replay(call)
        if is_done is not False or not had_programs or not self._is_of_another_class(call):
            return is_done, result
        if self._is_unpredicted(call):
            self.stats.rare += 1
            self._is_left_eager = True
            return False, RARE
        return super()._try_replay(call)

    def _is_of_another_class(self, call: Invocation) -> bool:
        """Whether a class predicts a call, and the programs with its key are of others: Python read other numbers."""
        if self._lengths is None or self._vote is not None:
            return False
        classes = self._lengths.candidates(call.key, call.leaves)
        groups = [cached.group for cached in self._cache.at(call.key)]
        return self._lengths.can_predict(classes) and classes[0] not in groups

    def _take(self, found: Prediction, call: Invocation) -> None:
        """The call is replayed by a predicted program, or compared with it."""
        rewrites = self._options.rewrites
        is_bare = rewrites and found.group.is_lean
        if self._must_issue_alike:
            cached = found.cached(0, False)
            cached.fingerprints = found.group.issued or {}
        else:
            cached = found.cached(CALLS_BEFORE_PASSES if rewrites and not is_bare else 0, is_bare)
        if found.why is None:
            cached.prediction, cached.is_unseen = None, True
            self.stats.instances += 1
        self._cache.add(call.key, cached)

    def _learns_of_others(self, group: LengthClass, call: Invocation, why: str) -> bool:
        """Whether other ranks have compared sizes that this one has not, where that is of use for these."""
        sizes, proof = group.sizes_of(shapes_of(call.key)), group.proof
        if proof is None or isinstance(sizes, str) or why == EQUAL:
            return False
        is_shared = why == proof.due or proof.knows_python(sizes, why)
        return is_shared and group.sharing.teach(proof)

    def _may_compare(self) -> bool:
        """Whether the time of another comparison has been saved by replays."""
        compared = self.stats.predictions + self.stats.mispredictions
        return compared < _FIRST_COMPARISONS + self.stats.replays // _REPLAYS

    # -- recordings ----------------------------------------------------------------------------

    def _begin_recording(self, call: Invocation) -> None:
        self._policy.ledger.pay(RECORDING)
        self._policy.kinds.recorded(call.key, self._wants_sizes(call))
        if self._lengths is not None:
            self._lengths.recorded.note(call.key)

    def _previous(self, key: Hashable) -> RecordingSummary | None:
        """The summary with which a recording is compared: one of its kind, of any sizes until the step has settled."""
        unkept = self._warmups.get(key)
        if unkept is None and not self._has_settled and self._compares_sizes(key):
            unkept = next(reversed(self._warmups.values()), None)
        return unkept.summary if unkept is not None else self._last_summary

    def _reference_of(
        self, call: Invocation, names: Sequence[str], recorded: Program, cached: CachedProgram
    ) -> Reference | None:
        """What programs for other sizes are made from. names: of the arguments. recorded: before the passes."""
        if not self._compares_sizes(call.key):
            return None
        key = self._key_with_sizes(call.key, recorded)
        return Reference.of(key, names, call.leaves, recorded, cached)

    def _learn(self, key: Hashable, reference: Reference, call: Invocation) -> LengthClass | None:
        """The class of a recorded call that is kept. key: of its program."""
        lengths = self._lengths
        assert lengths is not None
        if not lengths.candidates(
            key, call.leaves
        ):  # earlier recordings of one size only were not made ready for it
            for other, cached in list(self._cache.items()):
                if (earlier := reference.like(other, cached)) is not None:
                    cached.group = lengths.learn(other, earlier)
        return lengths.learn(key, reference)

    @property
    def _sizes_text(self) -> str:
        """Whether programs for other sizes are predicted, and why they are not."""
        why = self._options.why_static
        if self._lengths is None:
            why = why or "autograd has asked for other gradients"
        elif not self._predicts:
            why = "the ranks vote on each call of a forward"
        else:
            return f"programs for other sizes are predicted {self._lengths.recorded.text}"
        return f"programs for other sizes are not predicted: {why}"

    def _end_warm_ups(self, key: Hashable) -> None:
        """A recording is kept: those before it that were not were the step's first ones, whatever their sizes."""
        if not self._has_settled and self._compares_sizes(key):
            kind = open_key(key)
            self._warmups = {k: v for k, v in self._warmups.items() if open_key(k) != kind}
        self._warmups.pop(key, None)

    # -- passes --------------------------------------------------------------------------------

    def _before_passes(self, recorded: Program, call: Invocation) -> tuple[int, bool]:
        if not self._may_share(call):
            return super()._before_passes(recorded, call)
        must_pass = self._options.compares and bool(collectives(recorded))
        is_bare = needs_no_copies(recorded) and not must_pass
        return 0 if is_bare else CALLS_BEFORE_PASSES, is_bare

    def _may_share(self, call: Invocation) -> bool:
        """Whether the passes of a recorded program may run for all sizes of its class."""
        options = self._options
        if not options.rewrites or not self._passes_may_follow:
            return False
        return self._wants_sizes(call)

    @property
    def _passes_may_follow(self) -> bool:
        """Whether a program may be replayed before its passes run."""
        return self._policy.kinds.defers

    def _replay(self, cached: CachedProgram, call: Call) -> Any:
        result = super()._replay(cached, call)
        self._pass_if_worth(cached)
        return result

    def _pass_if_worth(self, cached: CachedProgram) -> None:
        if cached.is_bare and self._is_worth_passes(cached):
            self._optimise(self._cache.key_of(cached), cached)

    def _is_worth_passes(self, cached: CachedProgram) -> bool:
        group = cached.group
        if group is None or group.template is None or group.apart is not None:
            is_large = cached.program.nodes() >= LARGE
            enough = CALLS_BEFORE_FIRST_PASSES if is_large else CALLS_BEFORE_PASSES
            return cached.replays >= enough
        group.replays += 1
        is_often = cached.replays >= _REPLAYS_ALONE
        is_due = bool(group.passed) or group.replays >= REPLAYS_BEFORE_PASSES
        if not (is_often or is_due):
            return False
        sizes = group.sizes_of(shapes_of(self._cache.key_of(cached)))
        return is_due if group.shares_passes(sizes) else is_often

    def _waits(self, cached: CachedProgram) -> bool:
        group = cached.group
        if cached.waits and group is not None and group.template is not None and not group.is_early:
            if self._share_passes(self._cache.key_of(cached), cached):
                return False
            cached.waits = 1  # this call is the last one
        return super()._waits(cached)

    def _optimise(self, key: Hashable, cached: CachedProgram) -> None:
        if not self._share_passes(key, cached):
            cached.is_bare = False
            super()._optimise(key, cached)

    def _share_passes(self, key: Hashable, cached: CachedProgram) -> bool:
        """Give a program the passes of its class; whether these run for all sizes."""
        group = cached.group
        if group is None or group.template is None or group.is_early:
            return False
        self._run_passes(group)
        sizes = group.sizes_of(shapes_of(key))
        programs = None if isinstance(sizes, str) else group.passed_at(sizes)
        if programs is None:
            return False
        cached.takes(programs)
        cached.waits, cached.is_bare = 0, False
        cached.fingerprints = group.issued or {}
        self.stats.nodes = sum(each.nodes() for each in programs)
        return True

    def _run_passes(self, group: LengthClass) -> None:
        """Run the passes for all sizes of a class, once."""
        group.apart = group.apart or self._options.why_apart
        issued: list[Fingerprints] = []
        if self._must_issue_alike and group.issued is None:
            group.passed = []  # of a file

        def apply(program: Program) -> Program:
            passed = self._options.applied(program)
            issued.append(self._options.issued(passed))
            return passed

        try:
            with torch.no_grad(), disable_current_modes():
                group.run_passes(apply)
        except Exception as error:  # they run for each size, where an error is reported
            group.apart = f"the passes fail: {type(error).__name__}: {error}"
            log.info("the passes of %s do not run for all sizes: %s", self._name, error)
        if issued:
            group.issued = issued[0]
            if issued[0] != issued[-1]:
                group.apart = "what collectives send depends on sizes"

    @property
    def _must_issue_alike(self) -> bool:
        """Whether ranks compare the collectives of their programs before each replay."""
        return self._vote is not None and self._options.compares

    def _issued(self, group: LengthClass, shapes: Shapes) -> Fingerprints | None:
        """The fingerprints of the program for these shapes after the passes of its class; None: it has none."""
        if not group.shares_passes(group.sizes_of(shapes)):
            return None
        self._run_passes(group)
        return group.issued if group.apart is None else None

    # -- first calls ---------------------------------------------------------------------------

    def _run_first(self, audited: AuditedCall, cached: CachedProgram, call: Invocation) -> Any:
        """The first call of a predicted program: it runs for real; if it is another one, the program is dropped."""
        signature, prediction = cached.signature, cached.prediction
        assert signature is not None and prediction is not None
        sizes, proof = prediction.sizes, prediction.group.proof
        is_known = proof is not None and proof.knows_python(sizes, prediction.why)
        self._cache.drop(cached)
        self.stats.audits += 1
        self._policy.ledger.pay(COMPARISON)
        try:
            before = None if is_known else self._state_before(call, signature)
        except Exception as error:  # recordings refuse such objects by name
            result = self._fn(*call.args, **call.kwargs)
            assert cached.prediction is not None
            why = f"its state cannot be read: {error}"
            self._mispredicted(cached.prediction, call.key, why)
        else:
            audited.also = FirstCall(before, cached, signature).difference
            audited.watches = proof is None or proof.wants_watch(sizes)
            audited.observer = prediction.observer()
            result = audited.run(self._fn, call.args, call.kwargs, call.spec)
            self._judge_first(audited, cached, call)
        if not self._is_left_eager:  # the other ranks vote after this audit
            self._agree_on_audit(None, cached)
        return result

    def _judge_first(self, audited: AuditedCall, cached: CachedProgram, call: Invocation) -> None:
        prediction, verdict = cached.prediction, audited.verdict
        assert prediction is not None
        if verdict == AuditVerdict():
            is_due = prediction.is_due  # what is found moves the next one
            observer: Any = audited.observer
            if not prediction.found_right(observer, audited.watches):
                return
            self.stats.predictions += 1
            prediction.group.sharing.publish(prediction.sizes, is_due)
            cached.prediction, cached.audits = None, 1
            # Made again at the next audit: it is as large as the program.
            cached.op_stream = prediction.op_stream
            self._cache.add(call.key, cached)
            if prediction.group.passed:
                self._share_passes(call.key, cached)
        elif verdict is None or verdict.missed is None:
            why = "the comparison failed" if verdict is None else str(verdict.difference)
            self._mispredicted(prediction, call.key, why)

    def _mispredicted(self, prediction: Prediction, key: Hashable, why: str) -> None:
        self.stats.mispredictions += not prediction.group.is_early
        prediction.found_wrong(why)
        proof = prediction.group.proof
        if proof is not None and proof.lost is not None:
            prediction.group.sharing.publish(None)
        self._unpredicted.add(key)
        text = f"a call of {self._name} is not as predicted from calls of other sizes: {why}"
        log.info("%s", text)
        self.stats.missed(text)

    def _failed_unseen(self, cached: CachedProgram, call: Invocation, error: Exception) -> None:
        """The first replay of a program that was not compared has failed, with nothing changed."""
        assert cached.group is not None
        self._cache.drop(cached)
        shapes, why = shapes_of(call.key), f"{type(error).__name__}: {error}"
        cached.group.failed(why, shapes, was_known=True)
        self._unpredicted.add(call.key)
        self.stats.instances -= 1
        self.stats.mispredictions += 1
        self.stats.missed(
            f"a replay of {self._name} at a size that was not compared fails: {error}"
        )
