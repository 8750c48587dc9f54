"""An audited call of a captured forward: forward and backward run for real, and are compared with their programs.

    audit = AuditedForward(cached, expected)              expected: what the forward's program would have computed
    audit.after_forward(recorder, end)                    the verdict on the forward alone
    audit.before_backward(end, later, requested)          chooses the backward that would have been replayed
    audit.after_backward(run)                             the verdict on the ops of both

Compared are two recordings: that of the programs, of which `Signature`s are kept, and that of the audited call; in the
order and the words of `audit/comparison.py`, then what each has changed. Results of the forward are compared where its
graph can run beside it (`audit/results.py`); those of the backward follow from its ops.
A backward that no program covers is no difference: a replayed forward would have run again for it.
Invariant: it reads, and changes nothing; the recording is not kept.
"""

from __future__ import annotations

from functionalize.audit.comparison import Comparison
from functionalize.audit.left_state import difference_of_modes
from functionalize.audit.results import ExpectedResults
from functionalize.audit.signature import Signature
from functionalize.audit.verdict import AuditVerdict
from functionalize.fsdp.python_state import FSDPState, FSDPStateGuard, same_value
from functionalize.ir.guards import TensorGuard
from functionalize.ir.inputs import Argument, Call
from functionalize.recorder.recorder import Recorder
from functionalize.scalars.live_scalars import plain_tree
from functionalize.step.step_state import EntryState
from functionalize.step_backward.boundary import RequestedGradients
from functionalize.step_backward.joint_recording import ForwardEnd, JointRun, expected_state
from functionalize.step_backward.pair import BackwardProgram, ForwardProgram
from functionalize.templates.leaves import identity

_WRITTEN = "modified by an inplace operation"


class AuditedForward:
    """One audited call. cached: the programs. expected: the results of the forward; None: they are not compared."""

    def __init__(self, cached: ForwardProgram, expected: ExpectedResults | None) -> None:
        self.cached = cached
        self._expected = expected
        self._is_over = False
        self._backward: BackwardProgram | str = "no backward was called"

    def after_forward(self, recorder: Recorder, end: ForwardEnd) -> AuditVerdict:
        """The verdict on the forward, when it has run."""
        signature, cached = self.cached.signature, self.cached
        assert signature is not None
        verdict = compared(signature, end.signature(recorder), recorder)
        if verdict == AuditVerdict():
            difference = difference_of_modes(end.modes, cached.effects)
            if end.exit.changed is not None:
                difference = f"the step {end.exit.changed}"
            if difference is None and tuple(end.exit.has_grad_fn) != tuple(cached.has_grad_fn):
                difference = "other results require a gradient than in the program"
            if difference is not None:
                difference = f"after equal ops: {difference}"
            elif self._expected is not None:
                difference = self._expected.difference(plain_tree([*end.exit.leaves]))
            verdict = AuditVerdict(difference)
        self._is_over = verdict != AuditVerdict()
        self._expected = None
        return verdict

    def before_backward(
        self, end: ForwardEnd, later: EntryState, requested: RequestedGradients
    ) -> None:
        """Choose the backward whose guards hold. later: the state now."""
        self._backward = "autograd requests other gradients than in any recorded backward"
        expected, call = expected_state(end, later.fsdp), Call(later.leaves, [])
        for each in self.cached.backwards:
            if isinstance(self._backward, str) and each.requested == requested:
                found = _missed(each, call, len(end.entry.leaves), expected)
                self._backward = each if found is None else found

    def after_backward(self, run: JointRun) -> AuditVerdict:
        """The verdict on forward and backward, when both have run."""
        backward = self._backward
        if self._is_over:
            return AuditVerdict()  # which was said after the forward
        if isinstance(backward, str):
            return AuditVerdict(missed=backward)
        recording = run.recording()
        assert backward.signature is not None
        verdict = compared(backward.signature, recording.whole_signature(), run.recorder)
        if verdict != AuditVerdict():
            return verdict
        changed = recording.exit.changed or recording.refusal()
        return AuditVerdict(f"after equal ops: the step {changed}" if changed is not None else None)

    def failed(self, recorder: Recorder, error: Exception) -> AuditVerdict:
        """The verdict on a run that raised `error`.

        In a replay, too, an op raises it, autograd does for a saved tensor that was written, or a guard on a number
        may fail: nothing can be said then.
        """
        backward = self._backward
        signature = self.cached.signature if isinstance(backward, str) else backward.signature
        assert signature is not None
        if (
            self._is_over
            or recorder.failed is not None
            or signature.facts
            or _WRITTEN in str(error)
        ):
            return AuditVerdict()
        return AuditVerdict(f"the step raises {type(error).__name__}: {error}; the program goes on")


def compared(was: Signature, now: Signature, recorder: Recorder) -> AuditVerdict:
    """The verdict on a recording `now`, made by `recorder`, against the recording `was` of a program."""
    places = {identity(source): serial for serial, _, source in now.sources}
    # A place that this run does not use: no storage of this run corresponds to it.
    storages = {s: places.get(identity(source), -1 - s) for s, _, source in was.sources}
    hints = {identity(number.source): number.hint for number in now.numbers}
    known = [(each, identity(each.source)) for each in was.numbers]
    numbers = {each: hints[key] for each, key in known if key in hints}
    comparison = Comparison(was, recorder, storages, numbers)
    values = {fact.expression: fact.value for fact in now.facts}
    for row in now.rows:
        comparison.check_row(row, values.get(row.read) if row.read is not None else None)
    return comparison.verdict_on(now.leaves, now.spec, now.assigned)


def _missed(
    backward: BackwardProgram, call: Call, first: int, expected: FSDPState | None
) -> str | None:
    """The guard of a backward that fails, as text; None if it would be replayed.

    first: the index of the first tangent. The forward was guarded: only what may differ since then is looked at.
    """
    for fact in backward.program.facts:
        if isinstance(fact, FSDPStateGuard):
            # FSDP2 has run the forward; a replayed one leaves its state as it was on entry.
            failure = None if _is_state(fact.state, expected) else "FSDP2's state differs"
        else:
            failure = fact.failure(call)
        if failure is not None:
            return failure
    for guard in backward.program.guards:
        if isinstance(guard, TensorGuard):
            source = guard.spec.source
            if isinstance(source, Argument) and source.leaf >= first:
                found = TensorGuard(0, guard.spec).failure(
                    Call(call.leaves, [source.resolve(call)])
                )
                if found is not None:
                    return found
    return None


def _is_state(was: FSDPState, now: FSDPState | None) -> bool:
    return now is not None and all(map(same_value, was.values, now.values))
