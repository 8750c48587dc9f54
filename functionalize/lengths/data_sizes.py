"""What Python reads of the arguments, known before a call: sizes that ops make of them, and other numbers.

    loss = model(x)[mask].sum()           as many elements as `mask`, an argument, selects

    key = sizes.learned(key, guards)      of a program that was kept; guards: one of them on such sizes
    key = sizes.of(key, leaves)           of a later call: with `(torch.Size([17]), MADE)` at its end

    agreeing(guards, leaves)              which of several classes of programs fit a call, by `mask.all()`

So programs for other counts are other kinds of calls, of which one that is rare runs eagerly, and with `dynamic=True`
a count is a symbol like the length of an argument.
Invariant: a key is only where a program is looked for: the program has a guard on its sizes beside it.
Kinds of calls of which some programs have other such sizes than others keep their key.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from functionalize.ir.guards import Guard
from functionalize.program.early_guard import EarlyGuard
from functionalize.templates.leaves import leaves_of
from functionalize.templates.template import MADE

_KINDS_REMEMBERED = 512


@dataclass(frozen=True, slots=True)
class _Counted:
    """What counts the sizes of one kind of call. token: what is equal for all programs of the kind."""

    guard: EarlyGuard
    token: Any

    @staticmethod
    def by(guard: EarlyGuard) -> _Counted:
        counts = leaves_of(replace(guard.program, value_guards=()))
        return _Counted(guard, (len(guard.values), counts.tokens, counts.integers))


class DataSizes:
    """The sizes that ops make of arguments, for each kind of call; of how many kinds is bounded."""

    def __init__(self) -> None:
        self._counted: OrderedDict[Hashable, _Counted | None] = OrderedDict()
        self._has_any = False

    def of(self, key: Any, leaves: Sequence[Any]) -> Any:
        """The key of a call with its sizes, if programs of this kind have some."""
        counted = self._counted.get(key) if self._has_any else None
        if counted is None:
            return key
        sizes = counted.guard.numbers(leaves)
        return key if isinstance(sizes, str) else _extended(key, sizes)

    def learned(self, key: Any, guards: Iterable[Guard]) -> Any:
        """The key of a program that is kept. key: of its call."""
        key = key[:-1] if has_sizes(key) else key
        found = [each for each in guards if isinstance(each, EarlyGuard) and each.is_on_sizes]
        counted = _Counted.by(found[0]) if len(found) == 1 else None
        known = self._counted.setdefault(key, counted)
        self._counted.move_to_end(key)
        if len(self._counted) > _KINDS_REMEMBERED:
            self._counted.popitem(last=False)
        if known is None or counted is None or known.token != counted.token:
            self._counted[key] = None
            return key
        self._has_any = True
        return _extended(key, counted.guard.values)


def has_sizes(key: Any) -> bool:
    """Whether a key has sizes that ops made."""
    return type(key[-1]) is tuple and len(key[-1]) == 2 and key[-1][1] == MADE


def _extended(key: Any, sizes: Sequence[int]) -> Any:
    return (*key, (torch.Size(map(int, sizes)), MADE))


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
