"""Values in which some integers vary, made anew from these integers: what does not vary is shared.

    place = SymbolicInt(37, "s0", number=4)                  an integer that varies, the fifth of those of a program
    make = maker(InputSpec("x", (2, place), ...), InputSpec("x", (2, 37), ...))
    make(numbers)                                    InputSpec("x", (2, numbers[4]), ...)

Invariant: made for the integers of the recording, a value equals that of the recording, with the same types.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any

from functionalize.ir.ops import TensorRef
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
    return joined(
        [was for _, was in pairs], [maker(*pair) for pair in pairs], lambda found: build(*found)
    )


def leaf_maker(value: Any, numbers: Iterator[int | None]) -> Maker | None:
    """What makes a part of an op stream of the values of functions; None: nothing in it varies.

    numbers: of the function of each integer and geometry, in their order; None for those that do not vary.
    """
    kind = type(value)
    if kind is TensorRef or kind is int:
        number = next(numbers)
        if number is None:
            return None
        if kind is int:
            return itemgetter(number)
        storage = value.storage
        return lambda values: TensorRef(storage, values[number])
    if kind is dict:
        keys = list(value)
        parts = [leaf_maker(each, numbers) for each in value.values()]
        return joined(
            list(value.values()), parts, lambda found: dict(zip(keys, found, strict=True))
        )
    if isinstance(value, (list, tuple)):
        return joined(
            value, [leaf_maker(each, numbers) for each in value], list if kind is list else tuple
        )
    return None


def joined(
    values: Sequence[Any], parts: Sequence[Maker | None], build: Callable[[list[Any]], Any]
) -> Maker | None:
    """What makes a value of its parts; None: no part varies. parts: what makes each of `values`; None: the value."""
    varying = [(at, part) for at, part in enumerate(parts) if part is not None]
    if not varying:
        return None

    def made(now: Sequence[Any]) -> Any:
        found = list(values)
        for at, part in varying:
            found[at] = part(now)
        return build(found)

    return made
