"""Values in which some integers vary, made anew from these integers: what does not vary is shared.

    place = SymbolicInt(37, "s0", number=4)                  an integer that varies, the fifth of those of a program
    make = maker(InputSpec("x", (2, place), ...), InputSpec("x", (2, 37), ...))
    make(numbers)                                    InputSpec("x", (2, numbers[4]), ...)

Invariant: made for the integers of the recording, a value equals that of the recording, with the same types.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from functionalize.templates.template import SymbolicInt

Maker = Callable[[Sequence[Any]], Any]


def maker(new: Any, was: Any) -> Maker | None:
    """What makes a value like `was`; None: nothing in it varies.

    new: the same with places in the place of integers. Raises `TypeError` for a value of another type than lists,
    tuples, dictionaries, slices and dataclasses that their fields make.
    """
    if type(new) is SymbolicInt:
        return itemgetter(new.number)
    if new is was:
        return None
    if isinstance(was, slice):
        return _made_of(
            [(getattr(new, n), getattr(was, n)) for n in ("start", "stop", "step")], slice
        )
    if isinstance(was, dict):
        keys = list(was)
        pairs = [(new[key], was[key]) for key in keys]
        return _made_of(pairs, lambda *values: type(was)(zip(keys, values, strict=True)))
    if isinstance(was, (list, tuple)):
        build = type(was) if hasattr(was, "_fields") else lambda *values: type(was)(values)
        return _made_of(list(zip(new, was, strict=True)), build)
    if dataclasses.is_dataclass(was) and all(
        each.init and not each.kw_only for each in dataclasses.fields(was)
    ):
        names = [each.name for each in dataclasses.fields(was)]
        return _made_of([(getattr(new, n), getattr(was, n)) for n in names], type(was))
    raise TypeError(f"a {type(was).__name__} holds sizes, of which no copy can be made")


def _made_of(pairs: Sequence[tuple[Any, Any]], build: Callable[..., Any]) -> Maker | None:
    found = [(at, make) for at, pair in enumerate(pairs) if (make := maker(*pair)) is not None]
    if not found:
        return None
    constants = [was for _, was in pairs]

    def made(numbers: Sequence[Any]) -> Any:
        values = constants.copy()
        for at, part in found:
            values[at] = part(numbers)
        return build(*values)

    return made
