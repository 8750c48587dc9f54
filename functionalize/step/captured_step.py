"""A captured step: a whole training step, run for real while it is recorded, replayed from then on.

    step = functionalize.capture(train_step)
    step(batch)      runs eagerly and records, until the step is in its steady state
    step(batch)      replays: one flat sequence of functional ops, then the epilogue

    class Trainer:
        @functionalize.capture
        def step(self, batch): ...       every trainer has a captured step of its own: `trainer.step.stats`

    call -> plan      what this rank would do: `Replay`, `Audit`, `Compare`, `Record`, `Eager` (`plan.py`)
         -> agree     the worst plan of all ranks that vote
         -> act       replay; or run for real, compare, record; after a failed guard on a number, the next plan

A recording is judged, built and agreed on, then the outcome is kept on which all ranks agreed (`stages.py`). What not
every step has is in parts that share its `StepCore`: `audits`, `passes`, `predictions`, and the hooks of its kind.

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
import os
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

import torch
from torch import Tensor

from functionalize._compat.autograd import is_transformed
from functionalize._compat.dispatch import current_modes
from functionalize.audit.audited_call import AuditedCall
from functionalize.audit.signature import Signature
from functionalize.calls.late_numbers import filled, reads_late
from functionalize.errors import (
    FunctionalizeError,
    GuardError,
    LoadError,
    SaveError,
    UncapturableError,
)
from functionalize.fsdp.releases import warn_if_untested
from functionalize.ir.guards import Miss
from functionalize.ir.inputs import Call
from functionalize.ir.worlds import in_world
from functionalize.program.archive import damaged, refusal
from functionalize.program.executable import Vote
from functionalize.program.program import Program
from functionalize.recorder.recorder import Recorder
from functionalize.recorder.watched_recorder import WatchedRecorder
from functionalize.run.detached_outputs import refusing_backward
from functionalize.scalars.escaped_numbers import without_live
from functionalize.scalars.live_scalars import was_refused
from functionalize.state import arguments
from functionalize.state.arguments import UNOPENED
from functionalize.state.dropped_gradients import drop, put_back
from functionalize.state.memory_reports import memory_reports
from functionalize.state.number_arguments import VaryingArguments, varying_leaves
from functionalize.state.python_effects import repeat
from functionalize.state.python_state import VaryingNumbers
from functionalize.state.sources import leave
from functionalize.state.tensor_attributes import refused_class
from functionalize.step.audits import Audits
from functionalize.step.cache import (
    RESTS,
    CachedProgram,
    Found,
    how_differ,
    key_of,
)
from functionalize.step.call_log import CallLog
from functionalize.step.copies import State, copied, deep_copied, reduced, set_state
from functionalize.step.core import EVERY_CALL, StepCore
from functionalize.step.explain import Boundary, explanation
from functionalize.step.hooks import NO_HOOKS, Part
from functionalize.step.next_call import NextCall
from functionalize.step.options import CaptureOptions
from functionalize.step.outcome import (
    Built,
    NotYet,
    Outcome,
    Refused,
    Unkept,
    WarmUp,
)
from functionalize.step.pace import Pace
from functionalize.step.pass_schedule import PassSchedule
from functionalize.step.plan import (
    WAITS,
    Audit,
    Compare,
    Covered,
    Eager,
    LastPlan,
    Plan,
    Record,
    Replay,
)
from functionalize.step.policy import BUILDING, LOST_GRAPH
from functionalize.step.predictions import Predictions
from functionalize.step.recording import RecordingSummary, StepRecording
from functionalize.step.stages import (
    MAX_WARMUPS,
    MOST_WARMUPS,
    FinishedRun,
    Invocation,
    RecordedRun,
    agree,
    build,
    judge,
    may_still_change,
    record,
)
from functionalize.step.stats import ProgramCounts
from functionalize.step.step_file import SavedStep, load_step, save_step
from functionalize.step.vote import (
    CHOSE,
    DIFFER,
    RARE,
    Level,
    RankVote,
    ReaderNotes,
    VoteAfterGraph,
    has_messages,
)
from functionalize.templates.call_keys import open_key
from functionalize.util.gc_pause import only_young_collections
from functionalize.util.other_threads import reading_thread
from functionalize.util.own_values import own_values
from functionalize.util.process_groups import has_ranks
from functionalize.util.run_log import run_log
from functionalize.util.switches import MISSES, PLANS
from functionalize.util.tensor_wrappers import has_own_functions
from functionalize.util.text import counted, without_numbers
from functionalize.util.turns import (
    IMPATIENCE,
    MOST_DISTURBED,
    PATIENCE,
    PATIENCE_OF_RANKS,
    TURNS,
)
from functionalize.util.user_warning import warn_uncapturable
from functionalize.walk.live_places import NO_PLACES, LivePlaces
from functionalize.walk.unread import ReadArguments, looks_at_frames
from functionalize.walk.walker import PythonState

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
S = TypeVar("S")
_DISTURBED = "steps of other threads have run in its recordings"
_READ = "another thread may read the numbers of a recording"
_VAIN = "{}; recordings of calls that differ there were of no use: what has come there before is recorded"
_COVERED = (Replay, Audit, Compare)


class CapturedStep(Generic[P, R]):
    """A training step that is recorded in its steady state and replayed after. It takes and returns what the step does.

    boundary: what of a framework's loop it is, for `explain`. part: what is particular to its kind, see `hooks.py`.
    """

    boundary: Boundary | None = None

    def __init__(
        self,
        train_step: Callable[P, R],
        options: CaptureOptions,
        kind: Callable[[CapturedStep[..., Any]], Part] | None = None,
    ) -> None:
        functools.update_wrapper(self, train_step)
        self.core = core = StepCore(train_step, options)
        self.stats = core.stats
        self._kind = kind
        self.audits, self.passes = Audits(core), PassSchedule(core)
        self.part = kind(self) if kind is not None else None
        self._hooks = self.part.hooks if self.part is not None else NO_HOOKS
        self.predictions = self._new_predictions()
        self._arguments = ReadArguments(train_step)
        self._last_summary: RecordingSummary | None = None
        self._last_plan: LastPlan | None = None
        self._plain_reads = False  # whether C code has refused a live number
        self._repeats_calls = False  # whether a recording had calls that a replay makes again
        self._varying = VaryingNumbers()
        self._patience, self._disturbed = PATIENCE, 0  # how many recordings others have disturbed
        self._reads_no_clock = False  # whether such a recording was watched, and read no clock
        self._has_warned_of_thread = False
        self._reader_notes = ReaderNotes(core.name)
        # Whether recorded calls changed what Python holds, where threads may read.
        self._leaves_numbers = False
        self._numbers = VaryingArguments()
        self._logs_plans = PLANS.isEnabledFor(logging.DEBUG)
        log = run_log()
        self._call_log = CallLog(core, log) if log is not None else None
        # Not a forward, which goes on in its backward; nor what the user asks for at any cost.
        is_whole = self._hooks.leaves is None and not self._hooks.is_still
        is_timed = is_whole and core.policy.ledger.is_bounded
        self._pace = Pace(self._warn_of_pace) if is_timed else None
        # Of a call whose ranks vote: whether they also vote after the graph; whether it replays a second program.
        self._votes_again = self._tries_once = False
        # Whether a class of recordings may predict a call that its programs miss.
        self._asks_classes = False

    def _new_predictions(self) -> Predictions | None:
        lengths = self.core.options.lengths()
        if lengths is None:
            return None
        kind = self._hooks.predictions or Predictions
        return kind(self.core, self.passes, self.audits, lengths)

    def like(self, train_step: Callable[Q, S]) -> CapturedStep[Q, S]:
        """A captured step of its own for another callable, with the same options."""
        return CapturedStep(train_step, self.core.options, self._kind)

    def __repr__(self) -> str:
        core = self.core
        counts = counted(len(core.cache), "program"), counted(self.stats.replays, "replay")
        return f"<captured {core.name}: {', '.join(counts)}>"

    def __copy__(self) -> Any:
        return copied(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return deep_copied(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduced(self)

    def __setstate__(self, state: State) -> None:
        set_state(self, state)

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> CapturedStep[P, R]: ...
    @overload
    def __get__(
        self: CapturedStep[Concatenate[Any, Q], S], instance: object, owner: type | None = None
    ) -> CapturedStep[Q, S]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """As an attribute of a class: a bound method, for each instance a captured step of its own.

        Of a `classmethod` each class has one of its own; a `staticmethod` has one.
        """
        bind = getattr(type(self.core.fn), "__get__", None)
        bound = self.core.fn if bind is None else bind(self.core.fn, instance, owner)
        holder = getattr(bound, "__self__", None)
        if holder is None or bound is self.core.fn:
            return self
        own = own_values(holder)
        if own is not None:
            if self not in own:
                own[self] = self.like(bound)
            return own[self]
        error = UncapturableError(
            f"the method `{self.core.name}` of a {type(holder).__name__} cannot be captured: its programs are kept in "
            "the `__dict__` of the object, which has none. Add `__dict__` to its `__slots__`"
        )
        if self.core.options.raises:
            raise error
        if EVERY_CALL not in self.core.refused:
            self.core.refuse(EVERY_CALL, error)
        return bound

    @property
    def program(self) -> Program | None:
        """The program that was last made or replayed; as it was recorded, unless passes were asked for."""
        latest = self.core.cache.latest
        return (latest.recorded or latest.program) if latest is not None else None

    @property
    def memory(self) -> Any:
        """The memory of the step, with the lifetimes of eager and of the program; None without `memory=True`.

        A `StepMemory` of the planner.
        """
        latest = self.core.cache.latest
        return latest.memory if latest is not None else None

    @property
    def programs(self) -> tuple[Program, ...]:
        """All cached programs, the most recently used at the end; as `program`."""
        return tuple(cached.recorded or cached.program for cached in self.core.cache)

    @property
    def backward_programs(self) -> tuple[Program, ...]:
        """The programs of the backwards of a captured forward, by forward, the last recorded first."""
        backwards = (getattr(cached, "backwards", ()) for cached in self.core.cache)
        return tuple(each.program for of_forward in backwards for each in of_forward)

    @property
    def callable(self) -> Callable[..., Any]:
        """The callable that was captured."""
        return self.core.fn

    @property
    def is_busy(self) -> bool:
        """Whether this call is a part of another recording, of a transform of torch.func, or of forward-mode AD."""
        return is_transformed() or any(isinstance(mode, Recorder) for mode in current_modes())

    @property
    def asks_nobody(self) -> bool:
        """Whether one rank may call it alone: no ranks vote, and no kind of call is refused."""
        return self.core.vote is None and not self.core.refused

    def explain(self, verbose: bool = False) -> str:
        """What the next call would do and why, then what went wrong, then the programs, one a line.

        verbose: where each input of each program comes from, too, and its guards on numbers.
        """
        core = self.core
        next_call = NextCall(core, self._last_plan, self._is_due, self.passes.why_waits, self._pace)
        return explanation(
            core.name,
            self.boundary,
            next_call.text,
            self.stats,
            core.cache,
            core.refused.values(),
            core.unsettled.why,
            self._sizes_text,
            verbose,
        )

    @property
    def _sizes_text(self) -> str:
        """Whether programs for other sizes are predicted, and why they are not."""
        if self.predictions is not None:
            text = self.predictions.text
        else:
            why = self.core.options.why_static or "autograd has asked for other gradients"
            text = f"programs for other sizes are not predicted: {why}"
        return text if self._hooks.text is None else "\n".join([text, *self._hooks.text()])

    def forget(self) -> None:
        """Drop every program; the next call is recorded, and kept at once if the step was captured before."""
        self.core.forget()
        self._last_plan, self.predictions = None, self._new_predictions()
        if self._hooks.forget is not None:
            self._hooks.forget()

    def predict_no_more(self) -> bool:
        """Predict no programs from now on; whether there were predictions."""
        predicted, self.predictions = self.predictions is not None, None
        return predicted

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the programs to a file (one per rank: `step.rank0.fzp`), for `load` in another process.

        Raises `SaveError`, with nothing written, if a program refers to an object that has no name in the step. Only
        whole steps are saved, not a forward (`backward=True`) or the backwards of eager graphs.
        """
        core, why = self.core, self._hooks.why_unsaved
        if why:
            raise refusal(path, SaveError(why), "saved")
        if self._hooks.save is not None:
            self._hooks.save()
        for key, cached in list(core.cache.items()):
            if cached.awaits_passes and cached.recorded is None:
                self.passes.optimise(key, cached)
        lengths = self.predictions.lengths if self.predictions is not None else None
        save_step(path, core.fn, SavedStep.of(core.cache, lengths, core.varying, core.vote))

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
        core, why = self.core, self._hooks.why_unsaved
        if why:
            raise refusal(path, LoadError(why), "loaded")
        saved = load_step(path, core.fn, types, ops)
        try:
            programs = [(self.core.key_with_sizes(k, c.program), c) for k, c in saved.programs]
        except Exception as error:  # keys that no step has
            raise refusal(path, damaged(error), "loaded") from error
        for key, cached in programs:
            self.passes.restored(cached)
            core.cache.add(key, cached)
            self._numbers.restore(key)
        if self.predictions is not None:
            self.predictions.lengths.restore(saved.classes)
        core.varying |= saved.hyperparameters
        core.vote = saved.vote | core.vote if saved.vote is not None else core.vote

    # -- call ------------------------------------------------------------------------------------

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """One step: a replay if all guards of a program hold, else a real run that is recorded.

        Inside another recording, or a transform (`torch.func`, forward-mode AD), it is a part of that: eager.
        """
        grad_mode, core = torch.is_grad_enabled(), self.core
        began = self._call_log.began() if self._call_log is not None else None
        try:
            core.policy.calls += 1
            if core.options.is_off:
                return self._run_eagerly(args, kwargs)
            if is_transformed() or (current_modes() and self.is_busy):
                return self._run_eagerly(args, kwargs)
            if self._hooks.began is not None and self._hooks.began():
                return self._run_eagerly(args, kwargs)
            if core.policy.may_rest and self._rests():
                return self._run_eagerly(args, kwargs)
            if self._pace is not None and self._pace.asks and self._pace.runs_eagerly():
                return self._timed(args, kwargs)
            if (
                EVERY_CALL in core.refused
                and not core.options.raises
                and core.refusal(EVERY_CALL) is not None
            ):
                return self._run_eagerly(args, kwargs)
            turn = TURNS.take(self._turn_patience)
            if turn is None:
                self._note_impatience()
                return self._run_eagerly(args, kwargs)
            with turn:
                return self._run_in_turn(args, kwargs)
        except Exception:
            raise
        except BaseException:  # Ctrl-C can come between a change of the grad mode and its reset
            torch.set_grad_enabled(grad_mode)
            raise
        finally:
            if began is not None and self._call_log is not None:
                self._call_log.ended(began)

    def _run_in_turn(self, args: Any, kwargs: Any) -> Any:
        core, hooks = self.core, self._hooks
        began = self._pace.clock() if self._pace is not None else 0.0
        try:
            flat, spec = arguments.flatten(*self._arguments.of(args, kwargs))
            is_open = True
        except Exception as error:  # a cycle, or code of the user's
            is_open = False
            if UNOPENED not in core.refused:
                core.refuse(UNOPENED, arguments.unopened(args, kwargs, error))
        if not is_open:  # outside of `except`, so that errors of the step have no context
            self._last_plan = LastPlan(UNOPENED, Eager)
            return self._run_refused(core.refused[UNOPENED], args, kwargs)
        leaves = flat if hooks.leaves is None else hooks.leaves(flat)
        for kind in {*map(type, leaves)}:
            if has_own_functions(kind):  # to look at it would call the user's code
                if core.refusal(kind) is None:
                    core.refuse(kind, refused_class(kind))
                self._last_plan = LastPlan(kind, Eager)
                return self._run_refused(core.refused[kind], args, kwargs)
        if hooks.state is not None:
            key = self._key_with_state(leaves, spec)
        else:
            is_learning = not (hooks.is_still or core.hooks_run_outside)
            if is_learning and self._numbers.learn(spec, leaves):
                core.rename(lambda key: self._numbers.key(key, leaves))
            key = self._numbers.key(key_of(leaves, spec), leaves, self._has_program)
        call = Invocation(args, kwargs, leaves, spec, core.sizes.of(key, leaves))
        if core.refused:
            refused = core.refusal(call.key)
            if refused is not None:
                self._last_plan = LastPlan(call.key, Eager)
                return self._run_refused(refused, args, kwargs)
        plan = self._plan(call)
        if core.vote is not None:
            plan = self._agreed(plan, call)
            self._pace = None
        elif type(plan) is Record:
            plan = self._plan_recording(call, plan.why)
        pace = self._pace
        if pace is not None and isinstance(plan, (Replay, Eager)):
            looked = pace.clock()
            result = self._act(plan, call)
            acted, looked = pace.clock() - looked, looked - began
            if pace.is_timing:
                pace.looked(looked, acted)
            elif looked > acted / 2:
                pace.seconds += looked
                if pace.seconds > pace.limit:
                    self._begin_timing(pace)
            return result
        return self._act(plan, call)

    def flattened(self, args: Any, kwargs: Any) -> tuple[list[Any], Any]:
        """The leaves of the arguments that the callable reads, and their structure."""
        return arguments.flatten(*self._arguments.of(args, kwargs))

    def key(self, leaves: Sequence[Any], spec: Any) -> Hashable:
        """The key of a call in the cache."""
        return self.core.sizes.of(self._key_with_state(leaves, spec), leaves)

    def _key_with_state(self, leaves: Sequence[Any], spec: Any) -> Any:
        exact: Any = key_of(leaves, spec)
        if self._hooks.state is not None:
            return *exact, *self._hooks.state(leaves)
        return self._numbers.key(exact, leaves, self._has_program)

    def _has_program(self, exact: Any, leaves: Sequence[Any]) -> bool:
        """Whether there is a program of these very numbers among the arguments."""
        return self.core.sizes.of(exact, leaves) in self.core.cache.by_key

    # -- plan ------------------------------------------------------------------------------------

    def _plan(self, call: Invocation) -> Plan:
        """What this rank would do by itself."""
        core, hooks = self.core, self._hooks
        if hooks.begin is not None:
            hooks.begin(call)
        has_programs = call.key in core.cache.by_key
        self._asks_classes = has_programs and core.vote is None and self.predictions is not None
        if core.vote is None and not has_programs:
            core.cache.begin_call()
            eager = self._plan_without_programs(call)
            if eager is not None:
                return eager
        if hooks.plan is not None:
            own = hooks.plan(call)
            if own is not None:
                return own
        found = core.cache.first(call.key, call.leaves, call.spec)
        if found is not None:
            cached, audit = found[0], core.options.audit
            is_plain = (
                not cached.awaits_passes and cached.prediction is None and hooks.is_due is None
            )
            call_number = cached.replays + cached.audits + 1
            if is_plain and (cached.op_stream is None or not audit.is_due(call_number)):
                return Replay(*found)  # as `_plan_with` would find
            return self._plan_with(found)
        if core.vote is None:
            return self._plan_of_another_class(call)
        if self._stays_eager(call):
            return Eager(RARE, is_rare=True)
        found = core.cache.first(call.key, call.leaves, call.spec)  # it may have been predicted now
        if found is not None:
            return self._plan_with(found)
        if core.cache.is_hurried or not core.may_record(call.key):
            return Eager(core.cache.reason, is_vain=True)
        filling = self._filling(call.key)
        return Eager(filling) if filling is not None else Record(core.cache.reason)

    def _plan_with(self, found: Found) -> Plan:
        """The plan of a call that a program covers."""
        cached, _ = found
        if cached.awaits_passes and self.passes.must_wait(cached):
            return Eager(WAITS, waits=True)
        if cached.prediction is None and not self._is_due(cached):
            return Replay(*found)
        if self.core.vote is not None or self._reader() is None:  # ranks that vote ask together
            return Audit(*found) if cached.prediction is None else Compare(*found)
        # One that was predicted is compared before it is replayed. Else every call would be due, and run eagerly, as
        # long as that thread runs.
        eager = self._eager_beside_reader()
        return Replay(*found) if cached.prediction is None else eager

    def _is_due(self, cached: CachedProgram) -> bool:
        """Whether the next call of this program is audited."""
        is_due = self._hooks.is_due
        return self.audits.is_due(cached) if is_due is None else is_due(cached)

    def _plan_without_programs(self, call: Invocation) -> Eager | None:
        """Why a call of a kind without a program runs eagerly; None: it is recorded, or its program was predicted."""
        core = self.core
        if self._stays_eager(call):
            # Each call is another one, and no program was ever of use.
            if core.policy.rest.asks_none and core.policy.rest.is_in_vain():
                self._warn_of_kinds(call)
            return Eager(RARE, is_rare=True)
        if not core.cache.has(call.key) and not core.may_record(call.key):
            return Eager("a recording costs more than is left")
        return None

    def _warn_of_kinds(self, call: Invocation) -> None:
        """Warn that each call is of a kind of its own."""
        if self._last_plan is not None:
            names = arguments.leaf_names(self.core.fn, call.spec)
            found = how_differ(call.key, self._last_plan.key, names)
            warn_uncapturable(
                f"{self.core.name} runs eagerly, as nearly every call is another one for a program: {found}"
            )

    def _stays_eager(self, call: Invocation) -> bool:
        """Whether a call without a program runs eagerly, as its kind is rare; else its program may be predicted now."""
        stays_eager = self._hooks.stays_eager
        if stays_eager is not None and (found := stays_eager(call)) is not None:
            return found
        if self.predictions is not None:
            return self.predictions.stays_eager(call)
        return self.core.is_rare(call.key)

    def _plan_of_another_class(self, call: Invocation) -> Plan:
        """The plan where no program covers a call, though there may be a class of recordings that predicts it."""
        cache, predictions = self.core.cache, self.predictions
        is_asked, self._asks_classes = self._asks_classes, False
        if is_asked and predictions is not None and predictions.is_of_another_class(call):
            if self._stays_eager(call):
                return Eager(RARE, is_rare=True)
            found = cache.first(call.key, call.leaves, call.spec)
            if found is not None:
                return self._plan_with(found)
        return Record(cache.reason)

    def _plan_recording(self, call: Invocation, why: str) -> Record | Eager:
        """Whether a call that no program covers is recorded. why: what was missed. Ranks that vote have agreed."""
        why = str(why)  # without the question of a `Miss`
        if why != RESTS:
            self.core.note_miss(why)
        why_not = self._why_not_recorded(call.key, why) if self.core.vote is None else None
        if why_not is not None:
            return Eager(why_not)
        if self._hooks.why_not is not None:
            why_not = self._hooks.why_not(call)
            if why_not is not None:
                return Eager(why_not)
        if self._disturbed >= MOST_DISTURBED:
            TURNS.end_innermost()
            return Eager(_DISTURBED)
        if self.core.vote is None and self._has_live_numbers:
            if self._reader() is not None:
                self._reader_notes.write(self.stats.calls)
                return self._eager_beside_reader()
            if self._reader_notes.are_there(self.stats.calls):
                return Eager(_READ)
        return Record(why)

    def _why_not_recorded(self, key: Hashable, why: str) -> str | None:
        """Why a call is not worth a recording; None: it is. Without a vote."""
        core, cache, rest = self.core, self.core.cache, self.core.policy.rest
        if not core.records_missed:
            return why
        if (filling := self._filling(key)) is not None:
            return filling
        if cache.is_hurried or rest.takes_call():
            return RESTS
        if cache.thrashing or rest.goes_on(self.stats.replays + self.stats.audits):
            cache.give_up()
            rest.begin(self.stats.replays + self.stats.audits)
            return RESTS if rest.takes_call() else None
        if not core.may_record(key):
            if cache.miss is not None:
                rest.is_in_vain(cache.looked_slowly)
            return _VAIN.format(why)
        most = MAX_WARMUPS if core.has_settled else MOST_WARMUPS
        return core.unsettled.why(why) if core.unsettled.skips(why, most) else None

    def _filling(self, key: Hashable) -> str | None:
        """Why a recording of this call would not be kept, since it adds to a deque that is not full yet; or None."""
        previous = self._previous(key)
        going_on = [each.goes_on() for each in previous.filled] if previous is not None else ()
        return next(filter(None, going_on), None)

    def _rests(self) -> bool:
        """Whether the step rests, and asks no program: then a call costs nothing beyond eager."""
        core, rest = self.core, self.core.policy.rest
        core.policy.may_rest = bool(rest.left)
        if rest.is_vain:
            core.cache.is_hurried = not rest.asks_none and rest.takes_call()
            return rest.asks_none and rest.takes_call()
        core.cache.is_hurried = False
        return not len(core.cache) and core.vote is None and rest.takes_call()

    # -- agree -----------------------------------------------------------------------------------

    def _agreed(self, plan: Plan, call: Invocation) -> Plan:
        """The plan of this rank after the vote of all ranks: the worst plan of any of them."""
        core = self.core
        assert core.vote is not None
        found = plan if isinstance(plan, _COVERED) else None
        worst = core.vote.before_replay(
            found.cached if found is not None else None,
            is_due=isinstance(plan, (Audit, Compare)),
            is_rare=isinstance(plan, Eager) and not plan.is_vain,
            is_vain=isinstance(plan, Eager) and plan.is_vain,
            is_read=self._reader() is not None,
        )
        self._votes_again, self._tries_once, core.after = worst is Level.READS, False, None
        if worst is Level.READ:
            return self._eager_beside_reader()
        if worst in (Level.RARE, Level.VAIN):
            if worst is Level.VAIN and not core.cache.is_hurried:
                core.policy.rest.is_in_vain()
            if isinstance(plan, Eager) and not (plan.is_rare or plan.is_vain):
                return plan
            predicted = (plan.cached, plan.call) if isinstance(plan, Compare) else None
            return Compare(*predicted, is_alone=True) if predicted else Eager(RARE, is_rare=True)
        if worst is Level.DIFFERENT:
            why = self._note_different()
            core.note_miss(why)
            return Eager(why)
        if worst in (Level.NOT_YET, Level.REFUSED):
            missed = plan.why if isinstance(plan, Record) else core.cache.reason
            return self._plan_recording(call, missed or "a guard failed on another rank")
        assert found is not None
        if worst is not Level.AUDITED:
            return Replay(found.cached, found.call)
        kind = Audit if found.cached.prediction is None else Compare
        return kind(found.cached, found.call)

    def _note_different(self) -> str:
        """The programs of the ranks differ: without the optional passes all make new ones; returns the reason."""
        if (alike := self.core.options.alike()) is not None:  # of all ranks, whose votes are equal
            self.core.restart(alike)
            if self.predictions is not None:
                self.predictions.forget(alike.lengths())
            self.stats.missed(CHOSE)
            return CHOSE
        if DIFFER not in self.stats.guard_failures:
            warn_uncapturable(f"{self.core.name} runs eagerly: {DIFFER}")
        return DIFFER

    def _next_plan(self, plan: Covered, call: Invocation) -> Plan:
        """The plan after a guard on numbers of a program has failed, when its graph had run."""
        core = self.core
        if core.vote is not None:
            # The graph has issued its collectives: all ranks try another program, or none does.
            return self._other_on_all_ranks(plan, call)
        found = core.cache.further(call.leaves, call.spec)
        if found is not None:
            if found[0].prediction is not None:
                return Compare(*found)
            return Replay(*found) if isinstance(plan, Replay) else Audit(*found)
        following = self._plan_of_another_class(call)
        if isinstance(following, Record):
            return self._plan_recording(call, following.why)
        return following

    def _other_on_all_ranks(self, plan: Covered, call: Invocation) -> Plan:
        """The replay of the next program, if all ranks have one; else all record the call, or run it eagerly."""
        core, cache = self.core, self.core.cache
        # None: it was the vote of a second program, or there was none.
        after, core.after = core.after, None
        if after is None or not after.tries_others:
            if after is not None and not after.records:
                core.policy.rest.is_in_vain()
                core.note_miss(cache.reason)
                return Eager(cache.reason)
            return self._plan_recording(call, cache.reason)
        assert core.vote is not None
        if after.failure is None:  # on another rank: the same one, again
            resolved = plan.cached.program.resolve(call.leaves)
            found = (plan.cached, resolved) if isinstance(resolved, Call) else None
        else:
            found = cache.further(call.leaves, call.spec)
        mine, is_read = found[0] if found is not None else None, self._reader() is not None
        worst = core.vote.before_replay(mine, is_read=is_read)
        self._votes_again, self._tries_once = worst is Level.READS, True
        if worst is Level.READ:
            return self._eager_beside_reader()
        if found is not None and worst in (Level.KEPT, Level.READS):
            return Replay(*found)
        if worst is Level.DIFFERENT:
            core.note_miss(cache.reason)
            return Eager(cache.reason)
        return self._plan_recording(call, cache.reason)

    # -- act -------------------------------------------------------------------------------------

    def _act(self, plan: Plan, call: Invocation) -> Any:
        """Carry out a plan; if a guard on numbers fails, the next one."""
        while isinstance(plan, _COVERED):
            if self._logs_plans:
                self._log_plan(plan)
            try:
                if isinstance(plan, Replay):
                    result = (self._hooks.replay or self.replay)(plan.cached, plan.call)
                    self._last_plan = LastPlan(call.key, Replay)
                    return result
                audited = self._audited(plan)
            except Exception as error:
                following = self._after(error, plan, call)
                if following is None:
                    raise
                plan = following
            else:
                self._last_plan = LastPlan(call.key, type(plan))
                return self._run_audited(plan, audited, call)
        if self._logs_plans:
            self._log_plan(plan)
        self._last_plan = LastPlan(call.key, type(plan), plan.why)
        if isinstance(plan, Record):
            return (self._hooks.capture or self.capture)(replace(call, reason=plan.why))
        self.stats.rare += plan.is_rare
        self.stats.waiting += plan.waits
        return self._run_eagerly(call.args, call.kwargs)

    def _log_plan(self, plan: Plan) -> None:
        """Say what this call does."""
        why = (
            plan.why
            if isinstance(plan, (Record, Eager))
            else f"the program of {plan.cached.reason}"
        )
        text = f"{type(plan).__name__.lower()}: {why}"
        PLANS.debug("%s, call %d: %s", self.core.name, self.stats.calls + 1, text)

    def _run_eagerly(self, args: Any, kwargs: Any) -> Any:
        self.stats.eager += 1
        return self.core.fn(*args, **kwargs)

    def _timed(self, args: Any, kwargs: Any) -> Any:
        """An eager call whose time says whether replays pay."""
        pace = self._pace
        assert pace is not None
        began = pace.clock()
        result = self._run_eagerly(args, kwargs)
        pace.ran(pace.clock() - began)
        return result

    def _begin_timing(self, pace: Pace) -> None:
        """Guards have taken long: calls are timed, but for those of ranks, which must do alike."""
        if has_ranks():
            self._pace = None
        else:
            pace.is_timing = pace.asks = True

    def _warn_of_pace(self, slower: float) -> None:
        warn_uncapturable(
            f"{self.core.name} runs eagerly, as its calls take {slower:.1f} times as long where programs are asked: it "
            "does little beside what it depends on. Make objects that it reads once, and change their attributes, or "
            "capture a larger part of the loop"
        )

    def replay(self, cached: CachedProgram, call: Call, counts: bool = True) -> Any:
        """Run a program whose guards hold. counts: whether it is one of the cache, and counts the replay."""
        vote = self._vote_after_graph(cached) if self._votes_again else None
        drop(call, cached.dropped)
        refuse = refusing_backward(cached.has_grad_fn)
        result, left = cached.program.replay(call, vote, refuse)
        count = len(cached.slots)
        leave(call, cached.slots, left[:count], cached.effects)
        if counts:
            self.core.cache.used(cached, is_replayed=True)
        repeat(cached.python_effects, call, left[count:])
        if reads_late(cached.python_effects):
            result = filled(result, call)
        return result

    def _vote_after_graph(self, cached: CachedProgram) -> Vote | None:
        """The vote on whether all guards on numbers hold, where ranks vote again when the graph has run."""
        core = self.core
        if core.vote is None:
            return None
        key, is_second = core.cache.key_of(cached), self._tries_once

        def has_other(failure: str | None) -> bool:
            return not is_second and (failure is None or core.cache.has_other(Miss.of(failure)))

        def may_record(failure: str | None) -> bool:
            if self._reader() is not None:
                return False
            if failure is None:  # only another rank may have missed: nothing is counted here
                return core.policy.can_record
            return core.may_record(key, Miss.of(failure))

        core.after = VoteAfterGraph(core.vote, has_other, may_record)
        return core.after

    def _audited(self, plan: Audit | Compare) -> AuditedCall:
        """The call that is compared with a program; its graph may run beside it."""
        cached, group = plan.cached, plan.cached.group
        runs_graph = self.core.vote is None and (group is None or group.compares_results)
        # It makes as many objects as a recording, which are garbage at its end.
        with only_young_collections():
            return AuditedCall.of(cached.signature, cached.program, plan.call, runs_graph)

    def _run_audited(self, plan: Audit | Compare, audited: AuditedCall, call: Invocation) -> Any:
        with only_young_collections():
            if isinstance(plan, Audit):
                return (self._hooks.audit or self.audits.run)(audited, plan.cached, call)
            assert self.predictions is not None
            return self.predictions.compare(audited, plan.cached, call, plan.is_alone)

    def _after(self, error: Exception, plan: Covered, call: Invocation) -> Plan | None:
        """The plan after a replay has raised an error with nothing changed; None: the error is the call's."""
        core, cached = self.core, plan.cached
        if isinstance(error, GuardError):
            if plan.call.committed:  # of a captured step that an effect in Python has called
                return None
            put_back(plan.call, cached.dropped)
            core.cache.missed(str(error))
            core.cache.rule_out(Miss.of(error.args[0]))
            core.policy.ledger.pay(LOST_GRAPH)
            return self._next_plan(plan, call)
        is_ours = isinstance(error, FunctionalizeError) and not cached.is_unseen
        if is_ours or core.vote is not None or not cached.program.may_run_again(plan.call):
            return None
        if cached.is_unseen and self.predictions is not None:
            self.predictions.failed_unseen(cached, call, error)
        put_back(plan.call, cached.dropped)
        why = f"{type(error).__name__}: {error}"
        MISSES.warning("a replay of %s failed, the call runs eagerly: %s", core.name, why)
        return Eager(f"a replay failed: {why}")

    def _turn_patience(self) -> float:
        """How long this call waits for its turn. Ranks must all do the same in this call, so among ranks it is long."""
        has_waited = self._patience != PATIENCE
        is_among_ranks = self.core.vote is not None or has_ranks()
        return PATIENCE_OF_RANKS if is_among_ranks and not has_waited else self._patience

    def _note_impatience(self) -> None:
        """Another thread waits inside its turn: the call has gone without one."""
        if self._patience == PATIENCE:
            self._patience = IMPATIENCE
            warn_uncapturable(
                f"{self.core.name} runs eagerly where a captured step in another thread runs and waits inside"
            )

    def _reader(self) -> str | None:
        """The thread that may read the live numbers of a recording or an audit, so that there is none.

        Numbers that the step only computes with are in none of the objects that a thread can reach. Ranks without a
        vote need not agree: another one that records meanwhile keeps no program that relies on numbers.
        """
        holds_numbers = self._leaves_numbers or self._varying.found or self.core.varying
        return reading_thread(TURNS.threads) if holds_numbers else None

    def _eager_beside_reader(self) -> Eager:
        """The plan where a thread, here or on another rank, may read numbers; warns where it is here."""
        thread = None if self._has_warned_of_thread else self._reader()
        if thread is not None:
            self._has_warned_of_thread = True
            warn_uncapturable(
                f"{self.core.name} runs eagerly where it would be recorded, and is not audited, while {thread} may "
                "read the numbers that it changes: let that thread wait for them by `queue.get()`, and the thread of "
                "the step put them there"
            )
        return Eager(_READ)

    # -- record, judge, build, agree, keep -------------------------------------------------------

    def capture(self, call: Invocation) -> Any:
        """Run a call for real while it is recorded; keep its program if it was the steady state."""
        with only_young_collections():
            before = TURNS.disturbances
            run = self.record(call, self.recorder(call))
            if isinstance(run, RecordedRun):
                if TURNS.disturbances == before:
                    self.finish(run, call)
                else:  # what another thread did meanwhile is not the step's
                    self.stats.eager += 1
                    self._disturbed += 1
                result, log_of_numbers = [run.returned], run.recorder.scalar_log
                del run
                return without_live(log_of_numbers, result)
        return self.run_unrecordable(run, call)

    def recorder(self, call: Invocation) -> Recorder:
        """What records a call."""
        self._begin_recording(call)
        live = self._has_live_numbers
        observer = memory_reports().observer() if self.core.options.memory else None
        is_first = call.key not in self.core.unkept
        with_lifetimes = live and observer is not None
        is_watched = (is_first or self._repeats_calls) and not (in_world() or with_lifetimes)
        kind = WatchedRecorder if is_watched else Recorder
        recorder = kind(not in_world(), live=live, for_real=True, observer=observer)
        recorder.checks.goes_outside = self.core.goes_outside
        if in_world() or (with_lifetimes and self._reads_no_clock):
            recorder.checks.is_watched = True  # in a fake world, nothing is compared with eager
        if self._hooks.recorder is not None:
            self._hooks.recorder(recorder, call)
        return recorder

    @property
    def _has_live_numbers(self) -> bool:
        """Whether numbers are live in the next recording.

        Only from the second recording on: the first one shows which state the step moves. Of all kinds of calls, so
        that the ranks, whose kinds may differ, know at the second call whether they must vote.
        """
        return bool(self.stats.warmups or self.stats.captures or len(self.core.cache))

    def record(self, call: Invocation, recorder: Recorder) -> RecordedRun | NotYet | Refused:
        """Run the callable for real while `recorder` is active, or say why not."""
        warn_if_untested()
        for cached in self.core.cache:
            for fact in cached.program.facts:
                self.core.varying |= getattr(fact, "changed_keys", frozenset)()
        if recorder.scalar_log is not None:
            recorder.scalar_log.plain_reads = self._plain_reads
        varying, outside = self.core.varying, self.core.hooks_run_outside
        places, varies = self._places(call, recorder.live)
        numbers = varying_leaves(call.key) if recorder.live and not self._plain_reads else ()
        is_alone = self.core.vote is not None or outside or in_world()
        meets_as = None if is_alone else self.core.name
        try:
            run = record(
                self.core.fn,
                call,
                recorder,
                varying,
                outside,
                places,
                varies,
                meets_as,
                numbers,
                self._unowned_leaves(call.key),
            )
        except Exception as error:
            self._plain_reads |= was_refused(error)
            raise
        if isinstance(run, RecordedRun) and looks_at_frames(run.entry.python_state.state.names):
            self._arguments.read_all()
        return run

    def _places(
        self, call: Invocation, live: bool
    ) -> tuple[LivePlaces, Callable[[PythonState], LivePlaces] | None]:
        """The places in Python that may be live in this recording: earlier ones have moved them, or code outside has.

        What finds the latter, by the walk before this recording.
        """
        previous = self._previous(call.key)
        is_still = self._hooks.is_still or self._plain_reads or self.core.hooks_run_outside
        if previous is None or not live or is_still:
            return NO_PLACES, None
        learned = functools.partial(self._varying.learned, previous.facts)
        return previous.moved | self._varying.found, learned

    def _unowned_leaves(self, key: Hashable) -> Sequence[weakref.ref[Tensor]]:
        """The leaf tensors whose `.grad` the step may assign, and that only its last recording has found."""
        previous = self._previous(key)
        return previous.unowned_leaves if previous is not None else ()

    def _previous(self, key: Hashable) -> RecordingSummary | None:
        """The summary with which a recording is compared: one of its kind, of any sizes until the step has settled."""
        core = self.core
        unkept = core.unkept.get(key)
        if unkept is None and not core.has_settled and self._compares_sizes(key):
            unkept = next(reversed(core.unkept.values()), None)
        return unkept.summary if unkept is not None else self._last_summary

    def _compares_sizes(self, key: Hashable) -> bool:
        return self.predictions is not None and self.predictions.compares(key)

    def wants_sizes(self, call: Invocation) -> bool:
        """Whether programs for other sizes may be made once this call is recorded, too."""
        return self.predictions is not None and self.predictions.wants(call)

    def _begin_recording(self, call: Invocation) -> None:
        core = self.core
        core.policy.recorded(call.key, core.cache.miss)
        core.policy.kinds.recorded(call.key, self.wants_sizes(call))
        if self.predictions is not None:
            self.predictions.lengths.recorded.note(call.key)

    def finish(self, run: FinishedRun, call: Invocation, rerun: bool = False) -> None:
        """The stages after a recorded run. rerun: it was a forward that ran again, for a backward without a program."""
        checks, hyper = run.recorder.checks, run.recorder.calls.hyperparameters
        if hyper is not None:
            self.core.varying |= hyper.wanted
        if checks.repeated or checks.own_clock is not None:
            self._repeats_calls = True
            self._reads_no_clock |= bool(checks.is_watched) and checks.clock is None
        unkept = self.core.unkept.get(call.key)
        previous = self._previous(call.key)
        reasons = None if unkept is None or self.core.has_settled else unkept.reasons
        verdict = judge(run, reasons, previous)
        outcome = build(verdict, lambda recording: self._build(recording, call))
        compares, together = self.core.options.compares, run.rendezvous
        may_change = may_still_change(None if unkept is None else unkept.reasons)
        agreed = agree(outcome, run.recorder, self.core.vote, compares, rerun, together, may_change)
        if agreed.vote is not None and self.core.vote is None:
            self.core.policy.rest.begin_together()
        self.core.vote = agreed.vote
        self._keep(agreed.outcome, call)
        if isinstance(agreed.outcome, Built):
            self.core.unsettled.clear()
        elif isinstance(agreed.outcome, WarmUp):
            is_alone = together is not None or has_messages(
                run.recorder
            )  # the others do not vote, either
            votes = None if is_alone else RankVote.of(run.recorder, compares)
            if votes is None:  # else all ranks must record alike
                self.core.unsettled.add(
                    call.reason, agreed.outcome.reason, agreed.outcome.changes_arguments
                )
            elif self.core.policy.kinds.defers:  # all ranks decide together which calls they record
                self.core.vote = votes | self.core.vote
            if run.recorder.scalars and not run.recorder.live:
                self.core.policy.kinds.record_next()  # ranks find out together whether they must vote

    def _build(self, recording: StepRecording, call: Invocation) -> Built:
        """The program of a recording, after the passes."""
        hooks = self._hooks
        if hooks.build is not None and (own := hooks.build(recording, call)) is not None:
            return own
        recorded = recording.program(call.spec)
        before = hooks.before_passes(recorded) if hooks.before_passes is not None else None
        before = before or self.passes.before(recorded, call, self.wants_sizes(call))
        awaits_passes, replays_before = before
        program = recorded if awaits_passes else self.passes.apply(recorded)
        signature = self.signature(recording, call.key)
        counts = ProgramCounts.of(recording.recorder, recorded.nodes(), program)
        exit, memory = recording.exit, None
        if self.core.options.memory:
            memory = memory_reports().of(recording, recorded, program)
        cached = CachedProgram(
            program,
            exit.assigned,
            exit.effects,
            exit.has_grad_fn,
            call.reason,
            fingerprints={} if program is recorded else self.core.options.issued(program),
            memory=memory,
            op_stream=signature,
            python_effects=exit.python_effects,
            awaits_passes=awaits_passes,
            replays_before_passes=replays_before,
            dropped=recording.dropped(program),
            recorded=recorded if self.core.options.keeps_recorded else None,
        )
        reference = None
        if self.predictions is not None:
            names = recording.entry.roots.arguments
            reference = self.predictions.reference(call, names, recorded, cached)
        built = Built(cached, recording.summary, counts, reference)
        return built if hooks.built is None else hooks.built(built, recording, call)

    def signature(self, recording: StepRecording, key: Hashable) -> Callable[[], Signature] | None:
        """What makes that with which audited calls are compared; None if none is audited."""
        if self._hooks.compares is not None and self._hooks.compares(recording):
            return recording.signature()
        is_unused = self.core.options.audit.every == 0 and not self._compares_sizes(key)
        if is_unused or not recording.recorder.ignore_fake:
            return None  # a fake world, whose mode is off here, replays nothing
        return recording.signature()

    def _keep(self, outcome: Outcome, call: Invocation) -> None:
        """Keep the program, the summary with which the next recording is compared, or the refusal."""
        key = call.key
        if isinstance(outcome, (Built, WarmUp)):
            self._leaves_numbers |= outcome.summary.changes_objects
        if isinstance(outcome, Built):
            self._end_warm_ups(key)
            if outcome.is_replayed:
                self._keep_program(outcome, call)
            self._last_summary = outcome.summary
            self.stats.captured(outcome.counts)
        elif isinstance(outcome, WarmUp):
            MISSES.info("warming up %s: %s", self.core.name, outcome.reason)
            unkept = self.core.unkept.pop(key, None) or Unkept(outcome.summary)
            unkept.summary = outcome.summary
            unkept.reasons[without_numbers(outcome.reason)] += 1
            unkept.why = outcome.reason
            self.core.unkept[key] = unkept  # the last one at the end
            self.stats.warmups += 1
        else:
            self.core.refuse(EVERY_CALL if outcome.everywhere else key, outcome.error)
            self.stats.warmups += 1

    def _end_warm_ups(self, key: Hashable) -> None:
        """A recording is kept: those before it that were not were the step's first ones, whatever their sizes."""
        core = self.core
        if not core.has_settled and self._compares_sizes(key):
            kind = open_key(key)
            core.unkept = {k: v for k, v in core.unkept.items() if open_key(k) != kind}
        core.unkept.pop(key, None)

    def _keep_program(self, built: Built, call: Invocation) -> None:
        key = self.core.key_with_sizes(call.key, built.cached.program)
        (self._hooks.add or self.core.cache.add)(key, built.cached)
        self._last_plan = LastPlan(key, Record, call.reason, is_kept=True)
        self.core.policy.ledger.pay(BUILDING)
        self.core.note_guards(key, built.cached.program)
        if self.predictions is not None:
            self.predictions.lengths.recorded.note(key)
            if built.reference is not None:
                built.cached.group = self.predictions.learn(key, built.reference, call)

    # -- refusals --------------------------------------------------------------------------------

    def _run_refused(self, error: FunctionalizeError, args: Any, kwargs: Any) -> Any:
        """A call whose key was refused before."""
        if self.core.options.raises:
            raise error
        if self.core.vote is None or EVERY_CALL in self.core.refused:
            TURNS.end_innermost()
            return self._run_eagerly(args, kwargs)
        # The other ranks wait for this vote. Then they record, and vote again, or all ranks run eagerly.
        if self.core.vote.before_replay(None).runs_eagerly:
            return self._run_eagerly(args, kwargs)
        return self._run_unrecorded(error, args, kwargs)

    def run_unrecordable(self, refused: Refused | NotYet, call: Invocation) -> Any:
        """A call that failed before the step ran, since its objects cannot be inspected, or not before it."""
        if isinstance(refused, NotYet):
            return self._run_before_recording(refused, call)
        self.core.refuse(call.key, refused.error)
        if self.core.options.raises and not refused.is_bug:
            raise refused.error
        return self._run_unrecorded(refused.error, call.args, call.kwargs)

    def _run_unrecorded(self, error: FunctionalizeError, args: Any, kwargs: Any) -> Any:
        """Run a call that cannot be recorded; if ranks vote, no rank captures the step from now on."""
        result = self.core.fn(*args, **kwargs)
        if self.core.vote is not None:
            self.core.vote.worst(Level.REFUSED)
            self.core.refuse(EVERY_CALL, error)
        self.stats.eager += 1
        return result

    def _run_before_recording(self, not_yet: NotYet, call: Invocation) -> Any:
        """Run a call that makes what later recordings need; if ranks vote, they record again, too."""
        MISSES.info("%s runs eagerly, since it %s", self.core.name, not_yet.reason)
        result = self.core.fn(*call.args, **call.kwargs)
        if self.core.vote is not None:
            self.core.vote.worst(not_yet.level)
        else:
            self.core.unsettled.add(call.reason, not_yet.reason)
        self.stats.eager += 1
        return result
