"""`sum`, by its steps, for numbers of which some are live; it is written down once for what replaces it.

sum(loss.item() for loss in losses)     the generator runs between the additions, as in C's `sum`
sum([t, u], 0)                          tensors, and all that is no number: added in turn, by the original
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

original = sum
_NUMBERS = frozenset({bool, int, float})


def added_up(
    iterable: Iterable[Any],
    start: Any,
    is_live: Callable[[Any], bool],
    plain: Callable[[Any], Any],
    combine: Callable[[Any, list[Any]], Any],
) -> Any:
    """`sum(iterable, start)`. combine: what it is of numbers of which some are live, by `start` and the others.

    C adds up exact floats and ints in one way, and those of subclasses (numpy's) in another: beside these, live numbers
    are plain.
    """
    terms: list[Any] = []
    found = is_live(start)
    iterator = iter(iterable)
    for each in iterator:
        is_here = is_live(each)
        if type(each) in _NUMBERS or is_here:
            found = found or is_here
            terms.append(each)
        elif not found:
            return original(chain(terms, [each], iterator), start)
        elif isinstance(each, (int, float, complex)):
            return original(map(plain, chain(terms, [each], iterator)), plain(start))
        else:
            return original(iterator, combine(start, terms) + each)
    return combine(start, terms) if found else original(terms, start)
