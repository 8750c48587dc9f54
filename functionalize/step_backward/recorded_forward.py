"""A captured forward that ran for real, and the backward that autograd runs through its graph.

    forward = RecordedForward(owner, run, end, call)     after the run, which `record` of `stages.py` recorded
    forward.result()                                     its outputs have one autograd node: `boundary.py`
    forward.backward(tangents, requested, keep)          recorded into the same op stream; both programs are kept

Invariant: the backward is recorded once, at its first call; a second one (`retain_graph=True`) runs eagerly.
Refusals, noted in the recording: a gradient for a tensor that no module and no argument holds; a result that is a
parameter; a storage that grows between the forward and its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from functionalize._compat.autograd import BACKWARD, hook_functions
from functionalize.audit.audited_call import log_bug, observed
from functionalize.discharge.rules.resizes import RESIZE_STORAGE
from functionalize.fsdp.objects import FSDPTensor
from functionalize.ir.inputs import Call, Source
from functionalize.ir.ops import OpRecord, TensorRef
from functionalize.recorder.op_kinds import storage_of
from functionalize.recorder.recorder import Recorder
from functionalize.scalars.live_scalars import plain_tree
from functionalize.state.arguments import flatten_result
from functionalize.state.hyperparameters import lifted
from functionalize.state.module_calls import ModuleCalls
from functionalize.state.python_effects import unrepeated
from functionalize.state.sources import Gradient
from functionalize.step.stages import Invocation, RecordedRun
from functionalize.step.stats import Stats
from functionalize.step.step_state import EntryState
from functionalize.step.vote import RankVote
from functionalize.step_backward.audited_forward import AuditedForward
from functionalize.step_backward.boundary import (
    DetachedLeaves,
    RequestedGradients,
    is_output,
    leaves_of,
    run_backward,
    with_backward,
)
from functionalize.step_backward.joint_recording import ForwardEnd, JointRun
from functionalize.step_backward.pair import ForwardProgram
from functionalize.util.gc_pause import only_young_collections

TWICE = (
    "runs backward a second time through a captured forward, whose saved values are freed: call the first "
    "backward with retain_graph=True"
)


class Owner(Protocol):
    """The captured forward, as its backwards use it."""

    stats: Stats

    @property
    def callable(self) -> Callable[..., Any]:
        """The callable that was captured."""
        ...

    @property
    def is_busy(self) -> bool:
        """Whether another recording is active."""
        ...

    @property
    def vote(self) -> RankVote | None:
        """The vote of the ranks on replay; None: they need none."""
        ...

    @property
    def reduced_together(self) -> WeakSet[Any]:
        """The autograd nodes of all calls, if FSDP2 would reduce their gradients in one backward; else empty."""
        ...

    def missed_backward(self, reason: str) -> None:
        """Count a request that no recorded backward covers."""
        ...

    def run_again(self, leaves: DetachedLeaves, forward: ForwardProgram, reason: str) -> Any:
        """Run the forward of an earlier call for real: a `RecordedForward`, or a result without autograd history."""
        ...

    def finish_backward(self, run: JointRun, call: Invocation) -> None:
        """Judge, build and agree after the backward of a recorded forward; both programs are kept, or neither."""
        ...

    def finish_audit(self, audit: AuditedForward, run: JointRun) -> None:
        """Compare an audited forward and its backward with the programs."""
        ...

    def audit_raised(self, audit: AuditedForward, recorder: Recorder, error: Exception) -> None:
        """The backward of an audited forward has raised `error`."""
        ...


def note_hooks_inside(run: RecordedRun) -> None:
    """Refuse a forward that goes backward itself over a plain parameter with hooks: guards do not look at these."""
    if not any(record.phase == BACKWARD for record in run.recorder.records):
        return
    call = Call(run.entry.leaves, [])
    for name, slot in run.entry.slots:
        leaf = slot.of.resolve(call) if isinstance(slot, Gradient) else None
        if leaf is not None and hook_functions(leaf) and not hasattr(leaf, "device_mesh"):
            run.recorder.checks.note(
                f"goes backward itself, where the hooks of `{name.removesuffix('.grad')}` run, and is captured "
                "with its backward (`backward=True`), where they run outside: capture it as a whole step"
            )
            return


class RecordedForward:
    """A forward that ran for real, as the `CapturedBackward` of its node.

    end: the state after the forward; None once its backward was recorded. call: the call on detached arguments.
    rerun_of: the cached forward that ran again; None: this is a new recording. audit: the audit of which it is a part.
    """

    def __init__(
        self,
        owner: Owner,
        run: RecordedRun,
        end: ForwardEnd,
        call: Invocation,
        rerun_of: ForwardProgram | None,
        audit: AuditedForward | None = None,
    ) -> None:
        assert isinstance(call.leaves, DetachedLeaves)
        self._audit = audit
        self._owner, self._recorder = owner, run.recorder
        self._call, self._leaves = call, call.leaves
        self._end: ForwardEnd | None = end
        self._rerun_of, self._result = rerun_of, plain_tree(run.result)
        flat = flatten_result(self._result)[0]
        outputs = {id(leaf): leaf for leaf in flat if is_output(leaf)}
        self._outputs: list[Tensor] = list(outputs.values())
        self._watched: list[tuple[Tensor, int]] = []
        self.parameters = tuple(self._parameters(end.entry))
        self._note_returned_parameters(flat, end.entry)
        found = [source.resolve(Call(self._leaves, [])) for source in self.parameters]
        self._inputs = [self._leaves[i] for i in self._leaves.detached] + found

    def _parameters(self, entry: EntryState) -> Iterator[Source]:
        """The sources of the leaves into which autograd accumulates, except arguments and FSDP2's parameters."""
        places = self._places(entry)
        arguments = {id(self._leaves[i]) for i in self._leaves.detached}
        outside = {id(e.tensor) for e in self._recorder.storages.externals}
        for leaf in leaves_of(self._outputs):
            source = places.get(id(leaf))
            if id(leaf) in arguments or isinstance(source, FSDPTensor):
                continue
            if source is not None:
                yield source
            elif id(leaf) in outside:
                self._recorder.checks.note(
                    "a gradient goes to a tensor that no module and no argument holds: pass it as an argument"
                )

    def _places(self, entry: EntryState) -> dict[int, Source]:
        """The sources of all tensors that may have a gradient, by the ids of the tensors."""
        call = Call(self._leaves, [])
        return {
            id(slot.of.resolve(call)): slot.of
            for _, slot in entry.slots
            if isinstance(slot, Gradient)
        }

    def _note_returned_parameters(self, flat: Sequence[Any], entry: EntryState) -> None:
        """Refuse a parameter of FSDP2, which is not unsharded after a replayed forward. Others are returned."""
        arguments, places = (
            {id(self._leaves[i]) for i in self._leaves.detached},
            self._places(entry),
        )
        for leaf in flat:
            is_tensor = isinstance(leaf, Tensor) and id(leaf) not in arguments
            if is_tensor and leaf.requires_grad and leaf.is_leaf:
                source = places.get(id(leaf))
                if source is None or isinstance(source, FSDPTensor):
                    self._recorder.checks.note(
                        "returns a parameter of FSDP2 or one that no module holds, which a replay would return "
                        "without its gradient: return a value"
                    )

    def result(self) -> Any:
        """The result of the callable; autograd calls `backward` when it runs the backward of the outputs."""
        assert self._end is not None
        result, self._result = self._result, None
        count = len(self._leaves.detached)
        originals = [self._leaves.originals[i] for i in self._leaves.detached]
        inputs = originals + self._inputs[count:]
        return with_backward(result, self._end.exit.has_grad_fn, self, self._leaves, inputs)

    @property
    def reduced_together(self) -> WeakSet[Any]:
        return self._owner.reduced_together

    def watch(self, outputs: Sequence[Tensor]) -> None:
        self._watched = [(t, t._version) for t in outputs]

    def backward(
        self, tangents: Sequence[Tensor | None], requested: RequestedGradients, keep: bool
    ) -> Sequence[Tensor | None]:
        if not self._outputs:
            raise RuntimeError(TWICE)
        for output, (seen, version) in zip(self._outputs, self._watched, strict=False):
            if (
                seen._version != version
            ):  # the caller wrote to it: let autograd raise if it saved the value
                torch.autograd.graph.increment_version(output)
        end, self._end = self._end, None
        gradients: Sequence[Tensor | None]
        if end is None or self._owner.is_busy:
            gradients, _ = run_backward(self._outputs, tangents, self._inputs, requested, keep)
        else:
            with only_young_collections():
                gradients = self._record(end, tangents, requested, keep)
        if not keep:
            self._outputs = []
        return gradients

    def _record(
        self,
        end: ForwardEnd,
        tangents: Sequence[Tensor | None],
        requested: RequestedGradients,
        keep: bool,
    ) -> Sequence[Tensor | None]:
        recorder = self._recorder
        with torch.no_grad():
            self._note_resizes()
            leaves = [*self._leaves, *tangents]
            fn, live = self._owner.callable, end.entry.hyperparameters
            later = EntryState.now(fn, leaves, recorder, live, hooks_run_outside=True)
            if self._audit is not None:
                try:
                    self._audit.before_backward(end, later, requested)
                except Exception as error:
                    log_bug(error)
        recorder.resume()
        calls = ModuleCalls(numbered=False)
        calls.register(later.roots)
        hyperparameters = lifted(later.roots.optimizers, later.hyperparameters, recorder)
        try:
            observing, reading = calls.observing(recorder), end.entry.observed.reads.watching()
            with hyperparameters as hyper, observing, recorder, reading:
                found = observed(
                    self._call.observer,
                    lambda: run_backward(self._outputs, tangents, self._inputs, requested, keep),
                )
        except Exception as error:
            if self._audit is not None:
                self._owner.audit_raised(self._audit, recorder, error)
            raise
        gradients, refusal = found
        if refusal is not None:
            recorder.checks.note(refusal)
        if not keep:
            self._outputs = []
        run = JointRun(
            recorder,
            end,
            later,
            gradients,
            hyper.changed or unrepeated(hyper.effects),
            requested,
            self.parameters,
            self._rerun_of,
        )
        if self._audit is None:
            self._owner.finish_backward(run, self._call)
        else:
            self._owner.finish_audit(self._audit, run)
        return gradients

    def _note_resizes(self) -> None:
        """Record resizes of storages since the forward; refuse the recording if a storage has grown."""
        recorder = self._recorder
        for external in recorder.storages.externals:
            info = external.info
            if external.literal or not external.is_held:
                continue
            storage = storage_of(external.tensor)
            if storage.nbytes() == info.nbytes:
                continue
            if storage.nbytes():
                recorder.checks.note(
                    f"the storage of `{info.name}` grows between the forward and its backward (a module is "
                    "unsharded by hand?): do that inside the captured function"
                )
            recorder.storages.note_size(storage)
            ref = TensorRef(info.serial, external.ref.geometry)
            recorder.records.append(OpRecord(RESIZE_STORAGE, (ref, info.nbytes), {}))
