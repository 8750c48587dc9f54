"""The backward of a replayed forward: a replayed program, or autograd's backward of a forward that runs again.

    forward = ReplayedForward(owner, forward_program, call)     before the program runs
    forward.hold(saved)                                         the values that the program saved
    forward.backward(tangents, requested, keep)                 called by the node of `boundary.py`

Invariant: a backward that no program covers changes nothing, and then the forward runs again
(Note [A backward that was not recorded] in `captured_forward.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from functionalize._compat.autograd import KeptVersions, version_of, versions_of
from functionalize.errors import GuardError, InvariantError
from functionalize.ir.epilogue import Copy, alias
from functionalize.ir.generators import generator_states, set_generators
from functionalize.ir.inputs import Call
from functionalize.ir.ops import geometry_of
from functionalize.recorder.op_kinds import storage_of
from functionalize.state.sources import leave
from functionalize.state.step_guards import ModuleGuard, SlotGuard
from functionalize.step_backward.boundary import DetachedLeaves, RequestedGradients
from functionalize.step_backward.pair import BackwardProgram, ForwardProgram
from functionalize.step_backward.recorded_forward import TWICE, Owner, RecordedForward

_WRITTEN = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: {} of a "
    "captured forward was written after the forward ran"
)


class ReplayedForward:
    """A replayed forward, as the `CapturedBackward` of its node.

    Made before the program runs: it saves generator states and overwritten inputs, which a rerun needs.
    """

    def __init__(self, owner: Owner, forward: ForwardProgram, call: Call) -> None:
        self._owner, self._forward, self._call = owner, forward, call
        assert isinstance(call.leaves, DetachedLeaves)
        self._leaves: DetachedLeaves = call.leaves
        self._generators = generator_states() if forward.is_random else ()
        with torch.no_grad():
            self._overwritten = [(alias(t, g), alias(t, g).clone()) for t, g in self._written()]
        self._names: tuple[str, ...] = forward.saved
        self._saved: list[Any] | None = []
        self._watched: list[tuple[Tensor, int]] = []
        # Tensors that are held so that the ids in `_versions` are those of no others.
        self._held: list[Tensor] = []
        self._versions: dict[int, int] = {}
        self._rerun: RecordedForward | None = None

    def _written(self) -> Iterator[tuple[Tensor, Any]]:
        """The inputs that the program writes, with the written geometries."""
        for action in self._forward.program.epilogue:
            if isinstance(action, Copy):
                yield self._call.inputs[action.input], action.geometry
        for index in self._forward.program.writes:
            tensor = self._call.inputs[index]
            yield tensor, geometry_of(tensor)

    def hold(self, saved: Sequence[Any]) -> None:
        """Keep the values that the program saved, and the versions of the inputs at this time."""
        self._saved = list(saved)
        self._held = [t for t in (*self._call.inputs, *self._leaves) if isinstance(t, Tensor)]
        self._versions = dict(zip(map(id, self._held), versions_of(self._held), strict=True))

    def inputs(self) -> list[Tensor]:
        """The inputs of the autograd node: arguments and parameters that require a gradient."""
        arguments = [self._leaves.originals[i] for i in self._leaves.detached]
        return arguments + [source.resolve(self._call) for source in self._forward.parameters]

    @property
    def reduced_together(self) -> WeakSet[Any]:
        return self._owner.reduced_together

    def watch(self, outputs: Sequence[Tensor]) -> None:
        known = {storage_of(t)._cdata for t in self._saved or () if isinstance(t, Tensor)}
        self._watched = [(t, t._version) for t in outputs if storage_of(t)._cdata in known]

    def backward(
        self, tangents: Sequence[Tensor | None], requested: RequestedGradients, keep: bool
    ) -> Sequence[Tensor | None]:
        if self._rerun is not None:
            return self._rerun.backward(tangents, requested, keep)
        if self._saved is None:
            raise RuntimeError(TWICE)
        if any(t._version != version for t, version in self._watched):
            raise RuntimeError(_WRITTEN.format("an output"))
        found = self._matching(tangents, requested)
        vote = self._owner.vote
        if (
            vote is not None
            and vote.any_failed(found if isinstance(found, str) else None)
            and not isinstance(found, str)
        ):
            found = "a guard failed on another rank"
        if not isinstance(found, str):
            try:
                if not keep:
                    self._hand_over(*found)
                gradients = self._replay(*found)
            except GuardError as error:
                found = str(error)
            except Exception as error:  # of a program that no call was compared with
                may_run = self._forward.is_unseen and found[0].program.may_run_again(found[1])
                if not may_run:
                    raise
                found = f"a replay at a size that was not compared fails: {type(error).__name__}: {error}"
        if isinstance(found, str):
            gradients = self._run_again(found, tangents, requested, keep)
        if not keep:
            self._saved, self._held, self._versions, self._overwritten = None, [], {}, []
        return gradients

    def replay(
        self,
        backward: BackwardProgram,
        inputs: Mapping[int, Any],
        tangents: Sequence[Tensor | None],
    ) -> Sequence[Tensor | None]:
        """Replay a backward whose guards held when autograd asked for it, which was before the forward ran.

        inputs: those that it found then, by number; the others are values that the forward has saved since.
        """
        assert self._saved is not None
        values = dict(zip(self._names, self._saved, strict=True))
        call = Call([*self._leaves, *tangents, *(values[name] for name in backward.used)], [])
        for i, spec in enumerate(backward.program.inputs):
            call.inputs.append(inputs[i] if i in inputs else spec.source.resolve(call))
        self._hand_over(backward, call)
        gradients = self._replay(backward, call)
        self._saved, self._held, self._versions, self._overwritten = None, [], {}, []
        return gradients

    def _matching(
        self, tangents: Sequence[Tensor | None], requested: RequestedGradients
    ) -> tuple[BackwardProgram, Call] | str:
        """A recorded backward whose guards hold, with its inputs; else the reason why there is none."""
        assert self._saved is not None
        values = dict(zip(self._names, self._saved, strict=True))
        reason = "autograd requests other gradients than in any recorded backward"
        for each in self._forward.backwards:
            if each.requested != requested:
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

    def _check_unwritten(self, backward: BackwardProgram, call: Call) -> None:
        """Raise if an argument or parameter that the backward reads was written since the forward."""
        tensors = [(i, call.inputs[i]) for i in backward.unwritten]
        known = [(i, tensor) for i, tensor in tensors if id(tensor) in self._versions]
        for (i, tensor), now in zip(known, versions_of([t for _, t in known]), strict=True):
            if now != self._versions[id(tensor)]:
                raise RuntimeError(_WRITTEN.format(f"`{backward.program.inputs[i].name}`"))

    def _hand_over(self, backward: BackwardProgram, call: Call) -> None:
        """Let the program free each saved value after its last use. A rerun of the forward needs none."""
        call.freed = backward.freed
        first = len(call.leaves) - len(backward.used)
        call.leaves = [*call.leaves[:first], *[None] * len(backward.used)]
        self._saved = []

    def _replay(self, backward: BackwardProgram, call: Call) -> Sequence[Tensor | None]:
        values = backward.program.replay(call, self._owner.vote)
        count = len(values) - len(backward.slots)
        leave(call, backward.slots, values[count:], backward.effects)
        backward.replays += 1
        self._owner.stats.backwards += 1
        gradients: Sequence[Tensor | None] = values[:count]
        return gradients

    # -- a backward that no program covers -----------------------------------------------------

    def _run_again(
        self,
        reason: str,
        tangents: Sequence[Tensor | None],
        requested: RequestedGradients,
        keep: bool,
    ) -> Sequence[Tensor | None]:
        self._owner.missed_backward(reason)
        with torch.enable_grad():
            why_not = self._why_not_again()
            if why_not is not None:
                raise GuardError(
                    f"runs the backward of a captured forward, but {reason}; and the forward cannot run again for "
                    f"it, because {why_not}. Nothing was changed"
                )
            with self._state_on_entry():
                rerun = self._owner.run_again(self._leaves, self._forward, reason)
        parameters = rerun.parameters if isinstance(rerun, RecordedForward) else None
        if parameters is None or len(parameters) != len(self._forward.parameters):
            raise InvariantError("a forward that ran again has other parameters")
        gradients: Sequence[Tensor | None] = rerun.backward(tangents, requested, keep)
        if keep:
            self._rerun = rerun
        return gradients

    def _why_not_again(self) -> str | None:
        """Why the forward cannot run again: a change that `_state_on_entry` does not restore; None if it can."""
        program = self._forward.program
        if any(not isinstance(action, Copy) for action in program.epilogue):
            return "it resizes or replaces one of its inputs"
        call = Call(self._leaves, [])
        for fact in program.facts:
            fact = fact.but_numbers() if isinstance(fact, ModuleGuard) else fact
            failure = None if isinstance(fact, SlotGuard) else fact.failure(call)
            if failure is not None:
                return failure
        written = {id(tensor) for tensor, _ in self._written()}
        for spec, tensor in zip(program.inputs, self._call.inputs, strict=True):
            known = self._versions.get(id(tensor))
            if known is not None and id(tensor) not in written and known != version_of(tensor):
                return f"`{spec.name}` was written since"
        return None

    @contextmanager
    def _state_on_entry(self) -> Iterator[None]:
        """Inside the `with`: the generators, the inputs that the forward writes and the numbers of modules on entry."""
        facts = self._forward.program.facts
        states = generator_states()
        now = [tensor.clone() for tensor, _ in self._overwritten]
        try:
            if self._generators:
                set_generators(self._generators)
            self._write([was for _, was in self._overwritten])
            with ExitStack() as stack:
                for fact in facts:
                    if isinstance(fact, ModuleGuard):
                        stack.enter_context(fact.numbers_on_entry())
                yield
        finally:
            set_generators(states)
            self._write(now)

    def _write(self, values: Sequence[Tensor]) -> None:
        for (tensor, _), value in zip(self._overwritten, values, strict=True):
            # Autograd may have saved the tensor for its geometry only: its version counter must not change.
            with torch.no_grad(), KeptVersions([tensor]):
                tensor.copy_(value)
