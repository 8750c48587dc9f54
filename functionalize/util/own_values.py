"""Values that belong to one object, kept in its `__dict__`: what a descriptor knows about an instance.

    own = own_values(trainer)        a dict; None if there is no place for it (`__slots__` without `__dict__`)
    own[descriptor] = value          gone with the trainer, also if the value refers to it

Invariant: a copy of the object (shallow, deep, by pickle) begins without values, and nothing else of it changes.
"""

from __future__ import annotations

from typing import Any

OWN_VALUES = "__functionalize_own_values__"


class _Own:
    __slots__ = ("owner", "values")

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.values: dict[Any, Any] = {}

    def __reduce__(self) -> Any:
        return type(None), ()  # deep copies and pickles hold None in its place


def held_value(owner: Any, value: Any) -> Any | None:
    """`value`, if it is one of the values of `owner`, which gets none by this; else None."""
    own = (getattr(owner, "__dict__", None) or {}).get(OWN_VALUES)
    if not isinstance(own, _Own) or own.owner is not owner:
        return None
    return next((each for each in own.values.values() if each is value), None)


def own_values(owner: Any) -> dict[Any, Any] | None:
    """The values of `owner`, an object or a class, by descriptor; None if it cannot hold any."""
    table = getattr(owner, "__dict__", None)
    if table is None:
        return None
    own = table.get(OWN_VALUES)
    if not isinstance(own, _Own) or own.owner is not owner:  # that of another: a shallow copy
        own = _Own(owner)
        if isinstance(owner, type):
            type.__setattr__(owner, OWN_VALUES, own)
        else:
            table[OWN_VALUES] = own
    return own.values
