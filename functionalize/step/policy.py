"""When a call that no program covers is recorded, and what all this may cost.

    A call is recorded if the ledger can pay for it, if its kind has come often enough for what recordings of such calls
    have returned, and if what it missed has come before or fewer than three answers to its question were recorded.

    policy.rest.takes_call()         whether this call runs eagerly, and nothing is looked at
    policy.kinds.is_rare(key)        whether calls of a kind without a program came too seldom
    policy.may_record(key, miss)     whether a call that its programs missed is recorded
    policy.ledger.can_pay(AUDIT)     whether an audit is made now

Note [The ledger]
A captured step promises: what it has cost beyond eager is never more than 30 eager steps, plus 5 % of the calls so far.
Costs are counted in eager steps, by constants that were measured on FSDP2 steps whose time is Python's; where kernels
take the time all of these are smaller. So what a call may cost follows from the calls before it alone: it is the same
on all ranks with the same calls, and in every run. What replays return pays for recordings, up to a limit: a step that
has replayed for a week and no longer settles must not cost hours.

Options that ask for more work are outside of it: `allowance=None`, `backward=True`, `dynamic=True`, `audit=n`,
`memory=True`.

Note [Questions]
A guard asks a question (`off.id + 1`, `int(m.ptr)` in line 20), and recordings of one kind differ in its answer. An
answer that never returns is a running number: a program for it is of no use. Three recordings in a row may find other
answers, then only an answer that has come before is worth one: a pointer that goes round has each of its positions
recorded in the second round, a counter none. Of some numbers the first recording tells that they never return: a
drawn float that was made plain.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from functionalize.ir.guards import Miss

# Eager steps beyond the one that the call would have taken.
RECORDING = 4.5  # the first one, which is watched, takes more, each later one less
BUILDING = 2.5  # a program of a recording, and its code at the first replay
PASSES, PASS = 4.0, 0.8  # the metadata of a program, a copy and `verify`; one pass over it
SIZES = 2  # at which the passes of a class of lengths run
CLASS = 7.0  # beside them: programs at two sizes that were not recorded, their metadata, a template of the results
AUDIT = 7.0
COMPARISON = 4.0  # a first call of a predicted program that is compared
LOST_GRAPH = 0.25  # a graph that ran, and whose guards on numbers failed
# At the guards of programs, all of which fail: with a walk of all objects, without it.
LOOK, QUICK_LOOK = 0.5, 0.04
GAIN = 0.65  # of a replay
ALLOWANCE, _SHARE = 30.0, 0.05  # eager steps; of the calls
_MOST_SAVED = 60.0  # eager steps
_DIFFERENT_IN_A_ROW = 3
_VAIN_IN_A_ROW = 32  # calls, before the step rests
_SLOW_LOOK = 8  # calls for which one counts that took as long as a step
_LONGEST_REST = 1024  # calls
_RECORDED_AFTER = 2  # calls of a kind, while a recorded kind waits for its first replay
_FEW_KINDS = 2  # recorded kinds without a replay, before further ones must come twice as often
_KINDS_REMEMBERED = 4096
_ANSWERS_REMEMBERED = 512
_MOST_DOUBLINGS = 10
_RECORDINGS_AFTER_REST = 3  # before the next rest: of most steps the first recording is not kept


class Ledger:
    """What a step may still cost beyond eager, in eager steps: Note [The ledger].

    allowance: what it begins with. is_bounded: whether it refuses anything.
    owed: what programs that were begun need until their first replay: it pays for nothing else, or audits and further
    recordings would use up what the first program waits for.
    """

    def __init__(self, allowance: float = ALLOWANCE, is_bounded: bool = True) -> None:
        self.is_bounded = is_bounded
        self.balance, self._most = allowance, max(allowance, _MOST_SAVED)
        self.owed: Callable[[], float] = float

    @property
    def is_full(self) -> bool:
        """Whether no more can be saved."""
        return self.balance >= self._most

    def call(self) -> None:
        """A call of the step begins."""
        self._add(_SHARE)

    def replayed(self) -> None:
        """A program was replayed."""
        self._add(GAIN)

    def _add(self, steps: float) -> None:
        self.balance = min(self.balance + steps, self._most)

    def can_pay(self, cost: float, calls: int = 0, is_owed: bool = False) -> bool:
        """Whether a cost is within the promise. calls: so many calls later. is_owed: whether it is what is owed."""
        if not (self.is_bounded and cost):
            return True
        owed = 0.0 if is_owed else self.owed()
        return self.balance + calls * _SHARE >= min(cost + owed, self._most)

    def pay(self, cost: float) -> None:
        """Something has cost as many eager steps."""
        self.balance -= cost


@dataclass(slots=True)
class _Answer:
    """An answer without a program. calls: how often it came. recorded: how many of these were recorded."""

    calls: int = 0
    recorded: int = 0


@dataclass(slots=True)
class _Question:
    """What a guard of programs of one kind asks, with the answers without a program.

    recorded, unpaid: how many calls since the last replay were recorded, or would have been if the ledger had paid.
    is_told: whether the user knows that calls run eagerly for it. never_returns: whether no answer comes twice.
    """

    answers: OrderedDict[Hashable, _Answer] = field(default_factory=OrderedDict)
    recorded: int = 0
    unpaid: int = 0
    is_told: bool = False
    never_returns: bool = False

    def answer(self, text: Hashable) -> _Answer:
        """One answer, which has come now."""
        found = self.answers.setdefault(text, _Answer())
        self.answers.move_to_end(text)
        if len(self.answers) > _ANSWERS_REMEMBERED:
            self.answers.popitem(last=False)
        return found


class Questions:
    """The questions of all kinds of calls: Note [Questions]. Memory is bounded."""

    def __init__(self) -> None:
        # By the hash of a kind, which holds no argument, and the question.
        self._of: OrderedDict[tuple[int, str], _Question] = OrderedDict()
        self._pending: dict[int, dict[str, _Question]] = {}  # with misses since the last replay

    def is_worth_recording(self, key: Hashable, miss: Miss) -> bool:
        """Count a call whose programs all missed; whether its answer is likely to return."""
        question = self._question(key, miss.question)
        answer = question.answer(miss.answer)
        answer.calls += 1
        if answer.calls > 1:
            # Of some kinds the first recording is not kept; a step that raises has none.
            in_vain = max(question.recorded - _FEW_KINDS, answer.recorded - _FEW_KINDS, 0)
            return answer.calls > 1 << min(in_vain, _MOST_DOUBLINGS)
        return question.recorded < _DIFFERENT_IN_A_ROW and not question.never_returns

    def tell(self, key: Hashable, question: str) -> bool:
        """The user is told that calls run eagerly for a question; whether that is new."""
        found = self._question(key, question)
        was_told, found.is_told = found.is_told, True
        return not was_told

    def note_unpaid(self, key: Hashable, miss: Miss) -> bool:
        """Count a call that is worth a recording which the ledger does not pay; whether a warning is due now."""
        question = self._question(key, miss.question)
        self._note_pending(key, miss.question, question)
        question.unpaid += 1
        return question.unpaid > _DIFFERENT_IN_A_ROW and self.tell(key, miss.question)

    def never_returns(self, key: Hashable, question: str) -> None:
        """No answer to this question comes twice."""
        self._question(key, question).never_returns = True

    def recorded(self, key: Hashable, miss: Miss) -> None:
        """The call just counted is recorded."""
        question = self._question(key, miss.question)
        self._note_pending(key, miss.question, question)
        question.recorded += 1
        question.answer(miss.answer).recorded += 1

    def replayed(self, key: Hashable) -> None:
        """A program of this kind was of use."""
        if self._pending:
            for question in self._pending.pop(hash(key), {}).values():
                question.recorded = question.unpaid = 0

    def _note_pending(self, key: Hashable, text: str, question: _Question) -> None:
        if not (question.recorded or question.unpaid):
            self._pending.setdefault(hash(key), {})[text] = question

    def _question(self, key: Hashable, text: str) -> _Question:
        found = self._of.setdefault((hash(key), text), _Question())
        self._of.move_to_end((hash(key), text))
        if len(self._of) > _KINDS_REMEMBERED:
            (kind, oldest), _ = self._of.popitem(last=False)
            self._pending.get(kind, {}).pop(oldest, None)
            if kind in self._pending and not self._pending[kind]:
                del self._pending[kind]
        return found


@dataclass(slots=True)
class KindOfCall:
    """Calls with one key and without a program. unreplayed: whether one was recorded, and none was replayed since.

    evictions: how often other programs needed the place of its program. calls: since the last eviction.
    """

    calls: int = 0
    unreplayed: bool = False
    evictions: int = 0


class Kinds:
    """How often each kind of call came, its kind being its key in the cache; which kinds are recorded.

    A recording costs several eager steps, and only replays return that. So a new kind is recorded at once only while
    no recorded kind waits for its first replay. Else it is recorded when it has come twice, and twice as often for each
    kind that waits beyond two. So of lengths that never return one is recorded, and few of lengths that return seldom.
    A kind whose program was evicted must come twice as often each time, so that more kinds than there are places for
    are not recorded in turn. With `allowance=None` every kind is recorded at once.
    Invariant: memory is bounded; a kind that was not seen for `_KINDS_REMEMBERED` others counts from zero again.
    """

    def __init__(self, defers: bool = True) -> None:
        self.defers = defers  # whether any kind may be rare
        self._kinds: OrderedDict[int, KindOfCall] = OrderedDict()  # by hash: holds no argument
        self._unreplayed = 0
        self._records_next = False

    def is_rare(self, key: Hashable) -> bool:
        """Count a call without a program; whether its kind came too seldom to be recorded."""
        if not self.defers or self._records_next:
            return False
        kind = self._of(key)
        kind.calls += 1
        if not (self._unreplayed or kind.evictions):
            return False
        return kind.calls < self._needed(kind)

    def returns(self, key: Hashable, times: int) -> bool:
        """Count a call without a program; whether its kind has come as many times."""
        kind = self._of(key)
        kind.calls += 1
        return kind.calls >= times

    def missing(self, key: Hashable) -> int:
        """How many more calls of a kind without a program must come before one is recorded; 0: it is not rare."""
        kind = self._kinds.get(hash(key), KindOfCall())
        if not self.defers or self._records_next or not (self._unreplayed or kind.evictions):
            return 0
        return max(self._needed(kind) - kind.calls, 0)

    def _needed(self, kind: KindOfCall) -> int:
        doublings = max(self._unreplayed - _FEW_KINDS, 0) + kind.evictions
        return _RECORDED_AFTER << min(doublings, _MOST_DOUBLINGS)

    def record_next(self) -> None:
        """Record the next call, of any kind."""
        self._records_next = True

    def recorded(self, key: Hashable, is_compared: bool = False) -> None:
        """A call of this kind is recorded. is_compared: for programs of other sizes, so it need not return."""
        self._records_next = False
        kind = self._of(key)
        self._unreplayed += not (kind.unreplayed or is_compared)
        kind.unreplayed |= not is_compared

    def renamed(self, key: Hashable, other: Hashable) -> None:
        """A recorded call is of another kind than it seemed to be."""
        if self._of(key).unreplayed:
            self.replayed(key)
            self.recorded(other)

    def replayed(self, key: Hashable) -> None:
        """A program of this kind was replayed or audited."""
        kind = self._kinds.get(hash(key))
        if kind is not None and kind.unreplayed:
            kind.unreplayed = False
            self._unreplayed -= 1

    def evicted(self, key: Hashable) -> bool:
        """The program of this kind was dropped because another one needs its place; whether it waits for a replay."""
        kind = self._of(key)
        kind.calls, kind.evictions = 0, kind.evictions + 1
        return kind.unreplayed

    def _of(self, key: Hashable) -> KindOfCall:
        kind = self._kinds.setdefault(hash(key), KindOfCall())
        self._kinds.move_to_end(hash(key))
        if len(self._kinds) > _KINDS_REMEMBERED:
            self._unreplayed -= self._kinds.popitem(last=False)[1].unreplayed
        return kind


class Rest:
    """Calls that run eagerly without a look at anything, since those before were of no use.

        rest.is_in_vain()       a call ran eagerly, as none is worth a recording: after 32 in a row the step rests
        rest.begin(replays)     programs were dropped one after the other without a replay, as many as there may be
        rest.takes_call()       whether this call is a part of the rest; counts it

    Each rest is twice as long as the one before. In the rest of a step that was of use, those programs are still asked
    that take no time: an evaluation is over, and training goes on.
    Invariant: where ranks vote, all of them have called these alike.
    """

    def __init__(self) -> None:
        self._left = self._in_vain = 0
        self._is_vain = False  # whether this rest is one after calls in vain
        self._was_of_use = False  # whether a program was replayed
        self._length = _VAIN_IN_A_ROW
        self._long = _LONGEST_REST
        # Since the last rest after `begin`; None: there was none, or a program was of use after it.
        self._recordings: int | None = None
        self._replays = 0  # before the last such rest

    @property
    def length(self) -> int:
        """The number of calls of the next rest after `begin`."""
        return self._long

    @property
    def left(self) -> int:
        """The number of calls that this rest still takes."""
        return self._left

    @property
    def why(self) -> str:
        """Why it rests, for messages."""
        if self._is_vain:
            return "as calls like the last ones were of no use"
        return "as programs were dropped one after the other without a replay"

    def is_in_vain(self, looked_slowly: bool = False) -> bool:
        """A call ran eagerly because none like it is worth a recording; whether the first rest begins.

        looked_slowly: at all guards of a program.
        """
        self._in_vain += _SLOW_LOOK if looked_slowly else 1
        if self._in_vain >= _VAIN_IN_A_ROW:
            # One further call like this, and it rests again.
            is_first = self._length == _VAIN_IN_A_ROW
            self._left, self._in_vain = self._length, _VAIN_IN_A_ROW - 1
            self._is_vain = True
            self._length = min(2 * self._length, _LONGEST_REST)
            return is_first
        return False

    def is_of_use(self) -> None:
        """A program was replayed, or audited."""
        self._in_vain, self._length, self._was_of_use = 0, _VAIN_IN_A_ROW, True
        if self._is_vain:
            self._left = 0

    def begin_together(self) -> None:
        """Ranks begin to vote: what they do alike counts from now on."""
        self.is_of_use()
        self._was_of_use = False

    def begin(self, replays: int) -> None:
        """Give the step up. replays: of its programs so far."""
        self._left, self._long, self._is_vain = self._long, 2 * self._long, False
        self._recordings, self._replays = 0, replays

    @property
    def is_vain(self) -> bool:
        """Whether it is a rest after calls in vain."""
        return self._is_vain and self._left > 0

    @property
    def asks_none(self) -> bool:
        """Whether no program is asked in such a rest."""
        return not self._was_of_use

    def takes_call(self) -> bool:
        """Whether this call is a part of the rest; counts it."""
        if not self._left:
            return False
        self._left -= 1
        return True

    def goes_on(self, replays: int) -> bool:
        """Whether a call that no program covers is not worth a recording; counts the recordings after a rest."""
        if self._recordings is None:
            return False
        if replays > self._replays:  # a program was of use
            self._recordings = None
            return False
        self._recordings += 1
        return self._recordings > _RECORDINGS_AFTER_REST


class Policy:
    """When a step records, audits and compares.

    allowance: what the ledger begins with; None: every call that no program covers is recorded. is_bounded: whether the
    ledger refuses anything. recording: what a recording that is kept costs, with all that must be done for its
    first replay.
    records_all: whether `allowance` is None.
    saves: whether since the last replay a call was worth a recording that the ledger could not pay.
    calls, replays, replayed_kinds: those that nothing was asked about yet. A replay only notes them here, and whatever
    is asked next sees them first: a step that replays asks nothing.
    """

    def __init__(
        self,
        allowance: float | None = ALLOWANCE,
        is_bounded: bool = True,
        recording: float = RECORDING + BUILDING,
    ) -> None:
        self.records_all, self._recording = allowance is None, recording
        begins_with = ALLOWANCE if allowance is None else allowance
        self._ledger = Ledger(begins_with, is_bounded and not self.records_all)
        self._kinds = Kinds(defers=not self.records_all)
        self._questions = Questions()
        self._rest = Rest()
        # The question for which a call was left eager, if the user does not know.
        self.news: Miss | None = None
        self.saves = False
        self.calls = self.replays = 0
        self.replayed_kinds: set[Hashable] = set()
        self.may_rest = False  # whether `rest` may take the next call

    def _settle(self) -> None:
        """Tell all parts what has happened, in the order in which it has."""
        calls, replays, kinds = self.calls, self.replays, self.replayed_kinds
        if not calls and not replays:
            return
        self.calls = self.replays = 0
        for number in range(max(calls, replays)):
            if self._ledger.is_full:
                break
            if number < calls:
                self._ledger.call()
            if number < replays:
                self._ledger.replayed()
        if replays:
            self.replayed_kinds = set()
            for key in kinds:
                self._note_use(key)

    def _note_use(self, key: Hashable) -> None:
        self._kinds.replayed(key)
        self._questions.replayed(key)
        self._rest.is_of_use()

    @property
    def ledger(self) -> Ledger:
        """What the step may cost."""
        self._settle()
        return self._ledger

    @property
    def kinds(self) -> Kinds:
        """How often each kind of call came."""
        self._settle()
        return self._kinds

    @property
    def questions(self) -> Questions:
        """Which answers of guards have come."""
        self._settle()
        return self._questions

    @property
    def rest(self) -> Rest:
        """Whether the step rests. Whoever asks may let it rest."""
        self._settle()
        self.may_rest = True
        return self._rest

    @property
    def can_record(self) -> bool:
        """Whether the ledger pays for a recording, and for its program."""
        return self.ledger.can_pay(self._recording)

    @property
    def why_not_next(self) -> str | None:
        """Why the next call is not recorded, whatever it is, for messages; None: the ledger pays for it."""
        why = self.why_unpaid(self._recording)
        return None if self.records_all or why is None else f"a recording costs {why}"

    def why_unpaid(self, cost: float, is_owed: bool = False) -> str | None:
        """What is missing for something that costs as many eager steps; None: the next call can pay for it."""
        if self.ledger.can_pay(cost, calls=1, is_owed=is_owed):
            return None
        left, owed = self.ledger.balance, 0.0 if is_owed else self.ledger.owed()
        waits = f", of which programs that wait for their passes need {owed:g}" if owed else ""
        return f"{cost:g} eager steps, and {left:.1f} are left{waits}; each call adds {_SHARE:g}"

    def may_record(self, key: Hashable, miss: Miss | None, looked_slowly: bool = False) -> bool:
        """Whether a call is recorded that has no program, or whose programs all missed. Counts it.

        looked_slowly: whether all guards of a program were asked.
        """
        if self.records_all:
            return True
        can_pay = self.can_record
        if miss is not None:
            self.ledger.pay(LOOK if looked_slowly else QUICK_LOOK)
            if not self.questions.is_worth_recording(key, miss):
                self.news = miss if self.questions.tell(key, miss.question) else None
                return False
            if not can_pay and self.questions.note_unpaid(key, miss):
                self.news = miss
        self.saves = not can_pay
        return can_pay

    def recorded(self, key: Hashable, miss: Miss | None) -> None:
        """A call is recorded, which all ranks may do. miss: that of its programs, which `may_record` has counted."""
        self.ledger.pay(RECORDING)
        if miss is not None and not self.records_all:
            self.questions.recorded(key, miss)

    def replayed(self, key: Hashable) -> None:
        """A program of this kind was replayed or audited."""
        self._settle()
        self._note_use(key)
