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
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain, repeat
from operator import attrgetter, call, getitem, is_, methodcaller
from typing import Any

import torch
from torch import Tensor, nn

from functionalize._compat.fast_guards import dict_version

Read = Callable[[], Iterable[Any]]
_flat = chain.from_iterable
_values = methodcaller("values")
Names = Callable[[Any], tuple[Any, ...]]
_DICTS = frozenset({dict, OrderedDict, defaultdict})  # to iterate them runs no Python code


class Unchanged:
    """Facts about objects: added one by one, tested together.

    aliases: tensors that must stay windows on the storage of an input, each with the index of that input.
    """

    def __init__(self) -> None:
        self.aliases: list[tuple[Tensor, int]] = []
        self._seen: set[tuple[Any, ...]] = set()
        self._dicts: dict[int, _Dict] = {}
        self._lists: list[Any] = []
        self._spaces: list[tuple[Any, Names]] = []
        self._entries: list[tuple[Any, Any]] = []
        self._attributes: dict[str, list[Any]] = {}
        self._presence: dict[str, list[Any]] = {}
        self._kinds: list[Any] = []
        self._reads: list[Callable[[], Any]] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._tests: list[Callable[[], bool]] = []

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

    def elements(self, items: list[Any]) -> None:
        """The elements of a list."""
        if self._is_new("elements", id(items)):
            self._lists.append(items)

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

    def kind(self, value: Any) -> None:
        """The class of an object."""
        self._kinds.append(value)

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
        tables = [each.table for each in empty]
        self._tests.append(lambda: not any(tables))  # nearly all dicts of hooks
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
            self._equal(partial(_lengths, sized))
        self._same(lambda: _flat(map(call, readers, spaces)))
        for lists in _split(self._lists, lambda items: any(map(_is_weak, items))):
            self._same(partial(_flat, lists))
        for entries in _split(self._entries, lambda entry: _is_weak(getitem(*entry))):
            holders, keys = [h for h, _ in entries], [k for _, k in entries]
            self._same(partial(map, getitem, holders, keys))
        for name, owners in self._attributes.items():
            self._same(_reading(name, owners))
        for name, owners in self._presence.items():
            self._equal(_presence(_reading(name, owners)))
        self._same(partial(map, type, self._kinds))
        for optimizer in self._optimizers:
            self._freeze_states(optimizer)
        for read in self._reads:
            self._equal(read)
        self._attributes, self._presence = {}, {}  # their owners are held weakly from now on

    def hold(self) -> bool:
        """Whether nothing has changed since `freeze`. An exception of a read counts as a change."""
        try:
            return all(map(call, self._tests))
        except Exception:
            return False

    def _equal(self, read: Callable[[], Any]) -> None:
        was = read()
        self._tests.append(lambda: bool(read() == was))

    def _same(self, read: Read) -> None:
        """The values that a function returns are the same objects; their number is tested elsewhere."""
        values = list(read())
        if any(map(_is_weak, values)):
            tokens = list(map(token, values))
            self._tests.append(lambda: all(map(is_, map(call, tokens), read())))
        elif values:
            self._tests.append(lambda: all(map(is_, values, read())))

    def _freeze_states(self, optimizer: torch.optim.Optimizer) -> None:
        # Read through the optimizer each time: to hold the dicts would keep a replaced state alive.
        def states() -> Sequence[dict[str, Any]]:
            return list(optimizer.state.values())

        if not all(type(state) in _DICTS for state in states()):
            raise TypeError("the state of a parameter is no dict")
        self._equal(lambda: list(map(len, states())))
        self._same(lambda: optimizer.state)
        self._equal(lambda: list(_flat(states())))
        self._same(lambda: _flat(map(_values, states())))


class _Dict:
    """Facts about one dict: all of it, its keys, some entries, whether some entries are None, names in it."""

    def __init__(self, table: Any) -> None:
        self.table, self.is_whole, self.has_keys = table, False, False
        self.entries: set[Any] = set()
        self.presence: set[Any] = set()
        self.reads: list[Names] = []

    @property
    def is_empty(self) -> bool:
        return not (self.table or self.entries or self.presence or self.reads)

    def freeze(self) -> None:
        """Read the dict."""
        table = self.table
        self._keys, self._size = self._keys_now(), len(table)
        if self.is_whole:
            self.entries = set(table)
        self._values = [(key, token(table[key])) for key in self.entries]
        self._present = [(key, table[key] is None) for key in self.presence]
        self._reads = [(read, list(map(token, read(table)))) for read in self.reads]

    def _keys_now(self) -> list[Any]:
        """The keys as they count: a number by its identity, since 1 equals True."""
        if not (self.has_keys or self.is_whole):
            return []
        return [key if type(key) is str else _Same(key) for key in self.table]

    def hold(self) -> bool:
        """Whether the dict is as it was at `freeze`."""
        table = self.table
        return (
            self._keys_now() == self._keys
            and all(was() is table[key] for key, was in self._values)
            and all((table[key] is None) is was for key, was in self._present)
            and (not self._reads or len(table) == self._size)
            and all(all(map(is_, map(call, was), read(table))) for read, was in self._reads)
        )


class _Versions:
    """Dicts, most of which stay as they are: those that were written to are tested, as an equal value may be back."""

    def __init__(self, dicts: Sequence[_Dict]) -> None:
        self._dicts, self._tables = dicts, [each.table for each in dicts]
        self._versions = self._read()

    def _read(self) -> list[int]:
        return list(map(dict_version, self._tables)) if dict_version else []

    def hold(self) -> bool:
        """Whether each dict is as it was."""
        now = self._read()
        if now != self._versions:
            written = zip(self._dicts, now, self._versions, strict=True)
            if not all(each.hold() for each, new, old in written if new != old):
                return False
            self._versions = now
        return True


class _Same:
    """An object that is equal to one with the same value only."""

    def __init__(self, value: Any) -> None:
        self._token = token(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._token() is other._token()

    __hash__ = None  # type: ignore[assignment]


def _lengths(items: Sequence[Any]) -> list[int]:
    return list(map(len, items))


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


def _reading(name: str, owners: Sequence[Any]) -> Read:
    """A function that reads an attribute of each owner."""
    read = attrgetter(name)
    if any(map(_is_weak, owners)):
        tokens = list(map(token, owners))
        return lambda: map(read, map(call, tokens))
    return partial(map, read, owners)


def _presence(read: Read) -> Callable[[], list[bool]]:
    return lambda: list(map(is_, read(), repeat(None)))
