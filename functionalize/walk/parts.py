"""What an object of Python consists of, for the walk over the state of a step: a fact, and the objects that it holds.

    parts_of([1, x], names)         Parts((list, 2), [Part(0, 1), Part(1, x)]); the place of `x` is `Held(the list, 1)`
    parts_of(numpy.ones(3), names)  Parts((ndarray, "float64", (3,), bytes))
    parts_of(random, names)         its state; `is_moved`: code that draws from it changes it
    parts_of(config, names)         of an object of the user, the attributes that code of the step names
    parts_of(collection, names)     of an object of a library, every attribute; of C code, what pickling would write
    parts_of(connection, names)     `is_opaque`: it has state that cannot be read

A replay finds a part again by its place. Of torch's own objects, those of `_STATE_OF_TORCH` are state of a script: data
loaders, samplers, schedulers, autocast; those of `_MOVED_BY_STEPS` are as objects of libraries: stages of pipelines. Of
all others, streams, meshes and the like, count the type, the numbers that code names, which process group it is, and
which member of an enumeration. Locks and loggers have no state that determines the ops of a step.

Invariant: two objects with equal facts, whose parts have equal facts, cause the same ops. Nothing is changed, and no
method of the user is called: containers are read by the methods of their base class.

Note [Bound methods]
    trainer.forward_backward      def forward_backward(self, batch): return self.loss_fn(self.model(batch))
    parts_of(...)                 the code, `self.loss_fn` and `self.model`; not `self.step`, which the Trainer counts

Of an object of a library, only the attributes that the method reads or writes are parts of the method. They are read
from the bytecode: every use of `self` is followed by the name of an attribute. What the methods and properties among
them use counts, too. What is not understood is the whole object: `self` that is passed on, stored or seen by a nested
function, `super()`, names found by data, class methods, other descriptors, objects of the user, modules, optimizers.
"""

from __future__ import annotations

import abc
import argparse
import array as arrays
import contextvars
import ctypes
import enum
import functools
import gc
import hashlib
import inspect
import io
import itertools
import logging
import mmap
import numbers
import operator
import os
import pathlib
import queue
import random
import re
import sys
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler

from functionalize._compat.dispatch import is_traceable_wrapper_subclass
from functionalize._compat.distributed import is_dtensor_class
from functionalize.calls.progress import LOG_CLASSES
from functionalize.cost.categories import Category
from functionalize.ir.inputs import Call
from functionalize.util.by_class import by_class
from functionalize.util.bytecode import read
from functionalize.util.code_objects import is_generated
from functionalize.util.own_values import OWN_VALUES
from functionalize.util.packages import is_standard, is_users, is_users_class, is_users_function
from functionalize.util.process_groups import group_name, is_group
from functionalize.util.reader import READER, Reader
from functionalize.util.reading import is_a, item_of, table_of
from functionalize.util.tensor_wrappers import is_no_wrapper
from functionalize.util.text import with_article
from functionalize.walk.code_names import (
    EQUALITY,
    OBJECTS,
    TEXT,
    NameFilter,
    codes_of,
    globals_of,
    imports_of,
    names_of_methods,
    reads_any_global,
)
from functionalize.walk.fact_text import PLAIN, Path

SAME = object()  # the key of a part that has the path of its holder
WITH_ITEMS = (
    dict,
    list,
    tuple,
    deque,
)  # containers whose elements have places, by key or by position


@dataclass(frozen=True, slots=True)
class Held:
    """A place in Python: `container[key]`, attribute `key` of `container`, or the contents of a cell (`key` None).

    For an element of a tuple, `container` is the place of the tuple, because Python replaces a tuple as a whole.
    """

    container: Any
    key: Any
    category: ClassVar[Category] = Category.BUFFERS

    def resolve(self, call: Call | None = None) -> Any:
        return self.read_by(READER if call is None else call.reader)

    def read_by(self, reader: Reader) -> Any:
        """What is there now."""
        container = self.container
        if is_a(container, Held):
            container = container.read_by(reader)
        if self.key is None:
            return reader.attribute(container, "cell_contents")
        if is_a(container, WITH_ITEMS):
            return reader.item(container, self.key)
        return reader.attribute(container, self.key)

    @property
    def home(self) -> int:
        """The id of the object that holds it, for an element of a tuple of the object that holds the tuple."""
        inner = self.container
        return inner.home if is_a(inner, Held) else id(inner)

    @property
    def place(self) -> tuple[Any, Any]:
        """A key that is equal for equal places."""
        inner = self.container
        return (inner.place if is_a(inner, Held) else id(inner)), self.key


@dataclass(frozen=True, slots=True)
class MovedPlace(Held):
    """A place where the step puts another tensor at every call: it is looked up at each replay."""

    def resolve(self, call: Call | None = None) -> Any:
        return self.read_by(READER)


class Part(NamedTuple):
    """An object that another one holds.

    key: its place in the holder, `SAME` for an object that stands for its holder.
    name: for messages and inputs; None: the holder's; "+x": the holder's, followed by x.
    place: where a replay finds it again; None: nowhere.
    is_named: whether code of the step may read it.
    """

    key: Any
    value: Any
    name: str | None = None
    place: Held | None = None
    is_named: bool = True


@dataclass(slots=True)
class Parts:
    """What an object consists of.

    fact: about the object itself, compared by `==`.
    held: the objects that it holds.
    is_loose: no source finds these objects again, so tensors among them count by identity.
    is_moved: code reads the state only by changing it.
    is_opaque: there may be state that is not among the parts.
    attributes: its `__dict__`.
    still: of a part that is moved: objects that determine what is read, and that reading does not change.
    own: attributes and slots that a script has given an object that is read by its content. own_names: which of them
    code may read.
    """

    fact: Any
    held: list[Part] = field(default_factory=list)
    is_loose: bool = False
    is_moved: bool = False
    is_opaque: bool = False
    attributes: dict[str, Any] | None = None
    still: list[Part] = field(default_factory=list)
    own: list[Part] = field(default_factory=list)
    own_names: OwnNames | None = None


@dataclass(slots=True)
class Visit:
    """An object to visit. is_fact: whether it determines ops. is_loose: no source finds it.

    moving: the path of the state around it that is read only by changing it.
    """

    path: Path
    name: str
    value: Any
    place: Held | None = None
    is_fact: bool = True
    is_loose: bool = False
    moving: Path | None = None


class GroupToken(str):
    """The name of a process group, which may differ between processes: a saved program finds its groups by ranks."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "a process group"


class Is:
    """The fact that an object is this very one."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Is) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        name = getattr(self.value, "__qualname__", None) or getattr(self.value, "__name__", None)
        return name if isinstance(name, str) else with_article(type(self.value).__name__)


def attribute(table: Mapping[str, Any], key: str, is_named: bool = True) -> Part:
    """The entry of a table of attributes."""
    return Part(key, item_of(table, key), key, Held(table, key), is_named)


def _pickled(value: Any) -> Parts:
    """An object of C code, by what `__reduce_ex__` returns."""
    kind = type(value)
    try:
        reduced = value.__reduce_ex__(4)
    except Exception:
        return Parts(kind, is_opaque=True)
    if not isinstance(reduced, tuple):
        return Parts((kind, reduced))
    held = [Part(f"state {i}", each) for i, each in enumerate(reduced[1:3])]
    held += [Part("items", list(each)) for each in reduced[3:5] if each is not None]
    return Parts(kind, held, is_loose=True)


# -- what finds the parts of an object -------------------------------------------------------------

PartsReader = Callable[[Any, NameFilter], Parts]
_READERS: weakref.WeakKeyDictionary[type, PartsReader] = weakref.WeakKeyDictionary()
# A step uses objects of these classes by calls that a replay makes again: see calls/progress.py.
_BAR, _WRITER = "tqdm.std.tqdm", "torch.utils.tensorboard.writer.SummaryWriter"
_RUN, _REPEATED = "wandb.sdk.wandb_run.Run", "functionalize.calls.repeat.RepeatedFunction"


def parts_of(value: Any, names: NameFilter) -> Parts:
    """The parts of an object that is no plain value, tensor, module or optimizer."""
    kind = type(value)
    reader = _READERS.get(kind)
    if reader is None:
        reader = _READERS[kind] = reader_of(kind)
    found = reader(value, names)
    found.is_moved = found.is_moved and not names.reads_state
    return found


def reader_of(kind: type) -> PartsReader:
    """What finds the parts of objects of a class: their content, and the attributes that a script has given them."""
    reader = _content_of(kind)
    if reader in _WITH_ATTRIBUTES or not (kind.__dictoffset__ or slot_names(kind)):
        return reader
    return lambda value, names: _add_own(value, names, reader(value, names))


def is_read_by_content(kind: type) -> bool:
    """Whether the attributes in the `__dict__` of an object of a library are those that a script has assigned."""
    return _content_of(kind) not in _WITH_ATTRIBUTES


def _content_of(kind: type) -> PartsReader:
    """What finds the content of objects of a class."""
    names = [f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__]
    if _BAR in names or names[0] in (_WRITER, _RUN, _REPEATED) or names[0].endswith(LOG_CLASSES):
        return _repeated
    for kinds, reader in _BY_TYPE:
        if issubclass(kind, kinds):
            return reader
    package = kind.__module__.partition(".")[0]
    if package == "numpy" and hasattr(kind, "tobytes"):
        return _plain(_array)
    if package == "numpy" and any(base.__name__ == "dtype" for base in kind.__mro__):
        return _identity
    if kind.__module__.startswith("numpy.random"):
        return _content(_numpy_generator)
    if "_multiprocessing.SemLock" in names:
        return _semaphore
    if "_thread._ThreadHandle" in names:
        return _thread_handle
    if f"{kind.__module__}.{kind.__name__}" in _STATELESS:
        return _callable_or_kind
    if package in _OURS and not is_users_class(kind):
        return library if kind.__module__.startswith(_MOVED_BY_STEPS) else _of_torch
    if kind.__name__ == "cython_function_or_method":
        return _builtin
    if is_users_class(kind):
        return users
    return _iterator if issubclass(kind, Iterator) else library


def _plain(reader: Callable[[Any], Parts]) -> PartsReader:
    """Parts, and the attributes that a subclass adds."""

    def parts(value: Any, names: NameFilter) -> Parts:
        found = reader(value)
        if type(value).__module__ != "builtins":
            found.held = [*found.held, *_own_attributes(value, names)]
        return found

    _WITH_ATTRIBUTES.add(parts)
    return parts


def _content(reader: Callable[[Any], Parts]) -> PartsReader:
    return lambda value, names: reader(value)


# -- data: values, containers, arrays, buffers -----------------------------------------------------

_MAX_SEPARATE_FACTS = 64  # a container of plain values with more elements is one fact
_MAX_MOVING_FACTS = 1024  # of a container of plain values with more elements a replay moves none
_MAX_ELEMENTS = 100_000  # a container with more objects is opaque
_MAX_BYTES = 1 << 26  # a larger array is opaque
_ASKING_A_QUEUE = frozenset({"empty", "full", "queue", "unfinished_tasks"})
_TAKING = frozenset({"get", "get_nowait"})
_SHORT = 256  # bytes; of more, the hash is the fact
# Types of which equal values are interchangeable: 1.0 == 1 and -0.0 == 0.0 are not.
BY_EQUALITY = PLAIN - {bool, float, complex, torch.Size, range}
CONTAINERS = (list, tuple, dict, set, frozenset, deque, types.MappingProxyType)
_VALUES = (numbers.Number, slice, pathlib.PurePath, re.Pattern, bytes, str)
_BUFFERS = (bytearray, memoryview, arrays.array, mmap.mmap)
_C_DATA = (ctypes._SimpleCData, ctypes.Array, ctypes.Structure, ctypes.Union)


def _value(value: Any) -> Parts:
    """A number, text, or another immutable value."""
    kind = type(value)
    if is_a(value, slice):
        return Parts(kind, [Part(k, getattr(value, k)) for k in ("start", "stop", "step")])
    if is_a(value, re.Pattern):
        return Parts((kind, value.pattern, value.flags))
    for base in (float, int, str, bytes, complex):
        if is_a(value, base):  # a subclass may have another `__repr__`
            return Parts((kind, base.__repr__(value)))
    return Parts((kind, repr(value)))


def _member(value: enum.Enum) -> Parts:
    """A member of an enumeration, and what it stands for."""
    return Parts((type(value), str(value._name_)), [Part("value", value._value_)])


@dataclass(frozen=True, slots=True)
class _SetOrder:
    """The order in which code iterates over a set; a saved program has none, as texts have another elsewhere."""

    elements: tuple[Any, ...]

    def __repr__(self) -> str:
        return "in another order"


def _container(value: Any) -> Parts:
    """A container: its type, its size, its keys, its elements."""
    kind = type(value)
    is_table = is_a(value, (dict, types.MappingProxyType))
    elements = _elements(value)
    size = len(elements)
    if size > _MAX_SEPARATE_FACTS:
        entries = _entries(value) if is_table else []
        plain = [*elements, *entries]
        if set(map(type, plain)) <= BY_EQUALITY:
            is_set = is_a(value, (set, frozenset))
            if is_set:
                return Parts((kind, size, frozenset(elements), _SetOrder(tuple(elements))))
            return Parts((kind, size, tuple(plain)))
        # One by one they would take longer than most steps.
        if size > _MAX_MOVING_FACTS and set(map(type, plain)) <= PLAIN:
            return Parts((kind, size, _digest(repr(plain))))
        if size > _MAX_ELEMENTS:
            return Parts((kind, size), is_opaque=True)
    if is_table:
        held = [
            Part(
                _key_text(key, i),
                content,
                str(key) if type(key) in PLAIN else None,
                Held(value, key),
            )
            for i, (key, content) in enumerate(zip(elements, _entries(value), strict=True))
        ]
        held += [Part(f"key {i}", key) for i, key in enumerate(elements) if type(key) is not str]
        if is_a(value, defaultdict):
            held.append(Part("default_factory", value.default_factory))
        return Parts((kind, size, tuple(k if type(k) is str else type(k) for k in elements)), held)
    if is_a(value, WITH_ITEMS):
        bound = (deque.maxlen.__get__(value),) if is_a(value, deque) else ()
        held = [Part(i, v, f"+_{i}", Held(value, i)) for i, v in enumerate(elements)]
        return Parts((kind, size, *bound), held)
    order = _SetOrder(tuple(e for e in elements if type(e) in PLAIN))
    held = [Part(i, v, f"+_{i}") for i, v in enumerate(sorted(elements, key=_order))]
    return Parts((kind, size, order), held, is_loose=True)


def _elements(value: Any) -> list[Any]:
    bases: tuple[Any, ...] = (list, tuple, OrderedDict, dict, set, frozenset, deque)
    for base in bases:
        if is_a(value, base):
            return list(base.__iter__(value))
    return list(value)


def _entries(table: Any) -> list[Any]:
    if is_a(table, OrderedDict):  # it has an order of its own
        return list(OrderedDict.values(table))
    return list(dict.values(table)) if is_a(table, dict) else list(table.values())


def _key_text(key: Any, index: int) -> Any:
    return key if type(key) in PLAIN else f"{type(key).__name__} {index}"


def _order(value: Any) -> str:
    return repr(value) if type(value) in PLAIN else type(value).__qualname__


def _array(value: Any) -> Parts:
    """An array or a number of numpy: its numbers, and how they lie, by which numpy adds and torch makes tensors."""
    layout = value.strides, value.flags.writeable
    fact = (type(value), str(value.dtype), value.shape, *layout)
    if value.dtype.hasobject:
        return Parts(fact, [Part("elements", value.tolist())], is_loose=True)
    if value.nbytes > _MAX_BYTES:
        return Parts(fact, is_opaque=True)
    return Parts((*fact, _digest(value.tobytes())))


def _buffer(value: Any) -> Parts:
    """An object of bytes."""
    view = memoryview(value)
    return Parts((type(value), view.nbytes, _digest(view.tobytes())))


def _c_data(value: Any) -> Parts:
    """An object of ctypes: its bytes. What its pointers point to is not among them."""
    return Parts((type(value), _digest(bytes(memoryview(value).cast("B")))))


def _digest(data: bytes | str) -> Any:
    """Data as a fact, which is equal in another process, too: `hash` has a seed of each process."""
    if len(data) < _SHORT:
        return data
    whole = data.encode() if isinstance(data, str) else data
    return len(data), hashlib.sha256(whole).hexdigest()


# -- state that is read only by changing it --------------------------------------------------------


def _random_generator(value: random.Random) -> Parts:
    """A generator of Python's random numbers. One of the system has no state that can be read."""
    if is_a(value, random.SystemRandom):
        return Parts(type(value), is_opaque=True)
    return Parts(type(value), [Part("state", random.Random.getstate(value))], is_moved=True)


def _numpy_generator(value: Any) -> Parts:
    """A generator of numpy's random numbers, or the source of its bits."""
    bits = getattr(value, "bit_generator", None) or getattr(value, "_bit_generator", value)
    state = getattr(bits, "state", None)
    return Parts(type(value), [Part("state", state)], is_moved=True, is_opaque=state is None)


def _suspended(value: types.GeneratorType[Any, Any, Any], names: NameFilter) -> Parts:
    """A generator function's state: where it is suspended, and its variables. Its code reads what these lead to."""
    frame = value.gi_frame
    if frame is None:
        return Parts((type(value), None), is_moved=True)
    held = [Part(k, v, k) for k, v in list(frame.f_locals.items())]
    parts = Parts((type(value), frame.f_lasti), held, is_loose=True, is_moved=True)
    if is_users(frame.f_globals.get("__name__")):
        names.add(frame.f_code)
        used = [k for k in globals_of(frame.f_code) if k in frame.f_globals]
        parts.still = [part for part in held if not _is_of_loops(part.value)]
        parts.still += [Part(k, frame.f_globals[k], k) for k in used]
    return parts


def _is_of_loops(value: Any) -> bool:
    return type(value) in PLAIN or is_a(value, (Iterator, Tensor))


def _file(value: Any) -> Parts:
    """A file, by its position, and the file that it wraps; the standard streams have no position that matters.

    Of the standard streams, see `recorder/effects.py`. A pair of files tells none of its two.
    """
    if value in (sys.stdout, sys.stderr):
        return Parts(type(value))
    try:
        at = value.closed or value.tell()
    except (OSError, ValueError, AttributeError):
        at = None
    contents = None
    for base in (io.BytesIO, io.StringIO):
        if is_a(value, base) and not value.closed:
            contents = _digest(base.getvalue(value))
    inner = [getattr(value, name) for name in ("buffer", "raw") if _wraps(value, name)]
    return Parts(
        (type(value), at, contents),
        [Part("wrapped", each) for each in inner],
        is_moved=True,
        is_opaque=is_a(value, io.BufferedRWPair),
    )


def _wraps(value: Any, name: str) -> bool:
    try:
        return issubclass(type(getattr(value, name, None)), io.IOBase)
    except ValueError:  # it is detached
        return False


def _waiting(value: Any, names: NameFilter) -> Parts:
    """A queue: its elements, or their number. Asking for its size, or an empty one for more, does not move it."""
    held = [] if is_a(value, queue.SimpleQueue) else [Part("queue", list(value.queue))]
    if is_a(value, queue.Queue):
        asked = ["unfinished_tasks"] if "unfinished_tasks" in names.names else []
        # `is_shutdown`: since Python 3.13; then `put` raises.
        names_of_parts = ("maxsize", "is_shutdown", *asked)
        held += [Part(k, getattr(value, k)) for k in names_of_parts if hasattr(value, k)]
    size = value.qsize()
    is_moved = _ASKING_A_QUEUE.isdisjoint(names.names) and (
        size > 0 or _TAKING.isdisjoint(names.names)
    )
    # The elements of a simple one cannot be seen: another queue of that size may hold others.
    itself = (Is(value),) if is_a(value, queue.SimpleQueue) else ()
    return Parts((type(value), size, *itself), held, is_loose=True, is_moved=is_moved)


# -- functions and classes -------------------------------------------------------------------------

_DESCRIPTORS = (
    types.WrapperDescriptorType, types.MethodDescriptorType, types.ClassMethodDescriptorType,
    types.GetSetDescriptorType, types.MemberDescriptorType, types.CodeType, types.GenericAlias,
    types.UnionType,
)  # fmt: skip
_STATELESS = frozenset(
    {"builtins.object", "builtins.NoneType"}
    | {"builtins.ellipsis", "builtins.NotImplementedType", "numpy.ufunc", "typing.TypeVar"}
    | {"numpy._ArrayFunctionDispatcher", "builtins.traceback", "builtins.frame", "_ctypes.CField"}
    | {"builtins.instancemethod"}
)  # fmt: skip
_OURS = ("torch", "functionalize")
_CONSTRUCTORS = frozenset({"__new__", "__init__", "__post_init__", "__init_subclass__"})
_NO_STATE = frozenset(
    {"__dict__", "__weakref__", "__doc__", "__module__", "__class__", "__slots__", "_abc_impl"}
)
# What a class has of its annotations since Python 3.14, called where somebody asks for these.
_ANNOTATING = frozenset({"__annotate__", "__annotate_func__", "__annotations_cache__"})
# Methods that dataclasses generate, and what calls them.
_GENERATED = {"__repr__": TEXT} | dict.fromkeys(
    ("__eq__", "__hash__", "__lt__", "__le__", "__gt__", "__ge__"), EQUALITY
)

_ASKING_A_LOCK = frozenset({"locked", "acquire", "acquire_lock"})
_OF_LOGGERS = ("level", "propagate", "disabled", "handlers", "filters")
_OF_DESCRIPTORS = ("__func__", "fget", "fset", "fdel", "func", "args", "keywords")
_RECORDS = ("pybind11_", "PyCapsule")  # what a function of C++ is bound to


def _function(fn: types.FunctionType, names: NameFilter) -> Parts:
    code, users = fn.__code__, is_users_function(fn)
    of_torch = not users and (fn.__module__ or "").partition(".")[0] in _OURS
    held: list[Part] = []
    if users:
        every = names.is_dynamic and reads_any_global(code)
        wanted = (
            [k for k in fn.__globals__ if not k.startswith("__")] if every else globals_of(code)
        )
        held += [attribute(fn.__globals__, name) for name in wanted if name in fn.__globals__]
        held += [attribute(sys.modules, name) for name in _imported(fn)]
    for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
        try:
            content = cell.cell_contents
        except ValueError:  # an empty cell
            continue
        if not of_torch or type(content) in (types.FunctionType, types.BuiltinFunctionType):
            held.append(Part(name, content, name, Held(cell, None)))
    if not users:
        names.add_function(fn)
    if of_torch:
        return Parts(code, held)
    defaults = fn.__defaults__ or ()
    optional = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    held += [Part(f"defaults.{k}", v, k) for k, v in zip(optional, defaults, strict=False)]
    keywords = fn.__kwdefaults__ or {}
    held += [Part(f"defaults.{k}", v, k, Held(keywords, k)) for k, v in keywords.items()]
    table = vars(fn)
    held += [attribute(table, k, k == "__wrapped__" or k in names) for k in list(table)]
    return Parts(code, held)


def _imported(fn: types.FunctionType) -> list[str]:
    """The user's modules that code imports when it runs, as far as they are imported already."""
    found: dict[str, None] = {}
    for code in codes_of(fn.__code__):
        for level, name in imports_of(code):
            if name is None:  # it is data: a constant of the code, or any
                constants = [c for c in code.co_consts if type(c) is str and c in sys.modules]
                found.update(dict.fromkeys(constants or sys.modules))
            elif level:
                package = fn.__globals__.get("__package__") or ""
                parents = package.split(".")[: package.count(".") + 2 - level]
                found[".".join([*parents, name] if name else parents)] = None
            else:
                parts = name.split(".")
                found.update((".".join(parts[:i]), None) for i in range(1, len(parts) + 1))
    return [name for name in found if name in sys.modules and is_users(name)]


def _builtin(function: Any, names: NameFilter) -> Parts:
    names.add_function(function)
    owner = getattr(function, "__self__", None)
    kind = type(owner)
    is_static = issubclass(kind, types.ModuleType) or kind.__name__.startswith(_RECORDS)
    if owner is None or is_static:
        return Parts(function)
    return Parts(function.__name__, [Part("self", owner)])


def _partial(partial: functools.partial[Any], names: NameFilter) -> Parts:
    held = [Part("func", partial.func), Part("args", partial.args)]
    return Parts("partial", [*held, Part("keywords", partial.keywords)])


def _getter(getter: Any, names: NameFilter) -> Parts:
    """`attrgetter("a.b")`, `methodcaller("f")`: its names are data."""
    parts = _pickled(getter)
    names.add_words(repr(getter))
    return parts


def _descriptor(value: Any, names: NameFilter) -> Parts:
    inner = [getattr(value, a, None) for a in _OF_DESCRIPTORS]
    return Parts(type(value), [Part(SAME, each) for each in inner if each is not None])


def _class(kind: type, names: NameFilter) -> Parts:
    held = class_parts(kind, names, constructed=True)
    if is_users_class(type(kind)):
        held += class_parts(type(kind), names)
    if isinstance(kind, abc.ABCMeta) and is_users_class(kind):
        held.append(Part("registered", registered(kind)))
    if "__subclasses__" in names.names and is_users_class(kind):
        held.append(Part("subclasses", subclasses(kind)))
    return Parts(kind, held)


def subclasses(kind: type) -> tuple[type, ...]:
    """The classes that inherit a class directly."""
    return tuple(type.__subclasses__(kind))


def _cached(value: Any, names: NameFilter) -> Parts:
    """A function under `functools.cache`, its counts if code asks for them; of the user's, what it has cached."""
    held = [Part("__wrapped__", value.__wrapped__), *_own_attributes(value, names)]
    fact: Any = "cached"
    if "cache_info" in names.names:
        fact = "cached", tuple(value.cache_info())
    if not is_users(value.__module__):
        return Parts(fact, held)
    found = gc.get_referents(value)[1:]  # keys and results in their order, the table, the function
    *entries, table = found[: [each is value.__wrapped__ for each in found].index(True)]
    kinds = {type(each).__name__ for each in table.values()}
    if kinds == {"_lru_list_elem"}:
        entries = [each for each in entries if getattr(each, "__name__", "") not in kinds]
        held += [Part(f"cached {i}", each) for i, each in enumerate(entries)]
    else:
        held.append(Part("cached", table))
    return Parts(fact, held, is_loose=True)


def registered(kind: abc.ABCMeta) -> tuple[Any, ...]:
    """The classes that were registered as subclasses of an abstract class."""
    found = [reference() for reference in abc._get_dump(kind)[0]]  # type: ignore[attr-defined]
    return tuple(sorted((k for k in found if k is not None), key=lambda k: k.__qualname__))


def class_parts(kind: type, names: NameFilter, constructed: bool = False) -> list[Part]:
    """The attributes of a user's class that code may reach, along its MRO.

    constructed: whether code of the step may make an instance. Special methods, and methods that override one of a
    library's class, are called by others than the step.
    """
    own = [base for base in kind.__mro__ if is_users_class(base)]
    inherited = (
        {k for base in kind.__mro__ if base not in own for k in vars(base)} if own else set()
    )
    replaced = [
        Part(key, value, key, Held(base, key))
        for base in kind.__mro__
        if is_patchable(base)
        for key, value in list(vars(base).items())
        if type(value) is types.FunctionType and is_users_function(value)
    ]
    return replaced + [
        Part(key, value, key, Held(base, key))
        for base in own
        for key, value in list(vars(base).items())
        if key not in _NO_STATE
        and (
            (key in names and key not in _CONSTRUCTORS)
            or (constructed and key in _CONSTRUCTORS)
            or _is_called_by_others(key, value, names, inherited)
        )
    ]


def is_patchable(kind: type) -> bool:
    """Whether methods that a script replaces in this class of a library are looked for."""
    return issubclass(kind, (nn.Module, torch.optim.Optimizer)) and not is_users_class(kind)


def _is_called_by_others(key: str, value: Any, names: NameFilter, inherited: set[str]) -> bool:
    if key in _ANNOTATING:
        return "__annotations__" in names
    if key in _CONSTRUCTORS or not (callable(value) or hasattr(type(value), "__get__")):
        return False
    if not (key.startswith("__") and key.endswith("__")):
        return key in inherited
    code = value.__code__ if type(value) is types.FunctionType else None
    return code is None or not is_generated(code) or _GENERATED.get(key, "") in names


def _module(module: types.ModuleType, names: NameFilter) -> Parts:
    table, package = vars(module), module.__name__.partition(".")[0]
    if package == "functionalize":
        return Parts(Is(module))
    keys = names.of(table) if is_users(package) else [k for k in table if k in names.names]
    keys = [k for k in keys if not k.startswith("__") and table[k] is not sys.modules]
    if "__getattr__" in table and is_users(package):
        keys.append("__getattr__")
    return Parts(Is(module), [attribute(table, k) for k in keys])


# -- bound methods ---------------------------------------------------------------------------------

_OF_FRAMES = frozenset({"super", "locals", "vars", "dir", "eval", "exec", "f_locals", "_getframe"})
_ATTRIBUTE = frozenset({"attribute", "method", "super", "set_attribute", "del_attribute"})
_ALL_COUNTS = (torch.nn.Module, torch.optim.Optimizer, torch.Tensor, type, types.ModuleType)
WHOLE_METHOD = "method"  # the fact about a method all attributes of whose object count


def _method(method: types.MethodType, names: NameFilter) -> Parts:
    """The parts of a bound method, see Note [Bound methods]."""
    function, owner = method.__func__, method.__self__
    if not names.is_dynamic and type(function) is types.FunctionType and _is_of_library(owner):
        held = _parts_by_self(function, owner)
        if held is not None:
            fact = ("method of", type(owner), tuple(part.key for part in held))
            return Parts(fact, [Part(SAME, function), *held])
    return Parts(WHOLE_METHOD, [Part(SAME, function), Part("self", owner)])


def _is_of_library(owner: Any) -> bool:
    kind = type(owner)
    if issubclass(kind, _ALL_COUNTS) or kind.__module__.partition(".")[0] in _OURS:
        return False
    if any(is_users_class(base) for base in kind.__mro__):
        return False
    plain = type.__getattribute__(kind, "__getattribute__") is object.__getattribute__
    return plain and isinstance(getattr(owner, "__dict__", None), dict)


def _parts_by_self(function: types.FunctionType, owner: Any) -> list[Part] | None:
    """A part for each attribute that the function, or a method or property that it uses, reads or writes."""
    table, held = object.__getattribute__(owner, "__dict__"), dict[str, Part]()
    todo, done = [function], {function}
    while todo:
        used = _attributes_of_self(todo.pop().__code__)
        if used is None:
            return None
        for name in sorted(used - held.keys()):
            of_class: Any = next(
                (vars(k)[name] for k in type(owner).__mro__ if name in vars(k)), None
            )
            kind = type(of_class)
            if kind is property:
                inner = [of_class.fget, of_class.fset, of_class.fdel]
            elif hasattr(kind, "__set__"):
                return None
            elif name in table:
                held[name] = attribute(table, name)
                continue
            elif of_class is None and hasattr(type(owner), "__getattr__"):
                return None
            else:
                inner = [of_class]
            inner = [each for each in inner if each is not None]
            if any(type(each) is not types.FunctionType for each in inner):
                return None
            held[name] = Part(name, of_class, name)
            todo += [each for each in inner if each not in done]
            done |= set(inner)
    return list(held.values())


@functools.lru_cache(maxsize=4096)
def _attributes_of_self(code: types.CodeType) -> frozenset[str] | None:
    """The attributes of its first parameter that a function uses; None: it may use the object in another way."""
    if not code.co_argcount or not _OF_FRAMES.isdisjoint(code.co_names):
        return None
    self = code.co_varnames[0]
    if self in code.co_cellvars:
        return None
    steps = read(code)
    found = set()
    for step, then in zip(steps, [*steps[1:], None], strict=True):
        if step.value != self or step.op == "constant" or step.op in _ATTRIBUTE:
            continue
        if step.op != "local" or then is None or then.op not in _ATTRIBUTE - {"super"}:
            return None
        found.add(str(then.value))
    return frozenset(found)


# -- objects with attributes -----------------------------------------------------------------------

# Of torch, the objects of these modules are state of a script.
_STATE_OF_TORCH = (
    *("torch.utils.data", "torch.optim.", "torch.amp.", "torch.autograd.grad_mode"),
    *("torch.autograd.graph", "torch.distributions", "torch.nn.attention"),
    "torch.distributed.fsdp._fully_shard._fsdp_api",
)
# These hold what a step leaves for its next call, as objects of libraries do: counts, buffers, flags.
_MOVED_BY_STEPS = ("torch.distributed.pipelining",)
_OPAQUE = frozenset({"Store", "Future"})  # other threads and processes change what they hold
_BY_TEXT = frozenset({"finfo", "iinfo", "Tag", "qscheme", "ReduceOp", "Placement"})


def _own_attributes(value: Any, names: NameFilter) -> list[Part]:
    """The attributes of an object, with those in slots: of an object of the user, those that code names."""
    kind, table = type(value), table_of(value) or {}
    every, observed = not is_users_class(kind), names.observed_of(table)
    if not every and (base := _of_bases(kind, names)) is not None:
        names, every = base, base.is_dynamic
    read, all_read = (names, every) if observed is None else (observed, False)
    keys = [key for key in table if key != OWN_VALUES]
    held = [attribute(table, key, all_read or key in read) for key in keys]
    return [*held, *_slots(value, names, every)]


class OwnNames:
    """The attributes that count of an object that is read by its content: without those that hold content."""

    __slots__ = ("_content", "_names")

    def __init__(self, kind: type, names: NameFilter) -> None:
        self._content, self._names = _of_content(kind), names

    def __contains__(self, key: object) -> bool:
        return key in self._names and key not in self._content and key != OWN_VALUES


def _add_own(value: Any, names: NameFilter, found: Parts) -> Parts:
    """Add to the content of an object what a script has given it: attributes, and slots of its subclass."""
    found.own_names = OwnNames(type(value), names)
    table = table_of(value) or {}
    found.own = [attribute(table, key) for key in list(table) if key in found.own_names]
    found.own += slots_of(value, found.own_names)
    return found


def slots_of(value: Any, names: Container[Any]) -> list[Part]:
    """What is in the slots of an object."""
    return list(_slots(value, names, False))


def _slots_in(kind: type) -> Iterator[tuple[str, types.MemberDescriptorType]]:
    """The names and descriptors of the slots of a class, those of its first base first."""
    for base in kind.__mro__:
        if "__slots__" in vars(base):
            for name, slot in list(vars(base).items()):
                if isinstance(slot, types.MemberDescriptorType):
                    yield name, slot


@by_class
def slot_names(kind: type) -> frozenset[str]:
    """The names of the slots of a class, which have a descriptor each."""
    return frozenset(name for name, _ in _slots_in(kind))


@by_class
def _of_content(kind: type) -> frozenset[str]:
    """The attributes that the methods of libraries' classes assign, and those that Python and loggers' managers do."""
    assigned = frozenset(
        step.value
        for base in kind.__mro__
        if not is_users_class(base)
        for method in vars(base).values()
        if isinstance(method, types.FunctionType)
        if isinstance(wrapped := inspect.unwrap(method), types.FunctionType)
        for step in read(wrapped.__code__)
        if step.op == "set_attribute"
    )
    return assigned | _OF_FUNCTIONS | ({"parent"} if issubclass(kind, logging.Logger) else set())


_OF_FUNCTIONS = {
    *("__wrapped__", "__doc__", "__module__", "__name__", "__qualname__", "__annotations__"),
}


_PLAIN_BASES = ("builtins", "abc", "typing", "enum")


def _of_bases(kind: type, names: NameFilter) -> NameFilter | None:
    """The names with those in methods that a class of the user inherits from libraries (`UserDict`); None: no more."""
    size, found = names.inherited.get(kind, (None, None))
    if size == names.size:
        return cast(NameFilter | None, found)
    bases = [
        base
        for base in kind.__mro__
        if not is_users_class(base) and base.__module__ not in _PLAIN_BASES
    ]
    is_kept = issubclass(kind, (torch.nn.Module, torch.optim.Optimizer, torch.Tensor))
    found = names_of_methods(bases, names) if bases and not is_kept else None
    names.inherited[kind] = names.size, found
    return found


def _slots(value: Any, names: Container[Any], every: bool) -> Iterator[Part]:
    # A place in a container is an element, so that what is in its slots has none.
    has_places = not issubclass(type(value), WITH_ITEMS)
    for name, slot in _slots_in(type(value)):
        try:
            content = slot.__get__(value)
        except AttributeError:
            continue
        place = Held(value, name) if has_places else None
        yield Part(name, content, name, place, every or name in names)


def users(value: Any, names: NameFilter) -> Parts:
    """An object of a class of the user."""
    kind, held = type(value), _own_attributes(value, names)
    known = frozenset(part.key for part in held if part.is_named)
    return Parts(
        ("object", kind, known), held, is_opaque=is_native(kind), attributes=table_of(value)
    )


def library(value: Any, names: NameFilter) -> Parts:
    """An object of a library: every attribute; without attributes, what pickling would write."""
    kind, table = type(value), table_of(value)
    held = _own_attributes(value, names)
    wrapped = _wrapped(value)
    if wrapped is not None and "__wrapped__" not in (table or {}):
        held.append(Part("__wrapped__", wrapped))
    if held or not is_native(kind):
        known = frozenset(part.key for part in held if part.is_named)
        return Parts(("object", kind, known), held, attributes=table)
    if is_standard(kind.__module__.partition(".")[0]):
        return _pickled(value)
    return Parts(Is(value), is_opaque=True)


def _iterator(value: Any, names: NameFilter) -> Parts:
    """An iterator: code reads it by changing it."""
    parts = library(value, names) if table_of(value) is not None else _pickled(value)
    parts.is_moved = True
    # `map(scaled, numbers)`: the function is not moved. An `iter(function, end)` may not be, either.
    inner = [part.value for part in parts.held if type(part.value) is tuple]
    is_kept = is_a(value, itertools.repeat)  # reading it does not change what it repeats
    parts.still = [
        Part(f"function {i}", v) for i, v in enumerate(sum(inner, ())) if is_kept or _is_code(v)
    ]
    return parts


def _is_code(value: Any) -> bool:
    return callable(value) and not is_a(value, (type, types.BuiltinFunctionType))


def _callable_or_kind(value: Any, names: NameFilter) -> Parts:
    """An object without state that ops depend on, other than which function it is."""
    return Parts(Is(value) if callable(value) else ("kind", type(value)))


def _wrapped(value: Any) -> Any:
    """The function that a decorator wrapped (`__wrapped__`), or None. Some attributes raise (`torch.classes`)."""
    try:
        return getattr(value, "__wrapped__", None)
    except Exception:
        return None


def is_native(kind: type) -> bool:
    """Whether C code keeps state in the instances: they are larger than slots, `__dict__` and weak references need."""
    slots = len(list(_slots_in(kind)))
    words = slots + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
    return kind.__basicsize__ > object.__basicsize__ + 8 * words or kind.__itemsize__ > 0


def _namespace(value: Any, names: NameFilter) -> Parts:
    """A namespace of a script. A comparison of two of them, and their text, read all attributes."""
    table, every = vars(value), not names.names.isdisjoint((OBJECTS, TEXT))
    held = [attribute(table, key, every or key in names) for key in list(table)]
    known = frozenset(part.key for part in held if part.is_named)
    return Parts(("object", type(value), known), held, attributes=table)


# -- torch's own -----------------------------------------------------------------------------------


def _of_torch(value: Any, names: NameFilter) -> Parts:
    """An object of torch, or of this package."""
    kind = type(value)
    if kind.__module__.startswith(_STATE_OF_TORCH) and not hasattr(kind, "__members__"):
        return library(value, names)
    wrapped = _wrapped(value)
    if wrapped is not None:
        return Parts(("kind", kind), [Part("__wrapped__", wrapped)])
    if is_group(value):
        return Parts((kind, GroupToken(group_name(value))))
    if not _OPAQUE.isdisjoint(base.__name__ for base in kind.__mro__):
        return Parts(Is(value), is_opaque=True)
    if not _BY_TEXT.isdisjoint(base.__name__ for base in kind.__mro__):
        return Parts((kind, str(getattr(value, "op", value))))
    if hasattr(kind, "__members__"):  # an enumeration of C++
        return Parts((kind, repr(value)))
    if callable(value):
        return Parts(Is(value))
    table = table_of(value) or {}
    numbers = [key for key in table if key in names.names and type(table[key]) in PLAIN]
    return Parts(("kind", kind), [attribute(table, key) for key in numbers])


def has_only_attributes(value: Any) -> bool:
    """Whether `_of_torch` finds in an object nothing but attributes in its `__dict__`."""
    kind: Any = type(value)
    is_plain = kind.__getattribute__ is object.__getattribute__ and not hasattr(kind, "__getattr__")
    if not is_plain or type(table_of(value)) is not dict:
        return False
    return kind.__module__.startswith("torch.") and _of_torch(value, NameFilter()) == Parts(
        ("kind", kind)
    )


def attributes_of_tensor(tensor: Any, table: dict[str, Any], names: NameFilter) -> list[Part]:
    """What a script has assigned to a tensor; of a wrapper, the numbers, since its other attributes are its own.

    A `DTensor` has its own ones in slots. Of a class of the user, all but tensors.
    """
    kind: Any = type(tensor)
    is_plain = kind in (torch.Tensor, torch.nn.Parameter) or is_dtensor_class(kind)
    own = is_users_class(kind)
    return [
        attribute(table, key)
        for key in (names.of(table) if table else ())
        if key != "_is_param"  # torch's mark of wrappers, which a gathered parameter lacks
        and (is_plain or type(table[key]) in PLAIN or (own and not is_a(table[key], torch.Tensor)))
    ]


def inner_places(tensor: Any) -> Iterator[tuple[tuple[str, ...], Held, torch.Tensor]]:
    """The tensors inside a wrapper subclass, with the attributes that lead to each, and its place."""
    if is_no_wrapper(tensor) or not is_traceable_wrapper_subclass(tensor):
        return
    table = table_of(tensor) or {}
    for name in tensor.__tensor_flatten__()[0]:
        inner = getattr(tensor, name)
        if not is_a(inner, torch.Tensor):  # a DTensor of torch 2.15 names its mesh, too
            continue
        yield (name,), Held(table if name in table else tensor, name), inner
        for names, place, each in inner_places(inner):
            yield (name, *names), place, each


def _generator(value: torch.Generator, names: NameFilter) -> Parts:
    """A generator of torch's random numbers. A recording sees what a step does with the default ones itself."""
    if value is torch.default_generator or value in torch.cuda.default_generators:
        return Parts(("kind", type(value)))
    state = value.get_state().numpy().tobytes()
    return Parts(type(value), [Part("state", state)], is_moved=True)


def _scaler(value: GradScaler, names: NameFilter) -> Parts:
    """A gradient scaler. Its dict by optimizer is rebuilt in every step."""
    table = vars(value)
    kept = [k for k, v in table.items() if is_a(v, torch.Tensor) or type(v) in PLAIN]
    return Parts(("kind", type(value)), [Part(k, table[k], f"+{k}", Held(table, k)) for k in kept])


def _scheduler(value: LRScheduler, names: NameFilter) -> Parts:
    """A scheduler: this very one. What a step reads of it is noted while it is recorded: see calls/schedulers.py."""
    table = table_of(value) or {}
    held = [attribute(table, key, False) for key, each in table.items() if not _is_plain(each)]
    return Parts(Is(value), held)


def _is_plain(value: Any) -> bool:
    return type(value) in PLAIN or (
        type(value) is list and all(type(each) in PLAIN for each in value)
    )


# -- other objects ---------------------------------------------------------------------------------


def _repeated(value: Any, names: NameFilter) -> Parts:
    """An object of a library that a step uses by calls that a replay makes again."""
    return Parts(Is(value))


def _identity(value: Any, names: NameFilter) -> Parts:
    return Parts(value)


def _weak(value: Any, names: NameFilter) -> Parts:
    return Parts("weak reference", [Part(SAME, value())])


def _proxy(value: Any, names: NameFilter) -> Parts:
    """What a weak proxy stands for. A dead one raises `ReferenceError`, in whichever way it is used."""
    try:
        table, kind = value.__dict__, value.__class__
    except ReferenceError:
        return Parts("dead weak proxy")
    held = [attribute(table, key, key in names) for key in list(table)]
    known = frozenset(part.key for part in held if part.is_named)
    return Parts(("object", kind, known), [*held, *class_parts(kind, names)])


def _finalizer(value: weakref.finalize[Any, Any], names: NameFilter) -> Parts:
    """What a finaliser calls, which its class holds, and whether it has been called."""
    fact = ("finalizer", value.alive, value.atexit)
    _, function, args, keywords = value.peek() or (None, None, (), {})
    held = [Part("func", function), Part("args", args), Part("kwargs", keywords)]
    return Parts(fact, held, is_loose=True)


def _variable(value: contextvars.ContextVar[Any], names: NameFilter) -> Parts:
    return Parts(("kind", type(value)), [Part("value", value.get(None))])


def _environ(value: Any, names: NameFilter) -> Parts:
    return Parts(("kind", type(value)), [Part(SAME, dict(value))])


def _logger(value: Any, names: NameFilter) -> Parts:
    logger = value if is_a(value, logging.Logger) else value.logger
    level = logger.getEffectiveLevel() if isinstance(logger, logging.Logger) else 0
    fact = ("logger", getattr(logger, "name", ""), level, logging.root.manager.disable)
    # `merge_extra`: since Python 3.13.
    of_adapter = ("extra", "merge_extra") if logger is not value else ()
    held = [Part(k, getattr(value, k)) for k in of_adapter if hasattr(value, k)]
    held += [Part(k, getattr(logger, k, None)) for k in _OF_LOGGERS if k in names.names]
    if "hasHandlers" in names.names and isinstance(logger, logging.Logger):
        held.append(Part("hasHandlers", logging.Logger.hasHandlers(logger)))
    return Parts(fact, held)


def _lock(value: Any, names: NameFilter) -> Parts:
    is_asked = not _ASKING_A_LOCK.isdisjoint(names.names)
    # A recursive lock says only in its text whether it is held.
    return Parts((type(value), repr(value).startswith("<locked") if is_asked else None))


def _thread_handle(value: Any, names: NameFilter) -> Parts:
    """What a `Thread` holds since Python 3.13: whether it has ended."""
    return Parts((type(value), value.is_done()))


def _semaphore(value: Any, names: NameFilter) -> Parts:
    """What the locks, semaphores and events of multiprocessing consist of. Not every system can read its count."""
    try:
        return Parts((type(value), value._get_value()))
    except (NotImplementedError, OSError):
        return Parts(type(value), is_opaque=True)


def _view(value: Any, names: NameFilter) -> Parts:
    """The keys, values or items of a dict."""
    return Parts(type(value), [Part(SAME, value.mapping)])


def _error(value: BaseException, names: NameFilter) -> Parts:
    return Parts(("kind", type(value)), [Part("args", value.args), *_own_attributes(value, names)])


# -- by type ---------------------------------------------------------------------------------------

# These find all attributes themselves. What any other one finds is the content, to which `reader_of` adds attributes.
_WITH_ATTRIBUTES: set[PartsReader] = {
    *(users, library, _iterator, _namespace, _of_torch, _scheduler, _method),
    *(_function, _class, _module, _cached, _error, _proxy, _repeated),
}
_BY_TYPE: list[tuple[Any, PartsReader]] = [
    (types.FunctionType, _function),
    (types.MethodType, _method),
    ((types.BuiltinFunctionType, types.MethodWrapperType), _builtin),
    (functools.partial, _partial),
    ((operator.attrgetter, operator.methodcaller), _getter),
    (
        (staticmethod, classmethod, property, functools.cached_property, functools.partialmethod),
        _descriptor,
    ),
    (type, _class),
    (types.ModuleType, _module),
    (enum.Enum, _plain(_member)),
    (CONTAINERS, _plain(_container)),
    (_BUFFERS, _plain(_buffer)),
    (_C_DATA, _plain(_c_data)),
    (random.Random, _content(_random_generator)),
    (types.GeneratorType, _suspended),
    (type(functools.cache(len)), _cached),
    (io.IOBase, _content(_file)),
    ((queue.Queue, queue.SimpleQueue), _waiting),
    (_DESCRIPTORS, _identity),
    (weakref.ReferenceType, _weak),
    (weakref.ProxyTypes, _proxy),
    (weakref.finalize, _finalizer),
    (contextvars.ContextVar, _variable),
    (type(os.environ), _environ),
    ((type({}.keys()), type({}.values()), type({}.items())), _view),
    ((type(threading.Lock()), type(threading.RLock())), _lock),
    ((logging.Logger, logging.LoggerAdapter), _logger),
    (GradScaler, _scaler),
    (LRScheduler, _scheduler),
    (BaseException, _error),
    (torch.Generator, _generator),
    ((argparse.Namespace, types.SimpleNamespace), _namespace),
    (_VALUES, _plain(_value)),
]
