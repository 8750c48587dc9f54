"""What Python reads of the arguments, known before a call: sizes that ops make of them, and other numbers.

    loss = model(x)[mask].sum()           as many elements as `mask`, an argument, selects

    key = sizes.learned(key, guards)      of a program that was kept; guards: one of them on such sizes
    key = sizes.of(key, leaves)           of a later call: with `(torch.Size([17]), MADE)` at its end; of arguments of
                                          other sizes, too, if recordings determine how these are counted there

    agreeing(guards, leaves)              which of several classes of programs fit a call, by `mask.all()`

So programs for other counts are other kinds of calls, of which one that is rare runs eagerly, and with `dynamic=True`
a count is a symbol like the length of an argument.
Invariant: a key is only where a program is looked for: the program has a guard on its sizes beside it.
Kinds of calls of which some programs have other such sizes than others keep their key.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from functionalize.ir.guards import Guard
from functionalize.program.early_guard import EarlyGuard
from functionalize.templates.call_keys import has_made_sizes, open_key, shapes_of, with_made_sizes
from functionalize.templates.leaves import Leaves, leaves_of, with_integers
from functionalize.templates.symbols import Symbols
from functionalize.templates.template import EARLY, Unfitted, fitted

_KEYS_REMEMBERED = 512
_MOST_COUNTED = 8  # recordings of one kind, which determine how its sizes are counted


@dataclass(frozen=True, slots=True)
class _Counted:
    """What counts the sizes of one kind of call. leaves: of the program that does."""

    guard: EarlyGuard
    leaves: Leaves

    @staticmethod
    def by(guard: EarlyGuard) -> _Counted:
        return _Counted(guard, leaves_of(replace(guard.program, value_guards=())))

    def is_like(self, other: _Counted) -> bool:
        """Whether both count as many sizes, by programs that differ in integers only."""
        count = len(self.guard.values)
        return count == len(other.guard.values) and self.leaves.tokens == other.leaves.tokens

    def is_equal(self, other: _Counted) -> bool:
        """Whether both count the same."""
        return self.is_like(other) and self.leaves.integers == other.leaves.integers

    def with_integers(self, integers: Sequence[int]) -> _Counted:
        """What counts the same for arguments of other sizes."""
        program = self.guard.program
        other = with_integers(replace(program, value_guards=()), integers)
        guard = EarlyGuard(replace(other, value_guards=program.value_guards))
        return replace(self, guard=guard)


@dataclass(slots=True)
class _Counting:
    """What counts the sizes of calls that differ in the sizes of arguments. is_one: by one program but for integers."""

    counted: dict[Any, _Counted] = field(default_factory=dict)  # by the key of a call
    is_one: bool = True

    def add(self, key: Any, counted: _Counted) -> None:
        """Add what counts the sizes of a recorded call."""
        if len(self.counted) < _MOST_COUNTED:
            self.counted.setdefault(key, counted)
        self.is_one &= all(map(counted.is_like, self.counted.values()))

    def at(self, key: Any) -> _Counted | None:
        """What counts those of a call with arguments of new sizes; None: it is not known."""
        if not self.is_one or len(self.counted) < EARLY:
            return None
        calls = list(map(shapes_of, self.counted))
        symbols = Symbols.of(calls, [str(number) for number, _ in enumerate(calls[0])])
        sizes, known = symbols.sizes_of(shapes_of(key)), list(map(symbols.sizes_of, calls))
        if isinstance(sizes, str) or any(isinstance(each, str) for each in known):
            return None
        several = list(self.counted.values())
        found = fitted(known, [each.leaves.integers for each in several])  # type: ignore[arg-type]
        if isinstance(found, Unfitted):
            return None
        try:
            return several[0].with_integers([each.value(sizes) for each in found])
        except TypeError:  # a size in an object of which no copy can be made
            return None


class DataSizes:
    """The sizes that ops make of arguments, for each kind of call; of how many keys is bounded."""

    def __init__(self) -> None:
        self._counted: OrderedDict[Hashable, _Counted | None] = OrderedDict()
        self._kinds: dict[Hashable, _Counting] = {}  # by the key without sizes of arguments
        self._unseen: OrderedDict[Hashable, _Counted | None] = OrderedDict()

    def of(self, key: Any, leaves: Sequence[Any]) -> Hashable:
        """The key of a call with its sizes, if programs of this kind have some."""
        counted = self._counting(key) if self._kinds else None
        if counted is None:
            return key
        sizes = counted.guard.numbers(leaves)
        return key if isinstance(sizes, str) else with_made_sizes(key, sizes)

    def _counting(self, key: Any) -> _Counted | None:
        for known in (self._counted, self._unseen):
            if key in known:
                return known[key]
        kind = self._kinds.get(open_key(key))
        if kind is None:
            return None
        found = self._unseen[key] = kind.at(key)
        _bound(self._unseen)
        return found

    def learned(self, key: Any, guards: Iterable[Guard]) -> Hashable:
        """The key of a program that is kept. key: of its call."""
        key = key[:-1] if has_made_sizes(key) else key
        found = [each for each in guards if isinstance(each, EarlyGuard) and each.is_on_sizes]
        counted = _Counted.by(found[0]) if len(found) == 1 else None
        known = self._counted.setdefault(key, counted)
        self._counted.move_to_end(key)
        _bound(self._counted)
        self._unseen.clear()
        if counted is None or known is None or not known.is_equal(counted):
            self._counted[key] = None
            if (kind := self._kinds.get(open_key(key))) is not None:
                kind.is_one = False
            return key
        self._kinds.setdefault(open_key(key), _Counting()).add(key, counted)
        return with_made_sizes(key, counted.guard.values)


def _bound(remembered: OrderedDict[Hashable, Any]) -> None:
    if len(remembered) > _KEYS_REMEMBERED:
        remembered.popitem(last=False)


def early_guards(guards: Iterable[Guard]) -> list[EarlyGuard]:
    """The guards on numbers of the arguments that are no sizes."""
    found = [each for each in guards if isinstance(each, EarlyGuard)]
    return [each for each in found if not each.is_on_sizes]


def agreeing(
    classes: Sequence[tuple[Sequence[EarlyGuard], bool]], leaves: Sequence[Any]
) -> list[bool]:
    """For each class, whether Python has read in its calls what it reads of these arguments, as far as that is known.

    classes: the guards of each, and whether they are those for the sizes of the call. If not, they are not computed:
    truth values that another class knows of this call are compared.
    """
    known: dict[Any, Any] = {}
    agree = [True] * len(classes)
    for number, (guards, is_for_sizes) in enumerate(classes):
        for guard in guards if is_for_sizes else ():
            numbers = guard.numbers(leaves)
            if not isinstance(numbers, str):
                known.update(zip(guard.readings, numbers, strict=True))
                agree[number] &= numbers == list(guard.values)
    for number, (guards, is_for_sizes) in enumerate(classes):
        for guard in () if is_for_sizes else guards:
            for reading, value in zip(guard.readings, guard.values, strict=True):
                if type(value) is bool and known.get(reading, value) != value:
                    agree[number] = False
    return agree
