"""A fast test that a walk would find the same facts: each object that it visited still holds the very same objects.

    probes = state.probes              filled by the walk (`walker.py`)
    probes.hold(leaves)                True: nothing has changed; False: something may have, and a walk must compare

A walk goes from holder to holder. If every holder has the objects it had, by identity, then the walk goes the same way;
so a loop over all holders, one level deep each, is enough. An equal object in place of another one (a list made anew, a
float computed again) makes the test fail, and the walk decides.

State of C code without attributes (arrays, buffers) is read again. Python modules are compared in the names that code
reads, and by their number of names. Hooks on modules that had none are left to `ModuleGuard`.

Invariant: `hold` never returns True if a fact has changed. No tensor and no weakly held object is kept alive.
"""

from __future__ import annotations

import abc
import sys
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import is_, itemgetter, methodcaller
from typing import Any, cast

from torch import Tensor
from torch.optim import Optimizer

from functionalize._compat.fast_guards import ChangeCount, table_of_class
from functionalize.util.packages import is_users_class, is_users_function
from functionalize.util.reading import item_of, table_of, values_of
from functionalize.util.unchanged import Unchanged
from functionalize.walk.code_names import NameFilter
from functionalize.walk.fact_text import PLAIN
from functionalize.walk.live_places import NO_PLACES, Keys, LivePlaces, may_live, structure_of
from functionalize.walk.parts import (
    WHOLE_METHOD,
    Held,
    OwnNames,
    Part,
    Parts,
    has_only_attributes,
    is_patchable,
    parts_of,
    registered,
    slot_names,
    slots_of,
    subclasses,
)
from functionalize.walk.surroundings import CLASSES, NAMESPACES

Names = Container[Any] | None
_SELECTIONS = (frozenset, OwnNames)  # of the other names in a table, some change at every call
_values = methodcaller("values")
# Of these types, the parts of an object never change.
_FIXED = frozenset(
    {types.MethodType, types.BuiltinFunctionType, types.MethodWrapperType, tuple, frozenset, property}
    | {staticmethod, classmethod, slice, type}
)  # fmt: skip


class Probes:
    """The holders of one walk, and what each held. names: those that code may read. live: see `LivePlaces`."""

    def __init__(self, names: NameFilter, live: LivePlaces = NO_PLACES) -> None:
        self._names, self._live = names, live
        self._is_given_up = False
        self._clear()

    def _clear(self) -> None:
        self._starts: list[Any] = []
        self._tables: list[tuple[Mapping[Any, Any], tuple[Any, ...], tuple[Any, ...], Any]] = []
        self._namespaces: list[tuple[Mapping[str, Any], int, Any, Any]] = []
        self._kinds: list[tuple[Any, type]] = []
        self._lists: list[tuple[list[Any], tuple[Any, ...]]] = []
        self._cells: list[tuple[types.CellType, Any]] = []
        self._functions: list[tuple[types.FunctionType, Any, Any, Any]] = []
        self._attributes: list[tuple[Any, str, Any]] = []
        self._looks: list[tuple[Any, Any, list[Any]]] = []
        self._slots: list[tuple[Any, list[Any]]] = []
        self._with_tensors: list[tuple[Any, tuple[Any, ...], list[Any]]] = []
        self._values: list[tuple[Callable[[], Any], Any]] = []
        self._optimizers: list[tuple[Optimizer, Callable[[Optimizer], Any], Any]] = []
        self._empty: list[dict[str, Any]] = []
        self._classes: dict[type, Mapping[str, Any]] = {}
        self._defined: list[tuple[Any, ...]] = []

    def give_up(self) -> None:
        """Hold nothing from now on: the walk has come to an object that must not be kept alive."""
        self._is_given_up = True
        self._clear()

    # -- what a walk visits ------------------------------------------------------------------------

    def add_start(self, leaves: Sequence[Any]) -> None:
        """The objects among the leaves of the arguments."""
        self._starts = _objects(leaves)

    def add(self, value: Any, parts: Parts) -> None:
        """An object, and what it consisted of."""
        kind = type(value)
        if issubclass(kind, type):
            self.add_class_parts(value, parts.held)
            return self.add_class_parts(kind, parts.held)
        is_fixed = kind in _FIXED and (kind is not types.MethodType or parts.fact == WHOLE_METHOD)
        if is_fixed or self._is_given_up:
            return None
        if parts.attributes is not None:
            self._kinds.append((value, kind))
            plain = type.__getattribute__(kind, "__getattribute__") is object.__getattribute__
            if plain and object.__getattribute__(value, "__dict__") is parts.attributes:
                # It may be replaced as a whole. A method of the user is never called.
                self._attributes.append((value, "__dict__", parts.attributes))
        if kind is types.FunctionType:
            self._functions.append(
                (value, value.__code__, value.__defaults__, value.__kwdefaults__)
            )
            self._cells += [
                (cell, self._token(_content(cell), Held(cell, None)))
                for cell in value.__closure__ or ()
            ]
            self.add_names(
                value.__globals__, [p for p in parts.held if _is_in(p, value.__globals__)]
            )
            for part in parts.held:
                if _is_in(part, sys.modules):
                    self.add_value(partial(sys.modules.get, part.key))
            for table in filter(None, (vars(value), value.__kwdefaults__)):
                self.add_table(table)
            if not vars(value) and is_users_function(value):  # it may get its first attribute
                self._empty.append(vars(value))
        elif kind is list:  # of a deque, its bound counts, too
            self.add_list(value)
        elif kind is dict:
            self.add_table(value)
        elif issubclass(kind, types.ModuleType):
            self.add_names(vars(value), parts.held)
        elif parts.attributes is not None and len(parts.held) == len(parts.attributes):
            # Of an object of a library all attributes matter, whatever their names, or those that were read.
            whole = None if all(part.is_named for part in parts.held) else self._names
            observed = self._names.observed_of(parts.attributes)
            self.add_table(parts.attributes, whole if observed is None else observed)
        else:
            tokens = [self._token(p.value, p.place) for p in parts.held if p.is_named]
            self._looks.append((value, parts.fact, tokens))
        return None

    def add_own(self, value: Any, parts: Parts) -> None:
        """What a script has given an object that is read by its content."""
        if self._is_given_up:
            return
        table, kind = table_of(value), cast(Any, type(value))
        if table is not None:
            self._kinds.append((value, kind))
            if type(kind.__getattribute__) is types.WrapperDescriptorType:
                self._attributes.append((value, "__dict__", table))
            self.add_table(table, parts.own_names)
        if slot_names(kind):
            tokens = [self._token(p.value, p.place) for p in self._slots_of(value)]
            self._slots.append((value, tokens))

    def add_list(self, items: list[Any]) -> None:
        """A list."""
        if self._is_given_up:
            return
        if self._live.keys_of(items) or _hold_tensors(items):
            tokens = [self._token(each, Held(items, i)) for i, each in enumerate(items)]
            self._with_tensors.append((items, (), tokens))
        else:
            self._lists.append((items, tuple(items)))

    def add_table(self, table: Mapping[Any, Any], names: Names = None) -> None:
        """A dict. names: those of the entries that matter; None: all do."""
        if self._is_given_up:
            return
        if self._live.keys_of(table) or _hold_tensors(table.values()):
            wanted = _keys(table, names)
            tokens = [self._token(item_of(table, key), Held(table, key)) for key in wanted]
            self._with_tensors.append((table, (wanted, names), tokens))
        else:
            self._tables.append((table, tuple(table), tuple(table.values()), names))

    def add_names(self, table: Mapping[str, Any], parts: Sequence[Part]) -> None:
        """A namespace, of which code reads these names."""
        if self._is_given_up:
            return
        live = {p.key for p in parts if type(self._token(p.value, p.place)) is _LiveKind}
        for key in live:
            numbers = self._live.numbers_at(Held(table, key))
            self.add_value(partial(_kind_in, table, key, numbers))
        keys = tuple(dict.fromkeys(part.key for part in parts if part.key not in live))
        read = itemgetter(*keys) if len(keys) > 1 else lambda table: tuple(table[k] for k in keys)
        self._namespaces.append((table, len(table), read, read(table)))

    def add_names_of_tensor(self, table: dict[str, Any]) -> None:
        """The attributes of a tensor, nearly always none."""
        if table:
            self.add_table(table, self._names)
        elif not self._is_given_up:
            self._empty.append(table)

    def add_torch(self) -> None:
        """The namespaces of torch, and Python's builtins."""
        for table in NAMESPACES:
            self.add_value(ChangeCount(table))
        for kind in CLASSES.values():
            self.add_class(kind)

    def add_class(self, kind: type) -> None:
        """A class of a library: all that it defines."""
        if not self._is_given_up and kind not in self._classes:
            self._classes[kind] = vars(kind)
            self._defined.append(tuple(vars(kind).values()))

    def add_class_parts(self, kind: type, parts: Sequence[Part]) -> None:
        """A class, of which code reads these attributes."""
        if is_users_class(kind):
            self.add_attribute(kind, "__mro__")
            if issubclass(type(kind), abc.ABCMeta):
                self.add_value(partial(registered, cast(abc.ABCMeta, kind)))
            if "__subclasses__" in self._names.names:
                self.add_value(partial(subclasses, kind))
        for base in kind.__mro__:
            if is_patchable(base):
                self.add_class(base)
            elif is_users_class(base):
                own = [p for p in parts if p.place is not None and p.place.container is base]
                self.add_names(vars(base), own)

    def add_attribute(self, owner: Any, name: str) -> None:
        """An attribute of a class, or the `__dict__` of an object."""
        self._attributes.append((owner, name, getattr(owner, name)))

    def add_kind(self, value: Any) -> None:
        """The class of an object, which a script may replace."""
        self._kinds.append((value, type(value)))

    def add_value(self, read: Callable[[], Any]) -> None:
        """What a function returns, compared by `==`."""
        if not self._is_given_up:
            self._values.append((read, read()))

    def _token(self, value: Any, place: Held | None = None) -> Any:
        live = self._live.values
        if live and place is not None and may_live(value) and place.place in live:
            numbers = self._live.numbers_at(place)
            return _LiveKind(structure_of(value, numbers), numbers)
        return _TensorRef(value) if issubclass(type(value), Tensor) else value

    def add_optimizer(self, optimizer: Optimizer, read: Callable[[Optimizer], Any]) -> None:
        """An optimizer, of whose states a function reads something that is compared by `==`."""
        self._optimizers.append((optimizer, read, read(optimizer)))

    # -- the test ----------------------------------------------------------------------------------

    def hold(self, leaves: Sequence[Any]) -> bool:
        """Whether no holder has changed. leaves: of the arguments of this call."""
        if self._is_given_up or not self.starts_hold(leaves) or any(self._empty):
            return False
        if not self._classes_hold():
            return False
        for table, keys, values, names in self._tables:
            is_same = len(table) == len(keys) and all(map(is_, table.values(), values))
            if is_same and all(map(is_, table, keys)):
                continue
            if names is None or not _names_hold(table, keys, values, names):
                return False
        for items, were in self._lists:
            if len(items) != len(were) or not all(map(is_, items, were)):
                return False
        try:
            for space, size, read, values in self._namespaces:
                if len(space) != size or not all(map(is_, read(space), values)):
                    return False
        except KeyError:
            return False
        return (
            all(_is(token, _content(cell)) for cell, token in self._cells)
            and all(self._with_tensors_holds(*each) for each in self._with_tensors)
            and all(
                fn.__code__ is code
                and fn.__defaults__ is defaults
                and fn.__kwdefaults__ is keywords
                for fn, code, defaults, keywords in self._functions
            )
            and all(type(value) is kind for value, kind in self._kinds)
            and all(getattr(owner, name, None) is value for owner, name, value in self._attributes)
            and all(self._looks_hold(*look) for look in self._looks)
            and all(self._slots_hold(*each) for each in self._slots)
            and all(read() == value for read, value in self._values)
            and all(read(optimizer) == was for optimizer, read, was in self._optimizers)
        )

    def starts_hold(self, leaves: Sequence[Any]) -> bool:
        """Whether the objects among the arguments are the same."""
        starts = _objects(leaves)
        return len(starts) == len(self._starts) and all(map(is_, starts, self._starts))

    def note_in(self, facts: Unchanged) -> None:
        """Add all that `hold` reads, arguments apart, to `facts`. It holds now.

        Names of tables that no code reads count as well here, so that the facts may fail where `hold` would not.
        """
        for table, keys, values, names in self._tables:
            if type(names) not in _SELECTIONS:
                facts.table(table)
            else:  # of the others, some change at every call
                facts.read(partial(_names_hold, table, keys, values, names))
        for table in self._empty:
            facts.table(table)
        classes = list(map(table_of_class, self._classes))
        if None in classes:
            facts.read(self._classes_hold)
        for each in filter(None, classes):
            facts.table(each)
        for items, _ in self._lists:
            facts.elements(items)
        for holder, keys, tokens in self._with_tensors:
            if {*map(type, tokens), *map(type, keys)} & {_LiveKind, *_SELECTIONS}:
                facts.read(partial(self._with_tensors_holds, holder, keys, tokens))
            else:
                facts.table(holder) if keys else facts.elements(holder)
        for space, _, read, _ in self._namespaces:
            facts.names(space, read)
        for cell, token in self._cells:
            if _content(cell) is Probes:  # empty
                facts.read(partial(_content, cell))
            elif type(token) is _LiveKind:
                facts.read(partial(_kind_of, cell, token.numbers))
            else:
                facts.attribute(cell, "cell_contents")
        for fn, *_ in self._functions:
            for name in ("__code__", "__defaults__", "__kwdefaults__"):
                facts.attribute(fn, name)
        for value, _ in self._kinds:
            facts.kind(value)
        for owner, name, _ in self._attributes:
            facts.attribute(owner, name)
        kinds: set[type] = set()
        for look in self._looks:
            kind = type(look[0])
            if kind is OrderedDict:  # hooks, nearly always none
                facts.table(look[0])
                facts.table(vars(look[0]))
            elif kind in (set, frozenset) and _LiveKind not in map(type, look[2]):
                facts.elements(look[0])
            elif has_only_attributes(look[0]) and not self._live.keys_of(vars(look[0])):
                facts.kind(look[0])
                facts.attribute(look[0], "__dict__")
                facts.table(vars(look[0]))
                kinds.update(kind.__mro__)
            else:
                facts.read(partial(self._looks_hold, *look))
        for given in self._slots:
            facts.read(partial(self._slots_hold, *given))
        for kind in kinds:  # none of them gets a method or a property
            facts.names(vars(kind), lambda _: ())
        for read, _ in self._values:
            facts.read(read)
        for optimizer, read, _ in self._optimizers:
            if any(map(self._live.keys_of, values_of(optimizer.state))):
                facts.read(partial(read, optimizer))
            else:
                facts.states(optimizer)

    def _classes_hold(self) -> bool:
        return list(map(tuple, map(_values, self._classes.values()))) == self._defined

    def _with_tensors_holds(self, holder: Any, keys: tuple[Any, ...], tokens: list[Any]) -> bool:
        if not keys:
            return len(holder) == len(tokens) and all(map(_is, tokens, holder))
        wanted, names = keys
        if _keys(holder, names) != wanted:
            return False
        return all(_is(was, item_of(holder, k)) for was, k in zip(tokens, wanted, strict=True))

    def _slots_hold(self, value: Any, tokens: list[Any]) -> bool:
        now = self._slots_of(value)
        return len(now) == len(tokens) and all(map(_is, tokens, [part.value for part in now]))

    def _slots_of(self, value: Any) -> list[Part]:
        own = slots_of(value, OwnNames(type(value), self._names))
        return [part for part in own if part.is_named]

    def _looks_hold(self, value: Any, fact: Any, tokens: list[Any]) -> bool:
        now = parts_of(value, self._names)
        values = [part.value for part in now.held if part.is_named]
        return now.fact == fact and len(values) == len(tokens) and all(map(_is, tokens, values))


def _keys(table: Mapping[Any, Any], names: Names) -> list[Any]:
    return list(table) if names is None else [key for key in table if key in names]


def _names_hold(table: Mapping[Any, Any], keys: Any, values: Any, names: Container[Any]) -> bool:
    were = {key: value for key, value in zip(keys, values, strict=True) if key in names}
    return _keys(table, names) == list(were) and all(
        item_of(table, k) is v for k, v in were.items()
    )


def _hold_tensors(values: Iterable[Any]) -> bool:
    return any(issubclass(kind, Tensor) for kind in set(map(type, values)))


class _TensorRef(weakref.ref[Tensor]):
    """Stands for a tensor, which the probes must not keep alive."""


@dataclass(frozen=True, slots=True)
class _LiveKind:
    """Stands for the content of a live place. kind: its type, of a bundle its structure, but for these numbers."""

    kind: Hashable
    numbers: frozenset[Keys]


def _is(token: Any, value: Any) -> bool:
    if type(token) is _LiveKind:
        return token.kind == structure_of(value, token.numbers)
    return token is value or (type(token) is _TensorRef and token() is value)


def _kind_in(table: Mapping[str, Any], key: str, numbers: frozenset[Keys]) -> Hashable:
    return structure_of(table.get(key), numbers)


def _objects(leaves: Sequence[Any]) -> list[Any]:
    return [
        leaf for leaf in leaves if type(leaf) not in PLAIN and not issubclass(type(leaf), Tensor)
    ]


def _kind_of(cell: types.CellType, numbers: frozenset[Keys]) -> Hashable:
    return structure_of(_content(cell), numbers)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return Probes


def _is_in(part: Part, table: Mapping[str, Any]) -> bool:
    return part.place is not None and part.place.container is table
