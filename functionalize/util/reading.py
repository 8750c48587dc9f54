"""Reading a container of the step, with no method of a class of the user's, and without a change.

    item_of(optimizer.state, p)      the state of `p`; KeyError, and still no entry, if there is none
    items_of(module._buffers)        its pairs; also `keys_of`, `values_of`
    elements_of(groups)              its elements, in their order
    size_of(groups)                  their number
    is_a(batch, Mapping)             its type, whatever it says that its class is

`container[key]` calls `__getitem__` and `__missing__` of the container's class: a `defaultdict` makes an entry when it
is read. Sources, guards and the walk read the state of a step by these functions.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from typing import Any, TypeGuard

_ABSENT = object()
# Containers whose `container[key]` runs no Python code, and makes nothing.
PLAIN_CONTAINERS = frozenset({dict, OrderedDict, list, tuple})
# An `OrderedDict` has an order of its own, which the methods of `dict` do not see.
_BASES: tuple[Any, ...] = (OrderedDict, dict, list, tuple, set, frozenset, deque)


def is_a(value: Any, kinds: type | tuple[type, ...]) -> TypeGuard[Any]:
    """`isinstance(value, kinds)`, by the type: `isinstance` asks the object for its `__class__`."""
    return issubclass(type(value), kinds)


def table_of(value: Any) -> dict[str, Any] | None:
    """The `__dict__` of an object, read past a `__getattribute__` of its class; None without one."""
    try:
        table = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return table if isinstance(table, dict) else None


def item_of(container: Any, key: Any) -> Any:
    """`container[key]`, as the base class of the container reads it. Raises `LookupError` if there is none."""
    kind = type(container)
    if kind in PLAIN_CONTAINERS:
        return container[key]
    if issubclass(kind, dict):  # whose `__getitem__` calls `__missing__`
        value = dict.get(container, key, _ABSENT)
        if value is _ABSENT:
            raise KeyError(key)
        return value
    return base_of(container).__getitem__(container, key)


def entry_of(table: Any, key: Any, default: Any = None) -> Any:
    """`table.get(key, default)`, as the base class of the table reads it."""
    return base_of(table).get(table, key, default)


def put_entry(table: Any, key: Any, value: Any) -> None:
    """`table[key] = value`, as the base class of the table assigns it: for a value that stands there for a while."""
    base_of(table).__setitem__(table, key, value)


def base_of(container: Any) -> Any:
    """The class whose methods read a container: the class of the language that its own one extends, if there is one."""
    kind = type(container)
    if kind in PLAIN_CONTAINERS:
        return kind
    return next((base for base in _BASES if issubclass(kind, base)), kind)


def elements_of(container: Any) -> Iterable[Any]:
    """The elements of a list, tuple, set or deque, or the keys of a dict, as the base class iterates over them."""
    return container if type(container) in PLAIN_CONTAINERS else _Elements(container)


def keys_of(table: Any) -> Iterable[Any]:
    """The keys of a dict, as its base class gives them."""
    keys: Iterable[Any] = base_of(table).keys(table)
    return keys


def values_of(table: Any) -> Iterable[Any]:
    """The values of a dict, as its base class gives them."""
    values: Iterable[Any] = base_of(table).values(table)
    return values


def items_of(table: Any) -> Iterable[tuple[Any, Any]]:
    """The pairs of a dict, as its base class gives them."""
    items: Iterable[tuple[Any, Any]] = base_of(table).items(table)
    return items


def size_of(container: Any) -> int:
    """The number of the elements of a container, as its base class counts them."""
    size: int = base_of(container).__len__(container)
    return size


def modules_under(module: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """A module and all modules under it, each once, with full names: as `named_modules`, which users may override."""
    seen: set[int] = set()
    pending = [(prefix, module)]
    while pending:
        name, each = pending.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield name, each
        table = (table_of(each) or {}).get("_modules")
        # That of a scripted module is no dict.
        items = items_of(table) if is_a(table, dict) else each._modules.items()
        inner = [(f"{name}.{key}" if name else key, child) for key, child in items]
        pending += [pair for pair in reversed(inner) if pair[1] is not None]


class _Elements:
    """What iterates as the base class of a container does, each time anew."""

    __slots__ = ("_container",)

    def __init__(self, container: Any) -> None:
        self._container = container

    def __iter__(self) -> Any:
        return base_of(self._container).__iter__(self._container)
