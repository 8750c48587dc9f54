"""A step with programs: which call replays one of them, which call is audited, which runs eagerly.

    is_done, result = step._try_replay(call)      True: replayed or audited; False: no program's guards hold
    step._run_eagerly(args, kwargs)               the callable itself

`CapturedStep` adds the recording of calls that no program covers.
Invariants: if a guard fails, nothing has changed yet. If ranks vote, all of them replay, audit, or do neither.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from functionalize._compat.dispatch import disable_current_modes
from functionalize.audit.audited_call import AuditedCall, log_bug
from functionalize.audit.left_state import LeftState
from functionalize.audit.signature import Signature
from functionalize.audit.verdict import AuditVerdict
from functionalize.calls.late_numbers import filled, reads_late
from functionalize.errors import AuditError, FunctionalizeError, GuardError, UncapturableError
from functionalize.ir.guards import Miss
from functionalize.ir.inputs import Call
from functionalize.lengths.data_sizes import DataSizes
from functionalize.program.executable import Vote
from functionalize.program.program import Program
from functionalize.recorder.recorder import Recorder
from functionalize.run.detached_outputs import refuse_backward
from functionalize.state.arguments import leaf_names
from functionalize.state.dropped_gradients import drop, put_back
from functionalize.state.hyperparameters import Key
from functionalize.state.python_effects import repeat
from functionalize.state.sources import leave
from functionalize.step.cache import (
    CALLS_BEFORE_SECOND_RECORDING,
    MANY,
    CachedProgram,
    ProgramCache,
    key_of,
)
from functionalize.step.options import CaptureOptions
from functionalize.step.outcome import Refused, Unkept, UnsettledMisses
from functionalize.step.plan import LastPlan
from functionalize.step.policy import AUDIT, LOST_GRAPH
from functionalize.step.recording import RecordingSummary
from functionalize.step.stages import MAX_WARMUPS, Invocation
from functionalize.step.stats import Stats
from functionalize.step.step_state import EntryState
from functionalize.step.turns import TURNS
from functionalize.step.vote import (
    CHOSE,
    DIFFER,
    RARE,
    Level,
    RankVote,
    VoteAfterGraph,
    must_vote,
)
from functionalize.util.gc_pause import only_young_collections
from functionalize.util.other_threads import reading_thread
from functionalize.util.process_groups import has_ranks
from functionalize.util.text import counted
from functionalize.util.user_warning import warn_uncapturable
from functionalize.walk.live_places import NO_PLACES

log = logging.getLogger("functionalize")
Found = tuple[CachedProgram, Call]
EVERY_CALL = object()  # the key of a refusal that holds for calls of every kind
_MOST_FAILURES = 3  # of audits, before the step is refused
_DIFFERS = (
    "{} runs eagerly where {}: recordings of calls that differ there were of no use. A call is recorded again if it "
    "has come before. If this differs at every call, let ops compute with it instead: leave out `float()`, `int()`, "
    "`.item()`, or a key or an index that is made of it"
)
WAITS = "the program of this kind of call waits for its passes"


class ReplayedStep:
    """The programs of a step, and the calls that they cover."""

    _hooks_run_outside = False  # whether autograd runs the hooks of plain parameters after a replay
    _goes_outside = False  # whether it is the backward of a graph of the caller's
    boundary = ""  # what of a framework's loop it is, for `explain`

    def __init__(self, train_step: Callable[..., Any], options: CaptureOptions) -> None:
        self.stats = Stats()
        self._fn, self._options = train_step, options
        self._name = getattr(train_step, "__name__", type(train_step).__name__)
        self._policy = options.policy()
        self._cache, self._sizes = self._empty_cache(), DataSizes()
        self._lengths = options.lengths()
        self._warmups: dict[Hashable, Unkept] = {}  # by the key of a call
        self._unsettled = UnsettledMisses(self._name)
        self._refused: dict[Hashable, FunctionalizeError] = {}
        self._changed_hyperparameters: frozenset[Key] = frozenset()
        self._last_summary: RecordingSummary | None = None
        self._vote: RankVote | None = None
        self._unpredicted: set[Hashable] = set()  # keys of calls that were not as predicted
        # Whether this call is not recorded either; whether the ranks also vote after the graph.
        self._is_left_eager = self._votes_again = False
        self._after: VoteAfterGraph | None = None  # the vote of this call's replay
        self._tries_once = False  # whether this call replays a second program, and no third one
        self._has_warned_of_thread = False
        self._last_plan: LastPlan | None = None

    def __repr__(self) -> str:
        counts = counted(len(self._cache), "program"), counted(self.stats.replays, "replay")
        return f"<captured {self._name}: {', '.join(counts)}>"

    @property
    def asks_nobody(self) -> bool:
        """Whether one rank may call it alone: no ranks vote, and no kind of call is refused."""
        return self._vote is None and not self._refused

    def _empty_cache(self) -> ProgramCache:
        most, nbytes = self._options.max_programs, self._options.max_program_bytes
        policy = self._policy
        evicted, rest_length = policy.kinds.evicted, lambda: policy.rest.length
        return ProgramCache(self._name, most, nbytes, evicted, rest_length)

    def _key(self, leaves: Sequence[Any], spec: Any) -> Hashable:
        """The key of a call in the cache."""
        return self._sizes.of(key_of(leaves, spec), leaves)

    def _key_with_sizes(self, key: Hashable, program: Program) -> Hashable:
        """The key of a program that is kept, with the sizes that its ops make of arguments. key: of its call."""
        found = self._sizes.learned(key, program.guards)
        if found != key:
            self._policy.kinds.renamed(key, found)
        return found

    def _note_miss(self, reason: str) -> None:
        if len(self._cache):
            log.info("recording %s again: %s", self._name, reason)
            self.stats.missed(reason)

    def _run_eagerly(self, args: Any, kwargs: Any) -> Any:
        self.stats.eager += 1
        return self._fn(*args, **kwargs)

    # -- replay --------------------------------------------------------------------------------

    def _try_replay(self, call: Invocation) -> tuple[bool | None, Any]:
        """(True, result) if a program was replayed or audited, on every rank if they vote; else (False, why not).

        (None, the exception as text): an op failed, and nothing has changed; in eager the ops before it have effects.
        """
        matching = self._cache.matching(call.key, call.leaves, call.spec)
        found = next(matching, None)
        self._is_left_eager = waits = is_rare = found is not None and self._waits(found[0])
        is_vain = False
        if found is None and self._vote is not None:
            is_rare = self._is_unpredicted(call)
            matching = self._cache.matching(call.key, call.leaves, call.spec)
            found = None if is_rare else next(matching, None)
            is_vain = found is None and not is_rare
            is_vain = is_vain and (self._cache.is_hurried or not self._may_record(call.key))
        is_due = found is not None and self._is_due(found[0])
        if found is not None and is_due and not waits and self._is_read_elsewhere():
            if found[0].prediction is not None:  # it is compared before it is replayed
                self._is_left_eager = True
                return False, WAITS
            # Else every call would be due, and run eagerly, as long as that thread runs.
            is_due = False
        if self._vote is not None:
            mine = found[0] if found is not None and not waits else None
            worst = self._vote.before_replay(mine, is_due, is_rare, is_vain)
            self._votes_again, self._tries_once, self._after = worst is Level.READS, False, None
            is_eager = worst in (Level.RARE, Level.VAIN)
            self._is_left_eager = is_eager or worst is Level.DIFFERENT
            is_first = found is not None and found[0].prediction is not None
            is_due = worst is Level.AUDITED or (is_eager and is_first)
            if worst is Level.VAIN and not self._cache.is_hurried:
                self._policy.rest.is_in_vain()
            if is_eager and not is_first:
                self.stats.rare += 1
                return False, RARE
            if worst is Level.DIFFERENT:
                return False, self._note_different()
            if worst in (Level.NOT_YET, Level.REFUSED):
                return False, self._cache.reason or "a guard failed on another rank"
        if waits:
            self.stats.waiting += 1
            return False, WAITS
        # An audit makes as many objects as a recording, which are garbage at its end.
        with only_young_collections() if is_due else nullcontext():
            return self._try_all(found, matching, is_due, call)

    def _try_all(
        self, found: Found | None, matching: Iterator[Found], is_due: bool, call: Invocation
    ) -> tuple[bool | None, Any]:
        """The same, of a program whose guards hold, then of each further one. is_due: it is audited."""
        while found is not None:
            try:
                if not is_due:
                    return True, self._replay(*found)
                program, signature = found[0].program, found[0].signature
                group = found[0].group
                runs_graph = self._vote is None and (group is None or group.compares_results)
                audited = AuditedCall.of(signature, program, found[1], runs_graph)
            except GuardError as error:
                if found[1].committed:  # of a captured step that an effect in Python has called
                    raise
                put_back(found[1], found[0].dropped)
                self._cache.missed(str(error))
                self._cache.rule_out(Miss.of(error.args[0]))
                self._policy.ledger.pay(LOST_GRAPH)
                after = self._after
            except Exception as error:
                is_ours = isinstance(error, FunctionalizeError) and not found[0].is_unseen
                may_run = self._vote is None and found[0].program.may_run_again(found[1])
                if is_ours or not may_run:
                    raise
                if found[0].is_unseen:
                    self._failed_unseen(found[0], call, error)
                put_back(found[1], found[0].dropped)
                return None, f"{type(error).__name__}: {error}"
            else:
                run = self._audit if found[0].prediction is None else self._run_first
                return True, run(audited, found[0], call)
            # With a vote, the graph has issued its collectives: all ranks try another program, or none does.
            if self._vote is None:
                found = next(matching, None)
            else:
                found = self._other_on_all_ranks(after, found, matching, call)
        return False, self._cache.reason

    def _other_on_all_ranks(
        self, after: VoteAfterGraph | None, last: Found, matching: Iterator[Found], call: Invocation
    ) -> Found | None:
        """The next program of this rank, if all ranks have one; None: all record the call, or run it eagerly.

        after: the vote that has ended the replay of the last one; None: of a second one, or it was no vote.
        """
        self._after = None
        if after is None or not after.tries_others:
            self._leave_eager(after is not None and not after.records)
            return None
        assert self._vote is not None
        if after.failure is None:  # on another rank: the same one, again
            resolved = last[0].program.resolve(call.leaves)
            found = (last[0], resolved) if isinstance(resolved, Call) else None
        else:
            found = next(matching, None)
        worst = self._vote.before_replay(found[0] if found is not None else None)
        self._votes_again, self._tries_once = worst is Level.READS, True
        if worst in (Level.KEPT, Level.READS):
            return found
        self._is_left_eager = worst is Level.DIFFERENT
        return None

    def _leave_eager(self, is_left: bool) -> None:
        """Whether this call is not recorded, as all ranks have agreed."""
        self._is_left_eager = is_left
        if is_left:
            self._policy.rest.is_in_vain()

    def _is_read_elsewhere(self) -> bool:
        """Whether another thread may read the live numbers of a recording or an audit, so that there is none.

        Not asked among ranks, which must all do the same.
        """
        if self._vote is not None or has_ranks():
            return False
        thread = reading_thread(TURNS.threads)
        if thread is not None and not self._has_warned_of_thread:
            self._has_warned_of_thread = True
            warn_uncapturable(
                f"{self._name} runs eagerly where it would be recorded, and is not audited, while {thread} may read "
                "the numbers that it changes: let that thread wait for them by `queue.get()`, and the thread of the "
                "step put them there"
            )
        return thread is not None

    def _note_different(self) -> str:
        """The programs of the ranks differ: without the optional passes all make new ones; returns the reason."""
        if (alike := self._options.alike()) is not None:  # of all ranks, whose votes are equal
            self._options, self._cache = alike, self._empty_cache()
            self._lengths = alike.lengths() if self._lengths is not None else None
            self.stats.missed(CHOSE)
            return CHOSE
        if DIFFER not in self.stats.guard_failures:
            warn_uncapturable(f"{self._name} runs eagerly: {DIFFER}")
        return DIFFER

    def _replay(self, cached: CachedProgram, call: Call) -> Any:
        vote = self._vote_after_graph(cached) if self._votes_again else None
        drop(call, cached.dropped)
        result, left = cached.program.replay(call, vote)
        count = len(cached.slots)
        leave(call, cached.slots, left[:count], cached.effects)
        self._note_replay(cached)
        repeat(cached.python_effects, call, left[count:])
        if reads_late(cached.python_effects):
            result = filled(result, call)
        return refuse_backward(result, cached.has_grad_fn)

    def _vote_after_graph(self, cached: CachedProgram) -> Vote | None:
        """The vote on whether all guards on numbers hold, where ranks vote again when the graph has run."""
        if self._vote is None:
            return None
        key, is_second = self._cache.key_of(cached), self._tries_once

        def has_other(failure: str | None) -> bool:
            return not is_second and (failure is None or self._cache.has_other(Miss.of(failure)))

        def may_record(failure: str | None) -> bool:
            if failure is None:  # only another rank may have missed: nothing is counted here
                return self._policy.can_record
            return self._may_record(key, Miss.of(failure))

        self._after = VoteAfterGraph(self._vote, has_other, may_record)
        return self._after

    def _may_record(self, key: Hashable, miss: Miss | None = None) -> bool:
        """Whether to record a call that no program covers; counts it. miss: of a graph that has run, if one has."""
        policy, cache = self._policy, self._cache
        may_record = policy.may_record(key, miss or cache.miss, cache.looked_slowly)
        if not may_record and policy.news is not None:
            if not self._unsettled.tell(policy.news):
                warn_uncapturable(_DIFFERS.format(self._name, policy.news))
            policy.news = None
        return may_record

    def _note_replay(self, cached: CachedProgram) -> None:
        cached.replays += 1
        self.stats.replays += 1
        self._cache.used(cached)
        self._policy.ledger.replayed()
        self._policy.replayed(self._cache.key_of(cached))

    def _waits(self, cached: CachedProgram) -> bool:
        """Whether a call that a program covers runs eagerly, as its passes have not run; the last one runs them."""
        if not cached.waits or cached.prediction is not None:
            return False
        cached.waits, cached.found = cached.waits - 1, cached.found + 1
        self._cache.used(cached)
        key = self._cache.key_of(cached)
        self._policy.kinds.replayed(key)  # it has returned
        if not cached.waits:
            self._optimise(key, cached)
        return True

    def _optimise(self, key: Hashable, cached: CachedProgram) -> None:
        """Run the passes on a program that has been of use; if they fail, its kind is refused, or replayed without."""
        cached.waits, runner = 0, cached.program.runner
        try:
            with torch.no_grad(), disable_current_modes():
                self._rewrite(cached)
        except Exception as error:
            is_bug = not isinstance(error, FunctionalizeError)  # that must not end a loop
            if self._vote is not None or (is_bug and cached.replays):  # who refuses does not vote
                cached.program.runner = runner
                log.error("%s replays a program without its passes: %s", self._name, error)
                return
            self._cache.drop(cached)
            self._refuse(key, Refused.of(error).error)
        else:
            self.stats.nodes = cached.program.nodes()

    def _rewrite(self, cached: CachedProgram) -> None:
        cached.program = self._rewritten(cached.program)
        cached.fingerprints = self._options.issued(cached.program)

    def _rewritten(self, recorded: Program) -> Program:
        """The program of a recording after the passes."""
        return self._options.applied(recorded)

    def _before_passes(self, recorded: Program, call: Invocation) -> tuple[int, bool]:
        """How many calls must show that a program is of use before the passes run; whether replays do (`is_bare`).

        None if as many have waited for the recording.
        """
        unkept = self._warmups.get(call.key)
        if not self._passes_may_wait(call) or (unkept is not None and unkept.has_waited):
            return 0, False
        return self._cache.calls_before_passes(call.key, recorded), False

    def _passes_may_wait(self, call: Invocation) -> bool:
        """Whether passes may run later: the ranks, a report or a prediction do not compare their result."""
        options = self._options
        is_compared = options.compares or options.memory or self._wants_sizes(call)
        return self._policy.kinds.defers and options.rewrites and not is_compared

    def _let_wait(self, call: Invocation, recorder: Recorder) -> None:
        """After the first recording of a large step, which is not kept: the next one, and the passes, may wait.

        Ranks that vote, or will, record alike: theirs do not wait.
        """
        is_first = self.stats.warmups == 1 and not self._has_settled
        is_long = is_first and len(recorder.records) >= MANY and self._passes_may_wait(call)
        if is_long and self._vote is None and not must_vote(recorder):
            unkept = self._warmups[call.key]
            unkept.waits, unkept.has_waited = CALLS_BEFORE_SECOND_RECORDING, True
            log.info(
                "%s runs eagerly for %d calls before it is recorded and its passes run, which take as long as some 20 "
                "steps: with `record_after=1` they run at once",
                self._name,
                CALLS_BEFORE_SECOND_RECORDING,
            )

    def _compares_sizes(self, key: Hashable) -> bool:
        """Whether programs for other sizes may be made from recordings of this kind of call."""
        lengths = self._lengths
        return lengths is not None and self._predicts and lengths.recorded.are_compared(key)

    def _wants_sizes(self, call: Invocation) -> bool:
        """Whether they may be made once this call is recorded, too."""
        lengths = self._lengths
        return lengths is not None and self._predicts and lengths.wants(call.key, call.leaves)

    @property
    def _predicts(self) -> bool:
        """Whether programs for other sizes may be made; not where ranks vote on a forward apart from its backward."""
        return self._vote is None or not self._hooks_run_outside

    @property
    def _has_settled(self) -> bool:
        return bool(self.stats.captures or len(self._cache))

    def _is_rare(self, call: Invocation) -> bool:
        """Whether calls of this kind, which was never recorded, came too seldom to be recorded."""
        has_begun = self._has_settled or 0 < self.stats.warmups < MAX_WARMUPS
        if has_begun and self._wants_sizes(call):
            return False
        known = call.key in self._warmups or self._cache.has(call.key)
        return self._policy.kinds.is_rare(call.key) and not known

    def _is_unpredicted(self, call: Invocation) -> bool:
        """Whether the kind of a call without a program is rare; else its program may be predicted: `PredictedStep`."""
        return self._is_rare(call)

    def _run_first(self, audited: AuditedCall, cached: CachedProgram, call: Invocation) -> Any:
        """The first call of a predicted program that is compared: see `PredictedStep`."""
        raise NotImplementedError

    def _failed_unseen(self, cached: CachedProgram, call: Invocation, error: Exception) -> None:
        """The first replay of a predicted program that was not compared has failed: see `PredictedStep`."""
        raise NotImplementedError

    # -- audit ---------------------------------------------------------------------------------

    def _is_due(self, cached: CachedProgram) -> bool:
        """Whether the next call of this program is audited."""
        call, is_audited = cached.replays + cached.audits + 1, cached.op_stream is not None
        if cached.prediction is not None:
            return True
        return is_audited and self._options.audit.is_due(call) and self._can_pay_audit()

    def _can_pay_audit(self) -> bool:
        """Whether an audit is within what the step may cost, or was asked for."""
        return self._options.audit.every is not None or self._policy.ledger.can_pay(AUDIT)

    def _audit(self, audited: AuditedCall, cached: CachedProgram, call: Invocation) -> Any:
        """Run the step for real, and compare it with its program: the result is eager's, whatever is found."""
        is_thorough = self._begin_audit(cached)
        try:
            if is_thorough and cached.signature is not None:
                before = self._state_before(call, cached.signature)
                audited.also = LeftState(before, cached.effects).difference
        except Exception as error:  # the op stream and the results are compared alone
            log_bug(error)
        try:
            result = audited.run(self._fn, call.args, call.kwargs, call.spec)
        except Exception:
            self._note_difference(audited.verdict, cached)
            raise
        self._end_audit(audited.verdict, cached)
        return result

    def _begin_audit(self, cached: CachedProgram) -> bool:
        """Count an audited call of a program; whether what it changes in Python, and all its effects, are looked at."""
        cached.audits += 1
        self._cache.used(cached)
        if self._options.audit.every is None:  # else they were asked for
            self._policy.ledger.pay(AUDIT)
        self._policy.replayed(self._cache.key_of(cached))
        return self._options.audit.is_thorough(cached.replays + cached.audits)

    def _end_audit(self, verdict: AuditVerdict | None, cached: CachedProgram) -> None:
        """Count the verdict, None if the audit itself has failed, and settle it."""
        if verdict is None or verdict.missed is None:
            self.stats.audits += 1
        else:  # the program would not have been replayed
            self.stats.eager += 1
            self._note_miss(verdict.missed)
        self._settle(verdict, cached)

    def _settle(self, verdict: AuditVerdict | None, cached: CachedProgram) -> None:
        """Drop a program that differs from eager, on all ranks; raises `AuditError` where that is the option."""
        message = self._note_difference(verdict, cached)
        self._agree_on_audit(message, cached)
        if message is not None and self._options.audit.raises:
            raise AuditError(message)

    def _agree_on_audit(self, message: str | None, cached: CachedProgram) -> None:
        """Drop a program on all ranks if one of them differs from eager. message: how this one differs."""
        failed = Level.NOT_YET if self.stats.audit_failures < _MOST_FAILURES else Level.REFUSED
        level = Level.KEPT if message is None else failed
        worst = self._vote.worst(level) if self._vote is not None else level
        if worst is not Level.KEPT:
            self._cache.drop(cached)  # all ranks record again
        if worst is Level.REFUSED:
            why = f"replays differ from eager again and again: {message or 'on another rank'}"
            self._refuse(EVERY_CALL, UncapturableError(why))

    def _note_difference(self, verdict: AuditVerdict | None, cached: CachedProgram) -> str | None:
        """Drop a program that differs from eager; returns the message, None if it does not differ."""
        message = (verdict or AuditVerdict()).message(self._name, cached.replays + cached.audits)
        if message is not None:
            log.error("%s", message)
            self.stats.differed(message)
            self._cache.drop(cached)
        return message

    def _state_before(self, call: Invocation, signature: Signature) -> EntryState:
        """What a step may change and a replay may not: read before an audited call."""
        names, recorder = leaf_names(self._fn, call.spec), Recorder(True, live=signature.live)
        recorder.checks.goes_outside = self._goes_outside
        varying, outside = self._changed_hyperparameters, self._hooks_run_outside
        live = signature.moving.live if signature.moving is not None else NO_PLACES
        return EntryState.now(self._fn, call.leaves, recorder, varying, names, outside, live)

    # -- refusals ------------------------------------------------------------------------------

    def _refuse(self, key: Hashable, error: FunctionalizeError) -> None:
        self._warmups.pop(key, None)
        self._refused[key] = error
        if self._options.raises:
            log.warning("%s cannot be captured, its next call will raise: %s", self._name, error)
        else:
            warn_uncapturable(
                f"{self._name} cannot be captured, it runs eagerly from now on: {error}"
            )
