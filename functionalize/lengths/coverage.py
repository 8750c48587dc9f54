"""Which new sizes of a class are replayed at their first call, and which first call runs for real and is compared.

    coverage.why_compared((37,))        None: replay; "17 is odd, and no compared size was": run it, and compare

Three parties decide by a size. What each of them did at sizes that were compared is known; a new size is replayed only
if each of them does the same there:

- Python. Two runs were observed (`observed_sizes.py`) that have learned the same facts: they must hold at the new size.
  Calls of C functions, which may be effects, were seen in a run of which the facts hold, too.
  Integers that Python computed and gave to torch must be those that the template has (`x[: n // 4 * 4]`); what had one
  value in both runs must have it, since it may be a constant that the facts led to.
- torch, by thresholds, by 0 and 1, by remainders, by equality, where it chooses ops (inside one op it chooses again at
  every call). So the new sizes lie between compared ones, in every symbol at once; leave the remainders that compared
  ones have left, by 2 and by each divisor of a size in a formula, on other devices than the CPU also by 16; leave in
  each formula, of products too, the remainder that a compared call has left; and no two sizes of tensors are equal that
  differed in compared calls.
- This library, by how the windows on one storage relate: `SignatureTemplate.at` refuses.

And every n-th new size is compared whatever is known, on this rank or on another that runs the same ops: a choice of
torch by none of these rules is found so. n is `every`, and doubles with each such comparison that finds no difference,
up to `THINNEST` times `every`. What a size between two of these comparisons is replayed by does not change with n: the
facts, ranges, remainders and equalities.
Invariant: of a class in which a first call was not as predicted, and none of these rules says why, no size is known any
more: all its first calls are compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from functionalize.lengths.size_facts import SizeFacts
from functionalize.templates.fitting import Formula, Sizes

EVERY = 8
EQUAL = (
    "two sizes are equal that are not in other calls"  # what is found there holds for no other call
)
NEAR = "the size is hardly beyond compared ones"
_HARDLY = 16  # by at most this part of their range
_NEAR_CALLS = 4  # replays of so many return the time of a comparison
_MOST_NEAR = 16  # which no one comparison settles, as sizes of several arguments: then one is made all the same
_RUNS = 2  # observed runs with the same facts
_MOST_RUNS = 8
THINNEST = 8  # times `every`
_ALIGNED = 16  # elements; kernels of other devices pad what is not


@dataclass(slots=True)
class KnownPath:
    """A way through the Python code of a step. runs: the sizes of runs that took it, and have learned the facts.

    uses: for each integer that torch got, its part in the facts, and the functions that gave it in these runs.
    same: functions that vary and had one value in all runs: Python may have given torch a constant there, which these
    facts led to (`math.isqrt(n // 64)`). is_watched: whether calls of C functions were seen in a call that took it.
    """

    facts: SizeFacts
    runs: list[Sizes] = field(default_factory=list)
    uses: list[tuple[int, Sequence[Formula]]] = field(default_factory=list)
    same: list[tuple[Formula, int]] = field(default_factory=list)
    is_watched: bool = False

    @property
    def is_known(self) -> bool:
        """Whether sizes can be tested against it."""
        return len(self.runs) >= _RUNS and self.is_watched

    def is_taken(self, sizes: Sizes) -> bool:
        """Whether a call of these sizes, which was recorded or as predicted, has taken it."""
        return not isinstance(self._values(sizes), str)

    def add(self, sizes: Sizes, formulas: Iterable[Formula]) -> None:
        """Add a run. formulas: of all integers of the template."""
        if sizes not in self.runs:
            self.runs.append(sizes)
        known = [(each, self.facts.values(each)) for each in self.runs]
        self.uses = [
            (at, [f for f in formulas if all(f.value(s) == v[at] for s, v in known)])
            for at in self.facts.used
        ]
        values = [(f, {f.value(each) for each in self.runs}) for f in formulas if f.terms]
        self.same = [(f, several.pop()) for f, several in values if len(several) == 1]

    def difference(self, sizes: Sizes) -> str | None:
        """What is otherwise at other sizes; None: Python takes this way, and gives torch what the template has."""
        values = self._values(sizes)
        if isinstance(values, str):
            return values
        for at, functions in self.uses:
            if not functions:
                return "Python computes an integer that is in no op"
            if any(each.value(sizes) != values[at] for each in functions):
                return f"Python gives {values[at]} to torch, and the template has another integer"
        if any(each.value(sizes) != value for each, value in self.same):
            return "an integer varies that was the same in all observed runs"
        return None

    def _values(self, sizes: Sizes) -> Sequence[Any] | str:
        """The values of what the facts consist of; text: a fact does not hold."""
        try:
            values = self.facts.values(sizes)
        except ArithmeticError as error:
            return f"a number cannot be computed: {error}"
        return self.facts.difference(values) or values


@dataclass(slots=True)
class Coverage:
    """What is known of the sizes of one class.

    every: each so many new sizes are compared, at first; 1: all. gap: so many now.
    formulas: of all integers of the op stream and the program.
    modulus: by which remainders must be those of compared sizes. lengths: the functions that are sizes of tensors.
    compared: the sizes of calls that were recorded, or compared and as predicted. new: since the last comparison.
    elsewhere: sizes that other ranks have compared, which says what torch does (`audit/shared_sizes.py`).
    divided: the formulas that divide. near: sizes of calls that were hardly beyond the compared ones, and still are.
    watched: the sizes of calls in which calls of C functions were seen: all recorded ones, and some compared ones.
    is_unseen: whether a run that was not watched took a way that no watched call had taken.
    """

    every: int
    formulas: frozenset[Formula]
    lengths: frozenset[Formula]
    modulus: int
    compared: list[Sizes]
    gap: int
    new: int = 0
    lost: str | None = None
    elsewhere: list[Sizes] = field(default_factory=list)
    divided: Sequence[Formula] = ()
    near: list[Sizes] = field(default_factory=list)
    watched: list[Sizes] = field(default_factory=list)
    is_unseen: bool = False
    _paths: list[KnownPath] = field(default_factory=list)
    _tried: int = 0

    @staticmethod
    def of(
        every: int, formulas: Iterable[Formula], lengths: Iterable[Formula], on_cpu: bool
    ) -> Coverage:
        """Before any call was compared."""
        found = frozenset(formulas)
        divided = [each for each in found if each.operator]
        of_sizes = [each.divisor for each in divided if all(len(f) == 1 for _, f in each.terms)]
        modulus = math.lcm(2 if on_cpu else _ALIGNED, *of_sizes)
        return Coverage(every, found, frozenset(lengths), modulus, [], every, divided=divided)

    @property
    def due(self) -> str:
        """The reason where all else is known."""
        return f"one in {self.gap} new sizes is compared"

    @property
    def is_hopeless(self) -> bool:
        """Whether all first calls will be compared."""
        return self.every == 1 or self.lost is not None

    def wants_run(self, sizes: Sizes) -> bool:
        """Whether the first call of these sizes is observed: none was, or Python learns otherwise there."""
        if not self.wants_observer:
            return False
        return not self._known or _first_of(self._known, sizes) is not None

    @property
    def _known(self) -> list[KnownPath]:
        return [each for each in self._paths if each.is_known]

    @property
    def wants_observer(self) -> bool:
        """Whether another run may be observed."""
        return not self.is_hopeless and self._tried < _MOST_RUNS

    @property
    def has_known_path(self) -> bool:
        """Whether two observed runs have learned the same."""
        return bool(self._known)

    def python_differs(self, sizes: Sizes) -> str | None:
        """Why Python may take another way at these sizes than in observed runs; None: it does not."""
        known = self._known
        return _first_of(known, sizes) if known else "what Python learns of sizes was not observed"

    def knows_python(self, sizes: Sizes, why: str | None) -> bool:
        """Whether only torch may do otherwise at these sizes, which are compared. why: they are."""
        return why != self.due and self.takes_known_path(sizes)

    def takes_known_path(self, sizes: Sizes) -> bool:
        """Whether Python takes a way at these sizes that was observed twice."""
        return not self.is_hopeless and self.python_differs(sizes) is None

    def wants_watch(self, sizes: Sizes) -> bool:
        """Whether to see which C functions Python calls at these sizes: no call is known that took its way there.

        The first observed runs are not watched, as recordings take the same way in most steps.
        """
        if self.is_hopeless or self._known:
            return not self.takes_known_path(sizes)
        return self.is_unseen

    def observed(self, sizes: Sizes, found: SizeFacts | str, was_watched: bool = True) -> bool:
        """Add what an observed run has learned, that was as predicted; text: why it is not known.

        Returns whether calls of C functions were seen in it, or in another call that took its way: else they may do
        what no replay does, and the run proves nothing about its sizes.
        """
        self._tried += 1
        if was_watched and sizes not in self.watched:
            self.watched.append(sizes)
        is_seen = was_watched
        if isinstance(found, SizeFacts):
            path = next((each for each in self._paths if each.facts == found), None)
            if path is None:
                path = KnownPath(found)
                self._paths.append(path)
            path.add(sizes, self.formulas)
            path.is_watched = is_seen = any(map(path.is_taken, self.watched))
            found = "no two runs learned the same"
        self.is_unseen |= not is_seen
        if self._tried == _MOST_RUNS and not self._known:
            self.lost = found
        return is_seen

    def why_compared(self, sizes: Sizes, others: Sequence[Sizes] = ()) -> str | None:
        """Why the first call of these sizes runs for real; None: it is replayed.

        others: sizes of calls that did something else.
        """
        if sizes in self.compared:
            return None
        if self.every == 1:
            return "every new size is compared"
        if self.lost is not None:
            return f"it is not known what Python learns of sizes: {self.lost}"
        known = self._known
        if not known:
            return "what Python learns of sizes was not observed yet"
        return (
            _first_of(known, sizes) or self.torch_may_differ(sizes, others, known) or self._is_due()
        )

    def _is_due(self) -> str | None:
        if self.new + 1 < self.gap:
            self.new += 1
            return None
        return self.due

    def was_compared(self, sizes: Sizes, why: str | None = None) -> None:
        """A call of these sizes was recorded, or was as predicted. why: it was compared."""
        is_due = why == self.due
        self.compared.append(sizes)
        if why is None:
            self.watched.append(sizes)
        self.new = 0
        if is_due:
            self.was_due()

    def has_come_near(self, sizes: Sizes) -> bool:
        """Count a call of sizes hardly beyond the compared ones; whether as many have come as pay for a comparison.

        These are the ones that will be between compared sizes if this call is compared.
        """
        compared = [*self.compared, *self.elsewhere]
        self.near = [each for each in (*self.near, sizes) if not _is_between(each, compared)]
        if len(self.near) >= _MOST_NEAR:
            self.near = []
            return True
        compared.append(sizes)
        return sum(_is_between(each, compared) for each in self.near) >= _NEAR_CALLS

    def was_due(self) -> None:
        """A size was compared because one in so many is, on this rank or on another: the next one is so later."""
        self.new, self.gap = 0, min(2 * self.gap, THINNEST * self.every)

    def torch_may_differ(
        self, sizes: Sizes, others: Sequence[Sizes], known: Sequence[KnownPath]
    ) -> str | None:
        """Why torch may choose other ops at these sizes than at compared ones; None: it does not."""
        others = [each for each in others if _first_of(known, each) is None]
        compared = [*self.compared, *self.elsewhere]
        if not _is_between(sizes, compared, others):
            is_near = not others and _is_near(sizes, compared)
            return NEAR if is_near else f"{sizes} is not between compared sizes"
        for at, size in enumerate(sizes):
            rest = size % self.modulus
            if all(c[at] % self.modulus != rest for c in compared):
                return f"no compared size leaves {rest} by {self.modulus}, as {size} does"
        for formula in self.divided:
            rest = formula.rest(sizes)
            if all(formula.rest(c) != rest for c in compared):
                return f"no compared size leaves {rest} in {formula}"
        values = {each: each.value(sizes) for each in self.lengths}
        if len({*values.values()}) < len(values):
            return EQUAL
        for each in varying_below_two(values):
            if all(each.value(c) != values[each] for c in compared):
                return f"a tensor has the size {values[each]}, which it had in no compared call"
        return None


def varying_below_two(values: Mapping[Formula, int]) -> list[Formula]:
    """The functions that vary and are 0 or 1: torch takes other ops there, and strides do not say what is dense."""
    return [each for each, value in values.items() if value < 2 and each.terms]


def _is_near(sizes: Sizes, compared: Sequence[Sizes]) -> bool:
    """Whether one of the sizes is beyond the compared ones, and none is more than hardly beyond."""
    is_beyond = False
    for size, *column in zip(sizes, *compared, strict=True):
        low, high = min(column), max(column)
        margin = (high - low) // _HARDLY
        if not low - margin <= size <= high + margin:
            return False
        is_beyond = is_beyond or not low <= size <= high
    return is_beyond


def _is_between(sizes: Sizes, compared: Sequence[Sizes], others: Sequence[Sizes] = ()) -> bool:
    """Whether sizes lie between two compared ones, in every symbol at once, and none of `others` does."""
    below = [each for each in compared if _is_below(each, sizes)]
    above = [each for each in compared if _is_below(sizes, each)]
    return any(
        all(not (_is_below(low, other) and _is_below(other, high)) for other in others)
        for low in below
        for high in above
    )


def _is_below(low: Sizes, high: Sizes) -> bool:
    return all(a <= b for a, b in zip(low, high, strict=True))


def _first_of(paths: Sequence[KnownPath], sizes: Sizes) -> str | None:
    """None if Python takes one of these ways at these sizes, else why not the first one."""
    found = [each.difference(sizes) for each in paths]
    return None if None in found else found[0]
