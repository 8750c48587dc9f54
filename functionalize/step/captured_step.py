"""A captured step: a whole training step, run for real while it is recorded, replayed from then on.

    step = functionalize.capture(train_step)
    step(batch)      runs eagerly and records, until the step is in its steady state
    step(batch)      replays: one flat sequence of functional ops, then the epilogue

    call -> replay a cached program whose guards hold
         -> else record -> judge -> build -> agree, then keep the outcome on which all ranks agreed (`stages.py`)

Which recording is kept: see Note [Steady state] in `recording.py`. Several programs live side by side, see
`cache.py`; when ranks must agree on replay or capture, see `vote.py`.
Invariants: the effects of a step are applied exactly once per call. If a guard fails, nothing has changed yet, and the
call runs eagerly while it is recorded. An exception of the step propagates as in eager, and no program is kept.
Refusals (see `recording.py`): effects that a replay cannot repeat, and state that never settles. The call that was
recorded returns its result; the next call raises `UncapturableError` before it runs anything, or runs eagerly
(`on_uncapturable="eager"`).
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from functionalize._compat.dispatch import current_modes
from functionalize.errors import FunctionalizeError, GuardError
from functionalize.fake_world.world import in_world
from functionalize.fsdp.releases import warn_if_untested
from functionalize.ir.inputs import Call
from functionalize.lifetimes.observer import LifetimeObserver
from functionalize.program.collective_order import fingerprints
from functionalize.program.program import Program
from functionalize.recorder.live_scalars import plain_tree, was_refused
from functionalize.recorder.recorder import Recorder
from functionalize.state import arguments
from functionalize.state.detached_outputs import refuse_backward
from functionalize.state.hyperparameters import Key
from functionalize.state.sources import leave
from functionalize.step.cache import CachedProgram, ProgramCache, key_of
from functionalize.step.explain import explanation
from functionalize.step.options import CaptureOptions
from functionalize.step.outcome import Built, Outcome, Refused, WarmUp
from functionalize.step.recording import RecordingSummary, StepRecording
from functionalize.step.stages import (
    FinishedRun,
    Invocation,
    RecordedRun,
    agree,
    build,
    judge,
    record,
)
from functionalize.step.stats import ProgramCounts, Stats
from functionalize.step.step_file import SavedStep, load_step, save_step
from functionalize.step.step_memory import StepMemory
from functionalize.step.vote import Level, RankVote
from functionalize.util.gc_pause import only_young_collections

log = logging.getLogger("functionalize")
_EVERY_CALL = object()  # the key of a refusal that holds for calls of every kind
_COLLECTIVES_DIFFER = (
    "after the passes the programs of the ranks issue different collectives for this call, as they may where ranks "
    "have arguments of different sizes: give passes that decide by memory no budget"
)


class CapturedStep:
    """A training step that is recorded in its steady state and replayed after."""

    def __init__(self, train_step: Callable[..., Any], options: CaptureOptions) -> None:
        functools.update_wrapper(self, train_step)
        self.stats = Stats()
        self._fn, self._options = train_step, options
        self._name = getattr(train_step, "__name__", type(train_step).__name__)
        self._cache = ProgramCache(self._name, options.max_programs)
        # key of a call -> (how many recordings were not kept, the summary of the last of them)
        self._warmups: dict[Hashable, tuple[int, RecordingSummary]] = {}
        self._refused: dict[Hashable, FunctionalizeError] = {}
        self._changed_hyperparameters: frozenset[Key] = frozenset()
        self._last_kept: RecordingSummary | None = None
        self._vote: RankVote | None = None
        self._plain_reads = False  # whether C code has refused a live number
        self._collectives_differ = (
            False  # whether the ranks' programs for this call issue different collectives
        )

    @property
    def program(self) -> Program | None:
        """The program that was last made or replayed."""
        latest = self._cache.latest
        return latest.program if latest is not None else None

    @property
    def memory(self) -> StepMemory | None:
        """The memory of the step, with the lifetimes of eager and of the program; None without `memory=True`."""
        latest = self._cache.latest
        return latest.memory if latest is not None else None

    @property
    def programs(self) -> tuple[Program, ...]:
        """All cached programs, the most recently used at the end."""
        return tuple(cached.program for cached in self._cache)

    @property
    def is_busy(self) -> bool:
        """Whether another recording is active, of which this call is then a part."""
        return any(isinstance(mode, Recorder) for mode in current_modes())

    def explain(self) -> str:
        """Why each program exists, which guards missed, where each input comes from, what was refused."""
        return explanation(self._name, self.stats, self._cache, self._refused.values())

    def forget(self) -> None:
        """Drop every program; the next call is recorded, and kept at once if the step was captured before."""
        self._cache = ProgramCache(self._name, self._options.max_programs)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the programs to a file (one per rank: `step.rank0.fzp`), for `load` in another process.

        Raises `SaveError`, with nothing written, if a program refers to an object that has no name in the step.
        """
        saved = SavedStep(list(self._cache.items()), self._changed_hyperparameters, self._vote)
        save_step(path, self._fn, saved)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Add the programs that `save` wrote: the next call replays if the guards of one hold.

        Every rank must call it: it initialises FSDP2 if that has not run yet. Raises `LoadError`, with nothing
        loaded on any rank, if a file is damaged or is for another version, world, model, optimizer or code.
        """
        saved = load_step(path, self._fn)
        for key, cached in saved.programs:
            self._cache.add(key, cached)
        self._changed_hyperparameters |= saved.hyperparameters
        self._vote = saved.vote | self._vote if saved.vote is not None else self._vote

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step: a replay if all guards of a program hold, else a real run that is recorded.

        Inside another recording the call is part of that recording, and only runs the callable.
        """
        grad_mode = torch.is_grad_enabled()
        try:
            if self.is_busy:
                return self._run_eagerly(args, kwargs)
            flat, spec = arguments.flatten(args, kwargs)
            leaves = self._leaves(flat)
            key = key_of(leaves, spec)
            refused = self._refused.get(key) or self._refused.get(_EVERY_CALL)
            if refused is not None:
                return self._run_refused(refused, args, kwargs)
            is_replayed, result = self._try_replay(key, leaves, spec)
            if is_replayed:
                return result
            call = Invocation(args, kwargs, leaves, spec, key, reason=str(result))
            self._note_miss(call.reason)
            if self._skips_recording(key):
                return self._run_eagerly(args, kwargs)
            return self._capture(call)
        except Exception:
            raise
        except (
            BaseException
        ):  # Ctrl-C can interrupt between a change of the grad mode and its reset
            torch.set_grad_enabled(grad_mode)
            raise

    def _leaves(self, flat: list[Any]) -> Sequence[Any]:
        """The leaves of the arguments with which the callable is called."""
        return flat

    def _skips_recording(self, key: Hashable) -> bool:
        """Whether to run this call eagerly, unrecorded; if ranks vote, all ranks decide alike."""
        return self._collectives_differ or (self._cache.thrashing and self._vote is None)

    def _note_miss(self, reason: str) -> None:
        if len(self._cache):
            log.info("recording %s again: %s", self._name, reason)
            self.stats.missed(reason)

    def _run_eagerly(self, args: Any, kwargs: Any) -> Any:
        self.stats.eager += 1
        return self._fn(*args, **kwargs)

    # -- replay --------------------------------------------------------------------------------

    def _try_replay(self, key: Hashable, leaves: Sequence[Any], spec: Any) -> tuple[bool, Any]:
        """(True, result) if a program was replayed, on every rank if they vote; else (False, the reason why not)."""
        matching = self._cache.matching(key, leaves, spec)
        found = next(matching, None)
        if self._vote is not None:
            worst = self._vote.before_replay(found[0].fingerprints if found is not None else None)
            self._collectives_differ = worst is Level.DIFFERENT
            if self._collectives_differ:
                if _COLLECTIVES_DIFFER not in self.stats.guard_failures:
                    log.warning("%s runs eagerly: %s", self._name, _COLLECTIVES_DIFFER)
                return False, _COLLECTIVES_DIFFER
            if worst is not Level.KEPT:
                return False, self._cache.reason or "a guard failed on another rank"
        while found is not None:
            try:
                return True, self._replay(*found)
            except GuardError as error:
                self._cache.missed(str(error))
            # With a vote, the graph has issued its collectives: no other program is tried, all ranks run eagerly.
            found = None if self._vote is not None else next(matching, None)
        return False, self._cache.reason

    def _replay(self, cached: CachedProgram, call: Call) -> Any:
        vote = self._vote
        if vote is not None and vote.compares and not cached.program.value_guards:
            vote = None  # the equal fingerprints say that no rank's program has value guards
        result, gradients = cached.program.replay(call, vote)
        leave(call, cached.slots, gradients, cached.effects)
        self._cache.used(cached)
        self.stats.replays += 1
        return refuse_backward(result, cached.has_grad_fn)

    # -- record, judge, build, agree, keep -----------------------------------------------------

    def _capture(self, call: Invocation) -> Any:
        """Run a call for real while it is recorded; keep its program if it was the steady state."""
        with only_young_collections():
            run = self._record(call)
            if isinstance(run, RecordedRun):
                self._finish(run, call)
                return plain_tree(run.result)
        return self._run_unrecordable(run, call)

    def _record(self, call: Invocation) -> RecordedRun | Refused:
        warn_if_untested()
        # Numbers are live only from the second recording on: the first one has shown that the step stores none of them.
        live = bool(call.key in self._warmups or self.stats.captures or len(self._cache))
        observer = LifetimeObserver() if self._options.memory else None
        recorder = Recorder(not in_world(), live=live, for_real=True, observer=observer)
        for cached in self._cache:
            for fact in cached.program.facts:
                self._changed_hyperparameters |= getattr(fact, "changed_keys", frozenset)()
        if recorder.scalar_log is not None:
            recorder.scalar_log.plain_reads = self._plain_reads
        try:
            return record(self._fn, call, recorder, self._changed_hyperparameters)
        except Exception as error:
            self._plain_reads |= was_refused(error)
            raise

    def _finish(self, run: FinishedRun, call: Invocation, rerun: bool = False) -> None:
        """The stages after a recorded run. rerun: it was a forward that ran again, for a backward without a program."""
        calls, previous = self._warmups.get(call.key, (0, self._last_kept))
        verdict = judge(run, calls, previous)
        outcome = build(verdict, lambda recording: self._build(recording, call))
        agreed = agree(outcome, run.recorder, self._vote, self._options.compares, rerun)
        self._vote = agreed.vote
        self._keep(agreed.outcome, call.key)

    def _build(self, recording: StepRecording, call: Invocation) -> Built:
        """The program of a recording, after the passes."""
        recorded = recording.program(call.spec)
        program = self._options.applied(recorded)
        counts = ProgramCounts.of(recording.recorder, recorded.nodes(), program)
        exit = recording.exit
        cached = CachedProgram(
            program,
            exit.assigned,
            exit.effects,
            exit.has_grad_fn,
            call.reason,
            fingerprints=(
                fingerprints(program.graph, bool(program.value_guards))
                if self._options.compares
                else {}
            ),
            memory=StepMemory.of(recording, recorded, program),
        )
        return Built(cached, recording.summary, counts)

    def _keep(self, outcome: Outcome, key: Hashable) -> None:
        """Keep the program, the summary with which the next recording is compared, or the refusal."""
        if isinstance(outcome, Built):
            self._add(key, outcome.cached)
            self._warmups.pop(key, None)
            self._last_kept = outcome.summary
            self.stats.captured(outcome.counts)
        elif isinstance(outcome, WarmUp):
            log.info("warming up %s: %s", self._name, outcome.reason)
            calls, _ = self._warmups.get(key, (0, None))
            self._warmups[key] = calls + 1, outcome.summary
            self.stats.warmups += 1
        else:
            self._refuse(_EVERY_CALL if outcome.everywhere else key, outcome.error)
            self.stats.warmups += 1

    def _add(self, key: Hashable, cached: CachedProgram) -> None:
        self._cache.add(key, cached)

    # -- refusals ------------------------------------------------------------------------------

    def _refuse(self, key: Hashable, error: FunctionalizeError) -> None:
        self._warmups.pop(key, None)
        self._refused[key] = error
        then = "its next call will raise" if self._options.raises else "it runs eagerly from now on"
        log.warning("%s cannot be captured, %s: %s", self._name, then, error)

    def _run_refused(self, error: FunctionalizeError, args: Any, kwargs: Any) -> Any:
        """A call whose key was refused before."""
        if self._options.raises:
            raise error
        if self._vote is None or _EVERY_CALL in self._refused:
            return self._run_eagerly(args, kwargs)
        self._vote.before_replay(
            None
        )  # the other ranks wait for this vote, then record, and vote again
        return self._run_unrecorded(error, args, kwargs)

    def _run_unrecordable(self, refused: Refused, call: Invocation) -> Any:
        """A call that failed before the step ran, since its objects cannot be inspected."""
        self._refuse(call.key, refused.error)
        if self._options.raises and not refused.is_bug:
            raise refused.error
        return self._run_unrecorded(refused.error, call.args, call.kwargs)

    def _run_unrecorded(self, error: FunctionalizeError, args: Any, kwargs: Any) -> Any:
        """Run a call that cannot be recorded; if ranks vote, no rank captures the step from now on."""
        result = self._fn(*args, **kwargs)
        if self._vote is not None:
            self._vote.worst(Level.REFUSED)
            self._refuse(_EVERY_CALL, error)
        self.stats.eager += 1
        return result
