"""`capture(fn, backward=True)`: a forward that is replayed, and whose backward is a program, too.

    forward = functionalize.capture(loss_of, backward=True)
    loss = forward(batch)          recorded, later replayed; the loss requires a gradient
    loss.backward()                recorded, later replayed; gradients are where eager leaves them
    optimizer.step()               eager, as anything outside

A call without a history (under `no_grad`) is an ordinary captured step. Programs come in pairs, made of one forward
and the backward that was called on it; a forward that nobody goes backward from is recorded and not kept.

Note [A backward that was not recorded]
A replayed forward is gone backward from in another way than the recorded one: with other tangents, for other
inputs, into gradients that were not there. Then the forward runs again, eagerly, on the same arguments, from the
generators and the buffers it had, and autograd goes backward through that; the run is recorded, and its backward
is kept beside the others of the same forward. The ranks of a step must agree on it, as they must on any
collective. It is refused, before anything changes, if what the forward read was changed since.

Invariant: guards of a backward are checked when it is called, before anything changes.
Refusals: see `boundary.py`; a result that is a parameter; a saved value that was written in place since, as eager.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from functionalize._compat import below_autograd, current_modes, pytree
from functionalize.core.epilogue import Copy, alias
from functionalize.core.generators import generators_set_to, is_random
from functionalize.core.inputs import Argument, Call, Source
from functionalize.core.program import Program
from functionalize.errors import FunctionalizeError, GuardError, UncapturableError
from functionalize.frontend import arguments
from functionalize.frontend.arguments import flatten_result, unflatten_result
from functionalize.frontend.boundary import Wanted, attach, leaves_of, run_backward
from functionalize.frontend.collector import only_young_collections
from functionalize.frontend.dispatch import Recorder
from functionalize.frontend.fsdp import FSDPEffects, FSDPTensor
from functionalize.frontend.joint import Boundary, JointRecording, Pair
from functionalize.frontend.lifted import lifted
from functionalize.frontend.live import plain_tree
from functionalize.frontend.programs import Kept, key_of
from functionalize.frontend.recording import Entry, Exit, Recording
from functionalize.frontend.sources import Gradient, ModuleTensor, Slot
from functionalize.frontend.step import CapturedStep, Warmup

log = logging.getLogger("functionalize")
_PATIENCE = 4  # forwards in a row that nobody goes backward from, before fewer are recorded


class Leaves(list[Any]):
    """The leaves of a call; tensors that require a gradient are cut from the user's graph. given: uncut."""

    def __init__(self, given: Sequence[Any]) -> None:
        cut = torch.is_grad_enabled()
        super().__init__(_cut(x) if cut and _has_gradient(x) else x for x in given)
        self.given = given
        self.cut = tuple(i for i, x in enumerate(given) if x is not self[i])


def _has_gradient(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _cut(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()


@dataclass(eq=False)
class Backward:
    """One program that goes backward from a forward. used: the saved values that it takes."""

    program: Program
    wanted: Wanted
    used: tuple[str, ...]
    slots: Sequence[Slot]
    effects: FSDPEffects
    replays: int = 0


@dataclass(eq=False)
class Forward(Kept):
    """A program, and the backwards that go with it.

    spec: of what the callable returns, and of the gradients it assigned. results: how many leaves those are; the
    program returns saved values after them. parameters: leaves that a gradient may go to, besides arguments.
    """

    spec: Any = None
    results: int = 0
    saved: tuple[str, ...] = ()
    text: str = ""
    sources: tuple[Source, ...] = ()
    parameters: tuple[Source, ...] = ()
    backwards: list[Backward] = field(default_factory=list)
    random: bool = False


class CapturedForward(CapturedStep):
    """A callable whose forward and backward are replayed, each when it is called."""

    @property
    def backward_programs(self) -> tuple[Program, ...]:
        """Every backward kept, by forward, the last recorded first."""
        forwards = (kept for kept in self._programs if isinstance(kept, Forward))
        return tuple(each.program for kept in forwards for each in kept.backwards)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One forward: a replay if every guard of a program holds, else for real, recording."""
        if any(isinstance(mode, Recorder) for mode in current_modes()):
            self.stats.eager += 1
            return self._fn(*args, **kwargs)
        given, spec = arguments.flatten(args, kwargs)
        leaves = Leaves(given)
        key = key_of(leaves, spec)
        refused = self._refusal(key)
        if refused is not None:
            return self._run_refused(refused, args, kwargs)
        done, result = self._try(key, leaves, spec)
        if done:
            return result
        found = str(result)
        self._note_miss(found)
        waiting = self._unanswered.get(key, 0)
        if self._programs.thrashing or (waiting >= _PATIENCE and waiting & (waiting - 1)):
            self._unanswered[key] = waiting + 1
            self.stats.eager += 1
            return self._fn(*args, **kwargs)
        if leaves.cut:
            args, kwargs = unflatten_result(leaves, spec)
        with only_young_collections():
            recorded = self._forward(args, kwargs, leaves, spec, key, found)
        if isinstance(recorded, Recorded):
            self._unanswered[key] = waiting + 1
            if waiting + 1 == _PATIENCE:
                log.warning(
                    "%s is captured with its backward, and nobody goes backward from what it returns: call "
                    "it under torch.no_grad()",
                    self._name,
                )
            self.stats.eager += 1  # until its backward is recorded
            return recorded.result()
        return recorded

    @property
    def _unanswered(self) -> dict[Hashable, int]:
        """How many forwards of each kind were recorded since one was gone backward from."""
        return self.__dict__.setdefault("unanswered", {})  # type: ignore[no-any-return]

    # -- replay --------------------------------------------------------------------------------

    def _replay(self, kept: Kept, call: Call) -> Any:
        if not isinstance(kept, Forward):
            return super()._replay(kept, call)
        behind = Replayed(self, kept, call)
        values = kept.program.replay(call, self._vote)
        behind.take(values[kept.results :])
        result, gradients = unflatten_result(values[: kept.results], kept.spec)
        for slot, gradient in zip(kept.slots, gradients, strict=True):
            slot.assign(call, gradient)
        self._programs.used(kept)
        self.stats.replays += 1
        inputs = behind.inputs()
        return with_history(result, kept.history, behind, inputs, call.leaves)

    # -- record --------------------------------------------------------------------------------

    def _forward(
        self, args: Any, kwargs: Any, leaves: Leaves, spec: pytree.TreeSpec, key: Hashable, reason: str
    ) -> Any:
        """Run for real, recording: the recorded forward, or the result if that has no history."""
        warmup = self._warmups.setdefault(key, Warmup())
        live = bool(warmup.calls or len(self._programs))
        recorder = Recorder(ignore_fake=True, live=live)
        try:
            entry = Entry.now(self._fn, leaves, recorder, self._varying())
        except FunctionalizeError as error:
            self._refuse(key, error)
            return self._run_refused(error, args, kwargs)
        with lifted(entry.roots.optimizers, entry.lifted, recorder) as hyper, recorder:
            result = self._fn(*args, **kwargs)
        changed = hyper.changed or arguments.changed(args, kwargs, leaves, spec)
        if not any(_is_output(leaf, leaves) for leaf in flatten_result(result)[0]):
            outcome = self._outcome(
                lambda: Recording(recorder, entry, Exit.now(entry, result, changed)), spec, reason, warmup
            )
            self._settle(self._agreed(outcome, recorder), key, warmup)
            return plain_tree(result)
        with torch.no_grad():
            at = Boundary.now(entry, result, recorder, changed)
        return Recorded(self, recorder, at, plain_tree(result), leaves, spec, key, warmup, reason)

    def _kept(self, taken: Recording, spec: pytree.TreeSpec, reason: str) -> Kept:
        if not isinstance(taken, ForwardRecording):
            return super()._kept(taken, spec, reason)
        old = taken.beside
        pair = taken.pair(spec, old.saved if old is not None else ())
        self._count(taken.recorder, pair.forward)
        forward, backward = self._passed(pair.forward), self._passed(pair.backward)
        self.stats.nodes = forward.nodes()
        late = Backward(backward, taken.wanted, pair.used, pair.late_slots, pair.effects)
        kept = Forward(forward, pair.slots, FSDPEffects(), taken.at.exit.history, reason)
        kept.spec, kept.results, kept.saved = taken.at.exit.spec, pair.results, pair.saved
        kept.text, kept.sources, kept.parameters = pair.text, pair.sources, taken.parameters
        kept.backwards = [late]
        kept.random = any(is_random(n) for n in forward.graph.nodes)
        return kept

    def _add(self, key: Hashable, kept: Kept, beside: Forward | None) -> None:
        """Keep a new pair, or the backward of one whose forward there is already."""
        assert isinstance(kept, Forward)
        if beside is None or not _same_forward(beside, kept):
            self._programs.add(key, kept)
            return
        beside.program.graph, beside.program.runner = kept.program.graph, kept.program.runner
        beside.program, beside.saved = kept.program, kept.saved
        beside.backwards[:0] = kept.backwards
        del beside.backwards[_BACKWARDS:]


_BACKWARDS = 8  # kept of one forward
