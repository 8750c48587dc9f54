"""The parts of data: values, containers, arrays, buffers, and state that is read only by changing it.

    container([1, x])             Parts((list, 2), [Part(0, 1), Part(1, x)])
    array(numpy.ones(3))          Parts((ndarray, "float64", (3,), bytes))
    random_generator(random)      its state; `is_moved`: code that draws from it changes it

Invariant: no method of a subclass of the user is called: containers are read by the methods of their base class.
"""

from __future__ import annotations

import array as arrays
import builtins
import ctypes
import decimal
import enum
import gc
import io
import locale
import logging
import mmap
import numbers
import os
import pathlib
import queue
import random
import re
import sys
import threading
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import compress
from operator import is_not
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from functionalize._compat.autograd import saved_tensor_hooks
from functionalize._compat.dispatch import function_modes
from functionalize._compat.modules import global_hooks
from functionalize.util.packages import is_users
from functionalize.util.reading import is_a
from functionalize.walk.code_names import TEXT, NameFilter, globals_of
from functionalize.walk.fact_text import PLAIN
from functionalize.walk.parts import Held, Part, Parts

MAX_SEPARATE_FACTS = 64  # a container of plain values with more elements is one fact
_MAX_ELEMENTS = 100_000  # a container with more objects is opaque
_MAX_BYTES = 1 << 26  # a larger array is opaque
_ASKING_A_QUEUE = frozenset({"empty", "full", "queue", "unfinished_tasks"})
_TAKING = frozenset({"get", "get_nowait"})
_SHORT = 256  # bytes; of more, the hash is the fact
# Types of which equal values are interchangeable: 1.0 == 1 and -0.0 == 0.0 are not.
BY_EQUALITY = PLAIN - {bool, float, complex, torch.Size, range}
CONTAINERS = (list, tuple, dict, set, frozenset, deque, types.MappingProxyType)
VALUES = (numbers.Number, slice, pathlib.PurePath, re.Pattern, bytes, str)
BUFFERS = (bytearray, memoryview, arrays.array, mmap.mmap)
C_DATA = (ctypes._SimpleCData, ctypes.Array, ctypes.Structure, ctypes.Union)


def value_parts(value: Any) -> Parts:
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


def member(value: enum.Enum) -> Parts:
    """A member of an enumeration, and what it stands for."""
    return Parts((type(value), str(value._name_)), [Part("value", value._value_)])


@dataclass(frozen=True, slots=True)
class SetOrder:
    """The order in which code iterates over a set; a saved program has none, as texts have another elsewhere."""

    elements: tuple[Any, ...]

    def __repr__(self) -> str:
        return "in another order"


def container(value: Any) -> Parts:
    """A container: its type, its size, its keys, its elements."""
    kind = type(value)
    is_table = is_a(value, (dict, types.MappingProxyType))
    elements = _elements(value)
    size = len(elements)
    if size > MAX_SEPARATE_FACTS:
        entries = _entries(value) if is_table else []
        plain = [*elements, *entries]
        if set(map(type, plain)) <= BY_EQUALITY:
            is_set = is_a(value, (set, frozenset))
            if is_set:
                return Parts((kind, size, frozenset(elements), SetOrder(tuple(elements))))
            return Parts((kind, size, tuple(plain)))
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
    if is_a(value, (list, tuple)):
        return Parts(
            (kind, size), [Part(i, v, f"+_{i}", Held(value, i)) for i, v in enumerate(elements)]
        )
    is_set = not is_a(value, deque)
    order = (SetOrder(tuple(e for e in elements if type(e) in PLAIN)),) if is_set else ()
    ordered = sorted(elements, key=_order) if is_set else elements
    held = [Part(i, v, f"+_{i}") for i, v in enumerate(ordered)]
    return Parts((kind, size, *order), held, is_loose=True)


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


def array(value: Any) -> Parts:
    """An array or a number of numpy."""
    fact = (type(value), str(value.dtype), value.shape)
    if value.dtype.hasobject:
        return Parts(fact, [Part("elements", value.tolist())], is_loose=True)
    if value.nbytes > _MAX_BYTES:
        return Parts(fact, is_opaque=True)
    return Parts((*fact, _digest(value.tobytes())))


def buffer(value: Any) -> Parts:
    """An object of bytes."""
    view = memoryview(value)
    return Parts((type(value), view.nbytes, _digest(view.tobytes())))


def c_data(value: Any) -> Parts:
    """An object of ctypes: its bytes. What its pointers point to is not among them."""
    return Parts((type(value), _digest(bytes(memoryview(value).cast("B")))))


def _digest(data: bytes | str) -> Any:
    return data if len(data) < _SHORT else (len(data), hash(data))


# -- state that is read only by changing it --------------------------------------------------------


def process_generators() -> Iterator[tuple[str, Any]]:
    """The generators of `random` and of numpy: name and state."""
    yield "random", random.getstate()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        _, keys, *rest = numpy.random.get_state()
        yield "numpy.random", (keys.tobytes(), *rest)


def random_generator(value: random.Random) -> Parts:
    """A generator of Python's random numbers. One of the system has no state that can be read."""
    if is_a(value, random.SystemRandom):
        return Parts(type(value), is_opaque=True)
    return Parts(type(value), [Part("state", random.Random.getstate(value))], is_moved=True)


def numpy_generator(value: Any) -> Parts:
    """A generator of numpy's random numbers, or the source of its bits."""
    bits = getattr(value, "bit_generator", None) or getattr(value, "_bit_generator", value)
    state = getattr(bits, "state", None)
    return Parts(type(value), [Part("state", state)], is_moved=True, is_opaque=state is None)


def suspended(value: types.GeneratorType[Any, Any, Any], names: NameFilter) -> Parts:
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


def file(value: Any) -> Parts:
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


def waiting(value: Any, names: NameFilter) -> Parts:
    """A queue: its elements, or their number. Asking for its size, or an empty one for more, does not move it."""
    held = [] if is_a(value, queue.SimpleQueue) else [Part("queue", list(value.queue))]
    if is_a(value, queue.Queue):
        asked = ["unfinished_tasks"] if "unfinished_tasks" in names.names else []
        held += [Part(name, getattr(value, name)) for name in ("maxsize", *asked)]
    size = value.qsize()
    is_moved = _ASKING_A_QUEUE.isdisjoint(names.names) and (
        size > 0 or _TAKING.isdisjoint(names.names)
    )
    return Parts((type(value), size), held, is_loose=True, is_moved=is_moved)


# -- the process -----------------------------------------------------------------------------------

# Libraries read functions of torch through its namespaces (`nn.ReLU` calls `F.relu`), where the walk does not look: so
# what stands there is compared with what stood there when this package was imported. Names that torch adds later, and
# what a recording puts there, are no facts.
MODULES: dict[str, dict[str, Any]] = {"torch": vars(torch), "torch.nn.functional": vars(F)}
NAMESPACES = (*MODULES.values(), vars(builtins))
CLASSES: dict[str, type] = {
    "torch.Tensor": Tensor,
    "torch.nn.Module": nn.Module,
    "torch.optim.Optimizer": torch.optim.Optimizer,
}
_SPACES: dict[str, Mapping[str, Any]] = {**MODULES, **{k: vars(v) for k, v in CLASSES.items()}}
_TORCHS = ("torch", "functionalize", "typing")


def _is_torchs(value: Any) -> bool:
    module = getattr(value, "__module__", None)
    return type(value) is not types.FunctionType or str(module).partition(".")[0] in _TORCHS


_BY_DYNAMO = (
    "manual_seed",
)  # it replaces these for good when it is imported, as the first recording does
# What stood in the namespaces at the import, without functions that others had put there.
_FIRST = {
    name: {k: v for k, v in s.items() if _is_torchs(v) and k not in _BY_DYNAMO}
    for name, s in _SPACES.items()
}


# What other packages put there by themselves, and the value of the last line in an interactive session.
_FIRST_BUILTINS = dict(vars(builtins))


def replaced(names: NameFilter) -> Iterator[Part]:
    """What a script has put into Python's builtins and code names; functions in torch that are not torch's own."""
    for key, value in list(vars(builtins).items()):
        is_named = key in names.names and key != "_"
        is_ours = str(getattr(value, "__module__", None)).startswith("functionalize")
        if is_named and not is_ours and _FIRST_BUILTINS.get(key, replaced) is not value:
            yield Part(f"builtins.{key}", value, key)
    for name, space in _SPACES.items():
        first, keys, values = _FIRST[name], list(space), list(space.values())
        for key in compress(keys, map(is_not, values, map(first.get, keys))):
            value = space.get(key)
            if (key not in first and _is_torchs(value)) or not callable(value):
                continue
            if not str(getattr(value, "__module__", None)).startswith("functionalize"):
                yield Part(f"{name}.{key}", value, key)


def around(of_optimizers: bool) -> Iterator[Part]:
    """The function modes, the hooks on saved tensors and those on all modules or optimizers around the step."""
    for mode in function_modes():
        if not type(mode).__module__.startswith("functionalize"):
            yield Part(f"the function mode {type(mode).__name__}", mode)
    for i, hook in enumerate(saved_tensor_hooks()):
        yield Part(f"the hooks on saved tensors {i}", hook)
    for i, hook in enumerate(global_hooks(of_optimizers)):
        yield Part(f"the global hooks {i}", hook)


def _decimals() -> Any:
    context = decimal.getcontext()
    return context.prec, context.rounding, context.Emin, context.Emax


def _of_numpy(name: str) -> Callable[[], Any]:
    return lambda: getattr(sys.modules["numpy"], name)() if "numpy" in sys.modules else None


def _cudnn() -> Any:
    flags = torch.backends.cudnn
    return flags.enabled, flags.benchmark, flags.deterministic, flags.allow_tf32


def _loggers() -> Any:
    """The loggers that have a level of their own, or are disabled."""
    known = logging.root.manager.loggerDict.items()
    found = [(n, each) for n, each in known if isinstance(each, logging.Logger)]
    levels = [(n, each.level, each.disabled) for n, each in found if each.level or each.disabled]
    return logging.root.level, logging.root.manager.disable, tuple(levels)


def _environment() -> Any:
    return tuple(os.environ.items())


_SETTINGS: dict[str, Callable[[], Any]] = {
    **dict.fromkeys(("getenv", "getenvb", "environb", "expandvars", "expanduser"), _environment),
    "getLogger": _loggers,
    "current_thread": lambda: threading.current_thread().name,
    "active_count": threading.active_count,
    TEXT: _of_numpy("get_printoptions"),
    "Decimal": _decimals,
    "getcontext": _decimals,
    "getcwd": os.getcwd,
    "cwd": os.getcwd,
    "isenabled": gc.isenabled,
    "getrecursionlimit": sys.getrecursionlimit,
    "getlocale": locale.getlocale,
    "geterr": _of_numpy("geterr"),
    "get_printoptions": _of_numpy("get_printoptions"),
    "get_float32_matmul_precision": torch.get_float32_matmul_precision,
    "cudnn": _cudnn,
}


def settings(names: NameFilter) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Name and reader of each setting that code may read."""
    for name in sorted(_SETTINGS.keys() & names.names):
        yield name, _SETTINGS[name]
