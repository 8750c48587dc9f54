"""`functools.cache` for facts about an op: `OpOverload.__hash__` is Python, and passes ask of every node of a graph.

    @by_address
    def is_random_op(target: Any) -> bool: ...      runs once per op

Invariant: an op that was asked about is held, so that its address is never another object's. Of any other object the
function is called each time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from functionalize._compat.dispatch import OpOverload
from functionalize._compat.references import address

T = TypeVar("T")


def by_address(function: Callable[[Any], T]) -> Callable[[Any], T]:
    """The function, called once for each op."""
    known: dict[int, tuple[T, OpOverload]] = {}
    get = known.get

    @wraps(function)
    def found(target: Any) -> T:
        fact = get(address(target))
        if fact is not None:
            return fact[0]
        made = function(target)
        if isinstance(target, OpOverload):
            known[address(target)] = made, target
        return made

    return found
