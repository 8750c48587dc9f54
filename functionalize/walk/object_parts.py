"""What an object of Python consists of, for the walk over the state of a step: a fact, and the objects that it holds.

    parts_of([1, x], names)         Parts((list, 2), [Part(0, 1), Part(1, x)])
    parts_of(trainer, names)        the attributes that code of the step names (`code_names.py`)
    parts_of(connection, names)     `is_opaque`: it has state that cannot be read

Of objects of libraries, every attribute is a part. Of torch's own, only the objects that scripts use as state have
parts: data loaders, samplers, schedulers, autocast. Locks, loggers and other objects of torch have no state that
determines the ops of a step.

Invariant: two objects with equal facts, whose parts have equal facts, cause the same ops. Nothing is changed, and no
method of the user is called.
"""

from __future__ import annotations

import abc
import argparse
import contextvars
import enum
import functools
import gc
import io
import logging
import operator
import os
import queue
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler

from functionalize.calls.progress import LOG_CLASSES
from functionalize.util.code_objects import is_generated
from functionalize.util.packages import is_users
from functionalize.util.reading import is_a
from functionalize.walk import data_parts as data
from functionalize.walk import parts as objects
from functionalize.walk.bound_methods import method_parts
from functionalize.walk.code_names import (
    EQUALITY,
    TEXT,
    NameFilter,
    codes_of,
    globals_of,
    imports_of,
    reads_any_global,
)
from functionalize.walk.parts import SAME, Held, Is, Part, Parts, attribute, pickled

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
# Methods that dataclasses generate, and what calls them.
_GENERATED = {"__repr__": TEXT} | dict.fromkeys(
    ("__eq__", "__hash__", "__lt__", "__le__", "__gt__", "__ge__"), EQUALITY
)

_ASKING_A_LOCK = frozenset({"locked", "acquire", "acquire_lock"})
_OF_LOGGERS = ("level", "propagate", "disabled", "handlers", "filters")
_OF_DESCRIPTORS = ("__func__", "fget", "fset", "fdel", "func", "args", "keywords")
_RECORDS = ("pybind11_", "PyCapsule")  # what a function of C++ is bound to

# A step uses objects of these classes by calls that a replay makes again: see calls/progress.py.
_BAR, _WRITER = "tqdm.std.tqdm", "torch.utils.tensorboard.writer.SummaryWriter"

Look = Callable[[Any, NameFilter], Parts]
_LOOKS: weakref.WeakKeyDictionary[type, Look] = weakref.WeakKeyDictionary()
# These find all attributes themselves. What any other one finds is the content, to which `look_of` adds attributes.
_WITH_ATTRIBUTES: set[Look] = {
    *(objects.users, objects.library, objects.iterator, objects.namespace, objects.of_torch),
    *(objects.scheduler, method_parts),
}


def parts_of(value: Any, names: NameFilter) -> Parts:
    """The parts of an object that is no plain value, tensor, module or optimizer."""
    kind = type(value)
    look = _LOOKS.get(kind)
    if look is None:
        look = _LOOKS[kind] = look_of(kind)
    found = look(value, names)
    found.is_moved = found.is_moved and not names.reads_state
    return found


def look_of(kind: type) -> Look:
    """What finds the parts of objects of a class: their content, and the attributes that a script has given them."""
    look = _content_of(kind)
    if look in _WITH_ATTRIBUTES or not (kind.__dictoffset__ or objects.slot_names(kind)):
        return look
    return lambda value, names: objects.add_own(value, names, look(value, names))


def is_read_by_content(kind: type) -> bool:
    """Whether the attributes in the `__dict__` of an object of a library are those that a script has assigned."""
    return _content_of(kind) not in _WITH_ATTRIBUTES


def _content_of(kind: type) -> Look:
    """What finds the content of objects of a class."""
    names = [f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__]
    if _BAR in names or names[0] == _WRITER or names[0].endswith(LOG_CLASSES):
        return _repeated
    for kinds, look in _BY_TYPE:
        if issubclass(kind, kinds):
            return look
    package = kind.__module__.partition(".")[0]
    if package == "numpy" and hasattr(kind, "tobytes"):
        return _plain(data.array)
    if package == "numpy" and any(base.__name__ == "dtype" for base in kind.__mro__):
        return _identity
    if kind.__module__.startswith("numpy.random"):
        return _content(data.numpy_generator)
    if "_multiprocessing.SemLock" in names:
        return _semaphore
    if f"{kind.__module__}.{kind.__name__}" in _STATELESS:
        return objects.callable_or_kind
    if package in _OURS:
        return objects.of_torch
    if kind.__name__ == "cython_function_or_method":
        return _builtin
    if is_users(kind.__module__):
        return objects.users
    return objects.iterator if issubclass(kind, Iterator) else objects.library


def _plain(look: Callable[[Any], Parts]) -> Look:
    """Parts, and the attributes that a subclass adds."""

    def parts(value: Any, names: NameFilter) -> Parts:
        found = look(value)
        if type(value).__module__ != "builtins":
            found.held = [*found.held, *objects.own_attributes(value, names)]
        return found

    _WITH_ATTRIBUTES.add(parts)
    return parts


def _content(look: Callable[[Any], Parts]) -> Look:
    return lambda value, names: look(value)


# -- functions and classes -------------------------------------------------------------------------


def _function(fn: types.FunctionType, names: NameFilter) -> Parts:
    code, users = fn.__code__, is_users(fn.__module__)
    of_torch = (fn.__module__ or "").partition(".")[0] in _OURS
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
    parts = pickled(getter)
    names.add_words(repr(getter))
    return parts


def _descriptor(value: Any, names: NameFilter) -> Parts:
    inner = [getattr(value, a, None) for a in _OF_DESCRIPTORS]
    return Parts(type(value), [Part(SAME, each) for each in inner if each is not None])


def _class(kind: type, names: NameFilter) -> Parts:
    held = class_parts(kind, names, constructed=True)
    if is_users(type(kind).__module__):
        held += class_parts(type(kind), names)
    if isinstance(kind, abc.ABCMeta) and is_users(kind.__module__):
        held.append(Part("registered", registered(kind)))
    if "__subclasses__" in names.names and is_users(kind.__module__):
        held.append(Part("subclasses", subclasses(kind)))
    return Parts(kind, held)


def subclasses(kind: type) -> tuple[type, ...]:
    """The classes that inherit a class directly."""
    return tuple(type.__subclasses__(kind))


def _cached(value: Any, names: NameFilter) -> Parts:
    """A function under `functools.cache`; of a function of the user, what it has cached."""
    held = [Part("__wrapped__", value.__wrapped__), *objects.own_attributes(value, names)]
    if not is_users(value.__module__):
        return Parts("cached", held)
    found = gc.get_referents(value)[1:]  # keys and results in their order, the table, the function
    *entries, table = found[: [each is value.__wrapped__ for each in found].index(True)]
    kinds = {type(each).__name__ for each in table.values()}
    if kinds == {"_lru_list_elem"}:
        entries = [each for each in entries if getattr(each, "__name__", "") not in kinds]
        held += [Part(f"cached {i}", each) for i, each in enumerate(entries)]
    else:
        held.append(Part("cached", table))
    return Parts("cached", held, is_loose=True)


def registered(kind: abc.ABCMeta) -> tuple[Any, ...]:
    """The classes that were registered as subclasses of an abstract class."""
    found = [reference() for reference in abc._get_dump(kind)[0]]  # type: ignore[attr-defined]
    return tuple(sorted((k for k in found if k is not None), key=lambda k: k.__qualname__))


def class_parts(kind: type, names: NameFilter, constructed: bool = False) -> list[Part]:
    """The attributes of a user's class that code may reach, along its MRO.

    constructed: whether code of the step may make an instance. Special methods, and methods that override one of a
    library's class, are called by others than the step.
    """
    own = [base for base in kind.__mro__ if is_users(base.__module__)]
    inherited = (
        {k for base in kind.__mro__ if base not in own for k in vars(base)} if own else set()
    )
    replaced = [
        Part(key, value, key, Held(base, key))
        for base in kind.__mro__
        if is_patchable(base)
        for key, value in list(vars(base).items())
        if type(value) is types.FunctionType and is_users(value.__module__)
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
    return issubclass(kind, (nn.Module, torch.optim.Optimizer)) and not is_users(kind.__module__)


def _is_called_by_others(key: str, value: Any, names: NameFilter, inherited: set[str]) -> bool:
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


# -- other objects -------------------------------------------------------------------------------------


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
    held = [] if logger is value else [Part("extra", value.extra)]
    held += [Part(k, getattr(logger, k, None)) for k in _OF_LOGGERS if k in names.names]
    if "hasHandlers" in names.names and isinstance(logger, logging.Logger):
        held.append(Part("hasHandlers", logging.Logger.hasHandlers(logger)))
    return Parts(fact, held)


def _lock(value: Any, names: NameFilter) -> Parts:
    is_asked = not _ASKING_A_LOCK.isdisjoint(names.names)
    # A recursive lock says only in its text whether it is held.
    return Parts((type(value), repr(value).startswith("<locked") if is_asked else None))


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
    return Parts(
        ("kind", type(value)), [Part("args", value.args), *objects.own_attributes(value, names)]
    )


_BY_TYPE: list[tuple[Any, Look]] = [
    (types.FunctionType, _function),
    (types.MethodType, method_parts),
    ((types.BuiltinFunctionType, types.MethodWrapperType), _builtin),
    (functools.partial, _partial),
    ((operator.attrgetter, operator.methodcaller), _getter),
    (
        (staticmethod, classmethod, property, functools.cached_property, functools.partialmethod),
        _descriptor,
    ),
    (type, _class),
    (types.ModuleType, _module),
    (enum.Enum, _plain(data.member)),
    (data.CONTAINERS, _plain(data.container)),
    (data.BUFFERS, _plain(data.buffer)),
    (data.C_DATA, _plain(data.c_data)),
    (random.Random, _content(data.random_generator)),
    (types.GeneratorType, data.suspended),
    (type(functools.cache(len)), _cached),
    (io.IOBase, _content(data.file)),
    ((queue.Queue, queue.SimpleQueue), data.waiting),
    (_DESCRIPTORS, _identity),
    (weakref.ReferenceType, _weak),
    (weakref.ProxyTypes, _proxy),
    (weakref.finalize, _finalizer),
    (contextvars.ContextVar, _variable),
    (type(os.environ), _environ),
    ((type({}.keys()), type({}.values()), type({}.items())), _view),
    ((type(threading.Lock()), type(threading.RLock())), _lock),
    ((logging.Logger, logging.LoggerAdapter), _logger),
    (GradScaler, objects.scaler),
    (LRScheduler, objects.scheduler),
    (BaseException, _error),
    (torch.Generator, objects.generator),
    ((argparse.Namespace, types.SimpleNamespace), objects.namespace),
    (data.VALUES, _plain(data.value_parts)),
]
_WITH_ATTRIBUTES |= {_function, _class, _module, _cached, _error, _proxy, _repeated}
