"""The places in Python that a step moves and a replay moves alike: numbers, tensors, bundles, lists that only grow.

A bundle is a container of tensors that the step replaces as a whole: a tuple, a named tuple, a list, a dict, a
dataclass, a `SimpleNamespace`. In it are tensors, plain values and such containers. Numbers in it that the step was
seen to change are live, too.

    live = LivePlaces({held.place: held}, {id(losses): losses})
    live.kind_at(held, 4)      int: the number is no fact of the walk, its type is
    live.kind_at(other, 4)     None: the number is a fact

Invariant: of a live place, that it is there and the type of its content are facts; the content is none.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import sys
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Container, Hashable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from functionalize.scalars.live_scalars import is_live, left_behind
from functionalize.util.by_class import by_class
from functionalize.util.packages import is_users, is_users_class, is_users_function
from functionalize.util.reader import READER, Reader
from functionalize.util.reading import elements_of, is_a, items_of, table_of, values_of
from functionalize.util.structure import attributes_of
from functionalize.util.tensor_wrappers import address_of
from functionalize.util.text import with_article
from functionalize.util.unchanged import Same
from functionalize.walk.fact_text import NUMBERS, PLAIN
from functionalize.walk.parts import (
    CONTAINERS,
    Held,
    Visit,
    is_native,
    is_read_by_content,
    slot_names,
)
from functionalize.walk.unread import is_observable

LIVE_NUMBERS = frozenset({int, float})  # not bool, and no subclass
FIXED = frozenset(
    {bool, str}
)  # what a program has as constants, with guards on what was there on entry
_MOVED = LIVE_NUMBERS | FIXED
_TABLES = frozenset({dict, OrderedDict, defaultdict, Counter})
_RINGS = frozenset({list, deque})  # elements by position, which a step may change in place
_NAMESPACES = frozenset({argparse.Namespace, types.SimpleNamespace})
_KEYS = frozenset({str, int})  # of dicts that are made anew
_MOST_NESTED = 8
_MOST_NUMBERS = 64  # of a bundle without a tensor: a table of data is no state that a step moves
# Objects that stay the same object wherever they are, and others of which the content can change.
_UNCHANGED = (
    *(
        Tensor,
        nn.Module,
        torch.optim.Optimizer,
        torch.optim.lr_scheduler.LRScheduler,
        type,
        enum.Enum,
    ),
    *(
        types.FunctionType,
        types.MethodType,
        types.BuiltinFunctionType,
        types.ModuleType,
        tuple,
        frozenset,
    ),
)
_CHANGED = (list, dict, set, deque, bytearray)
_ABSENT = object()
_BOUND = "maxlen"  # the key in the structure of a deque, whose own keys are numbers
_NO_KEYS: frozenset[Any] = frozenset()
Keys = tuple[Any, ...]  # that lead from a container to something in it


class LivePlaces:
    """values: places of numbers and tensors, by `Held.place`. lists: lists that code only appends to, by id.

    numbers: for places of bundles, by `Held.place`: the keys that lead to each number, flag or text in them that moves.
    Never changed. It keeps the containers alive, so that their ids are not reused.
    """

    __slots__ = ("_keys", "lists", "numbers", "values")

    def __init__(
        self,
        values: Mapping[Any, Held] = MappingProxyType({}),
        lists: Mapping[int, list[Any]] = MappingProxyType({}),
        numbers: Mapping[Any, frozenset[Keys]] = MappingProxyType({}),
    ) -> None:
        self.values, self.lists, self.numbers = values, lists, numbers
        self._keys: dict[int, frozenset[Any]] = {}
        for holder, key in values:
            self._keys[holder] = self._keys.get(holder, _NO_KEYS) | {key}

    def __or__(self, other: LivePlaces) -> LivePlaces:
        numbers = dict(self.numbers)
        for place, each in other.numbers.items():
            numbers[place] = numbers.get(place, _NO_KEYS) | each
        return LivePlaces({**self.values, **other.values}, {**self.lists, **other.lists}, numbers)

    def __and__(self, other: LivePlaces) -> LivePlaces:
        """The places of values that are in both."""
        return LivePlaces({key: p for key, p in self.values.items() if key in other.values})

    def __bool__(self) -> bool:
        return bool(self.values or self.lists)

    def holds_bundle(self, place: Held | None, value: Any) -> bool:
        """Whether a live place holds a bundle: the step puts others there as a whole."""
        return (
            bool(self.values)
            and place is not None
            and place.place in self.values
            and is_bundle(value)
        )

    def has(self, place: Held) -> bool:
        """Whether the step moves what is at a place, alone or in a bundle."""
        return place.place in self.values or self.is_inside(place)

    def is_inside(self, place: Held) -> bool:
        """Whether a place is one of a bundle at a live place, or of a container in it."""
        outer = place
        while is_a(outer.container, Held):
            outer = outer.container
        is_live = outer is not place and outer.place in self.values
        return is_live and is_bundle(content(outer))

    def kind_at(self, place: Held | None, value: Any) -> type | None:
        """The type of the number at a live place; None for any other place or value."""
        if not self.values or place is None or type(value) not in _MOVED:
            return None
        if type(place.container) is Held:
            return type(value) if self._is_number_inside(place) else None
        return type(value) if place.place in self.values else None

    def _is_number_inside(self, place: Held) -> bool:
        keys: Keys = ()
        while type(place.container) is Held:
            keys, place = (place.key, *keys), place.container
        return keys in self.numbers_at(place)

    def numbers_at(self, place: Held) -> frozenset[Keys]:
        """The keys that lead to each number or flag that moves in the bundle at a place."""
        return self.numbers.get(place.place, _NO_KEYS) if self.numbers else _NO_KEYS

    @property
    def holders(self) -> frozenset[int]:
        """The ids of the containers with live places, and of the live lists."""
        return frozenset((*self._keys, *self.lists))

    def keys_of(self, container: Any) -> frozenset[Any]:
        """The keys of the live places in a container."""
        return self._keys.get(id(container), _NO_KEYS) if self._keys else _NO_KEYS


NO_PLACES = LivePlaces()


def is_writable(place: Held | None) -> bool:
    """Whether `put` can write to a place as the step does, without code of the user."""
    if place is None or is_a(place.container, Held):  # a part of what is replaced as a whole
        return False
    kind = type(place.container)
    if kind is types.CellType or kind in _TABLES or kind in _RINGS or kind is type:
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
    elif isinstance(container, deque):
        deque.__setitem__(container, key, value)
    elif type(container) is type:
        type.__setattr__(container, key, value)
    else:
        object.__setattr__(container, key, value)


def content(place: Held, read: Reader = READER) -> Any:
    """What a place holds now; an object that is nothing else if there is no such place."""
    try:
        return place.read_by(read)
    except (LookupError, AttributeError, ValueError):
        return _ABSENT


def is_absent(value: Any) -> bool:
    """Whether `content` found no such place."""
    return value is _ABSENT


def may_live(value: Any) -> bool:
    """Whether a replay can move a value: a number, a flag, a text, a tensor or a bundle."""
    return type(value) in _MOVED or issubclass(type(value), Tensor) or is_bundle(value)


def structure_of(value: Any, numbers: frozenset[Keys] = _NO_KEYS) -> Hashable:
    """What a replay does not move of a value: the type, and of a container the keys and the structures of its elements.

    Of what else a container holds beside tensors: the value of a number or a text, and which object another one is.
    numbers: the keys of live numbers and flags, of which only the type counts.
    """
    kind = type(value)
    found = None if issubclass(kind, Tensor) else elements_in(value)
    if found is None:
        return cast(Hashable, kind)
    return _Structures(numbers).of(value, found, (), _MOST_NESTED)


class _Structures(NamedTuple):
    numbers: frozenset[Keys]

    def of(self, value: Any, found: list[tuple[Any, Any]], keys: Keys, depth: int) -> Hashable:
        """The structure of a container with these elements."""
        parts = ((key, self._inside(each, (*keys, key), depth - 1)) for key, each in found)
        return type(value), (*_bound_of(value), *parts)

    def _inside(self, value: Any, keys: Keys, depth: int) -> Hashable:
        kind = type(value)
        if kind in PLAIN:
            return cast(Hashable, kind) if keys in self.numbers else (kind, repr(value))
        if keys in self.numbers and is_live(value):
            return cast(Hashable, value.node.kind)
        found = None if issubclass(kind, Tensor) else elements_in(value)
        if found is not None and depth:
            return self.of(value, found, keys, depth)
        return (
            cast(Hashable, kind)
            if found is not None or issubclass(kind, Tensor)
            else (kind, id(value))
        )


def _bound_of(value: Any) -> Iterator[Hashable]:
    """The most elements that a container takes, as a part of its structure, if there is such a number."""
    if type(value) is deque and value.maxlen is not None:
        yield _BOUND, (deque, str(value.maxlen))


def numbers_moved(was: Any, now: Any) -> frozenset[Keys]:
    """The keys of each number, flag or text that differs between two structures of a container that is made anew.

    Where one does, all numbers in it may: a window over the last losses fills element by element.
    """
    found = list(_leaves_between(was, now))
    moved = {keys for keys, _, is_same in found if not is_same}
    numbers = {keys for keys, kind, _ in found if kind in LIVE_NUMBERS}
    return frozenset(moved | numbers if moved else ())


def _leaves_between(was: Any, now: Any, keys: Keys = ()) -> Iterator[tuple[Keys, type, bool]]:
    """The keys of each number, flag or text of one type in two structures, the type, and whether it is the same."""
    if not (type(was) is type(now) is tuple and was[0] is now[0]):
        return
    kind, inner = was
    if kind in _MOVED:
        yield keys, kind, was == now
    elif type(inner) is type(now[1]) is tuple:
        after = dict(now[1])
        for key, before in inner:
            if key in after:
                yield from _leaves_between(before, after[key], (*keys, key))


def computed_alike(value: Any, was: Any, keys: Keys = ()) -> Iterator[Keys]:
    """The keys that lead to each live number in a container that is the plain number which a structure has there."""
    if type(was) is not tuple or type(was[1]) is not tuple:
        return
    inside = dict(was[1])
    for key, each in elements_in(value) or ():
        if is_live(each):
            number = left_behind(each)
            if inside.get(key) == (type(number), repr(number)):
                yield (*keys, key)
        elif not issubclass(type(each), Tensor):
            yield from computed_alike(each, inside.get(key), (*keys, key))


def without_values(structure: Any, numbers: Container[Keys], keys: Keys = ()) -> Any:
    """A structure in which of the numbers at these keys only the type counts."""
    if type(structure) is not tuple or type(structure[1]) is not tuple:
        return structure[0] if keys in numbers and type(structure) is tuple else structure
    parts = ((key, without_values(each, numbers, (*keys, key))) for key, each in structure[1])
    return structure[0], tuple(parts)


def difference_in(name: str, was: Any, now: Any) -> tuple[str, str, str]:
    """The first place at which two structures differ, as text, and what is there in each."""
    both = [each for each in (was, now) if type(each) is tuple and type(each[1]) is tuple]
    if len(both) == 2 and was[0] is now[0]:
        keys, keys_now = ([key for key, _ in each[1]] for each in both)
        if keys != keys_now:
            kind, counts = was[0].__name__, [len({*each} - {_BOUND}) for each in (keys, keys_now)]
            return name, f"a {kind} of {counts[1]}", f"a {kind} of {counts[0]}"
        for (key, before), (_, after) in zip(was[1], now[1], strict=True):
            if before != after:
                return difference_in(f"{name}.{key}", before, after)
    return name, _text_of_structure(now), _text_of_structure(was)


def _text_of_structure(structure: Any) -> str:
    if type(structure) is tuple and type(structure[1]) is str:
        return structure[1]  # of a number or a text
    kind = structure[0] if type(structure) is tuple else structure
    if issubclass(kind, (torch.SymFloat, torch.SymInt)):
        return "a number that the step computes"
    return "a tensor" if issubclass(kind, Tensor) else with_article(kind.__name__)


def is_bundle(value: Any) -> bool:
    """Whether a value is a container of tensors, of such containers, and of plain values; one is a tensor."""
    found = elements_in(value)
    return (
        found is not None
        and (leaves := _leaves_of(found, _MOST_NESTED)) is not None
        and (any(leaves) or 0 < len(leaves) <= _MOST_NUMBERS)
    )


def elements_in(value: Any) -> list[tuple[Any, Any]] | None:
    """The elements of a container that a replay can make anew, each with its key; None of any other object."""
    kind = type(value)
    if kind in PLAIN:  # most values, `torch.Size` among them
        return None
    if kind is tuple or _is_named_tuple(kind):
        return list(enumerate(tuple.__iter__(value)))
    if kind in _RINGS:
        return list(enumerate(kind.__iter__(value)))
    if kind is dict:
        return list(value.items())
    return _fields_of(value) if _is_record(kind) else None


def _leaves_of(elements: list[tuple[Any, Any]], depth: int) -> list[bool] | None:
    """For each leaf, whether it is a tensor; None: there are leaves of other kinds."""
    found: list[bool] = []
    for key, each in elements:
        if type(key) not in _KEYS:
            return None
        if issubclass(type(each), Tensor):
            found.append(True)
        elif type(each) in NUMBERS or is_live(each):
            found.append(False)
        else:
            inner = elements_in(each) if depth else None
            leaves = None if inner is None else _leaves_of(inner, depth - 1)
            if leaves is None:
                return None
            found += leaves
    return found


def part_at(value: Any, keys: Keys) -> Any:
    """What keys lead to in a container; an object that is nothing else if they lead nowhere."""
    for key in keys:
        value = content(Held(value, key))
    return value


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a bundle, and of containers in it."""
    found: list[Tensor] = []
    for _, each in elements_in(value) or ():
        if issubclass(type(each), Tensor):
            found.append(each)
        else:
            found += tensors_in(each)
    return found


def changeable_in(value: Any) -> Iterator[Any]:
    """The containers of a bundle that can be changed in place, itself among them, and their `__dict__`s."""
    found = elements_in(value)
    if found is None:
        return
    if not issubclass(type(value), tuple):
        yield value
        yield from filter(None, (table_of(value),))
    for _, each in found:
        yield from changeable_in(each)


def can_change(value: Any) -> bool:
    """Whether code may change the content of an object: not that of a number, a tensor, a module, a function."""
    kind = type(value)
    if kind in PLAIN or issubclass(kind, _UNCHANGED) or is_live(value):
        return False
    is_array = (kind.__module__, kind.__name__) == ("numpy", "ndarray")
    if is_array or issubclass(kind, _CHANGED):
        return True
    return table_of(value) is not None or bool(slot_names(kind))


def held_elsewhere(values: Iterable[Any], kept: Container[int] = ()) -> tuple[set[int], set[int]]:
    """The ids of the objects in these values that can be changed: those that anything else holds, too, and the others.

    values: what some places hold, each of which counts as one reference. kept: ids of objects into which not to look.
    """
    found = _counted(values, kept)
    shared = {at for at, each in found.items() if _references(each) > each[1] + _OWN_REFERENCES}
    return shared, {at for at, each in found.items() if each[0] is not None} - shared


def _counted(values: Iterable[Any], kept: Container[int] = ()) -> dict[int, list[Any]]:
    """By id, each object in these values, with the number of references to it that are found."""
    found: dict[int, list[Any]] = {}
    for value in values:
        _count(value, found, kept)
    return found


def _count(value: Any, found: dict[int, list[Any]], kept: Container[int]) -> None:
    """Count the references to each object in a value. Tuples do not count: nobody can change one."""
    elements: Iterable[tuple[Any, Any]] | None = () if id(value) in kept else elements_in(value)
    if elements is None:
        if not can_change(value):
            return
        elements = _items_of(value)
    known = found.get(id(value))
    if known is not None:
        known[1] += 1
        return
    # Of a tuple that is found twice, what it holds is counted once.
    found[id(value)] = [value if not issubclass(type(value), tuple) else None, 1]
    for _, each in elements:
        _count(each, found, kept)


def _items_of(value: Any) -> Iterable[tuple[Any, Any]]:
    """The items of a container of another type than `elements_in` knows."""
    if issubclass(type(value), dict):
        return list(dict.items(value))
    return list(enumerate(elements_of(value))) if issubclass(type(value), (list, deque)) else ()


def _references(counted: list[Any]) -> int:
    return 0 if counted[0] is None else sys.getrefcount(counted[0])


def is_alone(place: Held) -> bool:
    """Whether nothing but its place holds a container, nor the containers in it, so that a replay may make others."""
    return not held_elsewhere(contents([place]))[0]


def contents(places: Iterable[Held]) -> Iterator[Any]:
    """What each place holds now, of which the iterator keeps nothing."""
    for place in places:
        yield content(place)


# By which tuples are read; with others, an object is not its elements.
_OF_TUPLES = ("__iter__", "__getitem__", "__len__", "__eq__", "__hash__", "__getattribute__")


@by_class
def _is_named_tuple(kind: type) -> bool:
    """Whether a type is made by `namedtuple`, or adds methods to one, with nothing else in its instances."""
    if not issubclass(kind, tuple):
        return False
    made = next(each for each in reversed(kind.__mro__) if each not in (object, tuple))
    return (
        kind.__dictoffset__ == 0
        and made.__bases__ == (tuple,)
        and {"_fields", "_make", "_replace"} <= vars(made).keys()
        and all(getattr(kind, name) is getattr(tuple, name) for name in _OF_TUPLES)
    )


@by_class
def _is_record(kind: type) -> bool:
    """Whether the objects of a class are their attributes: a dataclass that reads and stores them as usual."""
    if kind in _NAMESPACES:
        return True
    return (
        dataclasses.is_dataclass(kind)
        and not issubclass(kind, (*CONTAINERS, nn.Module, torch.optim.Optimizer, Tensor))
        and kind.__getattribute__ is object.__getattribute__
        and not any(hasattr(kind, name) for name in ("__getattr__", "__del__"))
        and not is_native(kind)
    )


def _fields_of(value: Any) -> list[tuple[str, Any]] | None:
    """The attributes of a record; None if it has others than its class says."""
    found = attributes_of(value)
    kind = type(value)
    names = found if kind in _NAMESPACES else [f.name for f in dataclasses.fields(kind)]
    return [(name, found[name]) for name in names] if found.keys() == {*names} else None


class Bundle:
    """A bundle that was at a place, without keeping its tensors alive."""

    __slots__ = (*("_id", "_live", "addresses", "hints", "is_fixed", "structure", "tensors"),)

    def __init__(self, value: Any, numbers: frozenset[Keys] = _NO_KEYS) -> None:
        """numbers: the keys of live numbers in it, of which only the type counts."""
        tensors = tensors_in(value)
        self._id, self._live = id(value), numbers
        self.structure = structure_of(value, numbers)
        self.hints = {keys: left_behind(part_at(value, keys)) for keys in numbers}
        self.is_fixed = next(changeable_in(value), None) is None
        self.tensors = list(map(weakref.ref, tensors))
        self.addresses = list(map(address_of, tensors))

    def is_at(self, value: Any) -> bool:
        """Whether a value is the very container, whatever it holds by now, unless it has died."""
        return id(value) == self._id

    def is_same(self, value: Any) -> bool:
        """Whether the very container is there still, with the same content."""
        if not self.is_at(value) or not is_bundle(value):
            return False
        if structure_of(value, self._live) != self.structure:
            return False
        return all(was() is now for was, now in zip(self.tensors, tensors_in(value), strict=True))

    def is_another(self, was: Any) -> bool:
        """Whether another bundle, or anything else, was at the place before. Changes in place do not count."""
        if type(was) is not Bundle:
            return True
        if not self.is_fixed:
            return self._id != was._id
        return not (
            self._id == was._id
            and self.structure == was.structure
            and all(a() is b() is not None for a, b in zip(self.tensors, was.tensors, strict=True))
        )

    def may_replace(self, was: Any) -> bool:
        """Whether the step may put another bundle there at every call. The first one it may change in place later."""
        return self.is_fixed or type(was) is Bundle

    def has_other_storages(self) -> bool:
        """Whether a tensor that is alive was given another storage."""
        found = zip(self.tensors, self.addresses, strict=True)
        return any((t := was()) is not None and address_of(t) != at for was, at in found)


def is_same_content(was: Any, now: Any) -> bool:
    """Whether two contents of a place, see `content_of`, are one: the same tensor or container, or equal numbers."""
    if type(now) is Bundle:
        return not now.is_another(was)
    if type(now) is weakref.ReferenceType:
        return type(was) is weakref.ReferenceType and was() is now()
    return type(was) is type(now) and repr(was) == repr(now)


def is_users_object(value: Any) -> bool:
    """Whether a value is an object of a class of the user's, or a namespace."""
    kind = type(value)
    return kind in _NAMESPACES or is_users_class(kind)


def is_of_user(holder: Any) -> bool:
    """Whether an object, a function, a class or a Python module is the user's."""
    kind = type(holder)
    if kind is types.ModuleType:
        return is_users(holder.__name__.partition(".")[0])
    if kind is types.FunctionType:
        return is_users_function(holder)
    return is_users_class(holder) if issubclass(kind, type) else is_users_object(holder)


def may_grow(value: Any) -> bool:
    """Whether a value is a list, or a deque that takes any number of elements: it can only be appended to."""
    return type(value) is list or (type(value) is deque and value.maxlen is None)


def names_lists(holder: Any) -> bool:
    """Whether code finds a list in an object by an attribute's name or a key: in one of the user's, or a table."""
    kind = type(holder)
    return kind in _TABLES or (not issubclass(kind, CONTAINERS) and is_of_user(holder))


def state_numbers(optimizer: torch.optim.Optimizer, live: LivePlaces) -> list[tuple[Any, Any]]:
    """The numbers in an optimizer's state, each with its key; of live ones, the type."""
    return [
        (key, live.kind_at(Held(state, key), value) or (type(value), repr(value)))
        for state in states_of(optimizer)
        for key, value in items_of(state)
        if type(value) in PLAIN
    ]


def states_of(optimizer: torch.optim.Optimizer) -> list[dict[Any, Any]]:
    """The states of parameters, and the table of these, which may have other entries."""
    return [*(each for each in values_of(optimizer.state) if is_a(each, dict)), optimizer.state]


def tables_of(optimizer: torch.optim.Optimizer) -> list[dict[Any, Any]]:
    """The dicts in which an optimizer keeps what it has, groups of parameters too."""
    groups = [each for each in elements_of(optimizer.param_groups) if is_a(each, dict)]
    return [*states_of(optimizer), *groups, optimizer.defaults]


def tensors_of_optimizer(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Any, Held, Tensor]]:
    """The tensors that an optimizer holds beside its parameters: the key of each, and its place."""
    for table in tables_of(optimizer):
        for key, value in items_of(table):
            if issubclass(type(value), Tensor):
                yield key, Held(table, key), value


def state_now(optimizer: torch.optim.Optimizer, live: LivePlaces) -> list[Any]:
    """What stands in an optimizer's tables, to be compared by `==`: numbers of its state, and which tensors there are,
    with what it keeps beside the states of parameters.
    """
    found: list[Any] = list(state_numbers(optimizer, live))
    for table in tables_of(optimizer):
        for key, value in items_of(table):
            is_no_parameter = table is optimizer.state and type(key) is str
            is_compared = is_no_parameter or issubclass(type(value), Tensor)
            if is_compared and not live.has(Held(table, key)):
                found.append((key, Same(value)))
    return found


def may_move(holder: Visit, visit: Visit) -> bool:
    """Whether a replay may assign what the step assigns to a place of `holder`.

    Of a module or an optimizer no flags and texts: `training` is state of modules. Of an object of a library numbers
    and flags.
    """
    owner: Any = holder.value
    if type(owner) is types.MethodType:
        owner = owner.__self__
    kind, what = type(owner), type(visit.value)
    if visit.moving is not None or not is_writable(visit.place):
        return False
    if issubclass(kind, (nn.Module, torch.optim.Optimizer)):
        is_known = what not in FIXED
    elif issubclass(kind, Tensor):  # what a script has left on it
        is_known = True
    else:
        is_known = issubclass(kind, CONTAINERS) or is_of_user(owner) or is_read_by_content(kind)
    is_movable = what in (int, float, bool) or issubclass(what, Tensor)
    return (is_known and not visit.is_loose) or (is_movable and is_observable(kind))


def content_of(value: Any) -> Any:
    """The content of such a place: a tensor weakly, a number as a plain one."""
    if issubclass(type(value), Tensor):
        return weakref.ref(value)
    return Bundle(value) if is_bundle(value) else left_behind(value)


def _own_references() -> int:
    holder: list[Any] = [[]]
    (counted,) = _counted(contents([Held(holder, 0)])).values()
    return _references(counted) - 1


_OWN_REFERENCES = _own_references()  # those of the count itself, not in every Python the same
