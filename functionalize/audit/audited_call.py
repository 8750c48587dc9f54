"""One audited call: the step runs for real under a recorder, and is compared with the program that would have replayed.

    audited = AuditedCall.of(signature, program, call)     may raise GuardError: nothing has run
    result = audited.run(fn, args, kwargs, spec)           exactly what eager returns, with all its effects
    audited.verdict                                        what differs, see `comparison.py` and `results.py`

Invariants: the step runs once, whatever the audit finds, and its exceptions propagate. An error in the audit itself is
logged and is no verdict. Numbers are live if they were in the recording, so that torch takes the same paths.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from functionalize._compat.dispatch import disable_current_modes
from functionalize._compat.graphs import pytree
from functionalize.audit.audit_recorder import AuditRecorder
from functionalize.audit.comparison import Comparison
from functionalize.audit.results import ExpectedResults, is_comparable
from functionalize.audit.signature import Signature
from functionalize.audit.verdict import AuditVerdict
from functionalize.calls.late_numbers import with_late_values
from functionalize.errors import GuardError
from functionalize.ir.inputs import Call
from functionalize.program.program import Program
from functionalize.recorder.recorder import Recorder
from functionalize.scalars.escaped_numbers import replace_escaped, without_live
from functionalize.scalars.live_scalars import plain_tree
from functionalize.state import arguments
from functionalize.state.hyperparameters import lifted
from functionalize.state.moving_state import MovingPlaces, MovingState
from functionalize.state.python_effects import flatten_left, in_order
from functionalize.state.sources import changed_slots
from functionalize.util.switches import AUDITS
from functionalize.walk.converted_arrays import tensors_by_array
from functionalize.walk.live_places import NO_PLACES

# What else differs after the step, as text: of its recorder, its effects in Python, and the generators that it moved.
Also = Callable[[Recorder, Sequence[Any], Container[int]], str | None]


class Observer(Protocol):
    """What else is observed while the step runs; `settled` is called with its result, which it returns."""

    def __enter__(self) -> Any: ...
    def __exit__(self, *exc: Any) -> None: ...
    def settled(self, result: Any) -> Any: ...


def observed(observer: Observer | None, run: Callable[[], Any]) -> Any:
    """The result of `run`, while it is observed."""
    if observer is None:
        return run()
    with observer:
        return observer.settled(run())


class AuditedCall:
    """A call that is about to run, and afterwards its verdict; None: the audit itself has failed.

    also: asked where nothing else differs. watches: whether a profile function then sees the effects of the step, too.
    expected: what the program would have computed; None: its results are not compared. raised: what its graph raised.
    observer: active while the step runs.
    """

    def __init__(
        self,
        signature: Signature | None,
        call: Call,
        expected: ExpectedResults | None = None,
        raised: str | None = None,
    ) -> None:
        self.verdict: AuditVerdict | None = None
        self.also: Also | None = None
        self.watches = True
        self.observer: Observer | None = None
        self._before: list[weakref.ref[Tensor] | None] = []
        self.expected = expected
        self._raised = raised
        self._signature, self._call = signature, call

    @staticmethod
    def of(
        signature: Signature | None, program: Program, call: Call, runs_graph: bool
    ) -> AuditedCall:
        """Run the program's graph first, if that is safe; raises `GuardError` if a guard on a number fails in it.

        signature: None: nothing is compared. runs_graph: False if other ranks wait for the guards of a graph that runs.
        """
        expected, raised = None, None
        if runs_graph and is_comparable(program.with_graph):
            try:
                expected = ExpectedResults.of(program, call)
            except GuardError:
                raise
            except Exception as error:  # eager will raise, too, or the op streams will differ
                AUDITS.info("an audit compares no results, since the graph fails: %s", error)
                raised = repr(error)  # the error itself would keep the inputs
        call.inputs.clear()  # the step must be able to free them
        return AuditedCall(signature, Call(call.leaves, []), expected, raised)

    def run(self, fn: Callable[..., Any], args: Any, kwargs: Any, spec: pytree.TreeSpec) -> Any:
        """The result of the step. spec: the structure of the arguments."""
        signature = self._signature
        if signature is None:
            return fn(*args, **kwargs)
        recorder, leaves = (
            AuditRecorder(signature, self.watches and self.also is not None),
            arguments.flatten(args, kwargs)[0],
        )
        try:
            recorder.arrays = tensors_by_array(self._call.leaves)
            with torch.no_grad():
                comparison = self._begin(signature, recorder)
        except Exception as error:
            log_bug(error)
            return fn(*args, **kwargs)
        try:
            hyperparameters = lifted(signature.optimizers, signature.lifted, recorder)
            of_program = signature.moving or MovingPlaces(NO_PLACES)
            places = MovingState(of_program, recorder, of_program.objects())
            with hyperparameters as hyper, places as moving, recorder:
                moving.take(
                    observed(self.observer, lambda: moving.called(fn, args, kwargs, spec)), True
                )
        except Exception as error:
            replace_escaped(recorder.scalar_log)
            failure = error
            if repr(failure) == self._raised:  # a replay runs eagerly then, and raises it
                self.verdict = AuditVerdict()
            else:
                self._judge(lambda: comparison.verdict_of_failed(failure))
            raise
        moving.effects += hyper.effects
        changed = hyper.changed or arguments.changed(args, kwargs, leaves, spec)
        grad_mode = torch.is_grad_enabled()
        self._judge(lambda: self._verdict(comparison, changed, moving, grad_mode))
        return without_live(recorder.scalar_log, [moving.returned])

    def _begin(self, signature: Signature, recorder: AuditRecorder) -> Comparison:
        """Look up every place from outside, before the step runs."""
        gradients = [slot.resolve(self._call) for _, slot in signature.slots]
        self._before = [None if g is None else weakref.ref(g) for g in gradients]
        return recorder.begin(self._call)

    def _verdict(
        self,
        comparison: Comparison,
        changed: str | None,
        moving: MovingState,
        grad_mode: bool,
    ) -> AuditVerdict:
        assigned, gradients = [False] * len(self._before), []
        moving.finish()
        slots = comparison.signature.slots
        for at, gradient in changed_slots(slots, self._before, self._call, moving.replaced):
            assigned[at] = True
            gradients.append(gradient)
        changed = changed or moving.refusal or moving.unexplained
        result, calls = with_late_values(moving.result, comparison.recorder.python_effects)
        effects = in_order(calls, moving.effects)
        leaves, spec = flatten_left(result, gradients, effects, moving.one_object)
        comparison.recorder.checks.check_generators(lambda: "after its last random op")
        verdict = comparison.verdict(leaves, spec, assigned)
        if verdict != AuditVerdict():
            return verdict
        difference = f"after equal ops: the step {changed}" if changed is not None else None
        if difference is None and self.expected is not None:
            difference = self.expected.difference(plain_tree([*leaves]))
        if difference is None and self.also is not None:
            # Those that the step has left in places which it does not move: they are constants of the program.
            replace_escaped(comparison.recorder.scalar_log)
            with torch.set_grad_enabled(grad_mode):
                found = [effect for effect, _ in effects]
                difference = self.also(comparison.recorder, found, moving.explained)
        return AuditVerdict(difference)

    def _judge(self, verdict: Callable[[], AuditVerdict]) -> None:
        self.verdict, self.expected = judged(verdict), None


def judged(find: Callable[[], AuditVerdict]) -> AuditVerdict | None:
    """A verdict; None if the audit itself fails, which is logged."""
    try:
        with torch.no_grad(), disable_current_modes():
            return find()
    except Exception as error:
        log_bug(error)
        return None


def log_bug(error: Exception) -> None:
    """Log an error of an audit itself, after which the step goes on."""
    AUDITS.error("a bug in functionalize, please report it: an audit failed", exc_info=error)
