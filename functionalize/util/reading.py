"""Reading an element of a container of the step, with no method of a class of the user's, and without a change.

    item_of(optimizer.state, p)      the state of `p`; KeyError, and still no entry, if there is none

`container[key]` calls `__getitem__` and `__missing__` of the container's class: a `defaultdict` makes an entry when
somebody looks. Whatever looks at the state of a step (a source, a guard, the walk) reads it here.
"""

from __future__ import annotations

from collections import OrderedDict
from operator import getitem
from typing import Any

_ABSENT = object()
# Containers whose `container[key]` runs no Python code, and makes nothing.
PLAIN_CONTAINERS = frozenset({dict, OrderedDict, list, tuple})


def item_of(container: Any, key: Any) -> Any:
    """`container[key]`, as the base class of the container reads it. Raises `LookupError` if there is none."""
    kind = type(container)
    if kind in PLAIN_CONTAINERS:
        return container[key]
    if issubclass(kind, dict):
        value = dict.get(container, key, _ABSENT)
        if value is _ABSENT:
            raise KeyError(key)
        return value
    if issubclass(kind, list):
        return list.__getitem__(container, key)
    if issubclass(kind, tuple):
        return tuple.__getitem__(container, key)
    return getitem(container, key)  # a `mappingproxy`
