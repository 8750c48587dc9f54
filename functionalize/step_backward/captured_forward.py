"""`capture(fn, backward=True)`: a forward and its backward, each replayed by a program of its own.

    forward = functionalize.capture(loss_of, backward=True)
    loss = forward(batch)          recorded, later replayed; the loss requires a gradient
    loss.backward()                recorded, later replayed; gradients are in the same places as in eager
    optimizer.step()               eager, as all code outside

A call whose result has no autograd history (under `no_grad`) is an ordinary captured step. Programs are made in
pairs, from one forward and the backward that was called on it; the recording of a forward without one is not kept.

Note [A backward that was not recorded]
A replayed forward may be followed by another backward than the recorded one: with other tangents, for other
inputs, or with empty gradients where they were accumulated. Then the forward runs again, eagerly, on the same
arguments, with generators and buffers restored to their state on entry, and autograd runs the backward through that
graph. The run is recorded, and its backward is kept beside the others of the same forward. All ranks must run it again
together, as it issues collectives. If a value that the forward read has changed since, it is refused (`GuardError`)
before anything changes. Calls that the replay has made again (`print`, logging) are not made by the rerun.
FSDP2 runs it as outside of a backward (`fsdp/forward_again.py`).

Note [Two backwards of one forward]
Where gradients are emptied between forward and backward, the first microbatch after an update finds none, a later one
those of the others, and both have the same forward. Which one a program was recorded for can be told before its forward
is replayed, by whether a parameter was written since the last call (of the first call there is, by whether its backward
found no gradients). The other one is recorded when it first comes and there are gradients that may be emptied, so that
no forward must run again.

Note [Audited forwards]
An audited forward runs eagerly, and so does the backward that is called on it: its gradients are eager's. Both are
recorded, as a call without a program is, and the recording is compared with the programs (`audited_forward.py`), not
kept. Ranks audit a forward with collectives, or under FSDP2, at the same call: calls are counted from the first one,
whatever program they have. Otherwise a rank would run its forward again for a backward without a program,
collectives included, while another one has an audited forward, which needs no rerun.

Invariant: guards of a backward are checked when it is called, before anything changes.
Refusals: `create_graph=True`; a result that is a parameter of FSDP2; arguments that the callable writes in place while
they require a gradient; a saved value that was written since, as in eager.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import torch

from functionalize._compat.autograd import at_end_of_backward, version_of
from functionalize.audit.audited_call import AuditedCall, judged
from functionalize.errors import PassError
from functionalize.fsdp.forward_again import as_outside_of_backward
from functionalize.ir.generators import is_random
from functionalize.ir.inputs import Argument, Call, Source, chain_of
from functionalize.lengths.shared_passes import needs_no_copies
from functionalize.program.collective_order import recorded_sequences
from functionalize.recorder.recorder import Recorder
from functionalize.recorder.watched_recorder import WatchedRecorder
from functionalize.scalars.escaped_numbers import replace_escaped
from functionalize.scalars.live_scalars import plain_tree
from functionalize.state.arguments import flatten_result, unflatten_result
from functionalize.state.python_effects import repeat, unrepeated
from functionalize.state.sources import Gradient, leave
from functionalize.step.cache import CachedProgram
from functionalize.step.captured_step import CapturedStep
from functionalize.step.core import EVERY_CALL
from functionalize.step.hooks import Hooks
from functionalize.step.options import CaptureOptions
from functionalize.step.outcome import Built
from functionalize.step.recording import StepRecording
from functionalize.step.stages import Invocation, RecordedRun
from functionalize.step.stats import ProgramCounts
from functionalize.step.step_state import EntryState
from functionalize.step.vote import RankVote
from functionalize.step_backward.audited_forward import AuditedForward
from functionalize.step_backward.backward_of import ReplayedForward
from functionalize.step_backward.boundary import (
    DetachedLeaves,
    RequestedGradients,
    is_output,
    with_backward,
)
from functionalize.step_backward.joint_recording import ForwardEnd, JointRecording, JointRun, Pair
from functionalize.step_backward.pair import BackwardProgram, ForwardProgram, is_same_forward
from functionalize.step_backward.predicted_forward import EntryStates, ForwardPredictions
from functionalize.step_backward.recorded_forward import RecordedForward, note_hooks_inside
from functionalize.util.gc_pause import only_young_collections
from functionalize.util.process_groups import has_ranks
from functionalize.util.turns import TURNS
from functionalize.util.user_warning import warn_uncapturable

log = logging.getLogger("functionalize")
_PATIENCE = 4  # recorded forwards in a row without a backward, before fewer are recorded
_BACKWARDS = 8  # kept of one forward
_LOOKS = 64  # replays of a forward that are asked whether a parameter was written before
_FIRST_SINCE_UPDATE = "its backward may find other gradients than the recorded one: see `zero_grad`"
_NOT_PREDICTED = (
    "autograd has asked for other gradients than in recorded calls: programs for other sizes are "
    "not predicted any more"
)
_LACKS = "no backward was called on the results of the last recorded calls"


def captured_forward(
    forward: Callable[..., Any], options: CaptureOptions
) -> CapturedStep[..., Any]:
    """A captured step of a forward, whose backward runs outside of it. Raises `PassError`."""
    if options.compares:
        changing = next(each for each in options.passes if each.changes_collectives)
        raise PassError(
            f"`{changing}` changes collectives, and a forward's backward may be replayed on one rank and run on "
            "another: capture a whole step, or leave the pass out"
        )
    return CapturedStep(forward, options, Forward)


def forward_of(step: CapturedStep[..., Any]) -> Forward:
    """What is particular to a captured forward."""
    assert isinstance(step.part, Forward)
    return step.part


class Forward:
    """A captured forward: replays the forward when it is called, and its backward when autograd runs it."""

    def __init__(self, step: CapturedStep[..., Any]) -> None:
        self._step, self._core, self.stats = step, step.core, step.core.stats
        self._audits, self._passes = step.audits, step.passes
        self._core.hooks_run_outside = self._passes.may_follow = True
        self._is_sharded = False  # whether FSDP2 reduces the gradients
        # key of a call -> the number of recorded forwards in a row without a backward
        self._without_backward: dict[Hashable, int] = {}
        # number of a call -> its forward, which left its own graph, until its backward
        self._awaited: dict[int, JointRun] = {}
        self._calls = 0
        self._was_elsewhere = False  # whether a call ran eagerly because of another thread
        self._nodes: WeakSet[Any] = WeakSet()
        self._versions: tuple[int, ...] | None = None  # of the parameters, at the last call
        # Where nothing is predicted, the state is no part of the key.
        self._states = EntryStates() if self._core.options.dynamic else None
        self.hooks = Hooks(
            began=self._began,
            leaves=DetachedLeaves,
            state=self._state if self._states is not None else None,
            why_not=self._why_not,
            replay=self._replay,
            is_due=self._is_due,
            audit=self._audit,
            capture=self._capture,
            build=self._build,
            add=self._add,
            why_unsaved="is for a forward whose backward runs outside of it (`backward=True`): capture a whole step",
            predictions=self._new_predictions,
        )

    @property
    def callable(self) -> Callable[..., Any]:
        """The callable that was captured."""
        return self._core.fn

    @property
    def is_busy(self) -> bool:
        """Whether another recording is active."""
        return self._step.is_busy

    @property
    def reduced_together(self) -> WeakSet[Any]:
        """The autograd nodes of all calls, if FSDP2 would reduce their gradients in one backward; else empty."""
        return self._nodes if self._is_sharded else WeakSet()

    @property
    def vote(self) -> RankVote | None:
        """The vote of the ranks on replay; None: they need none."""
        return self._core.vote

    @property
    def _predictions(self) -> ForwardPredictions | None:
        found = self._step.predictions
        assert found is None or isinstance(found, ForwardPredictions)
        return found

    def _new_predictions(self, *parts: Any) -> ForwardPredictions:
        assert self._states is not None
        return ForwardPredictions(self._states, *parts)

    def _began(self) -> bool:
        if not has_ranks() and TURNS.forwards_elsewhere():
            if not self._was_elsewhere:
                self._was_elsewhere = True
                warn_uncapturable(
                    f"{self._core.name} runs eagerly while two threads call captured forwards, as their backwards run "
                    "outside (`backward=True`): capture whole steps"
                )
            return True
        self._calls += 1
        return False

    def _state(self, leaves: Sequence[Any]) -> tuple[Hashable, ...]:
        assert self._states is not None
        return (self._states.of(leaves),)

    def _why_not(self, call: Invocation) -> str | None:
        return _LACKS if self._lacks_backwards(call.key) else None

    def _lacks_backwards(self, key: Hashable) -> bool:
        """Whether to skip recording this call, since no backward was called on the forwards recorded last.

        After the first `_PATIENCE` calls it is tried again at calls whose number is a power of two.
        """
        count = self._without_backward[key] = self._without_backward.get(key, 0) + 1
        if count == _PATIENCE + 1:
            warn_uncapturable(
                f"{self._core.name} is captured with its backward, and no backward is called on its results: call it "
                "under torch.no_grad(), or capture it without `backward=True`"
            )
        return count > _PATIENCE and bool(count & (count - 1))

    # -- replay --------------------------------------------------------------------------------

    def covered(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        accepts: Callable[[ForwardProgram, Call], bool],
    ) -> tuple[ForwardProgram, Call] | None:
        """The program whose replay is this call, with its inputs, and count it as replayed; None: it must be called.

        accepts: whether the caller can make use of it. Ranks count alike, whichever of them calls.
        """
        core = self._core
        if self.is_busy or core.vote is not None or not torch.is_grad_enabled():
            return None
        flat, spec = self._step.flattened(args, kwargs)
        leaves = DetachedLeaves(flat)
        key = self._step.key(leaves, spec)
        if leaves.detached or key in core.refused or EVERY_CALL in core.refused:
            return None
        found = core.cache.first(key, leaves, spec)
        if (
            found is None
            or not isinstance(found[0], ForwardProgram)
            or not accepts(found[0], found[1])
        ):
            return None
        self._calls += 1
        if self._is_due(found[0]):
            self._calls -= 1
            return None
        core.cache.used(found[0], is_replayed=True)
        return found[0], found[1]

    def _replay(self, cached: CachedProgram, call: Call) -> Any:
        if not isinstance(cached, ForwardProgram):
            assert isinstance(call.leaves, DetachedLeaves)
            return call.leaves.with_originals(self._step.replay(cached, call))
        if self._expects_another_backward(cached, call):
            return self._record_beside(cached, call.leaves)
        replayed = ReplayedForward(self, cached, call)
        values = cached.program.replay(call, self._core.vote)
        replayed.hold(values[cached.results :])
        result, left = unflatten_result(values[: cached.results], cached.spec)
        count = len(cached.slots)
        leave(call, cached.slots, left[:count], cached.effects)
        self._core.cache.used(cached, is_replayed=True)
        repeat(cached.python_effects, call, left[count:])
        assert isinstance(call.leaves, DetachedLeaves)
        return with_backward(result, cached.has_grad_fn, replayed, call.leaves, replayed.inputs())

    def _is_updated(self, trained: Sequence[Source], leaves: Sequence[Any]) -> bool | None:
        """Whether a parameter was written since the last call; None: there was none."""
        call = Call(leaves, [])
        found = tuple(version_of(source.resolve(call)) for source in trained)
        before, self._versions = self._versions, found
        return None if before is None else found != before

    def _expects_another_backward(self, cached: ForwardProgram, call: Call) -> bool:
        """Whether to record this call though a program covers it: Note [Two backwards of one forward]."""
        core = self._core
        if cached.replays >= _LOOKS or len(cached.updated) == 2 or core.vote is not None:
            return False
        is_updated = self._is_updated(cached.trained, call.leaves)
        if is_updated in cached.updated or cached.group is not None:
            return False
        return any(Gradient(each).resolve(call) is not None for each in cached.trained)

    def _record_beside(self, cached: ForwardProgram, leaves: Sequence[Any]) -> Any:
        """Record a call that a program covers, to keep its backward beside the others of that program."""
        spec = cached.program.in_spec
        assert spec is not None and isinstance(leaves, DetachedLeaves)
        args, kwargs = unflatten_result(leaves.originals, spec)
        key = self._step.key(leaves, spec)
        call = Invocation(args, kwargs, leaves, spec, key, _FIRST_SINCE_UPDATE)
        forward = self._run_forward(call, self._step.recorder(call), rerun_of=cached)
        return forward.result() if isinstance(forward, RecordedForward) else forward

    def missed_backward(self, reason: str) -> None:
        """Count a request of autograd that no recorded backward covers."""
        self._core.note_miss(f"backward: {reason}")
        self.stats.reruns += 1
        self._predict_no_more()

    def _predict_no_more(self) -> None:
        """Autograd has asked for a backward that was not recorded."""
        if not self._step.predict_no_more():
            return
        core = self._core
        if self._is_sharded:
            log.warning("%s: %s; all ranks must run this forward again", core.name, _NOT_PREDICTED)
        for cached in list(core.cache):
            cached.group = None
            if cached.is_unseen:
                core.cache.drop(cached)
        self.stats.missed(_NOT_PREDICTED)

    def run_again(self, leaves: DetachedLeaves, forward: ForwardProgram, reason: str) -> Any:
        """Run the forward for real on the leaves of an earlier call; its backward may be kept beside the others."""
        spec = forward.program.in_spec
        assert spec is not None
        fresh = DetachedLeaves(leaves)
        args, kwargs = unflatten_result(leaves, spec)
        call = Invocation(args, kwargs, fresh, spec, self._step.key(fresh, spec), reason)
        recorder = self._step.recorder(call)
        recorder.calls.were_made = True
        with as_outside_of_backward():
            return self._run_forward(call, recorder, rerun_of=forward)

    # -- audit ---------------------------------------------------------------------------------

    def _is_due(self, cached: CachedProgram) -> bool:
        if not isinstance(cached, ForwardProgram) or cached.signature is None:
            return self._audits.is_due(cached)
        call = self._calls if cached.communicates else cached.replays + cached.audits + 1
        return self._core.options.audit.is_due(call, is_pair=True)

    def _audit(self, audited: AuditedCall, cached: CachedProgram, call: Invocation) -> Any:
        if not isinstance(cached, ForwardProgram) or cached.signature is None:
            return self._audits.run(audited, cached, call)
        kind = WatchedRecorder if self._audits.begin(cached) else Recorder
        recorder = kind(True, live=cached.signature.live, for_real=True)
        audit = AuditedForward(cached, audited.expected)
        forward = self._run_forward(call, recorder, audit=audit)
        return forward.result() if isinstance(forward, RecordedForward) else forward

    def audit_raised(self, audit: AuditedForward, recorder: Recorder, error: Exception) -> None:
        """An audited forward, or its backward, has raised `error`."""
        self._audits.note_difference(judged(lambda: audit.failed(recorder, error)), audit.cached)

    def finish_audit(self, audit: AuditedForward, run: JointRun) -> None:
        """Compare forward and backward with the programs."""
        verdict = judged(lambda: audit.after_backward(run))
        if verdict is not None and verdict.missed is not None:
            self._core.note_miss(f"backward: {verdict.missed}")
        # Autograd has not accumulated the gradients yet, which an error here would prevent.
        at_end_of_backward(lambda: self._audits.settle(verdict, audit.cached))

    # -- record, judge, build, agree, keep -----------------------------------------------------

    def _capture(self, call: Invocation) -> Any:
        if self._predictions is not None:
            call = self._predictions.compared(call)
        forward = self._run_forward(call, self._step.recorder(call))
        if not isinstance(forward, RecordedForward):
            return forward
        self.stats.eager += 1  # until its backward is recorded
        return forward.result()

    def _run_forward(
        self,
        call: Invocation,
        recorder: Recorder,
        rerun_of: ForwardProgram | None = None,
        audit: AuditedForward | None = None,
    ) -> Any:
        """Run for real while recording: a `RecordedForward`, or the result if it has no autograd history.

        The callable runs on detached arguments, so that its graph ends there.
        """
        detached = call
        assert isinstance(call.leaves, DetachedLeaves)
        if call.leaves.detached:
            args, kwargs = unflatten_result(call.leaves, call.spec)
            detached = replace(call, args=args, kwargs=kwargs)
        while_inside = [recorder.checks.refuse_here]
        call.leaves.connect(while_inside)
        with only_young_collections():
            try:
                run = self._step.record(detached, recorder)
            except Exception as error:
                if audit is not None:
                    self.audit_raised(audit, recorder, error)
                raise
            while_inside.clear()
            if isinstance(run, RecordedRun):
                self._is_sharded = bool(run.entry.fsdp.places)
                note_hooks_inside(run)
                has_history = any(map(is_output, flatten_result(run.result)[0]))
                if has_history or audit is not None:
                    changed = run.changed or unrepeated(run.moving.effects)
                    is_updated = self._is_updated(_trained(run.entry), run.entry.leaves)
                    end = ForwardEnd.now(run.entry, run.result, run.recorder, changed, is_updated)
                if audit is not None:
                    verdict = judged(lambda: audit.after_forward(recorder, end))
                    self._audits.end(verdict, audit.cached)
                if (
                    has_history
                    and rerun_of is None
                    and audit is None
                    and end.has_escaped(self._core.fn)
                ):
                    return self._with_own_graph(run, end, detached)
                if has_history:
                    return RecordedForward(self, run, end, detached, rerun_of, audit)
                if audit is None:
                    self._without_backward.pop(call.key, None)
                    self._step.finish(run, detached)
                return call.leaves.with_originals(plain_tree(run.result))
        return self._step.run_unrecordable(run, call)

    def _with_own_graph(self, run: RecordedRun, end: ForwardEnd, call: Invocation) -> Any:
        """The result with the graph that the callable made, which a backward reaches elsewhere, too.

        The stages run when autograd has run its backward, as they do on ranks that record theirs.
        """
        self.stats.eager += 1
        result = plain_tree(run.result)
        requested = RequestedGradients(False, ())
        joint = JointRun(run.recorder, end, end.entry, (), None, requested, (), None)
        awaited, number = self._awaited, self._calls
        awaited[number] = joint  # a hook that held it would hold its own graph
        while len(awaited) > _PATIENCE:
            del awaited[next(iter(awaited))]

        def before_backward(_: Any) -> None:
            if (run := awaited.pop(number, None)) is not None:
                at_end_of_backward(lambda: self.finish_backward(run, call))

        nodes = {leaf.grad_fn for leaf in flatten_result(result)[0] if is_output(leaf)}
        for node in nodes:
            node.register_prehook(before_backward)
        assert isinstance(call.leaves, DetachedLeaves)
        return call.leaves.with_originals(result)

    def finish_backward(self, run: JointRun, call: Invocation) -> None:
        """The stages after the backward of a recorded forward."""
        self._without_backward.pop(call.key, None)
        rerun = run.rerun_of is not None
        if not rerun:
            self.stats.eager -= 1  # its forward was counted so
        self._step.finish(run, call, rerun)
        replace_escaped(run.recorder.scalar_log)

    def _build(self, recording: StepRecording, call: Invocation) -> Built | None:
        if not isinstance(recording, JointRecording):
            return None
        run = recording.run
        pair = recording.pair(call.spec, run.rerun_of.saved if run.rerun_of is not None else ())
        awaits_passes = self._awaits_passes(pair, call)
        forward, backward = pair.forward, pair.backward
        if not awaits_passes:
            forward, backward = map(self._passes.apply, (forward, backward))
        nodes = pair.forward.nodes() + pair.backward.nodes()
        counts = ProgramCounts.of(run.recorder, nodes, forward)
        signature = self._step.signature(recording, call.key)
        whole = recording.whole_signature() if signature is not None else None
        cached = ForwardProgram(
            forward,
            pair.slots,
            run.end.modes,
            run.end.exit.has_grad_fn,
            call.reason,
            spec=run.end.exit.spec,
            results=pair.results,
            saved=pair.saved,
            text=pair.text,
            sources=pair.sources,
            parameters=run.parameters,
            backwards=[
                BackwardProgram(
                    backward, run.requested, pair.used, pair.backward_slots, pair.effects, whole
                )
            ],
            is_random=any(is_random(node) for node in forward.graph.nodes),
            communicates=self._is_sharded or bool(recorded_sequences(run.recorder.records)),
            updated=frozenset((run.is_updated,)),
            trained=_trained(run.end.entry),
            rerun_of=run.rerun_of,
            op_stream=signature,
            python_effects=run.end.exit.python_effects,
            awaits_passes=awaits_passes,
            replays_before_passes=awaits_passes,
        )
        counts = replace(counts, nodes=counts.nodes + backward.nodes())
        names, reference = run.end.entry.roots.arguments, None
        if whole is not None and run.rerun_of is None and self._predictions is not None:
            reference = self._predictions.reference_of_pair(call, names, pair, cached, whole)
        return Built(cached, recording.summary, counts, reference)

    def _awaits_passes(self, pair: Pair, call: Invocation) -> bool:
        """Whether programs are replayed before the passes, which may run for all sizes."""
        if call.expected is not None:
            return self._core.options.rewrites and call.expected.group.is_lean
        may_share = self._passes.may_share(self._step.wants_sizes(call))
        return may_share and all(map(needs_no_copies, (pair.forward, pair.backward)))

    def _add(self, key: Hashable, cached: CachedProgram) -> None:
        known = cached.rerun_of if isinstance(cached, ForwardProgram) else None
        if (
            known is None
            or not isinstance(cached, ForwardProgram)
            or not is_same_forward(known, cached)
        ):
            self._core.cache.add(key, cached)
            return
        # The same forward, whose new program saves the values for all its backwards. The new recording ran after the
        # first forward, so its `facts` describe a later state: keep the facts of the first one.
        cached.program.facts = known.program.facts
        known.program, known.saved = cached.program, cached.saved
        known.updated = frozenset((False, True))  # they have differed: no more can be told
        known.backwards = [*cached.backwards, *known.backwards][:_BACKWARDS]


def _trained(entry: EntryState) -> tuple[Source, ...]:
    """The sources of the parameters, without arguments."""
    found = (slot.of for _, slot in entry.slots if isinstance(slot, Gradient))
    return tuple(each for each in found if not any(isinstance(s, Argument) for s in chain_of(each)))
