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

import argparse
import contextvars
import enum
import functools
import io
import logging
import os
import queue
import random
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler

from functionalize.util.code_objects import is_generated
from functionalize.util.own_values import OWN_VALUES
from functionalize.util.packages import is_standard, is_users
from functionalize.walk import data_parts as data
from functionalize.walk.bound_methods import method_parts
from functionalize.walk.code_names import EQUALITY, TEXT, NameFilter, globals_of
from functionalize.walk.fact_text import PLAIN
from functionalize.walk.parts import SAME, Held, Is, Part, Parts, attribute, pickled

_DESCRIPTORS = (
    types.WrapperDescriptorType, types.MethodDescriptorType, types.ClassMethodDescriptorType,
    types.GetSetDescriptorType, types.MemberDescriptorType, types.CodeType, types.GenericAlias,
)  # fmt: skip
_STATELESS = frozenset(
    {"_thread.lock", "_thread.RLock", "_multiprocessing.SemLock", "builtins.object", "builtins.NoneType"}
    | {"builtins.ellipsis", "builtins.NotImplementedType", "types.UnionType", "numpy.ufunc", "typing.TypeVar"}
    | {"numpy._ArrayFunctionDispatcher", "builtins.traceback", "builtins.frame"}
)  # fmt: skip
# Of torch, the objects of these modules are state of a script.
_STATE_OF_TORCH = ("torch.utils.data", "torch.optim.", "torch.amp.", "torch.autograd.grad_mode")
_OURS = ("torch", "functionalize")
_CONSTRUCTORS = frozenset({"__new__", "__init__", "__post_init__", "__init_subclass__"})
_NO_STATE = frozenset(
    {"__dict__", "__weakref__", "__doc__", "__module__", "__class__", "__slots__"}
)
_GENERATED = {
    "__eq__": EQUALITY,
    "__repr__": TEXT,
}  # methods that dataclasses generate, and what calls them

# A step uses objects of these classes by calls that a replay makes again: see calls/progress.py.
_BAR, _WRITER = "tqdm.std.tqdm", "torch.utils.tensorboard.writer.SummaryWriter"

Look = Callable[[Any, NameFilter], Parts]
_LOOKS: weakref.WeakKeyDictionary[type, Look] = weakref.WeakKeyDictionary()


def parts_of(value: Any, names: NameFilter) -> Parts:
    """The parts of an object that is no plain value, tensor, module or optimizer."""
    kind = type(value)
    look = _LOOKS.get(kind)
    if look is None:
        look = _LOOKS[kind] = _look_of(kind)
    return look(value, names)


def _look_of(kind: type) -> Look:
    for kinds, look in _BY_TYPE:
        if issubclass(kind, kinds):
            return look
    names = [f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__]
    if _BAR in names or names[0] == _WRITER:
        return lambda value, names: Parts(Is(value))
    package = kind.__module__.partition(".")[0]
    if package == "numpy" and hasattr(kind, "tobytes"):
        return _plain(data.array)
    if package == "numpy" and any(base.__name__ == "dtype" for base in kind.__mro__):
        return _identity
    if kind.__module__.startswith("numpy.random"):
        return _plain(data.numpy_generator)
    if f"{kind.__module__}.{kind.__name__}" in _STATELESS:
        return _callable_or_kind
    if package in _OURS:
        return _attributes if kind.__module__.startswith(_STATE_OF_TORCH) else _of_torch
    if kind.__name__ == "cython_function_or_method":
        return _builtin
    if is_users(kind.__module__):
        return _users
    return _iterator if issubclass(kind, Iterator) else _attributes


def _plain(look: Callable[[Any], Parts]) -> Look:
    """Parts, and the attributes that a subclass adds."""

    def parts(value: Any, names: NameFilter) -> Parts:
        found = look(value)
        if type(value).__module__ != "builtins":
            found.held = [*found.held, *_own_attributes(value, names)]
        return found

    return parts


# -- functions and classes -------------------------------------------------------------------------


def _function(fn: types.FunctionType, names: NameFilter) -> Parts:
    code, users = fn.__code__, is_users(fn.__module__)
    of_torch = (fn.__module__ or "").partition(".")[0] in _OURS
    held: list[Part] = []
    if users:
        every = names.is_dynamic and "globals" in code.co_names
        wanted = (
            [k for k in fn.__globals__ if not k.startswith("__")] if every else globals_of(code)
        )
        held += [attribute(fn.__globals__, name) for name in wanted if name in fn.__globals__]
    for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
        try:
            content = cell.cell_contents
        except ValueError:  # an empty cell
            continue
        if not of_torch or type(content) in (types.FunctionType, types.BuiltinFunctionType):
            held.append(Part(name, content, name, Held(cell, None)))
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


def _builtin(function: Any, names: NameFilter) -> Parts:
    owner = getattr(function, "__self__", None)
    if owner is None or issubclass(type(owner), types.ModuleType):
        return Parts(function)
    return Parts(function.__name__, [Part("self", owner)])


def _partial(partial: functools.partial[Any], names: NameFilter) -> Parts:
    held = [Part("func", partial.func), Part("args", partial.args)]
    return Parts("partial", [*held, Part("keywords", partial.keywords)])


def _descriptor(value: Any, names: NameFilter) -> Parts:
    inner = [getattr(value, a, None) for a in ("__func__", "fget", "fset", "fdel", "func")]
    return Parts(type(value), [Part(SAME, each) for each in inner if each is not None])


def _class(kind: type, names: NameFilter) -> Parts:
    held = class_parts(kind, names, constructed=True)
    if is_users(type(kind).__module__):
        held += class_parts(type(kind), names)
    return Parts(kind, held)


def class_parts(kind: type, names: NameFilter, constructed: bool = False) -> list[Part]:
    """The attributes of a user's class that code may reach, along its MRO.

    constructed: whether code of the step may make an instance. Special methods, and methods that override one of a
    library's class, are called by others than the step.
    """
    own = [base for base in kind.__mro__ if is_users(base.__module__)]
    inherited = (
        {k for base in kind.__mro__ if base not in own for k in vars(base)} if own else set()
    )
    return [
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
    return Parts(Is(module), [attribute(table, k) for k in keys if not k.startswith("__")])


# -- objects ---------------------------------------------------------------------------------------


def _own_attributes(value: Any, names: NameFilter) -> list[Part]:
    """The attributes of an object, with those in slots: of an object of the user, those that code names."""
    every = not is_users(type(value).__module__)
    table = _table(value) or {}
    keys = [key for key in table if key != OWN_VALUES]
    held = [attribute(table, key, every or key in names) for key in keys]
    return [*held, *_slots(value, names, every)]


def _table(value: Any) -> dict[str, Any] | None:
    """The `__dict__` of an object, read past a `__getattribute__` of its class; None without one."""
    try:
        table = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return table if isinstance(table, dict) else None


def _slots(value: Any, names: NameFilter, every: bool) -> Iterator[Part]:
    for base in type(value).__mro__[:-1]:
        for name, slot in list(vars(base).items()):
            if isinstance(slot, types.MemberDescriptorType) and "__slots__" in vars(base):
                try:
                    yield Part(
                        name, slot.__get__(value), name, Held(value, name), every or name in names
                    )
                except AttributeError:
                    continue


def _users(value: Any, names: NameFilter) -> Parts:
    kind, held = type(value), _own_attributes(value, names)
    known = frozenset(part.key for part in held if part.is_named)
    table = _table(value)
    return Parts(("object", kind, known), held, is_opaque=_is_native(kind), attributes=table)


def _attributes(value: Any, names: NameFilter) -> Parts:
    """An object of a library: every attribute; without attributes, what pickling would write."""
    kind, table = type(value), _table(value)
    held = _own_attributes(value, names)
    wrapped = _wrapped(value)
    if wrapped is not None and "__wrapped__" not in (table or {}):
        held.append(Part("__wrapped__", wrapped))
    if held or not _is_native(kind):
        known = frozenset(part.key for part in held)
        return Parts(("object", kind, known), held, attributes=table)
    if is_standard(kind.__module__.partition(".")[0]):
        return pickled(value)
    return Parts(Is(value), is_opaque=True)


def _iterator(value: Any, names: NameFilter) -> Parts:
    parts = _attributes(value, names) if _table(value) is not None else pickled(value)
    parts.is_moved = True
    return parts


def _of_torch(value: Any, names: NameFilter) -> Parts:
    wrapped = _wrapped(value)
    if wrapped is not None:
        return Parts(("kind", type(value)), [Part("__wrapped__", wrapped)])
    return _callable_or_kind(value, names)


def _callable_or_kind(value: Any, names: NameFilter) -> Parts:
    return Parts(Is(value) if callable(value) else ("kind", type(value)))


def _wrapped(value: Any) -> Any:
    """The function that a decorator wrapped (`__wrapped__`), or None. Some attributes raise (`torch.classes`)."""
    try:
        return getattr(value, "__wrapped__", None)
    except Exception:
        return None


def _is_native(kind: type) -> bool:
    """Whether C code keeps state in the instances: they are larger than slots, `__dict__` and weak references need."""
    slots = sum(
        isinstance(each, types.MemberDescriptorType)
        for base in kind.__mro__
        if "__slots__" in vars(base)
        for each in vars(base).values()
    )
    return kind.__basicsize__ > object.__basicsize__ + 8 * (slots + 2) or kind.__itemsize__ > 0


def _identity(value: Any, names: NameFilter) -> Parts:
    return Parts(value)


def _namespace(value: Any, names: NameFilter) -> Parts:
    table = vars(value)
    held = [attribute(table, key, key in names) for key in list(table)]
    known = frozenset(part.key for part in held if part.is_named)
    return Parts(("object", type(value), known), held, attributes=table)


def _weak(value: Any, names: NameFilter) -> Parts:
    return Parts("weak reference", [Part(SAME, value())])


def _proxy(value: Any, names: NameFilter) -> Parts:
    """What a weak proxy stands for. A dead one raises `ReferenceError`, in whichever way it is used."""
    table, kind = value.__dict__, value.__class__
    held = [attribute(table, key, key in names) for key in list(table)]
    known = frozenset(part.key for part in held if part.is_named)
    return Parts(("object", kind, known), [*held, *class_parts(kind, names)])


def _variable(value: contextvars.ContextVar[Any], names: NameFilter) -> Parts:
    return Parts(("kind", type(value)), [Part("value", value.get(None))])


def _environ(value: Any, names: NameFilter) -> Parts:
    return Parts(("kind", type(value)), [Part(SAME, dict(value))])


def _logger(value: Any, names: NameFilter) -> Parts:
    logger = value if isinstance(value, logging.Logger) else value.logger
    level = logger.getEffectiveLevel() if isinstance(logger, logging.Logger) else 0
    return Parts(("logger", getattr(logger, "name", ""), level, logging.root.manager.disable))


def _error(value: BaseException, names: NameFilter) -> Parts:
    return Parts(("kind", type(value)), [Part("args", value.args), *_own_attributes(value, names)])


def _scaler(value: GradScaler, names: NameFilter) -> Parts:
    """Its dict by optimizer is rebuilt in every step."""
    table = vars(value)
    kept = [k for k, v in table.items() if isinstance(v, torch.Tensor) or type(v) in PLAIN]
    return Parts(("kind", type(value)), [Part(k, table[k], f"+{k}", Held(table, k)) for k in kept])


def _scheduler(value: LRScheduler, names: NameFilter) -> Parts:
    """A scheduler: this very one. What a step reads of it is noted while it is recorded: see calls/schedulers.py."""
    table = _table(value) or {}
    held = [attribute(table, key, False) for key, each in table.items() if not _is_plain(each)]
    return Parts(Is(value), held)


def _is_plain(value: Any) -> bool:
    return type(value) in PLAIN or (
        type(value) is list and all(type(each) in PLAIN for each in value)
    )


_BY_TYPE: list[tuple[Any, Look]] = [
    (types.FunctionType, _function),
    (types.MethodType, method_parts),
    ((types.BuiltinFunctionType, types.MethodWrapperType), _builtin),
    (functools.partial, _partial),
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
    (random.Random, _plain(data.random_generator)),
    (types.GeneratorType, _plain(data.suspended)),
    (io.IOBase, _plain(data.file)),
    ((queue.Queue, queue.SimpleQueue), lambda value, names: data.waiting(value)),
    (_DESCRIPTORS, _identity),
    (weakref.ReferenceType, _weak),
    (weakref.ProxyTypes, _proxy),
    (contextvars.ContextVar, _variable),
    (type(os.environ), _environ),
    ((logging.Logger, logging.LoggerAdapter), _logger),
    (GradScaler, _scaler),
    (LRScheduler, _scheduler),
    (BaseException, _error),
    ((argparse.Namespace, types.SimpleNamespace), _namespace),
    (data.VALUES, _plain(data.value_parts)),
]
