"""The places in Python that a step moves and that a replay moves alike: numbers, tensors, tuples of tensors, lists that
only grow.

    live = LivePlaces({held.place: held}, {id(losses): losses})
    live.kind_at(held, 4)      int: the number is no fact of the walk, its type is
    live.kind_at(other, 4)     None: the number is a fact

Invariant: of a live place, that it is there and the type of its content are facts; the content is none.
"""

from __future__ import annotations

import argparse
import types
import weakref
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Hashable, Mapping
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn

from functionalize.scalars.live_scalars import left_behind
from functionalize.util.packages import is_users
from functionalize.util.reading import values_of
from functionalize.util.tensor_wrappers import address_of
from functionalize.walk.data_parts import CONTAINERS
from functionalize.walk.fact_text import NUMBERS, PLAIN
from functionalize.walk.object_parts import is_read_by_content
from functionalize.walk.parts import Held, Visit
from functionalize.walk.unread import is_observable

LIVE_NUMBERS = frozenset({int, float})  # not bool, and no subclass
_MOVED = LIVE_NUMBERS | {bool}
_TABLES = frozenset({dict, OrderedDict, defaultdict, Counter})
_NAMESPACES = frozenset({argparse.Namespace, types.SimpleNamespace})
_ABSENT = object()
_NO_KEYS: frozenset[Any] = frozenset()


class LivePlaces:
    """values: places of numbers and tensors, by `Held.place`. lists: lists that code only appends to, by id.

    Never changed. It keeps the containers alive, so that their ids are not reused.
    """

    __slots__ = ("_keys", "lists", "values")

    def __init__(
        self,
        values: Mapping[Any, Held] = MappingProxyType({}),
        lists: Mapping[int, list[Any]] = MappingProxyType({}),
    ) -> None:
        self.values, self.lists = values, lists
        self._keys: dict[int, frozenset[Any]] = {}
        for holder, key in values:
            self._keys[holder] = self._keys.get(holder, _NO_KEYS) | {key}

    def __or__(self, other: LivePlaces) -> LivePlaces:
        return LivePlaces({**self.values, **other.values}, {**self.lists, **other.lists})

    def __and__(self, other: LivePlaces) -> LivePlaces:
        """The places of values that are in both."""
        return LivePlaces({key: p for key, p in self.values.items() if key in other.values})

    def __bool__(self) -> bool:
        return bool(self.values or self.lists)

    def holds_bundle(self, place: Held | None, value: Any) -> bool:
        """Whether a live place holds a tuple of tensors: the step puts others there as a whole."""
        return (
            bool(self.values)
            and place is not None
            and place.place in self.values
            and is_bundle(value)
        )

    def is_inside(self, place: Held) -> bool:
        """Whether a place is one of a tuple at a live place, or of a tuple in it."""
        outer = place
        while isinstance(outer.container, Held):
            outer = outer.container
        is_live = outer is not place and outer.place in self.values
        return is_live and is_bundle(content(outer))

    def kind_at(self, place: Held | None, value: Any) -> type | None:
        """The type of the number at a live place; None for any other place or value."""
        if not self.values or place is None or type(value) not in _MOVED:
            return None
        return type(value) if place.place in self.values else None

    def keys_of(self, container: Any) -> frozenset[Any]:
        """The keys of the live places in a container."""
        return self._keys.get(id(container), _NO_KEYS) if self._keys else _NO_KEYS


NO_PLACES = LivePlaces()


def is_writable(place: Held | None) -> bool:
    """Whether `put` can write to a place as the step does, without code of the user."""
    if place is None:
        return False
    kind = type(place.container)
    if kind is types.CellType or kind in _TABLES or kind is list or kind is type:
        return True
    slot = getattr(kind, place.key, None) if isinstance(place.key, str) else None
    return isinstance(slot, types.MemberDescriptorType)


def put(place: Held, value: Any) -> None:
    """Write to a place."""
    container, key = place.container, place.key
    if type(container) is types.CellType:
        container.cell_contents = value
    elif isinstance(container, dict):
        dict.__setitem__(container, key, value)
    elif isinstance(container, list):
        list.__setitem__(container, key, value)
    elif type(container) is type:
        type.__setattr__(container, key, value)
    else:
        object.__setattr__(container, key, value)


def content(place: Held) -> Any:
    """What a place holds now; an object that is nothing else if there is no such place."""
    try:
        return place.resolve()
    except (LookupError, AttributeError, ValueError):
        return _ABSENT


def is_absent(value: Any) -> bool:
    """Whether `content` found no such place."""
    return value is _ABSENT


def may_live(value: Any) -> bool:
    """Whether a replay can move a value: a number, a flag, a tensor or a tuple of tensors."""
    return type(value) in _MOVED or issubclass(type(value), Tensor) or is_bundle(value)


def structure_of(value: Any) -> Hashable:
    """What a replay does not move of a value: the type, and of a tuple the structures of its elements.

    Of what else a tuple holds beside tensors: the value of a number or a text, and which object another one is.
    """
    if _is_tuple(type(value)):
        return type(value), tuple(map(_structure_inside, tuple.__iter__(value)))
    return cast(Hashable, type(value))


def _structure_inside(value: Any) -> Hashable:
    if issubclass(type(value), Tensor) or _is_tuple(type(value)):
        return structure_of(value)
    return (type(value), repr(value)) if type(value) in PLAIN else (type(value), id(value))


def is_bundle(value: Any) -> bool:
    """Whether a value is a tuple or named tuple of tensors, of such tuples, and of plain values; one is a tensor."""
    return _is_tuple(type(value)) and (leaves := leaves_of(value)) is not None and any(leaves)


def leaves_of(value: Any) -> list[bool] | None:
    """For each leaf of a tuple, whether it is a tensor; None: there are leaves of other kinds."""
    found: list[bool] = []
    for each in tuple.__iter__(value):
        if issubclass(type(each), Tensor):
            found.append(True)
        elif type(each) in NUMBERS:
            found.append(False)
        elif not _is_tuple(type(each)) or (inner := leaves_of(each)) is None:
            return None
        else:
            found += inner
    return found


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a tuple, and of tuples in it."""
    found: list[Tensor] = []
    for each in tuple.__iter__(value):
        if issubclass(type(each), Tensor):
            found.append(each)
        elif _is_tuple(type(each)):
            found += tensors_in(each)
    return found


def _is_tuple(kind: type) -> bool:
    """Whether a type is `tuple` or made by `namedtuple`, with nothing else in its instances."""
    return kind is tuple or (
        issubclass(kind, tuple)
        and kind.__bases__ == (tuple,)
        and kind.__dictoffset__ == 0
        and {"_fields", "_make", "_replace"} <= vars(kind).keys()
        and kind.__iter__ is tuple.__iter__
    )


class Bundle:
    """A tuple that was at a place, without keeping its tensors alive."""

    __slots__ = ("_id", "addresses", "structure", "tensors")

    def __init__(self, value: Any) -> None:
        tensors = tensors_in(value)
        self._id, self.structure = id(value), structure_of(value)
        self.tensors = list(map(weakref.ref, tensors))
        self.addresses = list(map(address_of, tensors))

    def is_same(self, value: Any) -> bool:
        """Whether the very tuple is there still."""
        if id(value) != self._id or not is_bundle(value) or structure_of(value) != self.structure:
            return False
        return all(was() is now for was, now in zip(self.tensors, tensors_in(value), strict=True))

    def equals(self, other: Bundle) -> bool:
        """Whether both are of the same tuple."""
        return (
            self._id == other._id
            and self.structure == other.structure
            and all(
                a() is b() is not None for a, b in zip(self.tensors, other.tensors, strict=True)
            )
        )

    def has_other_storages(self) -> bool:
        """Whether a tensor that is alive was given another storage."""
        found = zip(self.tensors, self.addresses, strict=True)
        return any((t := was()) is not None and address_of(t) != at for was, at in found)


def is_of_user(holder: Any) -> bool:
    """Whether an object, a function, a class or a Python module is the user's."""
    kind = type(holder)
    if kind is types.ModuleType:
        return is_users(holder.__name__.partition(".")[0])
    if kind in _NAMESPACES:
        return True
    named = holder if kind is types.FunctionType or issubclass(kind, type) else kind
    return is_users(named.__module__)


def names_lists(holder: Any) -> bool:
    """Whether code finds a list in an object by an attribute's name or a key: in one of the user's, or a table."""
    kind = type(holder)
    return kind in _TABLES or (not issubclass(kind, CONTAINERS) and is_of_user(holder))


def state_numbers(optimizer: torch.optim.Optimizer, live: LivePlaces) -> list[tuple[Any, Any]]:
    """The numbers in an optimizer's state, each with its key; of live ones, the type."""
    return [
        (key, live.kind_at(Held(state, key), value) or (type(value), repr(value)))
        for state in list(values_of(optimizer.state))
        if isinstance(state, dict)
        for key, value in state.items()
        if type(value) in PLAIN
    ]


def may_move(holder: Visit, visit: Visit) -> bool:
    """Whether a replay may assign what the step assigns to a place of `holder`.

    Of a module or an optimizer no flags: `training` is state of modules. Of an object of a library integers and flags.
    """
    owner: Any = holder.value
    if type(owner) is types.MethodType:
        owner = owner.__self__
    kind, what = type(owner), type(visit.value)
    if visit.moving is not None or not is_writable(visit.place):
        return False
    if issubclass(kind, (nn.Module, torch.optim.Optimizer)):
        is_known = what is not bool
    elif issubclass(kind, Tensor):  # what a script has left on it
        is_known = True
    else:
        is_known = issubclass(kind, CONTAINERS) or is_of_user(owner) or is_read_by_content(kind)
    return (is_known and not visit.is_loose) or (what in (int, bool) and is_observable(kind))


def content_of(value: Any) -> Any:
    """The content of such a place: a tensor weakly, a number as a plain one."""
    if issubclass(type(value), Tensor):
        return weakref.ref(value)
    return Bundle(value) if is_bundle(value) else left_behind(value)
