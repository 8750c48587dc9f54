"""What is behind the outputs of a captured forward: its backward, recorded or replayed.

    Recorded     the callable ran for real: autograd's own graph, and the recording, which goes on in the backward
    Replayed     a program ran: its saved values, and the backwards that were made for it

Invariant: a backward that a program does not cover leaves everything as it was, and then the forward runs again
(Note [A backward that was not recorded] in `forward.py`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch import Tensor

from functionalize._compat import pytree
from functionalize.core.collector import only_young_collections
from functionalize.core.epilogue import Copy, alias
from functionalize.core.generators import generator_states, set_generators
from functionalize.core.inputs import Argument, Call, Source
from functionalize.core.ops import OpRecord, TensorRef, geometry_of
from functionalize.core.rules.resizes import RESIZE_STORAGE
from functionalize.errors import GuardError, InvariantError
from functionalize.frontend.arguments import flatten_result, unflatten_result
from functionalize.frontend.boundary import Wanted, attach, leaves_of, run_backward
from functionalize.frontend.dispatch import Recorder
from functionalize.frontend.fsdp import FSDPTensor
from functionalize.frontend.guards import SlotGuard
from functionalize.frontend.joint import Boundary, JointRecording
from functionalize.frontend.lifted import lifted
from functionalize.frontend.op_kinds import storage_of
from functionalize.frontend.recording import Entry, Exit
from functionalize.frontend.sources import Gradient, ModuleTensor, leave

if TYPE_CHECKING:
    from functionalize.frontend.forward import Backward, CapturedForward, Forward
    from functionalize.frontend.outcome import Warmup

_TWICE = (
    "goes backward a second time through a captured forward, whose saved values are freed: give the first "
    "backward retain_graph=True"
)
_WRITTEN = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: {} of a "
    "captured forward was written after the forward ran"
)


class Leaves(list[Any]):
    """The leaves of a call; tensors that require a gradient are cut from the user's graph. given: uncut."""

    def __init__(self, given: Sequence[Any]) -> None:
        cutting = torch.is_grad_enabled()
        super().__init__(_cut(leaf) if cutting else leaf for leaf in given)
        self.given = given
        self.cut = [i for i, leaf in enumerate(given) if leaf is not self[i]]


def _cut(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and leaf.requires_grad:
        return leaf.detach().requires_grad_()
    return leaf


def is_output(leaf: Any) -> bool:
    """Whether a leaf of a result is something to go backward from."""
    return isinstance(leaf, Tensor) and leaf.requires_grad and leaf.grad_fn is not None


def with_history(
    result: Any, history: Sequence[bool], behind: Any, leaves: Leaves, inputs: Sequence[Tensor]
) -> Any:
    """A result whose outputs lead to `behind`; arguments that it holds are the caller's own."""
    flat, spec = flatten_result(result)
    values = {id(leaf): leaf for leaf, yes in zip(flat, history, strict=True) if yes}
    new: dict[int, Any] = {id(leaves[i]): leaves.given[i] for i in leaves.cut}
    new |= zip(values, attach(behind, list(values.values()), inputs), strict=True)
    return unflatten_result([new.get(id(leaf), leaf) for leaf in flat], spec)


# -- recorded --------------------------------------------------------------------------------------


class ForwardRecording(JointRecording):
    """A recording of both halves. parameters: what gradients went to. beside: the forward it was run for again."""

    wanted: Wanted
    parameters: tuple[Source, ...]
    beside: Forward | None


class Recorded:
    """A forward that ran for real. at: where it ended; None once its backward was recorded."""

    def __init__(
        self,
        owner: CapturedForward,
        recorder: Recorder,
        at: Boundary,
        result: Any,
        leaves: Leaves,
        spec: pytree.TreeSpec,
        key: Hashable,
        warmup: Warmup,
        reason: str,
        beside: Forward | None,
    ) -> None:
        self._owner, self._recorder, self._leaves = owner, recorder, leaves
        self._at: Boundary | None = at
        self._spec, self._key, self._warmup = spec, key, warmup
        self._reason, self._beside, self._result = reason, beside, result
        outputs = {id(leaf): leaf for leaf in flatten_result(result)[0] if is_output(leaf)}
        self._outputs: list[Tensor] = list(outputs.values())
        self._watched: list[tuple[Tensor, int]] = []
        self.parameters = tuple(self._found())
        call = Call(leaves, [])
        self._inputs = [leaves[i] for i in leaves.cut] + [s.resolve(call) for s in self.parameters]

    def _found(self) -> Iterator[Source]:
        """Where the leaves are that autograd would accumulate into, apart from arguments and FSDP2's."""
        assert self._at is not None
        call, entry, recorder = Call(self._leaves, []), self._at.entry, self._recorder
        places = {
            id(slot.of.resolve(call)): slot.of
            for _, slot in entry.slots
            if isinstance(slot, Gradient)
        }
        cut = {id(self._leaves[i]) for i in self._leaves.cut}
        outside = {id(e.tensor) for e in recorder.storages.externals}
        for leaf in leaves_of(self._outputs):
            source = places.get(id(leaf))
            if id(leaf) in cut or isinstance(source, FSDPTensor):
                continue
            if source is not None:
                yield source
            elif id(leaf) in outside:
                recorder.checks.note(
                    "a gradient goes to a tensor that no module and no argument holds: pass it as an argument"
                )
        for leaf in flatten_result(self._result)[0]:
            if (
                isinstance(leaf, Tensor)
                and leaf.requires_grad
                and id(leaf) not in cut
                and leaf.is_leaf
            ):
                recorder.checks.note(
                    "returns a parameter, which a replay would return without its gradient: return a value"
                )

    def result(self) -> Any:
        """What the callable returned, its outputs leading here."""
        assert self._at is not None
        result, self._result = self._result, None
        inputs = [self._leaves.given[i] for i in self._leaves.cut] + self._inputs[
            len(self._leaves.cut) :
        ]
        return with_history(result, self._at.exit.history, self, self._leaves, inputs)

    @property
    def reduced_together(self) -> WeakSet[Any]:
        return self._owner.reduced_together

    def watch(self, outputs: Sequence[Tensor]) -> None:
        self._watched = [(t, t._version) for t in outputs]

    def backward(
        self, tangents: Sequence[Tensor | None], wanted: Wanted, keep: bool
    ) -> Sequence[Tensor | None]:
        if not self._outputs:
            raise RuntimeError(_TWICE)
        for output, (seen, version) in zip(self._outputs, self._watched, strict=False):
            if seen._version != version:  # autograd says so, if it needs what was there
                torch.autograd.graph.increment_version(output)
        at, self._at = self._at, None
        gradients: Sequence[Tensor | None]
        if at is None or self._owner.is_busy:
            gradients = run_backward(self._outputs, tangents, self._inputs, wanted, keep)
        else:
            with only_young_collections():
                gradients = self._record(at, tangents, wanted, keep)
        if not keep:
            self._outputs = []
        return gradients

    def _record(
        self, at: Boundary, tangents: Sequence[Tensor | None], wanted: Wanted, keep: bool
    ) -> Sequence[Tensor | None]:
        owner, recorder = self._owner, self._recorder
        with torch.no_grad():
            self._note_resizes()
            given = [*self._leaves, *tangents]
            later = Entry.now(owner.callable, given, recorder, at.entry.lifted)
        recorder.resume()
        with lifted(later.roots.optimizers, later.lifted, recorder) as hyper, recorder:
            gradients = run_backward(self._outputs, tangents, self._inputs, wanted, keep)
        if not keep:
            self._outputs = []

        def take() -> ForwardRecording:
            end = Exit.now(later, gradients)
            taken = ForwardRecording(recorder, at, later, end, hyper.changed)
            taken.wanted, taken.parameters, taken.beside = wanted, self.parameters, self._beside
            return taken

        again = self._beside is not None
        owner.recorded(take, recorder, self._spec, self._key, self._warmup, self._reason, again)
        return gradients

    def _note_resizes(self) -> None:
        """Storages that were emptied since the forward are so in the recording; others must be as they were."""
        recorder = self._recorder
        for external in recorder.storages.externals:
            info = external.info
            storage = None if external.literal else storage_of(external.tensor)
            if storage is None or storage.nbytes() == info.nbytes:
                continue
            if storage.nbytes():
                recorder.checks.note(
                    f"the storage of `{info.name}` grows between the forward and its backward (a module is "
                    "unsharded by hand?): do that inside the captured function"
                )
            recorder.storages.note_size(storage)
            ref = TensorRef(info.serial, external.ref.geometry)
            recorder.records.append(OpRecord(RESIZE_STORAGE, (ref, info.nbytes), {}))


# -- replayed --------------------------------------------------------------------------------------


class Replayed:
    """A forward that a program ran. Made before it runs, for a rerun to begin from the same state."""

    def __init__(self, owner: CapturedForward, kept: Forward, call: Call) -> None:
        self._owner, self._kept, self._call = owner, kept, call
        assert isinstance(call.leaves, Leaves)
        self._leaves: Leaves = call.leaves
        self._states = generator_states() if kept.random else ()
        with torch.no_grad():
            self._before = [(alias(t, g), alias(t, g).clone()) for t, g in self._written()]
        self._names: tuple[str, ...] = kept.saved
        self._saved: list[Any] | None = []
        self._watched: list[tuple[Tensor, int]] = []
        self._versions: dict[int, tuple[Tensor, int]] = {}
        self._again: Recorded | None = None

    def _written(self) -> Iterator[tuple[Tensor, Any]]:
        for action in self._kept.program.epilogue:
            if isinstance(action, Copy):
                yield self._call.inputs[action.input], action.geometry
        for index in self._kept.program.writes:
            tensor = self._call.inputs[index]
            yield tensor, geometry_of(tensor)

    def take(self, saved: Sequence[Any]) -> None:
        """What the program returned for the backward."""
        self._saved = list(saved)
        found = [t for t in (*self._call.inputs, *self._leaves) if isinstance(t, Tensor)]
        self._versions = {id(t): (t, _version(t)) for t in found}

    def inputs(self) -> list[Tensor]:
        """The tensors of the user's graph that gradients go to."""
        arguments = [self._leaves.given[i] for i in self._leaves.cut]
        return arguments + [source.resolve(self._call) for source in self._kept.parameters]

    @property
    def reduced_together(self) -> WeakSet[Any]:
        return self._owner.reduced_together

    def watch(self, outputs: Sequence[Tensor]) -> None:
        known = {storage_of(t)._cdata for t in self._saved or () if isinstance(t, Tensor)}
        self._watched = [(t, t._version) for t in outputs if storage_of(t)._cdata in known]

    def backward(
        self, tangents: Sequence[Tensor | None], wanted: Wanted, keep: bool
    ) -> Sequence[Tensor | None]:
        if self._again is not None:
            return self._again.backward(tangents, wanted, keep)
        if self._saved is None:
            raise RuntimeError(_TWICE)
        if any(t._version != version for t, version in self._watched):
            raise RuntimeError(_WRITTEN.format("an output"))
        found = self._matching(tangents, wanted)
        vote = self._owner.vote
        if (
            vote is not None
            and vote.any_failed(isinstance(found, str))
            and not isinstance(found, str)
        ):
            found = "a guard failed on another rank"
        if not isinstance(found, str):
            try:
                gradients = self._replay(*found)
            except GuardError as error:
                found = str(error)
        if isinstance(found, str):
            gradients = self._rerun(found, tangents, wanted, keep)
        if not keep:
            self._saved, self._versions, self._before = None, {}, []
        return gradients

    def _matching(
        self, tangents: Sequence[Tensor | None], wanted: Wanted
    ) -> tuple[Backward, Call] | str:
        """A backward whose guards hold, with its inputs; or why there is none."""
        assert self._saved is not None
        values = dict(zip(self._names, self._saved, strict=True))
        reason = "it was asked for other gradients than any that was recorded"
        for each in self._kept.backwards:
            if each.wanted != wanted:
                continue
            if not all(name in values for name in each.used):
                reason = "it needs values that this forward did not save"
                continue
            leaves = [*self._leaves, *tangents, *(values[name] for name in each.used)]
            call = each.program.resolve(leaves)
            if not isinstance(call, str):
                self._check_unwritten(each, call)
                return each, call
            reason = call
        return reason

    def _check_unwritten(self, backward: Backward, call: Call) -> None:
        """Arguments and parameters that the backward reads are as the forward found them."""
        for spec, tensor in zip(backward.program.inputs, call.inputs, strict=True):
            known = self._versions.get(id(tensor))
            plain = isinstance(spec.source, (Argument, ModuleTensor)) and (
                isinstance(spec.source, Argument) or spec.source.table == "_parameters"
            )
            if known is not None and plain and known[1] != _version(tensor):
                raise RuntimeError(_WRITTEN.format(f"`{spec.name}`"))

    def _replay(self, backward: Backward, call: Call) -> Sequence[Tensor | None]:
        values = backward.program.replay(call, self._owner.vote)
        count = len(values) - len(backward.slots)
        leave(call, backward.slots, values[count:], backward.effects)
        backward.replays += 1
        self._owner.stats.backwards += 1
        gradients: Sequence[Tensor | None] = values[:count]
        return gradients

    # -- a backward that no program covers -----------------------------------------------------

    def _rerun(
        self, reason: str, tangents: Sequence[Tensor | None], wanted: Wanted, keep: bool
    ) -> Sequence[Tensor | None]:
        self._owner.missed_backward(reason)
        with torch.enable_grad():
            why_not = self._not_again()
            if why_not is not None:
                raise GuardError(
                    f"goes backward from a captured forward, but {reason}; and the forward cannot run again for "
                    f"it, because {why_not}. Nothing was changed"
                )
            with self._as_it_was():
                again = self._owner.run_again(self._leaves, self._kept, reason)
        theirs = again.parameters if isinstance(again, Recorded) else None
        if theirs is None or len(theirs) != len(self._kept.parameters):
            raise InvariantError("a forward that ran again has other parameters")
        gradients: Sequence[Tensor | None] = again.backward(tangents, wanted, keep)
        if keep:
            self._again = again
        return gradients

    def _not_again(self) -> str | None:
        """What is not as it was when the forward began, apart from what is put back."""
        program = self._kept.program
        if any(not isinstance(action, Copy) for action in program.epilogue):
            return "it resizes or replaces a tensor that it was given"
        call = Call(self._leaves, [])
        for fact in program.facts:
            failure = None if isinstance(fact, SlotGuard) else fact.failure(call)
            if failure is not None:
                return failure
        written = {id(tensor) for tensor, _ in self._written()}
        for spec, tensor in zip(program.inputs, self._call.inputs, strict=True):
            known = self._versions.get(id(tensor))
            if known is not None and id(tensor) not in written and known[1] != _version(tensor):
                return f"`{spec.name}` was written since"
        return None

    @contextmanager
    def _as_it_was(self) -> Iterator[None]:
        """The generators, and what the forward writes, as they were when it began."""
        states = generator_states()
        now = [tensor.clone() for tensor, _ in self._before]
        try:
            if self._states:
                set_generators(self._states)
            self._put([was for _, was in self._before])
            yield
        finally:
            set_generators(states)
            self._put(now)

    def _put(self, values: Sequence[Tensor]) -> None:
        for (tensor, _), value in zip(self._before, values, strict=True):
            # autograd saved some of these, whose values it does not need
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tensor):
                tensor.copy_(value)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
