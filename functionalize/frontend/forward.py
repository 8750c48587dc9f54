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
collective. It is refused (`GuardError`), before anything changes, if what the forward read was changed since.

Invariant: guards of a backward are checked when it is called, before anything changes.
Refusals: `create_graph=True`; a result that is a parameter; arguments that the callable writes in place while they
require a gradient; a saved value that was written since, as in eager.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

from functionalize._compat import pytree
from functionalize.core.collector import only_young_collections
from functionalize.core.generators import is_random
from functionalize.core.inputs import Call, Source
from functionalize.core.program import Program
from functionalize.errors import LoadError, PassError, SaveError
from functionalize.frontend import arguments
from functionalize.frontend.agreement import Vote
from functionalize.frontend.arguments import flatten_result, unflatten_result
from functionalize.frontend.behind import (
    ForwardRecording,
    Leaves,
    Recorded,
    Replayed,
    is_output,
    with_history,
)
from functionalize.frontend.boundary import Wanted
from functionalize.frontend.dispatch import Recorder
from functionalize.frontend.fsdp_state import FSDPEffects
from functionalize.frontend.joint import Boundary
from functionalize.frontend.lifted import lifted
from functionalize.frontend.live import plain_tree
from functionalize.frontend.names import leaf_names
from functionalize.frontend.options import Options
from functionalize.frontend.outcome import Warmup
from functionalize.frontend.programs import Kept, key_of
from functionalize.frontend.recording import Entry, Recording
from functionalize.frontend.sources import Slot, leave
from functionalize.frontend.step import CapturedStep
from functionalize.frontend.world import in_world

log = logging.getLogger("functionalize")
_PATIENCE = 4  # forwards in a row that nobody goes backward from, before fewer are recorded
_BACKWARDS = 8  # kept of one forward
_NOT_WHOLE = (
    "is for a forward that is gone backward from outside (`backward=True`): capture a whole step"
)


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
    text, sources: what tells whether two forwards are the same. beside: one that this may be the same as.
    """

    spec: Any = None
    results: int = 0
    saved: tuple[str, ...] = ()
    text: str = ""
    sources: tuple[Source, ...] = ()
    parameters: tuple[Source, ...] = ()
    backwards: list[Backward] = field(default_factory=list)
    random: bool = False
    beside: Forward | None = None


class CapturedForward(CapturedStep):
    """A callable whose forward and backward are replayed, each when it is called."""

    def __init__(self, forward: Callable[..., Any], options: Options) -> None:
        super().__init__(forward, options)
        if options.compares:
            changing = next(each for each in options.passes if each.changes_collectives)
            raise PassError(
                f"`{changing}` changes collectives, and a forward's backward may be replayed on one rank and run on "
                "another: capture a whole step, or leave the pass out"
            )
        # recorded forwards that nobody went backward from
        self._unanswered: dict[Hashable, int] = {}
        self._shards = False  # whether FSDP2 reduces the gradients
        self._nodes: WeakSet[Any] = WeakSet()

    @property
    def backward_programs(self) -> tuple[Program, ...]:
        """Every backward kept, by forward, the last recorded first."""
        forwards = (kept for kept in self._programs if isinstance(kept, Forward))
        return tuple(each.program for kept in forwards for each in kept.backwards)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Refused: only whole steps are saved."""
        raise SaveError(f"{os.fspath(path)} cannot be saved: it {_NOT_WHOLE}")

    def load(self, path: str | os.PathLike[str]) -> None:
        """Refused: only whole steps are loaded."""
        raise LoadError(f"{os.fspath(path)} cannot be loaded: it {_NOT_WHOLE}")

    @property
    def callable(self) -> Callable[..., Any]:
        """What was captured."""
        return self._fn

    @property
    def reduced_together(self) -> WeakSet[Any]:
        """The nodes of this forward's calls, where FSDP2 would reduce the gradients of all in one backward."""
        return self._nodes if self._shards else WeakSet()

    @property
    def vote(self) -> Vote | None:
        """How the ranks agree, if they must."""
        return self._vote

    def _leaves(self, given: list[Any]) -> Any:
        return Leaves(given)

    def _gives_up(self, key: Hashable) -> bool:
        return super()._gives_up(key) or self._is_ignored(key)

    def _record(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: Any,
        spec: pytree.TreeSpec,
        key: Hashable,
        reason: str,
    ) -> Any:
        recorded = self._forward(args, kwargs, leaves, spec, key, reason)
        if not isinstance(recorded, Recorded):
            return recorded
        self.stats.eager += 1  # until its backward is recorded
        return recorded.result()

    def _is_ignored(self, key: Hashable) -> bool:
        """Whether to record no more for now: nobody went backward from what was recorded."""
        count = self._unanswered[key] = self._unanswered.get(key, 0) + 1
        if count == _PATIENCE + 1:
            log.warning(
                "%s is captured with its backward, and nobody goes backward from what it returns: call it under "
                "torch.no_grad(), or capture it without `backward=True`",
                self._name,
            )
        return count > _PATIENCE and bool(count & (count - 1))

    # -- replay --------------------------------------------------------------------------------

    def _replay(self, kept: Kept, call: Call) -> Any:
        if not isinstance(kept, Forward):
            return super()._replay(kept, call)
        behind = Replayed(self, kept, call)
        values = kept.program.replay(call, self._vote)
        behind.take(values[kept.results :])
        result, gradients = unflatten_result(values[: kept.results], kept.spec)
        leave(call, kept.slots, gradients, kept.effects)
        self._programs.used(kept)
        self.stats.replays += 1
        assert isinstance(call.leaves, Leaves)
        return with_history(result, kept.history, behind, call.leaves, behind.inputs())

    def missed_backward(self, reason: str) -> None:
        """No backward of a forward covers what it is asked for."""
        self._note_miss(f"backward: {reason}")
        self.stats.reruns += 1

    def run_again(self, leaves: Leaves, kept: Forward, reason: str) -> Any:
        """The forward for real, on the leaves of an earlier call; its backward may be kept beside the others."""
        spec = kept.program.in_spec
        fresh = Leaves(leaves)
        args, kwargs = unflatten_result(fresh, spec)  # type: ignore[arg-type]
        key = key_of(fresh, spec)
        return self._forward(args, kwargs, fresh, spec, key, reason, kept)

    # -- record --------------------------------------------------------------------------------

    def _forward(
        self,
        args: Any,
        kwargs: Any,
        leaves: Leaves,
        spec: Any,
        key: Hashable,
        reason: str,
        beside: Forward | None = None,
    ) -> Any:
        """Run for real, recording: what is behind the outputs, or the result if none has a history."""
        if leaves.cut:
            args, kwargs = unflatten_result(leaves, spec)
        warmup = self._warmups.setdefault(key, Warmup())
        live = bool(warmup.calls or self.stats.captures or len(self._programs))
        recorder = Recorder(ignore_fake=not in_world(), live=live, for_real=True)
        try:
            with only_young_collections():
                names = leaf_names(self._fn, spec)
                entry = Entry.now(self._fn, leaves, recorder, self._varying(), names)
            recorder.arguments = entry.places.arguments()
            self._shards = bool(entry.fsdp.places)
        except Exception as error:
            return self._refused_before(key, error, args, kwargs)
        with only_young_collections():
            with lifted(entry.roots.optimizers, entry.lifted, recorder) as hyper, recorder:
                result = self._fn(*args, **kwargs)
            changed = hyper.changed or arguments.changed(args, kwargs, leaves, spec)
            if any(is_output(leaf) for leaf in flatten_result(result)[0]):
                at = Boundary.now(entry, result, recorder, changed)
                result = plain_tree(result)
                return Recorded(
                    self, recorder, at, result, leaves, spec, key, warmup, reason, beside
                )
            self._unanswered.pop(key, None)
            self._conclude(entry, recorder, result, changed, spec, key, reason, warmup)
        return plain_tree(result)

    def recorded(
        self,
        take: Callable[[], ForwardRecording],
        recorder: Recorder,
        spec: pytree.TreeSpec,
        key: Hashable,
        warmup: Warmup,
        reason: str,
        again: bool,
    ) -> None:
        """The backward of a recorded forward (run `again`?) ran: keep both, or not yet, or refuse them."""
        self._unanswered.pop(key, None)
        outcome = self._agreed(self._outcome(take, spec, reason, warmup), recorder)
        if not again:
            self.stats.eager -= 1  # it was counted so until now
        elif (vote := Vote.among(recorder)) is not None:
            # A rank that kept it alone would replay where the others run their forwards again.
            outcome = outcome.unless(vote.worst(outcome.level))
        self._settle(outcome, key, warmup)

    def _kept(self, taken: Recording, spec: pytree.TreeSpec, reason: str) -> Kept:
        if not isinstance(taken, ForwardRecording):
            return super()._kept(taken, spec, reason)
        beside = taken.beside
        pair = taken.pair(spec, beside.saved if beside is not None else ())
        forward, backward = (
            self._options.applied(pair.forward),
            self._options.applied(pair.backward),
        )
        self.stats.count(taken.recorder, pair.forward.nodes() + pair.backward.nodes(), forward)
        self.stats.nodes += backward.nodes()
        late = Backward(backward, taken.wanted, pair.used, pair.late_slots, pair.effects)
        return Forward(
            forward,
            pair.slots,
            FSDPEffects(),
            taken.at.exit.history,
            reason,
            spec=taken.at.exit.spec,
            results=pair.results,
            saved=pair.saved,
            text=pair.text,
            sources=pair.sources,
            parameters=taken.parameters,
            backwards=[late],
            random=any(is_random(node) for node in forward.graph.nodes),
            beside=beside,
        )

    def _keep(self, key: Hashable, kept: Kept) -> None:
        beside = getattr(kept, "beside", None)
        if beside is None or not isinstance(kept, Forward) or not _are_same(beside, kept):
            super()._keep(key, kept)
            return
        # The same forward, which now saves what either backward needs; it began in another state than the first.
        kept.program.facts = beside.program.facts
        beside.program, beside.saved = kept.program, kept.saved
        beside.backwards = [*kept.backwards, *beside.backwards][:_BACKWARDS]


def _are_same(a: Forward, b: Forward) -> bool:
    """Whether two forwards run the same ops on the same inputs."""
    return (
        a.text == b.text
        and len(a.sources) == len(b.sources)
        and all(_place(x) == _place(y) for x, y in zip(a.sources, b.sources, strict=True))
    )


def _place(source: Any) -> Any:
    """What tells two sources apart: their types, what they name, and the objects they look in."""
    if source is None or isinstance(source, (str, int, tuple)):
        return source
    slots = getattr(type(source), "__slots__", None)
    if slots is None or not hasattr(source, "resolve"):
        return id(source)
    return type(source), *[_place(getattr(source, name)) for name in slots]
