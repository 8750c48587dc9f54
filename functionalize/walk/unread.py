"""What the code of a step does not read: parameters of a function, and attributes of objects of libraries.

    def training_step(self, batch, batch_idx): return self.loss(batch)
    arguments = ReadArguments(trainer.training_step)
    arguments.of((batch, 3), {})                  (batch, None), {}

A parameter is unread if no instruction of the function names it, but for `del batch_idx`. Then only code that looks at
the variables of frames finds it.

    reads = AttributeReads(roots)
    with reads.watching():
        trainer.training_step(batch)
    reads.observed()                              {id of its `__dict__`: (this, {"model", "args"})}

While a step is recorded, the classes of libraries' objects note which attributes code reads, sets and deletes. A step
that reads the same values does the same, so the attributes that it did not touch are no facts: `state.epoch`, which a
Trainer counts. A name that is read and is not there counts, too.
A class may hold the `__dict__` that its instances share (`self.__dict__ = self._shared`): while a step is watched, a
`_SharedTable` stands in its place, which notes who reads it.
Invariant: what is not understood is read: parameters of callables that are no Python functions, parameters that nested
functions see, all parameters of functions whose code looks at variables of frames (`locals`, `f_locals`). Whether code
that they call does so is known after a walk: `looks_at_frames`. Likewise what is in slots, and all attributes of an
object whose `__dict__` is read, also from a class, or held by anything that the walk has found, which is copied or
pickled, or whose class is of C code or has methods that look past `__getattribute__`.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
import weakref
from collections import UserDict
from collections.abc import Callable, Container, Iterator
from typing import Any, NamedTuple

import torch

from functionalize.errors import UncapturableError
from functionalize.util.by_class import by_class
from functionalize.util.bytecode import read as steps_of
from functionalize.util.packages import is_installed
from functionalize.util.patching import Patch, Patches
from functionalize.walk.code_names import NameFilter, names_in
from functionalize.walk.code_uses import assigned_constant
from functionalize.walk.converted_arrays import Conversions, converted_arrays, with_tensors
from functionalize.walk.fact_text import Path
from functionalize.walk.parts import is_native, library, reader_of, users
from functionalize.walk.roots import Roots

# Names by which code reads the variables of a frame: of any, and of its own.
_OF_ANY_FRAME = frozenset({"f_locals", "getargvalues", "capture_locals"})
_OF_ITS_FRAME = frozenset({"locals", "vars", "dir", "eval", "exec"})
_NUMBERS = frozenset({bool, int, float})


class Unread(NamedTuple):
    """Parameters that are not read. positions: among positional arguments. names: as keywords."""

    positions: frozenset[int]
    names: frozenset[str]


_NONE = Unread(frozenset(), frozenset())
_NO_ARRAYS = Conversions(frozenset())


class ReadArguments:
    """The arguments of calls of `fn`, without numbers that it does not read; tensors for arrays that it converts."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        is_bound = type(fn) is types.MethodType
        function = fn.__func__ if isinstance(fn, types.MethodType) else fn
        self._function = function if type(function) is types.FunctionType else None
        self._first = int(is_bound)  # the position of the first argument
        self._code: types.CodeType | None = None
        self._unread = _NONE
        self._owner = fn.__self__ if isinstance(fn, types.MethodType) else None
        self._conversions = _NO_ARRAYS
        self._positions: dict[str, int] = {}

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The arguments of a call, with None in the place of numbers that are not read.

        A tensor on its memory is in the place of an array, see `converted_arrays.py`.
        """
        function = self._function
        if function is None:
            return args, kwargs
        # They may be replaced.
        if function.__code__ is not self._code or not self._conversions.hold():
            self._code = function.__code__
            self._read(function)
        if self._conversions.arrays:
            args, kwargs = with_tensors(self._conversions.arrays, self._positions, args, kwargs)
        positions, names = self._unread
        if not names:
            return args, kwargs
        kept = tuple(
            None if i in positions and type(each) in _NUMBERS else each
            for i, each in enumerate(args, self._first)
        )
        return kept, {
            key: None if key in names and type(each) in _NUMBERS else each
            for key, each in kwargs.items()
        }

    def _read(self, function: types.FunctionType) -> None:
        code = function.__code__
        try:
            self._unread = _unread_of(code)
            self._conversions = converted_arrays(function, self._owner)
        except UncapturableError:
            # An unknown instruction or Python: the recording refuses the step by name.
            self._unread, self._conversions = _NONE, _NO_ARRAYS
        named = code.co_varnames[: code.co_argcount]
        self._positions = {name: at - self._first for at, name in enumerate(named)}

    def read_all(self) -> None:
        """From now on every argument counts as read."""
        self._function = None


def looks_at_frames(names: NameFilter) -> bool:
    """Whether code with these names may look at the variables of the functions that call it."""
    return not _OF_ANY_FRAME.isdisjoint(names.names)


@functools.lru_cache(maxsize=1024)
def _unread_of(code: types.CodeType) -> Unread:
    if not (_OF_ANY_FRAME | _OF_ITS_FRAME).isdisjoint(names_in(code).names):
        return _NONE
    read = set(code.co_cellvars)
    for step in steps_of(code):
        if step.op != "del_local":
            read |= {step.value} if isinstance(step.value, str) else set()
            read |= set(step.value) if isinstance(step.value, tuple) else set()
            read |= set(step.keywords)
    positional = code.co_varnames[: code.co_argcount]
    named = code.co_varnames[code.co_posonlyargcount : code.co_argcount + code.co_kwonlyargcount]
    names = frozenset(named) - read
    return Unread(frozenset(at for at, name in enumerate(positional) if name in names), names)


# -- attributes of objects of libraries ------------------------------------------------------------

_PAST = frozenset({"__getattribute__", "__setattr__", "__delattr__", "getattr_static"})
_WHOLE = frozenset({"__dict__", "__dir__", "__reduce__", "__reduce_ex__", "__getstate__"})
_KEPT = (torch.nn.Module, torch.optim.Optimizer, torch.Tensor)
_HEAP = 1 << 9  # a class that Python code has made
_get = object.__getattribute__

_PATCHES: weakref.WeakKeyDictionary[type, Patches] = weakref.WeakKeyDictionary()
_HELD: weakref.WeakKeyDictionary[type, dict[str, Patches]] = weakref.WeakKeyDictionary()
_ACTIVE: list[AttributeReads] = []  # of all threads: a step may leave work to others


def is_of_library(owner: type) -> bool:
    """Whether attributes are those of such an object, or are read by a method of one that is captured."""
    return owner is types.MethodType or is_observable(owner)


@by_class
def is_observable(kind: type) -> bool:
    """Whether the attributes that code reads of instances of a class can be observed: of a library, in plain Python."""
    bases = kind.__mro__[:-1]
    setter: Any = type(kind).__setattr__
    return (
        reader_of(kind) in (library, users)
        and not issubclass(kind, _KEPT)
        and setter is type.__setattr__
        and bool(kind.__flags__ & _HEAP)
        and not is_native(kind)
        and any(is_installed(base.__module__) for base in bases)
        and kind.__getattribute__ is _get
        and all(_PAST.isdisjoint(_names_in_methods(base)) for base in bases)
    )


def _names_in_methods(kind: type) -> frozenset[str]:
    found = set[str](key for key in vars(kind) if key in _PAST)
    for value in vars(kind).values():
        inner = [getattr(value, name, None) for name in ("__func__", "fget", "fset", "fdel")]
        for each in (value, *inner):
            if type(each) is types.FunctionType:
                found |= names_in(each.__code__).names
    return frozenset(found)


class AttributeReads:
    """The attributes of objects of libraries that code reads, sets or deletes while it is watched. roots: of a walk.

    held: ids of objects that the walk has found: a `__dict__` among them may be read in other ways.
    """

    def __init__(self, roots: Roots, held: Container[int] = frozenset()) -> None:
        self._tables: dict[int, tuple[dict[str, Any], set[str]]] = {}
        self._paths: dict[int, Path] = {}
        self._touched: set[int] = set()
        self._kinds: dict[type, None] = {}
        self._holders: dict[tuple[type, str], dict[str, Any]] = {}
        self._assigned: dict[tuple[int, str], tuple[type, str] | None] = {}
        for key, (table, kinds, path) in roots.tables.items():
            if all(map(is_observable, kinds)):
                self._paths[key] = path
                self._kinds.update(dict.fromkeys(kinds))
                if key not in held:
                    self._tables[key] = table, set()
                    self._holders.update(_holders_of(table, kinds))

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Note what code does while this is open."""
        installed: list[Patches] = []
        try:
            for patches in (
                *(_known(_PATCHES, kind, _patches) for kind in self._kinds),
                *(
                    _known(_HELD.setdefault(kind, {}), name, functools.partial(_held, kind, table))
                    for (kind, name), table in self._holders.items()
                ),
            ):
                patches.install()
                installed.append(patches)
            _ACTIVE.append(self)
            yield
        finally:
            if self in _ACTIVE:
                _ACTIVE.remove(self)
            for patches in installed:
                patches.remove()

    def note(self, table: Any, name: str) -> None:
        """Code uses this attribute of the object with this `__dict__`."""
        if id(table) not in self._paths:
            return
        self._touched.add(id(table))
        if name in _WHOLE:
            self._tables.pop(id(table), None)
        elif id(table) in self._tables:
            self._tables[id(table)][1].add(name)

    def note_assigned(self, table: Any, name: str, constant: tuple[type, str] | None) -> None:
        """Code assigns to this attribute. constant: a number that it writes out, by type and text."""
        self._assigned[id(table), name] = constant

    def assigned(self, place: tuple[Any, Any]) -> tuple[type, str] | None:
        """The constant that code has assigned last to a place, see `Held.place`; None: another value, or none."""
        return self._assigned.get(place) if place[0] in self._tables else None

    @property
    def size(self) -> tuple[int, ...]:
        """Another one if anything was noted."""
        noted = (len(names) for _, names in self._tables.values())
        return len(self._tables), len(self._touched), sum(noted)

    def observed(self) -> dict[int, tuple[dict[str, Any], frozenset[str]]]:
        """The tables of objects with attributes that were not touched, and the names that were.

        Code may find an object by a global of its library: all attributes on the way to it, as the walk went, count.
        """
        found = {key: set(names) for key, (_, names) in self._tables.items()}
        holders = {self._paths[key]: names for key, names in found.items()}
        for path in [self._paths[key] for key in self._touched]:
            while path:
                path, name = path
                if path in holders:
                    holders[path].add(name)
        return {
            key: (table, frozenset(found[key]))
            for key, (table, _) in self._tables.items()
            if table.keys() - found[key]
        }


class _SharedTable(UserDict[str, Any]):
    """Stands in a class for the `__dict__` of its instances. For code, attributes of the class are that `__dict__`."""

    def __init__(self, table: dict[str, Any]) -> None:
        self.table = table

    @property
    def data(self) -> dict[str, Any]:  # type: ignore[override]
        _note_table(self.table, "__dict__")
        return self.table

    def __get__(self, instance: Any, owner: type) -> dict[str, Any]:
        return self.data


def _holders_of(table: dict[str, Any], kinds: set[type]) -> dict[tuple[type, str], dict[str, Any]]:
    """Which classes, by which name, hold the `__dict__` of their instances, which then share it."""
    bases = {base for kind in kinds for base in kind.__mro__}
    held = [(base, name, value) for base in bases for name, value in vars(base).items()]
    return {
        (base, name): table
        for base, name, value in held
        if value is table or (type(value) is _SharedTable and value.table is table)
    }


def _known(table: Any, key: Any, patches: Callable[[Any], Iterator[Patch]]) -> Patches:
    """The patches for a key, which all recordings share."""
    found: Patches | None = table.get(key)
    if found is None:
        found = table[key] = Patches(functools.partial(patches, key))
    return found


def _held(kind: type, table: dict[str, Any], name: str) -> Iterator[Patch]:
    yield kind, name, _SharedTable(table)


def _note(value: Any, name: str) -> None:
    _note_table(_get(value, "__dict__"), name)


def _note_table(table: Any, name: str) -> None:
    for each in tuple(_ACTIVE):
        each.note(table, name)


def _patches(kind: type) -> Iterator[Patch]:
    """(owner, name, replacement). The class has the methods of `object`."""

    def __getattribute__(self: Any, name: str) -> Any:
        _note(self, name)
        return _get(self, name)

    def __setattr__(self: Any, name: str, value: Any) -> None:
        _note(self, name)
        if _ACTIVE:
            table, constant = _get(self, "__dict__"), assigned_constant(sys._getframe(1))
            for each in tuple(_ACTIVE):
                each.note_assigned(table, name, constant)
        object.__setattr__(self, name, value)

    def __delattr__(self: Any, name: str) -> None:
        _note(self, name)
        object.__delattr__(self, name)

    for each in (__getattribute__, __setattr__, __delattr__):
        yield kind, each.__name__, each
