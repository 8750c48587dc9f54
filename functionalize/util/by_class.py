"""What a function finds about a class, kept as long as the class lives.

    @by_class
    def slot_names(kind): ...

    slot_names(Batch)    computed once; no longer kept when `Batch`, a class made in a function, is collected

`functools.cache` would keep such a class, and what its methods refer to, until the process ends.
Invariant: what is found depends on the class alone, and does not refer to it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


def by_class(find: Callable[[type], Found]) -> Callable[[type], Found]:
    """A function that calls `find` once for each class."""
    known: weakref.WeakKeyDictionary[type, Found] = weakref.WeakKeyDictionary()

    @functools.wraps(find)
    def found(kind: type) -> Found:
        try:
            return known[kind]
        except KeyError:
            return known.setdefault(kind, find(kind))

    return found
