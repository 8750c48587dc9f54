"""A step whose programs for new sizes are predicted: which first calls are replayed, which are compared.

    step._is_skipped(call)       whether a call without a program runs eagerly; else its program may be predicted now
    step._run_first(...)         a first call that runs for real, and is compared

Invariant: a predicted program is replayed only if its first call was as predicted, or `lengths/proofs.py` says why it
would be.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

from functionalize.audit.audited_call import AuditedCall
from functionalize.audit.verdict import AuditVerdict
from functionalize.lengths.first_call import FirstCall
from functionalize.lengths.length_classes import LengthClasses, shapes_of
from functionalize.lengths.observed_sizes import ObservedSizes
from functionalize.step.cache import CALLS_BEFORE_PASSES, CachedProgram
from functionalize.step.replayed_step import ReplayedStep
from functionalize.step.stages import Invocation
from functionalize.step.vote import Level
from functionalize.util.gc_pause import only_young_collections

log = logging.getLogger("functionalize")
# A first call that is compared takes as long as some five eager ones: as many as these, then one for so many replays.
_FIRST_COMPARISONS, _REPLAYS = 8, 4


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
        return is_rare

    def _is_unpredicted(self, call: Invocation) -> bool:
        """Whether the kind of a call without a program is rare; else its program may be predicted."""
        lengths = self._lengths
        if lengths is None or call.key in self._warmups or not lengths.can_predict(call.key):
            return self._is_rare(call)
        if call.key in self._unpredicted:
            return False
        why, may_be_known = self._why_compared(lengths, call.key)
        if why is not None:
            is_rare = not self._may_compare() if may_be_known else self._is_rare(call)
            if is_rare:
                return True
        found = lengths.unseen(call.key) if why is None else lengths.predicted(call.key)
        if found is None:
            return self._is_rare(call)
        found = replace(found, why=why)
        if not may_be_known:
            self._kinds.recorded(call.key)
        cached = found.cached(CALLS_BEFORE_PASSES if self._options.rewrites else 0)
        if why is None:
            cached.prediction, cached.is_unseen = None, True
            self.stats.instances += 1
        self._cache.add(call.key, cached)
        return False

    def _why_compared(self, lengths: LengthClasses, key: Hashable) -> tuple[str | None, bool]:
        """Why the first call of a kind is compared, None: it is replayed; whether its like may ever be replayed."""
        group = lengths.nearest(key)
        if self._options.has_budget or group.proof is None or group.proof.is_hopeless:
            return "all first calls are compared", False
        return lengths.why_compared(key), True

    def _may_compare(self) -> bool:
        """Whether the time of another comparison has been saved by replays."""
        return self.stats.audits < _FIRST_COMPARISONS + self.stats.replays // _REPLAYS

    def _run_first(self, audited: AuditedCall, cached: CachedProgram, call: Invocation) -> Any:
        """The first call of a predicted program: it runs for real; if it is another one, the program is dropped."""
        signature = cached.signature
        assert signature is not None
        self._cache.drop(cached)
        self.stats.audits += 1
        try:
            before = self._state_before(call, signature)
        except Exception as error:  # recordings refuse such objects by name
            result = self._fn(*call.args, **call.kwargs)
            self._mispredicted(cached, call, f"its state cannot be read: {error}")
        else:
            audited.also = FirstCall(before, cached, signature).difference
            assert cached.prediction is not None
            audited.observer = observer = cached.prediction.observer()
            with only_young_collections():
                result = audited.run(self._fn, call.args, call.kwargs, call.spec)
            self._judge_first(audited.verdict, cached, call, observer)
        if self._vote is not None:  # the other ranks vote after this audit
            self._vote.worst(Level.KEPT)
        return result

    def _judge_first(
        self,
        verdict: AuditVerdict | None,
        cached: CachedProgram,
        call: Invocation,
        observer: ObservedSizes | None,
    ) -> None:
        prediction = cached.prediction
        assert prediction is not None
        if verdict == AuditVerdict():
            prediction.found_right(observer)
            cached.prediction, cached.audits = None, 1
            self.stats.predictions += 1
            self._cache.add(call.key, cached)
        elif verdict is None or verdict.missed is None:
            why = "the comparison failed" if verdict is None else str(verdict.difference)
            self._mispredicted(cached, call, why)

    def _mispredicted(self, cached: CachedProgram, call: Invocation, why: str) -> None:
        assert cached.prediction is not None
        cached.prediction.found_wrong(why)
        self.stats.mispredictions += 1
        self._unpredicted.add(call.key)
        text = f"a call of {self._name} is not as predicted from calls of other sizes: {why}"
        log.info("%s", text)
        self.stats.missed(text)

    def _failed_unseen(self, cached: CachedProgram, call: Invocation, error: Exception) -> None:
        """The first replay of a program that was not compared has failed, with nothing changed."""
        assert self._lengths is not None
        self._cache.drop(cached)
        shapes, why = shapes_of(call.key), f"{type(error).__name__}: {error}"
        self._lengths.nearest(call.key).failed(why, shapes, was_known=True)
        self._unpredicted.add(call.key)
        self.stats.instances -= 1
        self.stats.mispredictions += 1
        self.stats.missed(
            f"a replay of {self._name} at a size that was not compared fails: {error}"
        )
