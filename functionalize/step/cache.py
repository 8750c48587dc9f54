"""The programs of one step, side by side: train and eval, first and last microbatch, sequence lengths.

    cache.first(key, leaves, spec)     the last used program whose guards all hold, with its inputs
    cache.further(leaves, spec)        the one after it
    cache.add(key, cached)             adds a program; at the limit the least recently used one is dropped

The key of a call is made of properties of its arguments (shapes, dtypes, numbers). The programs with that key are tried
in order, the last used first, those first of which earlier calls have shown what to look at. A guard on a number that
fails rules out the programs that were recorded with another answer.
Invariant: at most `limit` programs. After `limit` programs in a row were dropped without a replay, recording stops:
some fact differs at every call, and the warning names it. Then the step rests, see `policy.py`.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Size, Tensor

from functionalize._compat.graphs import pytree
from functionalize.audit.signature import Signature
from functionalize.fsdp.python_state import FSDPEffects
from functionalize.ir.guards import Miss, NumberGuard, answers_among
from functionalize.ir.inputs import Call
from functionalize.lengths.length_class import LengthClass, Prediction
from functionalize.program.early_guard import EarlyGuard
from functionalize.program.program import Program
from functionalize.state.number_arguments import BESIDE_LEAVES
from functionalize.state.python_effects import PythonEffect
from functionalize.state.sources import Gradient, Slot
from functionalize.step.policy import Policy
from functionalize.step.stats import Stats
from functionalize.step.vote import Fingerprints
from functionalize.util.reading import is_a
from functionalize.util.structure import odd_keys
from functionalize.util.text import without_numbers
from functionalize.walk.fact_text import NUMBERS

log = logging.getLogger("functionalize")
MOST_PROGRAMS = 64  # of a step
MAX_PROGRAM_BYTES = 2**30  # of all of them
_USELESS = 16  # programs that are dropped in a row without a replay: no more is recorded
_NODE_NBYTES = 6_000  # resident memory per node, with its op record and code
RESTS = "the step rests, as calls like the last ones were of no use"
FIRST = "the first call"
STRUCTURE = "the structure of the arguments changed"


@dataclass(eq=False)
class CachedProgram:
    """One program of a step, and the effects of a replay on Python objects.

    slots: the slots to which a replay assigns the gradients that the program returns.
    effects: the changes of FSDP2's state in Python.
    python_effects: what a replay repeats in Python, in its order, with the values that the program returns last.
    has_grad_fn: for each leaf of the result, whether it had an autograd history in eager.
    reason: why the call was recorded.
    replays: the number of replays.
    fingerprints: those of the collectives in each process group; empty unless passes may change collectives.
    memory: the memory report; None if lifetimes were not recorded.
    op_stream: the recorded one, with which audited calls are compared, or what makes it; None: the program is not
    audited.
    audits: the number of audited calls.
    awaits_passes: whether its passes have not run, as the ledger has not paid for them. replays_before_passes: whether
    it is replayed meanwhile; else calls that find it run eagerly. found: the number of these calls.
    has_missed: whether a call missed it.
    dropped: the slots that a replay empties first, see `state/dropped_gradients.py`.
    prediction: set until the program, which was not recorded, was found equal to a call: see `lengths/first_call.py`.
    is_unseen: whether it is replayed, and was neither recorded nor compared: see `lengths/coverage.py`.
    group: the calls that differ in sizes only.
    recorded: the program before its passes, if no passes were asked for: see `CaptureOptions.keeps_recorded`.
    followed_by: the program with its key that was replayed after it, the last time.
    """

    program: Program
    slots: Sequence[Slot]
    effects: FSDPEffects
    has_grad_fn: Sequence[bool]
    reason: str
    replays: int = 0
    fingerprints: Fingerprints = field(default_factory=dict)
    memory: Any = None
    op_stream: Signature | Callable[[], Signature] | None = None
    audits: int = 0
    python_effects: Sequence[PythonEffect] = ()
    awaits_passes: bool = False
    replays_before_passes: bool = False
    found: int = 0
    has_missed: bool = False
    dropped: Sequence[Gradient] = ()
    prediction: Prediction | None = None
    is_unseen: bool = False
    group: LengthClass | None = None
    recorded: Program | None = None
    followed_by: CachedProgram | None = None
    _sized: tuple[Program, int] | None = None
    _answers: tuple[Program, dict[Hashable, str]] | None = None

    @property
    def waits(self) -> bool:
        """Whether calls that find it run eagerly until its passes have run."""
        return self.awaits_passes and not self.replays_before_passes

    @property
    def is_owed(self) -> bool:
        """Whether the ledger keeps back what its passes cost: not once a call has missed it, and none has found it."""
        return self.waits and not (self.has_missed and self.is_unused)

    @property
    def is_unused(self) -> bool:
        """Whether no call has found it."""
        return self.replays == self.audits == self.found == 0

    @property
    def signature(self) -> Signature | None:
        """The op stream; made at first use."""
        if callable(self.op_stream):
            self.op_stream = self.op_stream()
        return self.op_stream

    @property
    def answers(self) -> dict[Hashable, str]:
        """The recorded answer to each question of its guards on numbers."""
        program = self.program
        if self._answers is None or self._answers[0] is not program:
            numbers = [g for g in program.facts if isinstance(g, NumberGuard)]
            found: dict[Hashable, str] = {g.question: repr(g.value) for g in numbers}
            early = [g.program.value_guards for g in program.guards if isinstance(g, EarlyGuard)]
            for guards in (*early, program.value_guards):
                found.update(answers_among(guards))
            self._answers = program, found
        return self._answers[1]

    @property
    def replayed_alike(self) -> tuple[Any, ...]:
        """What else must be equal in all recordings of which programs for other sizes are made."""
        changed = (self.slots, self.python_effects, self.dropped, self.has_grad_fn)
        return (self.effects, *map(tuple, changed))

    def made_by(self, found: Prediction, **parts: Any) -> CachedProgram:
        """Another entry with the programs of a prediction. parts: further fields of the entry."""
        parts = {"op_stream": found.op_stream} | parts
        return self.with_program(found.programs[0], **parts)

    def with_program(self, program: Program, **parts: Any) -> CachedProgram:
        """Another entry, for a program that was not recorded. parts: further fields of the entry."""
        return replace(self, program=program, recorded=None, followed_by=None, **parts)

    def rewrite(self, apply: Callable[[Program], Program]) -> None:
        """Replay what `apply` makes of its programs from now on."""
        recorded, self.program = self.program, apply(self.program)
        if recorded is not self.program:
            recorded.forget_inputs()

    def takes(self, programs: Sequence[Program]) -> None:
        """Replay these programs from now on: they are the same ones after the passes, for the same state."""
        programs[0].facts = self.program.facts
        self.program.forget_inputs()
        self.program = programs[0]

    @property
    def nbytes(self) -> int:
        """An estimate of the memory that the program keeps: nodes with their code and op stream, constants."""
        if self._sized is None or self._sized[0] is not self.program:
            held = [*self.program.constants.values(), *(s.source for s in self.program.inputs)]
            tensors = [t for t in (getattr(h, "value", h) for h in held) if is_a(t, Tensor)]
            nodes = self.program.nodes()
            if self.recorded is not None and self.recorded is not self.program:
                nodes += self.recorded.nodes()
            nbytes = _NODE_NBYTES * nodes + sum(t.nbytes for t in tensors)
            self._sized = self.program, nbytes
        return self._sized[1]


Found = tuple[CachedProgram, Call]


def key_of(leaves: Sequence[Any], spec: Any) -> Hashable:
    """The key of a call in the cache; calls with different keys cannot share a program."""
    found: list[Hashable] = [spec, odd_keys(spec)]
    for leaf in leaves:
        if type(leaf) is Tensor and not leaf.requires_grad and not leaf.is_nested:
            found.append((leaf.shape, leaf.dtype, leaf.device, False))
        elif is_a(leaf, Tensor):
            found.append(_key_of_tensor(leaf))
        elif type(leaf) in (float, complex):
            found.append(repr(leaf))
        else:
            # One of a class that extends such a type may compare by code of the user's: a guard does without.
            found.append(("number", leaf) if type(leaf) in NUMBERS else ("object", type(leaf)))
    return tuple(found)


def how_differ(key: Any, before: Any, names: Sequence[str]) -> str:
    """What is not equal in the keys of two calls, and what makes it so. names: of the leaves of the first."""
    if type(before) is not tuple:  # of a call whose arguments were refused
        return STRUCTURE
    if key[0] != before[0]:
        advice = "pass lists and dicts of as many elements at every call, or keep them out of the arguments"
        return f"{_other_structure(key[0], before[0])}: {advice}"
    pairs = zip(key[BESIDE_LEAVES:], before[BESIDE_LEAVES:], strict=False)
    for at, (now, was) in enumerate(pairs):
        if now == was or at >= len(names):
            continue
        if type(now[0]) is Size:
            return f"`{names[at]}` is {_sized(now)}, was {_sized(was)}"
        is_text = now[0] == "number" and isinstance(now[1], (str, bytes))
        advice = (
            ": keep a text that varies out of the arguments"
            if is_text
            else ": pass a number that varies as an argument of its own, or as a tensor"
        )
        return f"`{names[at]}` is {_valued(now)}, was {_valued(was)}{advice}"
    return "other sizes follow from the arguments"


def _other_structure(now: pytree.TreeSpec, was: pytree.TreeSpec) -> str:
    for root, given, before in zip(("args", "kwargs"), now.children(), was.children(), strict=True):
        each = list(zip(given.children(), before.children(), strict=False))
        for at, (inside, other) in enumerate(each):
            if inside != other:
                name = at if root == "args" else repr(given.context[at])
                counts = inside.num_leaves, other.num_leaves
                more = f" ({counts[0]} elements, had {counts[1]})" if counts[0] != counts[1] else ""
                return f"the structure of `{root}[{name}]` changed{more}"
    return STRUCTURE


def _sized(part: Any) -> str:
    is_tensor = type(part[0]) is Size
    return f"a tensor of {tuple(part[0])}, {part[1]}" if is_tensor else "no tensor"


def _valued(part: Any) -> str:
    if type(part) is str:  # of a float
        return part
    kind, value = part[0], part[1]
    return repr(value) if kind == "number" else getattr(value, "__name__", kind)


def _key_of_tensor(leaf: Tensor) -> Hashable:
    # A subclass has a `__torch_function__` of its own, and code may ask for the type.
    kind = () if type(leaf) is Tensor else (type(leaf),)
    try:
        return leaf.shape, leaf.dtype, leaf.device, _differentiated(leaf), *kind
    except RuntimeError:  # a nested tensor, which is refused when the call is recorded
        return "nested", leaf.dtype


def _differentiated(leaf: Tensor) -> bool | str:
    """Whether a backward reaches a tensor, and whether it goes on from there into the graph that made it."""
    return leaf.requires_grad and (leaf.grad_fn is None or "computed")


def _numbers(cached: CachedProgram) -> list[tuple[str, str]]:
    """The numbers that Python read from tensors in a recording."""
    return [(g.where, repr(g.value)) for g in cached.program.value_guards]


class ProgramCache:
    """At most `MOST_PROGRAMS` programs of one step, called `name` in messages, of at most 1 GiB unless one has more.

    policy, stats: those of the step, which see what is replayed and what is dropped.
    """

    def __init__(self, name: str, policy: Policy, stats: Stats) -> None:
        self._name, self._policy, self._stats = name, policy, stats
        self.by_key: dict[Hashable, list[CachedProgram]] = {}  # the last used first
        self._used: OrderedDict[CachedProgram, Hashable] = OrderedDict()  # the last used at the end
        self._misses: Counter[str] = Counter()
        self._example: dict[str, str] = {}
        self._unused_in_a_row = 0
        self._other_state: set[CachedProgram] = set()  # programs whose guards failed at this call
        self._held: set[CachedProgram] = set()  # those whose guards held
        self.reason = ""
        self.miss: Miss | None = None
        self.is_hurried = False  # whether no program is asked all of its guards
        self._left: list[CachedProgram] = []  # to be tried
        self._unknown: list[CachedProgram] = []  # of those tried, whose guards must be asked
        # Whether those programs are asked of which the last calls have shown what to look at.
        self._is_quick = True
        self.looked_slowly = False

    def __len__(self) -> int:
        return len(self._used)

    def __iter__(self) -> Any:
        return iter(self._used)

    def items(self) -> Iterator[tuple[Hashable, CachedProgram]]:
        """Every program with its key, the last used at the end."""
        return ((key, cached) for cached, key in self._used.items())

    @property
    def latest(self) -> CachedProgram | None:
        """The program that was last replayed or added."""
        return next(reversed(self._used), None)

    @property
    def thrashing(self) -> bool:
        """Whether programs are added and dropped without a replay."""
        return self._unused_in_a_row >= min(_USELESS, MOST_PROGRAMS)

    def give_up(self) -> None:
        """Drop the programs that were of no use, and no longer count them as thrashing."""
        for cached in list(self._used):
            if cached.is_unused:
                self.drop(cached)
        self._unused_in_a_row = 0

    def has(self, key: Hashable) -> bool:
        """Whether there is a program with this key."""
        return key in self.by_key

    def at(self, key: Hashable) -> Sequence[CachedProgram]:
        """The programs with this key."""
        return self.by_key.get(key, ())

    def key_of(self, cached: CachedProgram) -> Hashable:
        """The key of a program."""
        return self._used[cached]

    def first(self, key: Hashable, leaves: Sequence[Any], spec: Any) -> Found | None:
        """A program whose guards hold, with its inputs. `further`: the one after it.

        The first that is asked is the one that came after the last used one when that was last used: most often that
        one again. So of the programs of a ring's positions one is asked, which takes a fourth of a small step.

        `reason`: why there is none, the first failed guard; `miss`: that guard, if a program has failed.
        `looked_slowly`: whether all guards of one were asked, which takes as long as a small step.
        While the step saves for a program, a number that has missed before is asked first: the call runs eagerly then.
        """
        self.reason, self.miss, self.looked_slowly = "", None, False  # `begin_call`
        self._other_state.clear()
        self._held.clear()
        programs = self.by_key.get(key, [])
        likely = programs[0].followed_by if programs else None
        if likely is not None and likely is not programs[0] and likely in programs:
            programs = [likely, *(each for each in programs if each is not likely)]
        self._unknown, self._is_quick = [], True
        found = programs[0].program.known(leaves, self._policy.saves) if programs else None
        if isinstance(found, Call):
            self._left = programs[1:]
            self._held.add(programs[0])
            return programs[0], found
        self._left = list(programs)
        return self.further(leaves, spec, found)

    def further(self, leaves: Sequence[Any], spec: Any, asked: str | None = "") -> Found | None:
        """The next program whose guards hold. asked: what the first one has said; empty: it was not asked.

        First those are asked of which the last calls have shown what to look at: another program's full check takes
        longer.
        """
        while True:
            while self._left:
                cached = self._left.pop(0)
                if cached in self._other_state:  # ruled out meanwhile
                    continue
                found: Call | str | None
                if asked != "":
                    found, asked = asked, ""
                elif self._is_quick:
                    found = cached.program.known(leaves)
                else:
                    found = cached.program.resolve_anew(leaves)
                    self.looked_slowly |= cached.program.looked_slowly
                if isinstance(found, Call):
                    self._held.add(cached)
                    return cached, found
                if found is None:
                    self._unknown.append(cached)
                else:
                    self._fails(cached, found)
            if not self._is_quick:
                break
            self._left, self._unknown, self._is_quick = self._untried(), [], False
            if self.is_hurried and self._left:
                self.missed(RESTS)
                self._left = []
                return None
        if not self.reason:
            self.missed(self._why_none(leaves, spec))
        return None

    def _fails(self, cached: CachedProgram, failure: str) -> None:
        self.missed(failure)
        cached.has_missed = True
        self._other_state.add(cached)
        self.rule_out(Miss.of(failure))

    def rule_out(self, miss: Miss) -> None:
        """A program has missed: the others that give another answer to the same question are not tried."""
        self.miss = self.miss or miss
        if miss.asked is None:
            return
        for cached in self._untried():
            if cached.answers.get(miss.asked, miss.answer) != miss.answer:
                self._other_state.add(cached)

    def has_other(self, miss: Miss) -> bool:
        """Whether a program that was not tried yet gives the answer that a call has missed another one by."""
        return any(c.answers.get(miss.asked) == miss.answer for c in self._untried())

    def _untried(self) -> list[CachedProgram]:
        return [c for c in (*self._left, *self._unknown) if c not in self._other_state]

    def begin_call(self) -> None:
        """No guard has failed yet."""
        self.reason, self.miss, self.looked_slowly = "", None, False

    def _why_none(self, leaves: Sequence[Any], spec: Any) -> str:
        if self.latest is None:
            return FIRST
        if spec != self.latest.program.in_spec:
            return STRUCTURE
        call = self.latest.program.resolve(leaves)
        return call if isinstance(call, str) else "the arguments are of another kind"

    def missed(self, reason: str) -> None:
        """Record that a guard failed; the first failure of a call is its `reason`."""
        self.reason = self.reason or reason
        kind = without_numbers(reason)
        self._misses[kind] += 1
        self._example[kind] = reason

    def used(self, cached: CachedProgram, is_replayed: bool = False) -> None:
        """Record that a program was audited, or replayed: then it is counted, and the policy sees it later."""
        key = self._used[cached]
        self._used.move_to_end(cached)
        bucket = self.by_key[key]
        bucket[0].followed_by = cached
        if bucket[0] is not cached:
            bucket.remove(cached)
            bucket.insert(0, cached)
        if is_replayed:
            cached.replays += 1
            self._stats.replays += 1
            self._policy.replays += 1
            self._policy.saves = False
            self._policy.replayed_kinds.add(key)

    def add(self, key: Hashable, cached: CachedProgram) -> None:
        """Add a program. It replaces one for the same numbers and state; at the limit, the least recently used."""
        for old in list(self.by_key.get(key, ())):
            is_like = _numbers(old) == _numbers(cached)
            has_numbers = bool(cached.program.value_guards) and old not in self._other_state
            if (is_like and (has_numbers or old in self._held)) or old.prediction is not None:
                self.drop(old)
        while self._is_full(cached):
            oldest, its_key = next(iter(self._used.items()))
            self.drop(oldest)
            waited = self._policy.kinds.evicted(its_key)
            first = self._unused_in_a_row == 0
            unused = waited and oldest.is_unused
            self._unused_in_a_row = self._unused_in_a_row + 1 if unused else 0
            if self.thrashing or (first and self._unused_in_a_row):
                self._warn()
        self.by_key.setdefault(key, []).insert(0, cached)
        self._used[cached] = key

    def _is_full(self, new: CachedProgram) -> bool:
        if len(self._used) >= MOST_PROGRAMS:
            return True
        return bool(self._used) and sum(c.nbytes for c in (*self._used, new)) > MAX_PROGRAM_BYTES

    def drop(self, cached: CachedProgram) -> None:
        """Remove a program, if it is still there."""
        key = self._used.pop(cached, None)
        if key is None:
            return
        bucket = self.by_key[key]
        bucket.remove(cached)
        for each in bucket:
            if each.followed_by is cached:
                each.followed_by = None
        if not bucket:
            del self.by_key[key]

    def _warn(self) -> None:
        kind, times = self._misses.most_common(1)[0]
        again = f"it runs eagerly from now on, and is tried again after {self._policy.rest.length} such calls"
        end = again if self.thrashing else "the oldest is dropped"
        log.warning(
            "%s has %d programs, as many as it may (%s), and needs another: %s. Missed most often "
            "(%d times): %s",
            self._name,
            len(self._used) + 1,
            "the most that are kept" if len(self._used) + 1 >= MOST_PROGRAMS else "1 GiB",
            end,
            times,
            self._example[kind],
        )
