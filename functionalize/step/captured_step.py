"""A captured step: a whole training step, run for real while it is recorded, replayed from then on.

    step = functionalize.capture(train_step)
    step(batch)      runs eagerly and records, until the step is in its steady state
    step(batch)      replays: one flat sequence of functional ops, then the epilogue

    class Trainer:
        @functionalize.capture
        def step(self, batch): ...       every trainer has a captured step of its own: `trainer.step.stats`

    call -> replay a cached program whose guards hold
         -> else record -> judge -> build -> agree, then keep the outcome on which all ranks agreed (`stages.py`)

Which recording is kept: see Note [Steady state] in `recording.py`. Several programs live side by side, see
`cache.py`; when ranks must agree on replay or capture, see `vote.py`.
Invariants: the effects of a step are applied exactly once per call. If a guard fails, nothing has changed yet, and the
call runs eagerly while it is recorded; if an op of a replay fails before anything changed, the call runs eagerly. An
exception of the step propagates as in eager, and no program is kept.
Refusals (see `recording.py`): effects that a replay cannot repeat, and state that never settles. The call that was
recorded returns its result; the next call raises `UncapturableError` before it runs anything, or runs eagerly
(`on_uncapturable="eager"`).
"""

from __future__ import annotations

import functools
import logging
import math
import os
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from functionalize._compat.autograd import is_transformed
from functionalize._compat.dispatch import current_modes
from functionalize.audit.signature import Signature
from functionalize.errors import FunctionalizeError, LoadError, SaveError, UncapturableError
from functionalize.fake_world.world import in_world
from functionalize.fsdp.releases import warn_if_untested
from functionalize.lifetimes.observer import LifetimeObserver
from functionalize.lifetimes.step_memory import StepMemory
from functionalize.program.archive import damaged, refusal
from functionalize.program.program import Program
from functionalize.recorder.recorder import Recorder
from functionalize.recorder.watched_recorder import WatchedRecorder
from functionalize.scalars.escaped_numbers import replace_escaped
from functionalize.scalars.live_scalars import plain_tree, was_refused
from functionalize.state import arguments
from functionalize.state.python_state import VaryingNumbers
from functionalize.step.cache import RESTS, CachedProgram
from functionalize.step.copies import CopiedStep
from functionalize.step.explain import explanation
from functionalize.step.next_call import NextCall
from functionalize.step.options import CaptureOptions
from functionalize.step.outcome import Built, NotYet, Outcome, Refused, Unkept, WarmUp
from functionalize.step.plan import Eager, LastPlan, Record, Replay
from functionalize.step.policy import BUILDING
from functionalize.step.recording import StepRecording
from functionalize.step.replayed_step import EVERY_CALL, WAITS
from functionalize.step.stages import (
    MAX_WARMUPS,
    MOST_WARMUPS,
    FinishedRun,
    Invocation,
    RecordedRun,
    agree,
    build,
    judge,
    record,
)
from functionalize.step.stats import ProgramCounts
from functionalize.step.step_file import SavedStep, load_step, save_step
from functionalize.step.turns import IMPATIENCE, MOST_DISTURBED, PATIENCE, TURNS
from functionalize.step.vote import RARE, Level, RankVote
from functionalize.util.gc_pause import only_young_collections
from functionalize.util.own_values import own_values
from functionalize.util.process_groups import has_ranks
from functionalize.util.text import without_numbers
from functionalize.util.user_warning import warn_uncapturable
from functionalize.walk.live_places import NO_PLACES, LivePlaces
from functionalize.walk.unread import ReadArguments, looks_at_frames

log = logging.getLogger("functionalize")


class CapturedStep(CopiedStep):
    """A training step that is recorded in its steady state and replayed after."""

    _why_unsaved = ""  # for messages: why no file can hold its programs

    def __init__(self, train_step: Callable[..., Any], options: CaptureOptions) -> None:
        super().__init__(train_step, options)
        functools.update_wrapper(self, train_step)
        self._arguments = ReadArguments(train_step)
        self._plain_reads = False  # whether C code has refused a live number
        self._repeats_calls = False  # whether a recording had calls that a replay makes again
        self._varying = VaryingNumbers()
        self._patience, self._disturbed = PATIENCE, 0  # how many recordings others have disturbed
        self._reads_no_clock = False  # whether such a recording was watched, and read no clock

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
        """Whether this call is a part of another recording, of a transform of torch.func, or of forward-mode AD."""
        return is_transformed() or any(isinstance(mode, Recorder) for mode in current_modes())

    def explain(self, verbose: bool = False) -> str:
        """What the next call would do and why, then what went wrong, then the programs, one a line.

        verbose: where each input of each program comes from, too, and its guards on numbers.
        """
        next_call = NextCall(
            self._last_plan,
            self._cache,
            self._policy,
            self._refused,
            EVERY_CALL,
            self._options.raises,
            self._warmups,
            self._is_due,
            self._vote is not None,
        )
        return explanation(
            self._name,
            self.boundary,
            next_call.text,
            self.stats,
            self._cache,
            self._refused.values(),
            self._sizes_text,
            verbose,
        )

    def forget(self) -> None:
        """Drop every program; the next call is recorded, and kept at once if the step was captured before."""
        self._policy = self._options.policy()
        self._cache, self._lengths = self._empty_cache(), self._options.lengths()
        self._last_plan = None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the programs to a file (one per rank: `step.rank0.fzp`), for `load` in another process.

        Raises `SaveError`, with nothing written, if a program refers to an object that has no name in the step. Only
        whole steps are saved, not a forward (`backward=True`) or the backwards of eager graphs.
        """
        if self._why_unsaved:
            raise refusal(path, SaveError(self._why_unsaved), "saved")
        for key, cached in list(self._cache.items()):
            if cached.waits or cached.is_bare:
                self._optimise(key, cached)
        found = self._cache, self._lengths, self._changed_hyperparameters, self._vote
        save_step(path, self._fn, SavedStep.of(*found))

    def load(
        self,
        path: str | os.PathLike[str],
        types: Sequence[type] = (),
        ops: Sequence[str] = (),
    ) -> None:
        """Add the programs that `save` wrote: the next call replays if the guards of one hold.

            step.load("step.fzp", types=[Batch], ops=["mylib"])

        types, ops: classes of yours, and namespaces of custom ops, that the file may name beside those that the
        code of the step names. Every rank must call it: it initialises FSDP2 if that has not run yet.
        Raises `LoadError`, with nothing loaded on any rank, if a file is damaged, is for another version, world,
        model, optimizer or code, or needs a class or an op that neither the step nor an argument names.
        """
        if self._why_unsaved:
            raise refusal(path, LoadError(self._why_unsaved), "loaded")
        saved = load_step(path, self._fn, types, ops)
        try:
            programs = [(self._key_with_sizes(k, c.program), c) for k, c in saved.programs]
        except Exception as error:  # keys that no step has
            raise refusal(path, damaged(error), "loaded") from error
        for key, cached in programs:
            self._cache.add(key, cached)
        if self._lengths is not None:
            self._lengths.restore(saved.classes)
        self._changed_hyperparameters |= saved.hyperparameters
        self._vote = saved.vote | self._vote if saved.vote is not None else self._vote

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """As an attribute of a class: a bound method, for each instance a captured step of its own.

        Of a `classmethod` each class has one of its own; a `staticmethod` has one.
        """
        bind = getattr(type(self._fn), "__get__", None)
        bound = self._fn if bind is None else bind(self._fn, instance, owner)
        holder = getattr(bound, "__self__", None)
        if holder is None or bound is self._fn:
            return self
        own = own_values(holder)
        if own is not None:
            if self not in own:
                own[self] = type(self)(bound, self._options)
            return own[self]
        error = UncapturableError(
            f"the method `{self._name}` of a {type(holder).__name__} cannot be captured: its programs are kept in the "
            "`__dict__` of the object, which has none. Add `__dict__` to its `__slots__`"
        )
        if self._options.raises:
            raise error
        if EVERY_CALL not in self._refused:
            self._refuse(EVERY_CALL, error)
        return bound

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step: a replay if all guards of a program hold, else a real run that is recorded.

        Inside another recording, or a transform (`torch.func`, forward-mode AD), it is a part of that: eager.
        """
        grad_mode = torch.is_grad_enabled()
        try:
            self._policy.ledger.call()
            if self.is_busy or self._rests():
                return self._run_eagerly(args, kwargs)
            if EVERY_CALL in self._refused and not self._options.raises:
                return self._run_eagerly(args, kwargs)
            turn = self._take_turn()
            if turn is None:
                return self._run_eagerly(args, kwargs)
            with turn:
                return self._run_in_turn(args, kwargs)
        except Exception:
            raise
        except BaseException:  # Ctrl-C can come between a change of the grad mode and its reset
            torch.set_grad_enabled(grad_mode)
            raise

    def _take_turn(self) -> AbstractContextManager[None] | None:
        """The turn of this call among those of other threads; None: one of them waits inside its turn.

        Ranks must all do the same in this call, so among ranks it waits.
        """

        def patience() -> float:
            return math.inf if self._vote is not None or has_ranks() else self._patience

        turn = TURNS.take(patience)
        if turn is None and self._patience == PATIENCE:
            self._patience = IMPATIENCE
            warn_uncapturable(
                f"{self._name} runs eagerly where a captured step in another thread runs and waits inside"
            )
        return turn

    def _run_in_turn(self, args: Any, kwargs: Any) -> Any:
        flat, spec = arguments.flatten(*self._arguments.of(args, kwargs))
        leaves = self._leaves(flat)
        key = self._key(leaves, spec)
        self._cache.begin_call()
        self._last_plan = LastPlan(key, Replay)
        refused = self._refused.get(key) or self._refused.get(EVERY_CALL)
        if refused is not None:
            return self._run_refused(refused, args, kwargs)
        call = Invocation(args, kwargs, leaves, spec, key)
        if self._vote is None and not self._cache.has(key) and self._is_skipped(call):
            return self._stay_eager(call, "calls of its kind were not worth a recording")
        is_done, result = self._try_replay(call)
        if is_done:
            return result
        if is_done is None:
            log.warning("a replay of %s failed, the call runs eagerly: %s", self._name, result)
            return self._stay_eager(call, f"a replay failed: {result}")
        call = replace(call, reason=str(result))
        if call.reason not in (RARE, WAITS, RESTS):
            self._note_miss(call.reason)
        if (why := self._why_not_recorded(call)) is not None:
            return self._stay_eager(call, why)
        if self._disturbed >= MOST_DISTURBED:
            TURNS.end_innermost()
            return self._stay_eager(call, "steps of other threads have run in its recordings")
        if self._has_live_numbers and self._is_read_elsewhere():
            return self._stay_eager(call, "another thread may read the numbers of a recording")
        self._last_plan = LastPlan(call.key, Record, call.reason)
        return self._capture(call)

    def _stay_eager(self, call: Invocation, why: str) -> Any:
        """The callable itself. why: for `explain`."""
        self._last_plan = LastPlan(call.key, Eager, why)
        return self._run_eagerly(call.args, call.kwargs)

    def _leaves(self, flat: list[Any]) -> Sequence[Any]:
        """The leaves of the arguments with which the callable is called."""
        return flat

    def _why_not_recorded(self, call: Invocation) -> str | None:
        """Why this call runs eagerly, unrecorded; None: it is recorded. If ranks vote, all ranks decide alike."""
        if self._is_left_eager or self._vote is not None:
            return call.reason if self._is_left_eager else None
        rest = self._policy.rest
        if self._cache.is_hurried or rest.takes_call():
            return RESTS
        if self._cache.thrashing or rest.goes_on(self.stats.replays + self.stats.audits):
            self._cache.give_up()
            rest.begin(self.stats.replays + self.stats.audits)
            return RESTS if rest.takes_call() else None
        if not self._may_record(call.key):
            if self._cache.miss is not None:
                rest.is_in_vain(self._cache.looked_slowly)
            return (
                f"{call.reason}; recordings of calls that differ there were of no use, one is made where what is found "
                "there has come before"
            )
        most = MAX_WARMUPS if self._has_settled else MOST_WARMUPS
        if self._unsettled.skips(call.reason, most):
            return self._unsettled.why(call.reason)
        return None

    def _rests(self) -> bool:
        """Whether the step rests, and asks no program: then a call costs nothing beyond eager."""
        rest = self._policy.rest
        if rest.is_vain:
            self._cache.is_hurried = not rest.asks_none and rest.takes_call()
            return rest.asks_none and rest.takes_call()
        self._cache.is_hurried = False
        return not len(self._cache) and self._vote is None and rest.takes_call()

    # -- record, judge, build, agree, keep -----------------------------------------------------

    def _capture(self, call: Invocation) -> Any:
        """Run a call for real while it is recorded; keep its program if it was the steady state."""
        with only_young_collections():
            before = TURNS.disturbances
            run = self._record(call, self._recorder(call))
            if isinstance(run, RecordedRun):
                if TURNS.disturbances == before:
                    self._finish(run, call)
                else:  # what another thread did meanwhile is not the step's
                    self.stats.eager += 1
                    self._disturbed += 1
                result, log_of_numbers = plain_tree(run.result), run.recorder.scalar_log
                del run
                replace_escaped(log_of_numbers)  # the caller may hold them
                return result
        return self._run_unrecordable(run, call)

    def _recorder(self, call: Invocation) -> Recorder:
        self._begin_recording(call)
        live = self._has_live_numbers
        observer = LifetimeObserver() if self._options.memory else None
        is_first = call.key not in self._warmups
        with_lifetimes = live and observer is not None
        is_watched = (is_first or self._repeats_calls) and not (in_world() or with_lifetimes)
        kind = WatchedRecorder if is_watched else Recorder
        recorder = kind(not in_world(), live=live, for_real=True, observer=observer)
        recorder.checks.goes_outside = self._goes_outside
        if in_world() or (with_lifetimes and self._reads_no_clock):
            recorder.checks.is_watched = True  # in a fake world, nothing is compared with eager
        return recorder

    @property
    def _has_live_numbers(self) -> bool:
        """Whether numbers are live in the next recording.

        Only from the second recording on: the first one shows which state the step moves. Of all kinds of calls, so
        that the ranks, whose kinds may differ, know at the second call whether they must vote.
        """
        return bool(self.stats.warmups or self.stats.captures or len(self._cache))

    def _record(self, call: Invocation, recorder: Recorder) -> RecordedRun | NotYet | Refused:
        warn_if_untested()
        for cached in self._cache:
            for fact in cached.program.facts:
                self._changed_hyperparameters |= getattr(fact, "changed_keys", frozenset)()
        if recorder.scalar_log is not None:
            recorder.scalar_log.plain_reads = self._plain_reads
        varying, outside = self._changed_hyperparameters, self._hooks_run_outside
        places = self._places(call, recorder.live)
        has_vote = self._vote is not None or self._options.compares
        meets_as = None if has_vote or outside or in_world() else self._name
        try:
            run = record(self._fn, call, recorder, varying, outside, places, meets_as)
        except Exception as error:
            self._plain_reads |= was_refused(error)
            raise
        if isinstance(run, RecordedRun) and looks_at_frames(run.entry.python_state.state.names):
            self._arguments.read_all()
        return run

    def _places(self, call: Invocation, live: bool) -> LivePlaces:
        """The places in Python that may be live in this recording: earlier ones, or code outside, have moved them."""
        previous = self._previous(call.key)
        if previous is None or not live or self._plain_reads or self._hooks_run_outside:
            return NO_PLACES
        facts = self.program.facts if self.program is not None else ()
        return previous.moved | self._varying.learned(facts, call.leaves)

    def _finish(self, run: FinishedRun, call: Invocation, rerun: bool = False) -> None:
        """The stages after a recorded run. rerun: it was a forward that ran again, for a backward without a program."""
        checks, hyper = run.recorder.checks, run.recorder.calls.hyperparameters
        if hyper is not None:
            self._changed_hyperparameters |= hyper.wanted
        if checks.repeated or checks.own_clock is not None:
            self._repeats_calls = True
            self._reads_no_clock |= bool(checks.is_watched) and checks.clock is None
        unkept = self._warmups.get(call.key)
        previous = self._previous(call.key)
        reasons = None if unkept is None or self._has_settled else unkept.reasons
        verdict = judge(run, reasons, previous)
        outcome = build(verdict, lambda recording: self._build(recording, call))
        compares, together = self._options.compares, run.rendezvous
        agreed = agree(outcome, run.recorder, self._vote, compares, rerun, together)
        if agreed.vote is not None and self._vote is None:
            self._policy.rest.begin_together()
        self._vote = agreed.vote
        self._keep(agreed.outcome, call)
        if isinstance(agreed.outcome, Built):
            self._unsettled.clear()
        elif isinstance(agreed.outcome, WarmUp):
            votes = RankVote.of(run.recorder, compares) if together is None else None
            if votes is None:  # else all ranks must record alike
                self._unsettled.add(call.reason, agreed.outcome.reason)
            elif self._policy.kinds.defers:  # all ranks decide together which calls they record
                self._vote = votes | self._vote
            if run.recorder.scalars and not run.recorder.live:
                self._policy.kinds.record_next()  # ranks find out together whether they must vote
            self._let_wait(call, run.recorder)

    def _build(self, recording: StepRecording, call: Invocation) -> Built:
        """The program of a recording, after the passes."""
        recorded = recording.program(call.spec)
        waits, is_bare = self._before_passes(recorded, call)
        program = recorded if waits or is_bare else self._rewritten(recorded)
        signature = self._signature(recording, call.key)
        counts = ProgramCounts.of(recording.recorder, recorded.nodes(), program)
        exit = recording.exit
        cached = CachedProgram(
            program,
            exit.assigned,
            exit.effects,
            exit.has_grad_fn,
            call.reason,
            fingerprints={} if program is recorded else self._options.issued(program),
            memory=StepMemory.of(recording, recorded, program),
            op_stream=signature,
            python_effects=exit.python_effects,
            waits=waits,
            dropped=recording.dropped(program),
            is_bare=is_bare,
        )
        names = recording.entry.roots.arguments
        reference = self._reference_of(call, names, recorded, cached)
        return Built(cached, recording.summary, counts, reference)

    def _signature(self, recording: StepRecording, key: Hashable) -> Callable[[], Signature] | None:
        """What makes that with which audited calls are compared; None if none is audited."""
        is_unused = self._options.audit.every == 0 and not self._compares_sizes(key)
        if is_unused or not recording.recorder.ignore_fake:
            return None  # a fake world, whose mode is off here, replays nothing
        return recording.signature()

    def _keep(self, outcome: Outcome, call: Invocation) -> None:
        """Keep the program, the summary with which the next recording is compared, or the refusal."""
        key = call.key
        if isinstance(outcome, Built):
            self._end_warm_ups(key)
            if outcome.is_replayed:
                self._keep_program(outcome, call)
            self._last_summary = outcome.summary
            self.stats.captured(outcome.counts)
        elif isinstance(outcome, WarmUp):
            log.info("warming up %s: %s", self._name, outcome.reason)
            unkept = self._warmups.pop(key, None) or Unkept(outcome.summary)
            unkept.summary = outcome.summary
            unkept.reasons[without_numbers(outcome.reason)] += 1
            unkept.why = outcome.reason
            self._warmups[key] = unkept  # the last one at the end
            self.stats.warmups += 1
        else:
            self._refuse(EVERY_CALL if outcome.everywhere else key, outcome.error)
            self.stats.warmups += 1

    def _keep_program(self, built: Built, call: Invocation) -> None:
        key = self._key_with_sizes(call.key, built.cached.program)
        self._add(key, built.cached)
        self._last_plan = LastPlan(key, Record, call.reason, is_kept=True)
        self._policy.ledger.pay(BUILDING)
        if self._lengths is not None:
            self._lengths.recorded.note(key)
            if built.reference is not None:
                built.cached.group = self._learn(key, built.reference, call)

    def _add(self, key: Hashable, cached: CachedProgram) -> None:
        self._cache.add(key, cached)

    # -- refusals ------------------------------------------------------------------------------

    def _run_refused(self, error: FunctionalizeError, args: Any, kwargs: Any) -> Any:
        """A call whose key was refused before."""
        if self._options.raises:
            raise error
        if self._vote is None or EVERY_CALL in self._refused:
            TURNS.end_innermost()
            return self._run_eagerly(args, kwargs)
        # The other ranks wait for this vote. Then they record, and vote again, or all ranks run eagerly.
        if self._vote.before_replay(None) is Level.RARE:
            return self._run_eagerly(args, kwargs)
        return self._run_unrecorded(error, args, kwargs)

    def _run_unrecordable(self, refused: Refused | NotYet, call: Invocation) -> Any:
        """A call that failed before the step ran, since its objects cannot be inspected, or not before it."""
        if isinstance(refused, NotYet):
            return self._run_before_recording(refused, call)
        self._refuse(call.key, refused.error)
        if self._options.raises and not refused.is_bug:
            raise refused.error
        return self._run_unrecorded(refused.error, call.args, call.kwargs)

    def _run_unrecorded(self, error: FunctionalizeError, args: Any, kwargs: Any) -> Any:
        """Run a call that cannot be recorded; if ranks vote, no rank captures the step from now on."""
        result = self._fn(*args, **kwargs)
        if self._vote is not None:
            self._vote.worst(Level.REFUSED)
            self._refuse(EVERY_CALL, error)
        self.stats.eager += 1
        return result

    def _run_before_recording(self, not_yet: NotYet, call: Invocation) -> Any:
        """Run a call that makes what later recordings need; if ranks vote, they record again, too."""
        log.info("%s runs eagerly, since it %s", self._name, not_yet.reason)
        result = self._fn(*call.args, **call.kwargs)
        if self._vote is not None:
            self._vote.worst(not_yet.level)
        else:
            self._unsettled.add(call.reason, not_yet.reason)
        self.stats.eager += 1
        return result
