"""What the parts of one captured step share: the callable, its programs, counts, options, refusals and vote.

    core = StepCore(train_step, options)
    core.may_record(key)         whether a call that no program covers is recorded; counts it
    core.is_rare(key)            whether calls of its kind came too seldom; counts it
    core.refuse(key, error)      later calls of this kind raise, or run eagerly

A part (`Audits`, `PassSchedule`, `Predictions`, what is particular to a kind of step) holds the core, and no step.
Invariant: ranks that vote change what they share in the same calls, in the same way.

Note [Tried again]
What a step does at its first calls need not be what it does later: a history grows until it is full, a cache is filled,
an object is made. So a kind of call that was refused is tried again after 32 of its calls, then after twice as many
each time, if the ledger pays for the recording. Not tried again: where refusals are raised, where ranks vote, and
captured forwards among ranks, whose recordings no other rank would wait for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from functionalize._compat.references import address
from functionalize.audit.signature import Signature
from functionalize.errors import FunctionalizeError
from functionalize.ir.guards import Miss, NumberGuard
from functionalize.lengths.data_sizes import DataSizes
from functionalize.program.program import Program
from functionalize.recorder.recorder import Recorder
from functionalize.state.arguments import leaf_names
from functionalize.state.hyperparameters import Key
from functionalize.step.cache import ProgramCache
from functionalize.step.options import CaptureOptions
from functionalize.step.outcome import Unkept, UnsettledMisses
from functionalize.step.policy import Policy
from functionalize.step.stages import Invocation
from functionalize.step.stats import Stats
from functionalize.step.step_state import EntryState
from functionalize.step.vote import RankVote, VoteAfterGraph
from functionalize.util.process_groups import has_ranks
from functionalize.util.switches import MISSES, REFUSALS
from functionalize.util.text import without_numbers
from functionalize.util.user_warning import warn_uncapturable
from functionalize.walk.live_places import NO_PLACES

_SAVES_FOR = 64  # calls
EVERY_CALL = object()  # the key of a refusal that holds for calls of every kind
_TRIED_AGAIN, _MOST_REFUSED = 32, 8192  # calls after a refusal
_DIFFERS = (
    "{} runs eagerly where {}: recordings of calls that differ there were of no use, or cost more than it may spend by "
    "now. A call is recorded again if it has come before, or once that is paid. If this differs at every call, let ops "
    "compute with it instead: leave out `float()`, `int()`, `.item()`, or a key or an index that is made of it"
)


_NEVER = (
    "{} runs eagerly where {} is drawn anew at every call: let ops compute with it instead, "
    "leave out `float()`, a text, a key or an index that is made of it, or pass the number as an argument"
)


class StepCore:
    """One captured step, for its parts.

    fn: the callable. name: of the step, in messages. sizes: which sizes ops make of arguments. unkept: by key, the
    recordings that were not kept. unsettled: the misses whose recordings were not. refused: by key, see `refusal`.
    varying: hyperparameters that have changed. vote: None: the ranks need none. after: the vote of this call's replay,
    once its graph has run. records_missed: whether this call is recorded if its replay misses.
    hooks_run_outside: whether autograd runs the hooks of plain parameters after a replay. goes_outside: whether it is
    the backward of a graph of the caller's.
    """

    hooks_run_outside = False
    goes_outside = False

    def __init__(self, fn: Callable[..., Any], options: CaptureOptions) -> None:
        self.fn, self.options = fn, options
        self.name: str = getattr(fn, "__name__", type(fn).__name__)
        self.stats = Stats()
        self.policy = self._new_policy()
        self.cache, self.sizes = self._empty_cache(), DataSizes()
        self.unkept: dict[Hashable, Unkept] = {}
        self.unsettled = UnsettledMisses(self.name)
        self.refused: dict[Hashable, FunctionalizeError] = {}
        self._left: dict[Hashable, int] = {}  # calls of a refused kind until it is tried again
        self._refusals: Counter[Hashable] = Counter()  # how often a kind was refused
        self._told: set[str] = set()  # the refusals that the user knows
        self.varying: frozenset[Key] = frozenset()
        self.vote: RankVote | None = None
        self.after: VoteAfterGraph | None = None
        self.records_missed = True
        self._saves_until = 0  # this number of calls

    def _new_policy(self) -> Policy:
        policy = self.options.policy()
        policy.ledger.owed = self._owed
        return policy

    def _owed(self) -> float:
        """What the passes cost that must run before some programs are replayed, in eager steps."""
        waiting = Counter(address(each.group or each) for each in self.cache if each.is_owed)
        one, of_class = self.options.passes_cost, self.options.class_passes_cost
        return sum(min(n * one, of_class) for n in waiting.values())

    def _empty_cache(self) -> ProgramCache:
        return ProgramCache(self.name, self.policy, self.stats)

    def forget(self) -> None:
        """Drop every program, and what calls have cost and returned."""
        self.policy = self._new_policy()
        self.cache = self._empty_cache()

    def restart(self, options: CaptureOptions) -> None:
        """Drop every program, and make others with these options."""
        self.options, self.cache = options, self._empty_cache()

    @property
    def has_settled(self) -> bool:
        """Whether a recording was kept, or a program loaded."""
        return bool(self.stats.captures or len(self.cache))

    @property
    def must_issue_alike(self) -> bool:
        """Whether ranks compare the collectives of their programs before each replay."""
        return self.vote is not None and self.options.compares

    def rename(self, name: Callable[[Hashable], Hashable]) -> None:
        """Give kinds of calls without a program another key: some differed in numbers alone that are inputs now."""
        for key in [*self.unkept]:
            if (new := name(key)) != key:
                self.unkept[new] = self.unkept.pop(key)
                self.policy.kinds.renamed(key, new)

    def key_with_sizes(self, key: Hashable, program: Program) -> Hashable:
        """The key of a program that is kept, with the sizes that its ops make of arguments. key: of its call."""
        found = self.sizes.learned(key, program.guards)
        if found != key:
            self.policy.kinds.renamed(key, found)
        return found

    # -- when a call is recorded -----------------------------------------------------------------

    def may_record(self, key: Hashable, miss: Miss | None = None) -> bool:
        """Whether to record a call that no program covers; counts it. miss: of a graph that has run, if one has."""
        if not self.records_missed:
            return False
        policy, cache = self.policy, self.cache
        may_record = policy.may_record(key, miss or cache.miss, cache.looked_slowly)
        if policy.saves:
            self._saves_until = self.stats.calls + _SAVES_FOR
        if not may_record and policy.news is not None:
            if not self.unsettled.tell(policy.news):
                warn_uncapturable(_DIFFERS.format(self.name, policy.news))
            policy.news = None
        return may_record

    def note_guards(self, key: Hashable, program: Program) -> None:
        """Warn of guards of a new program that cannot hold twice; other answers to them are not recorded."""
        if self.policy.records_all:
            return
        for guard in program.facts:
            if not (isinstance(guard, NumberGuard) and guard.never_holds):
                continue
            self.policy.questions.never_returns(key, guard.question)
            if self.policy.questions.tell(key, guard.question):
                warn_uncapturable(_NEVER.format(self.name, guard.question))

    @property
    def saves(self) -> bool:
        """Whether one of the last calls was worth a recording that the ledger could not pay."""
        return self.stats.calls < self._saves_until

    def is_rare(self, key: Hashable) -> bool:
        """Whether calls of this kind came too seldom to be recorded; counts one. None is that was recorded."""
        known = key in self.unkept or self.cache.has(key)
        return self.policy.kinds.is_rare(key) and not known

    # -- what has happened -----------------------------------------------------------------------

    def note_miss(self, reason: str) -> None:
        """A guard did not hold, so that a call is recorded or runs eagerly."""
        if len(self.cache):
            MISSES.info("recording %s again: %s", self.name, reason)
            # A `Miss` is a text with a question, which no process can unpickle.
            self.stats.missed(str(reason))

    def refusal(self, key: Hashable) -> FunctionalizeError | None:
        """Why calls with this key cannot be captured; None: they can, or this one is tried: Note [Tried again]."""
        for each in (key, EVERY_CALL):
            error = self.refused.get(each)
            if error is not None and not self._tries_again(each):
                return error
        return None

    def _tries_again(self, key: Hashable) -> bool:
        """Count a call that was refused; whether to forget the refusal."""
        self._left[key] = left = self._left[key] - 1
        alone = self.vote is None and not (self.hooks_run_outside and has_ranks())
        if left > 0 or self.options.raises or not alone or not self.policy.can_record:
            return False
        del self.refused[key]
        return True

    def refuse(self, key: Hashable, error: FunctionalizeError) -> None:
        """Calls with this key cannot be captured."""
        self.unkept.pop(key, None)
        self.refused[key] = error
        self._left[key] = min(_TRIED_AGAIN << min(self._refusals[key], 16), _MOST_REFUSED)
        self._refusals[key] += 1
        reason = without_numbers(str(error))
        was_told = reason in self._told
        self._told.add(reason)
        if was_told:
            REFUSALS.info("%s cannot be captured: %s", self.name, error)
        elif self.options.raises:
            REFUSALS.warning(
                "%s cannot be captured, its next call will raise: %s", self.name, error
            )
        else:
            warn_uncapturable(f"{self.name} cannot be captured, it runs eagerly: {error}")

    def state_before(self, call: Invocation, signature: Signature) -> EntryState:
        """What a step may change and a replay may not: read before a call that is compared with `signature`."""
        names, recorder = leaf_names(self.fn, call.spec), Recorder(True, live=signature.live)
        recorder.checks.goes_outside = self.goes_outside
        live = signature.moving.live if signature.moving is not None else NO_PLACES
        leaves: Sequence[Any] = call.leaves
        return EntryState.now(
            self.fn, leaves, recorder, self.varying, names, self.hooks_run_outside, live
        )
