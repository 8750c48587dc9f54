"""A fast test that objects still hold the very same objects: one comparison by identity of all of them, in C.

    facts = Unchanged()
    facts.table(vars(module)), facts.attribute(p, "requires_grad"), facts.elements(group["params"])
    facts.freeze()
    facts.hold()                      True: each holds what it held at `freeze`

A replay asks it in place of its guards (`program/known_inputs.py`). Values that are equal and not identical make it
fail; then the guards themselves decide, and have the words for a failure.

Invariant: `hold` returns True only if every read would return what it returned at `freeze`. No tensor is kept alive but
parameters, which the guards of a program hold anyway.
"""

from __future__ import annotations

import weakref
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain, repeat
from operator import attrgetter, call, getitem, is_, methodcaller
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from functionalize._compat.autograd import reference_count
from functionalize._compat.fast_guards import dict_version, has_plain_attributes, plain_reads
from functionalize.util.reading import PLAIN_CONTAINERS, elements_of, item_of, size_of, values_of

Read = Callable[[], Iterable[Any]]
Test = Callable[[], bool]
_flat = chain.from_iterable
_values = methodcaller("values")
Names = Callable[[Any], tuple[Any, ...]]
# Of these `len` runs no Python code.
_PLAIN_SIZES = PLAIN_CONTAINERS | {set, frozenset, deque, MappingProxyType}
_DICTS = frozenset({dict, OrderedDict, defaultdict})  # to iterate them runs no Python code


class Unchanged:
    """Facts about objects: added one by one, tested together.

    aliases: tensors that must stay windows on the storage of an input, each with the index of that input.
    places: what stands for attributes of objects, each with its object and the name.
    """

    def __init__(self, beside: Unchanged | None = None) -> None:
        """beside: other facts, which are tested before these: what is among them is not added again."""
        self.aliases: list[tuple[Tensor, int]] = []
        self.places: dict[Any, tuple[Any, str]] = {}
        self._seen: set[tuple[Any, ...]] = set(beside._seen) if beside is not None else set()
        tables = beside._dicts.items() if beside is not None else ()
        self._whole_beside = {at for at, each in tables if each.is_whole}
        self._dicts: dict[int, _Dict] = {}
        self._lists: list[Any] = []
        self._empty: list[Any] = []
        self._spaces: list[tuple[Any, Names]] = []
        self._entries: list[tuple[Any, Any]] = []
        self._attributes: dict[str, list[Any]] = {}
        self._presence: dict[str, list[Any]] = {}
        self._kinds: list[Any] = []
        self._counted: list[Callable[[], Any]] = []
        self._reads: list[Callable[[], Any]] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._tests: list[Test] = []
        self._plain_tests: list[Test] = []  # of attributes of tensors, read by C code alone

    def _is_new(self, *key: Any) -> bool:
        known = len(self._seen)
        self._seen.add(key)
        return len(self._seen) > known

    def _of(self, table: Any) -> _Dict:
        return self._dicts.setdefault(id(table), _Dict(table))

    def _table_with(self, owner: Any, name: str) -> dict[str, Any] | None:
        """The `__dict__` of an object, if its attribute `name` is read from there and nowhere else."""
        kind: Any = type(owner)
        if kind.__getattribute__ is not object.__getattribute__ or hasattr(kind, name):
            return None
        table = getattr(owner, "__dict__", None)
        if type(table) is not dict or name not in table:
            return None
        self.attribute(owner, "__dict__")  # which may be replaced as a whole
        return table

    # -- facts ---------------------------------------------------------------------------------------

    def table(self, table: Any) -> None:
        """All entries of a dict, in their order."""
        if id(table) not in self._whole_beside:
            self._of(table).is_whole = True

    def keys(self, table: Any) -> None:
        """The keys of a dict, in their order."""
        self._of(table).has_keys = True

    def names(self, space: Any, read: Names) -> None:
        """The number of entries of a namespace, and those that `read` returns, always as many."""
        if type(space) is dict:
            self._of(space).reads.append(read)
        else:
            self._spaces.append((space, read))

    def elements(self, items: Collection[Any]) -> None:
        """The elements of a list or a set, in their order."""
        if self._is_new("elements", id(items)):
            self._lists.append(items)

    def emptiness(self, container: Any) -> None:
        """That a container is empty, as it is."""
        self._empty.append(container)

    def entry(self, holder: Any, key: Any) -> None:
        """`holder[key]`."""
        if type(holder) is dict:
            self._of(holder).entries.add(key)
        elif self._is_new("entry", id(holder), key):
            self._entries.append((holder, key))

    def attribute(self, owner: Any, name: str) -> None:
        """`owner.name`."""
        table = self._table_with(owner, name)
        if table is not None:
            self._of(table).entries.add(name)
        elif self._is_new(name, id(owner)):
            self._attributes.setdefault(name, []).append(owner)

    def presence(self, owner: Any, name: str) -> None:
        """Whether `owner.name` is None."""
        table = self._table_with(owner, name)
        if table is not None:
            self._of(table).presence.add(name)
        elif self._is_new("presence", name, id(owner)):
            self._presence.setdefault(name, []).append(owner)

    def place(self, place: Any, owner: Any, name: str) -> None:
        """Something stands for `owner.name`, as long as the facts hold."""
        if not _is_weak(owner):
            self.places[place] = owner, name

    def kind(self, value: Any) -> None:
        """The class of an object."""
        self._kinds.append(value)

    def kinds(self, table: Any) -> None:
        """The keys of a dict, in their order, and the classes of its values."""
        found = self._of(table)
        found.has_keys = found.has_kinds = True

    def references(self, tensor: Tensor) -> None:
        """The number of references that C++ has to a tensor."""
        if self._is_new("references", id(tensor)):
            self._counted.append(token(tensor))

    def window(self, tensor: Tensor, index: int) -> None:
        """A tensor stays a window on the storage of input `index`."""
        self.aliases.append((tensor, index))

    def states(self, optimizer: torch.optim.Optimizer) -> None:
        """The states of an optimizer's parameters, each a dict."""
        if self._is_new("states", id(optimizer)):
            self._optimizers.append(optimizer)

    def read(self, read: Callable[[], Any]) -> None:
        """The result of a function, compared by `==`."""
        self._reads.append(read)

    # -- the test ------------------------------------------------------------------------------------

    def freeze(self) -> None:
        """Read all that was added. Add nothing afterwards."""
        filled, empty = _split(self._dicts.values(), lambda each: each.is_empty)
        tables = [*(each.table for each in empty), *self._empty]
        own = [each for each in tables if type(each) not in PLAIN_CONTAINERS]
        plain = [each for each in tables if type(each) in PLAIN_CONTAINERS]
        self._tests.append(lambda: not any(plain))  # nearly all dicts of hooks
        if own:
            self._tests.append(lambda: not any(map(size_of, own)))
        for each in filled:
            each.freeze()
        has_versions = dict_version is not None
        others, versioned = _split(filled, lambda each: has_versions and type(each.table) in _DICTS)
        self._tests += [each.hold for each in others]
        self._tests.append(_Versions(versioned).hold)
        ordered = [each.table for each in versioned if type(each.table) is OrderedDict]
        self._equal(
            lambda: list(_flat(ordered))
        )  # a key that moves to the end makes no new version
        spaces, readers = [s for s, _ in self._spaces], [r for _, r in self._spaces]
        for sized in (spaces, self._lists):
            are_plain = {*map(type, sized)} <= _PLAIN_SIZES
            self._equal(partial(_lengths, sized, len if are_plain else size_of))
        self._same(lambda: _flat(map(call, readers, spaces)))
        lists_read = list(map(elements_of, self._lists))
        for lists in _split(lists_read, lambda items: any(map(_is_weak, items))):
            self._same(partial(_flat, lists))
        for entries in _split(self._entries, lambda entry: _is_weak(item_of(*entry))):
            holders, keys = [h for h, _ in entries], [k for _, k in entries]
            reads = [getitem if type(h) in PLAIN_CONTAINERS else item_of for h in holders]
            self._same(partial(map, call, reads, holders, keys))
        for is_plain, names, owners in _by_names(self._attributes):
            with plain_reads() if is_plain else nullcontext():
                self._same(reading(names, owners), is_plain)
        for is_plain, names, owners in _by_names(self._presence):
            with plain_reads() if is_plain else nullcontext():
                self._equal(_presence(reading(names, owners)), is_plain)
        self._same(partial(map, type, self._kinds))
        if self._counted:
            self._equal(lambda: sum(map(reference_count, map(call, self._counted))))
        self._tests += [_States(optimizer).hold for optimizer in self._optimizers]
        for read in self._reads:
            self._equal(read)
        self._attributes, self._presence = {}, {}  # their owners are held weakly from now on

    def hold(self) -> bool:
        """Whether nothing has changed since `freeze`. An exception of a read counts as a change."""
        try:
            if not all(map(call, self._tests)):
                return False
            with plain_reads():
                return all(map(call, self._plain_tests))
        except Exception:
            return False

    def _equal(self, read: Callable[[], Any], is_plain: bool = False) -> None:
        was = read()
        (self._plain_tests if is_plain else self._tests).append(lambda: bool(read() == was))

    def _same(self, read: Read, is_plain: bool = False) -> None:
        """The values that a function returns are the same objects; their number is tested elsewhere."""
        values = list(read())
        if values:
            (self._plain_tests if is_plain else self._tests).append(_are(values, read))


def _are(values: Sequence[Any], read: Read) -> Test:
    """A test that a function returns these very objects."""
    if any(map(_is_weak, values)):
        tokens = list(map(token, values))
        return lambda: all(map(is_, map(call, tokens), read()))
    return lambda: all(map(is_, values, read()))


class _Dict:
    """Facts about one dict: all of it, its keys, kinds of values, some entries, which of them are None, names."""

    def __init__(self, table: Any) -> None:
        self.table, self.is_whole = table, False
        self.has_keys = self.has_kinds = False
        self._read = getitem if type(table) in PLAIN_CONTAINERS else item_of
        self.entries: set[Any] = set()
        self.presence: set[Any] = set()
        self.reads: list[Names] = []

    @property
    def is_empty(self) -> bool:
        return not (size_of(self.table) or self.entries or self.presence or self.reads)

    def freeze(self) -> None:
        """Read the dict."""
        table, get = self.table, self._read
        self._keys, self._kinds, self._size = self._keys_now(), self._kinds_now(), size_of(table)
        if self.is_whole:
            self.entries = set(elements_of(table))
        self._values = [(key, token(get(table, key))) for key in self.entries]
        self._present = [(key, get(table, key) is None) for key in self.presence]
        self._reads = [(read, list(map(token, read(table)))) for read in self.reads]

    def _keys_now(self) -> list[Any]:
        """The keys as they count: a number by its identity, since 1 equals True."""
        if not (self.has_keys or self.is_whole):
            return []
        return [key if type(key) is str else Same(key) for key in elements_of(self.table)]

    def _kinds_now(self) -> list[type]:
        return list(map(type, values_of(self.table))) if self.has_kinds else []

    def hold(self) -> bool:
        """Whether the dict is as it was at `freeze`."""
        table, get = self.table, self._read
        return (
            self._keys_now() == self._keys
            and self._kinds_now() == self._kinds
            and all(was() is get(table, key) for key, was in self._values)
            and all((get(table, key) is None) is was for key, was in self._present)
            and (not self._reads or size_of(table) == self._size)
            and all(all(map(is_, map(call, was), read(table))) for read, was in self._reads)
        )


class _Versions:
    """Dicts, most of which stay as they are: those that were written to are tested, as an equal value may be back."""

    def __init__(self, dicts: Sequence[_Dict]) -> None:
        self._dicts, self._tables = dicts, [each.table for each in dicts]
        self._versions = self._read()

    def _read(self) -> array[int]:
        tuple(self._tables)  # a short loop over all: the processor fetches many at a time
        return array("Q", map(dict_version, self._tables) if dict_version else ())

    def hold(self) -> bool:
        """Whether each dict is as it was."""
        now = self._read()
        if now != self._versions:
            written = zip(self._dicts, now, self._versions, strict=True)
            if not all(each.hold() for each, new, old in written if new != old):
                return False
            self._versions = now
        return True


class _States:
    """The states of an optimizer's parameters.

    They are read through the optimizer each time: to hold the dicts would keep a replaced state alive. The version of a
    dict is that of no other one, so equal versions mean the same dicts with the same contents.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        # An optimizer may keep other things beside the states of its parameters.
        self._others = _are(list(self._others_now()), self._others_now)
        self._has_versions = dict_version is not None and not any(
            type(each) is OrderedDict for each in (optimizer.state, *self._states())
        )  # a key that moves to the end makes no new version
        self._keys, self._sizes = self._keys_now(), self._sizes_now()
        self._parameters = _are(
            list(elements_of(optimizer.state)), lambda: elements_of(self._optimizer.state)
        )
        self._values = _are(list(self._values_now()), self._values_now)
        self._versions = self._versions_now()

    def _states(self) -> list[dict[str, Any]]:
        return [each for each in values_of(self._optimizer.state) if type(each) in _DICTS]

    def _others_now(self) -> Iterable[Any]:
        return (each for each in values_of(self._optimizer.state) if type(each) not in _DICTS)

    def _sizes_now(self) -> list[int]:
        return list(map(len, self._states()))

    def _keys_now(self) -> list[str]:
        return list(_flat(self._states()))

    def _values_now(self) -> Iterable[Any]:
        return _flat(map(_values, self._states()))

    def _versions_now(self) -> array[int]:
        if not self._has_versions or dict_version is None:
            return array("Q")
        return array("Q", map(dict_version, (self._optimizer.state, *self._states())))

    def hold(self) -> bool:
        """Whether the same parameters have the same states."""
        versions = self._versions_now()
        if versions and versions == self._versions:
            return True
        if not (
            self._sizes_now() == self._sizes
            and self._parameters()
            and self._others()
            and self._keys_now() == self._keys
            and self._values()
        ):
            return False
        self._versions = versions
        return True


class Same:
    """An object that is equal to one with the same value only."""

    def __init__(self, value: Any) -> None:
        self._token = token(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self._token() is other._token()

    __hash__ = None  # type: ignore[assignment]


def _lengths(items: Sequence[Any], size: Callable[[Any], int]) -> list[int]:
    return list(map(size, items))


def _is_weak(value: Any) -> bool:
    """Whether a value must not be kept alive."""
    return issubclass(type(value), Tensor) and not isinstance(value, nn.Parameter)


def token(value: Any) -> Callable[[], Any]:
    """A function that returns the value and does not keep a tensor alive; then it returns None."""
    return weakref.ref(value) if _is_weak(value) else repeat(value).__next__


def _split(items: Iterable[Any], is_second: Callable[[Any], bool]) -> tuple[list[Any], list[Any]]:
    parts: tuple[list[Any], list[Any]] = [], []
    for item in items:
        parts[is_second(item)].append(item)
    return parts


def _by_names(
    attributes: Mapping[str, Sequence[Any]],
) -> Iterator[tuple[bool, tuple[str, ...], list[Any]]]:
    """Owners with the same attributes, whose memory one read then passes over once: is_plain, names, owners.

    is_plain: whether C code alone reads them. attributes: name -> owners.
    """
    names: dict[int, tuple[str, ...]] = {}
    owners: dict[int, Any] = {}
    for name, each in attributes.items():
        for owner in each:
            owners[id(owner)] = owner
            names[id(owner)] = (*names.get(id(owner), ()), name)
    alike: dict[tuple[bool, tuple[str, ...]], list[Any]] = {}
    for key, owner in owners.items():
        alike.setdefault((has_plain_attributes(type(owner)), names[key]), []).append(owner)
    for (is_plain, found), several in alike.items():
        yield is_plain, found, several


def reading(names: tuple[str, ...], owners: Sequence[Any]) -> Read:
    """A function that reads the attributes of each owner, of which it keeps no tensor alive."""
    read, is_weak = attrgetter(*names), any(map(_is_weak, owners))
    held = list(map(token, owners)) if is_weak else list(owners)

    def values() -> Iterable[Any]:
        return map(read, map(call, held) if is_weak else held)

    return values if len(names) == 1 else lambda: _flat(values())


def _presence(read: Read) -> Callable[[], list[bool]]:
    return lambda: list(map(is_, read(), repeat(None)))
