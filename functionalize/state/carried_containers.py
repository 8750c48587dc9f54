"""Containers that a step leaves for its next call: live numbers in them, and which of them are one object.

    self.state = {"h": h.detach(), "n": self.state["n"] + 1}      the number is live in the recording
    self.a = self.b = [h, c]; return self.a                       a replay leaves one list, too

    inside = NumbersInside(place, "self.state", keys)             keys: of the live numbers in the bundle there
    inside.put(log)                                               the recording begins
    inside.take_away(memo)                                        it ends: the bundle is as it was, if it is there
    copies(value, memo), with_plain(value, memo)                  with live numbers for the program, plain for the user
    one_object([(None, result), (effect, value), ...])            the containers that are found in several places
    marked(result, places)                                        `KeptObject` for what was there before the step

A tuple that gets a live number is another tuple until the recording ends. Invariant: after the step, also after an
exception, no container at a live place, and none of the result that is in one, holds a live number.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from functionalize.scalars.live_scalars import as_live, is_live, left_behind
from functionalize.scalars.scalar_log import ScalarLog
from functionalize.state.place_effects import PlaceNumber
from functionalize.util.structure import KeptObject
from functionalize.walk.live_places import LIVE_NUMBERS, Keys, content, elements_in, part_at, put
from functionalize.walk.parts import Held

Memo = dict[
    int, tuple[Any, Any]
]  # by the id of a container: itself, so that the id stays its own, and what stands for it
Where = tuple[
    Any, Keys
]  # the value of an effect, or the result (None), and the keys that lead to something in it


class NumbersInside:
    """The live numbers of the bundle at a place. keys: of each of them."""

    def __init__(self, place: Held, name: str, keys: frozenset[Keys]) -> None:
        self._place, self._name, self._keys = place, name, keys
        self._put: list[
            tuple[Held, Any, Any]
        ] = []  # a place, what stands there now, what stood there
        self._numbers: list[tuple[Keys, Any]] = []

    def put(self, log: ScalarLog) -> None:
        """Put live numbers in the places of plain ones."""
        was = content(self._place)
        now = self._with_live(was, self._place, (), log)
        if now is not was:
            self._replace(self._place, now, was)

    def _with_live(self, value: Any, place: Held, keys: Keys, log: ScalarLog) -> Any:
        """What stands for a value. place: through which every call finds it."""
        if keys in self._keys and type(value) in LIVE_NUMBERS:
            name = ".".join(map(str, (self._name, *keys)))
            live = as_live(log.from_source(PlaceNumber(place, name, type(value)), name, value))
            self._numbers.append((keys, live))
            return live
        found = elements_in(value)
        if found is None or not any(each[: len(keys)] == keys for each in self._keys):
            return value
        made = [self._with_live(e, Held(place, k), (*keys, k), log) for k, e in found]
        if issubclass(type(value), tuple):
            return _tuple_like(value, [each for _, each in found], made)
        for (key, was), now in zip(found, made, strict=True):
            if now is not was:
                self._replace(Held(value, key), now, was)
        return value

    def _replace(self, place: Held, now: Any, was: Any) -> None:
        put(place, now)
        self._put.append((place, now, was))

    def are_in(self, bundle: Any) -> bool:
        """Whether a bundle of the same structure holds these very numbers."""
        return all(part_at(bundle, keys) is live for keys, live in self._numbers)

    def take_away(self, memo: Memo) -> None:
        """Put back what stood there, where the step has put nothing else. memo: of `with_plain`."""
        for place, now, was in self._put:
            if content(place) is now:
                put(place, was)
            if issubclass(type(now), tuple):
                memo[id(now)] = now, was
        self._put.clear()
        self._numbers.clear()


def holds_live(value: Any) -> bool:
    """Whether a container, or one in it, holds a live number."""
    return any(is_live(each) or holds_live(each) for _, each in elements_in(value) or ())


def copies(value: Any, memo: Memo) -> Any:
    """Another container of the same type with the same content, for each container; one where it is one."""
    found = elements_in(value)
    if found is None:
        return value
    if id(value) in memo:
        return memo[id(value)][1]
    kind: Any = type(value)
    if issubclass(kind, tuple):
        made = _tuple_like(value, [], [copies(each, memo) for _, each in found])
        memo[id(value)] = value, made
        return made
    made = _empty_like(value)
    memo[id(value)] = value, made
    for key, each in found:
        inner = copies(each, memo)
        if kind in (list, deque):
            made.append(inner)
        elif kind is dict:
            made[key] = inner
        else:
            object.__setattr__(made, key, inner)
    return made


def _empty_like(value: Any) -> Any:
    kind: Any = type(value)
    if kind is deque:
        return deque(maxlen=value.maxlen)
    return kind() if kind in (list, dict, types.SimpleNamespace) else object.__new__(kind)


def reaches(value: Any, memo: Memo, above: frozenset[int] = frozenset()) -> bool:
    """Whether a value is, or holds, a container that is in `memo`. above: ids of the containers around it."""
    found = elements_in(value)
    if found is None or id(value) in above:
        return False
    above |= {id(value)}
    return id(value) in memo or any(reaches(each, memo, above) for _, each in found)


def with_plain(value: Any, memo: Memo) -> Any:
    """A value with plain numbers in the places of live ones: in place, or another tuple."""
    if is_live(value):
        return left_behind(value)
    found = elements_in(value)
    if found is None:
        return value
    if id(value) in memo:
        return memo[id(value)][1]
    if issubclass(type(value), tuple):
        plain = _tuple_like(
            value, [each for _, each in found], [with_plain(e, memo) for _, e in found]
        )
        memo[id(value)] = value, plain
        return plain
    memo[id(value)] = value, value
    for key, each in found:
        now = with_plain(each, memo)
        if now is not each:
            put(Held(value, key), now)
    return value


def marked(value: Any, places: Mapping[int, tuple[Held, Any]]) -> Any:
    """A result with a `KeptObject` for each object that was there before the step, whatever is in it.

    places: by id, such objects, each with its place. What holds one is copied; a replay makes it anew anyway.
    """
    known = places.get(id(value))
    if known is not None and known[1] is value:
        return KeptObject(known[0])
    found = elements_in(value)
    if found is None:
        return value
    made = [marked(each, places) for _, each in found]
    if all(a is b for a, (_, b) in zip(made, found, strict=True)):
        return value
    if issubclass(type(value), tuple):
        return _tuple_like(value, (), made)
    copied = copies(value, {id(each): (each, each) for _, each in found})
    for (key, _), each in zip(found, made, strict=True):
        put(Held(copied, key), each)
    return copied


def _tuple_like(value: Any, were: Sequence[Any], elements: Sequence[Any]) -> Any:
    """A tuple of the same type with these elements; the tuple itself if they are those that it has."""
    if were and all(a is b for a, b in zip(were, elements, strict=True)):
        return value
    return tuple.__new__(type(value), elements)


def one_object(values: Iterable[tuple[Any, Any]]) -> list[tuple[Where, Where]]:
    """Pairs of places at which one container stands: the first one, and where it is to be put, in this order.

    values: the result and values of effects, each with what names it.
    """
    first: dict[int, Where] = {}
    found: list[tuple[Where, Where]] = []
    for of, value in values:
        _note(value, (of, ()), first, found)
    return found


def _note(
    value: Any, where: Where, first: dict[int, Where], found: list[tuple[Where, Where]]
) -> bool:
    """Note a container and those in it. Whether it matters which object it is: of a tuple of constants it does not."""
    elements = elements_in(value)
    if elements is None:
        return issubclass(type(value), Tensor)
    if id(value) in first:
        found.append((first[id(value)], where))
        return True
    first[id(value)] = where
    of, keys = where
    # What is inside comes first: a tuple in which something is put in place of another object is another tuple.
    inner = [_note(each, (of, (*keys, key)), first, found) for key, each in elements]
    matters = any(inner) or not issubclass(type(value), tuple)
    if not matters:
        del first[id(value)]
    return matters
