"""`capture`: a whole training step, run once for real while it is recorded, replayed from then on.

    step = functionalize.capture(train_step)
    step(batch)      runs eagerly and records, until the step is in its steady state
    step(batch)      replays: one flat sequence of functional ops, then the epilogue

Which recording is kept: see Note [Steady state] in `recording.py`.
Invariants: a step is never lost and never run twice. A guard that fails means that the call runs eagerly,
recording; nothing was changed before. An exception passes through as eager raised it, and no program is kept.
Refusals (see `recording.py`): what a replay could not repeat, and state that never settles. The step that was
recorded is returned; the next call raises `UncapturableError` before it runs anything.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from functionalize._compat import pytree
from functionalize.core.inputs import Call, Source
from functionalize.core.program import Program
from functionalize.core.rules.resizes import RESIZE_STORAGE
from functionalize.errors import FunctionalizeError, GuardError, UncapturableError
from functionalize.frontend.agreement import Vote, collectives
from functionalize.frontend.collector import only_young_collections
from functionalize.frontend.dispatch import Recorder
from functionalize.frontend.history import without_history
from functionalize.frontend.recording import Entry, Exit, Recording

log = logging.getLogger("functionalize")
_MAX_WARMUPS = 5
_FAILURES_KEPT = 100


@dataclass(slots=True)
class Stats:
    """What happened so far, and what the current program was made from.

    calls = warmups + captures + replays (a warm-up ran eagerly and was not kept). ops, resizes: recorded.
    guard_failures: the last hundred. nodes_recorded, nodes: in the graph before and after the passes.
    """

    warmups: int = 0
    captures: int = 0
    replays: int = 0
    guard_failures: list[str] = field(default_factory=list)
    ops: int = 0
    resizes: int = 0
    nodes_recorded: int = 0
    nodes: int = 0
    collectives: Counter[str] = field(default_factory=Counter)
    inputs: int = 0
    guards: int = 0


def capture(
    train_step: Callable[..., Any] | None = None, *, passes: Sequence[Any] | str = ()
) -> Any:
    """Record `train_step` (any callable; also a decorator) and replay it from then on.

    passes: a pipeline for the program: its text (`"elide_copies"`) or `Pass` objects, see `docs/passes.md`.
    A step that cannot be captured runs, and its next call raises `UncapturableError` before anything ran;
    whatever the step itself raises passes through.
    """
    if train_step is None:
        return functools.partial(capture, passes=passes)
    return CapturedStep(train_step, passes)


class CapturedStep:
    """A training step that is recorded in its steady state and replayed after."""

    def __init__(self, train_step: Callable[..., Any], passes: Sequence[Any] | str) -> None:
        functools.update_wrapper(self, train_step)
        self.stats = Stats()
        self.program: Program | None = None
        self._fn, self._passes = train_step, _parsed(passes)
        self._name = getattr(train_step, "__name__", type(train_step).__name__)
        self._gradients: list[Source] = []
        self._history: list[bool] = []
        self._vote: Vote | None = None
        self._before: Recording | None = None
        self._attempts = 0
        self._refused: FunctionalizeError | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step: a replay if every guard holds, else for real, recording."""
        if self._refused is not None:
            raise self._refused
        leaves, in_spec = pytree.tree_flatten((args, kwargs))
        if self.program is not None:
            done, result = self._replay(self.program, leaves, in_spec)
            if done:
                return result
        with only_young_collections():
            return self._record(args, kwargs, leaves, in_spec)

    # -- replay --------------------------------------------------------------------------------

    def _replay(
        self, program: Program, leaves: Sequence[Any], in_spec: pytree.TreeSpec
    ) -> tuple[bool, Any]:
        call: Call | str = "the structure of the arguments changed"
        if in_spec == program.in_spec:
            call = program.resolve(leaves)
        if self._vote is not None and self._vote.any_failed(isinstance(call, str)):
            call = call if isinstance(call, str) else "a guard failed on another rank"
        if isinstance(call, Call):
            try:
                result, gradients = program.replay(call, self._vote)
            except GuardError as error:
                call = str(error)
            else:
                for source, gradient in zip(self._gradients, gradients, strict=True):
                    source.resolve(call).grad = gradient
                self.stats.replays += 1
                return True, without_history(result, self._history)
        log.info("recapturing %s: %s", self._name, call)
        self.stats.guard_failures.append(call)
        del self.stats.guard_failures[:-_FAILURES_KEPT]
        self.program, self._before, self._attempts = None, None, 0
        return False, None

    # -- record --------------------------------------------------------------------------------

    def _record(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: Sequence[Any],
        in_spec: pytree.TreeSpec,
    ) -> Any:
        recorder = Recorder(ignore_fake=True)
        entry = Entry.now(self._fn, leaves, recorder)
        with recorder:
            result = self._fn(*args, **kwargs)
        after = Exit.now(entry, result)
        try:
            with torch.no_grad(), recorder.quiet():
                self._take(Recording(recorder, entry, after), in_spec)
        except FunctionalizeError as error:
            self._refused, self._before = error, None
            log.warning("%s cannot be captured, its next call will raise: %s", self._name, error)
        self._history = [
            isinstance(x, torch.Tensor) and x.requires_grad and x.grad_fn is not None
            for x in pytree.tree_leaves(result)
        ]
        return result

    def _take(self, taken: Recording, in_spec: pytree.TreeSpec) -> None:
        """Keep the recording if it is the steady state; raises if it never will be."""
        refused = taken.refused()
        if refused is not None:
            raise UncapturableError(refused)
        unsettled = taken.unsettled(self._before)
        if unsettled is None:
            self._keep(taken, in_spec)
            return
        self._before = taken
        self._attempts += 1
        self.stats.warmups += 1
        log.info("warming up %s: %s", self._name, unsettled)
        if self._attempts >= _MAX_WARMUPS:
            raise UncapturableError(
                f"the step did not settle in {self._attempts} calls: {unsettled}"
            )

    def _keep(self, taken: Recording, in_spec: pytree.TreeSpec) -> None:
        program, stats = taken.program(in_spec), self.stats
        stats.nodes_recorded = program.nodes()
        if self._passes:
            import passes  # the arrow of imports points from passes to here

            program = passes.run(program, self._passes)
        records = taken.recorder.records
        stats.ops, stats.nodes = len(records), program.nodes()
        stats.resizes = sum(r.target is RESIZE_STORAGE for r in records)
        stats.collectives = collectives(program)
        stats.inputs, stats.guards = len(program.inputs), len(program.guards)
        stats.captures += 1
        self.program, self._gradients, self._before = program, taken.assigned, None
        self._vote = Vote.of(program)


def _parsed(pipeline: Sequence[Any] | str) -> Sequence[Any]:
    """The passes of a pipeline; a mistake in its text is told before any step runs."""
    if not isinstance(pipeline, str):
        return pipeline
    import passes

    return passes.parse(pipeline)
