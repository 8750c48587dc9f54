"""The parts of data: values, containers, arrays, buffers, and state that is read only by changing it.

    container([1, x])             Parts((list, 2), [Part(0, 1), Part(1, x)])
    array(numpy.ones(3))          Parts((ndarray, "float64", (3,), bytes))
    random_generator(random)      its state; `is_moved`: code that draws from it changes it

Invariant: no method of a subclass of the user is called: containers are read by the methods of their base class.
"""

from __future__ import annotations

import array as arrays
import ctypes
import decimal
import enum
import gc
import io
import locale
import mmap
import numbers
import os
import pathlib
import queue
import random
import re
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from functionalize.walk.code_names import NameFilter
from functionalize.walk.fact_text import PLAIN
from functionalize.walk.parts import Held, Part, Parts

MAX_SEPARATE_FACTS = 64  # a container of plain values with more elements is one fact
_MAX_ELEMENTS = 100_000  # a container with more objects is opaque
_MAX_BYTES = 1 << 26  # a larger array is opaque
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
    if isinstance(value, slice):
        return Parts(kind, [Part(k, getattr(value, k)) for k in ("start", "stop", "step")])
    if isinstance(value, re.Pattern):
        return Parts((kind, value.pattern, value.flags))
    for base in (float, int, str, bytes, complex):
        if isinstance(value, base):  # a subclass may have another `__repr__`
            return Parts((kind, base.__repr__(value)))
    return Parts((kind, repr(value)))


def member(value: enum.Enum) -> Parts:
    """A member of an enumeration."""
    return Parts((type(value), str(value.name), repr(value._value_)))


def container(value: Any) -> Parts:
    """A container: its type, its size, its keys, its elements."""
    kind = type(value)
    is_table = isinstance(value, (dict, types.MappingProxyType))
    elements = _elements(value)
    size = len(elements)
    if size > MAX_SEPARATE_FACTS:
        entries = _entries(value) if is_table else []
        plain = [*elements, *entries]
        if set(map(type, plain)) <= BY_EQUALITY:
            is_set = isinstance(value, (set, frozenset))
            return Parts((kind, size, frozenset(elements) if is_set else tuple(plain)))
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
        if isinstance(value, defaultdict):
            held.append(Part("default_factory", value.default_factory))
        return Parts((kind, size, tuple(k if type(k) is str else type(k) for k in elements)), held)
    if isinstance(value, (list, tuple)):
        return Parts(
            (kind, size), [Part(i, v, f"+_{i}", Held(value, i)) for i, v in enumerate(elements)]
        )
    ordered = elements if isinstance(value, deque) else sorted(elements, key=_order)
    return Parts((kind, size), [Part(i, v, f"+_{i}") for i, v in enumerate(ordered)], is_loose=True)


def _elements(value: Any) -> list[Any]:
    bases: tuple[Any, ...] = (list, tuple, OrderedDict, dict, set, frozenset, deque)
    for base in bases:
        if isinstance(value, base):
            return list(base.__iter__(value))
    return list(value)


def _entries(table: Any) -> list[Any]:
    if isinstance(table, OrderedDict):  # it has an order of its own
        return list(OrderedDict.values(table))
    return list(dict.values(table)) if isinstance(table, dict) else list(table.values())


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
    """A generator of Python's random numbers."""
    return Parts(type(value), [Part("state", value.getstate())], is_moved=True)


def numpy_generator(value: Any) -> Parts:
    """A generator of numpy's random numbers, or the source of its bits."""
    bits = getattr(value, "bit_generator", None) or getattr(value, "_bit_generator", value)
    state = getattr(bits, "state", None)
    return Parts(type(value), [Part("state", state)], is_moved=True, is_opaque=state is None)


def suspended(value: types.GeneratorType[Any, Any, Any]) -> Parts:
    """A generator function's state: where it is suspended, and its variables."""
    frame = value.gi_frame
    if frame is None:
        return Parts((type(value), None), is_moved=True)
    held = [Part(k, v, k) for k, v in list(frame.f_locals.items())]
    return Parts((type(value), frame.f_lasti), held, is_loose=True, is_moved=True)


def file(value: Any) -> Parts:
    """A file, by its position; the standard streams have none that matters, see `recorder/effects.py`."""
    if value in (sys.stdout, sys.stderr):
        return Parts(type(value))
    try:
        at = value.closed or value.tell()
    except (OSError, ValueError, AttributeError):
        at = None
    contents = None
    for base in (io.BytesIO, io.StringIO):
        if isinstance(value, base) and not value.closed:
            contents = _digest(base.getvalue(value))  # type: ignore[arg-type]
    return Parts((type(value), at, contents), is_moved=True)


def waiting(value: Any) -> Parts:
    """A queue: its elements, or their number."""
    held = [] if isinstance(value, queue.SimpleQueue) else [Part("queue", list(value.queue))]
    return Parts((type(value), value.qsize()), held, is_loose=True, is_moved=True)


# -- the process -----------------------------------------------------------------------------------

# Libraries read functions of torch through its namespaces (`nn.ReLU` calls `F.relu`), where the walk does not look: so
# what stands there is compared with what stood there when this package was imported. Names that torch adds later, and
# what a recording puts there, are no facts.
MODULES: dict[str, dict[str, Any]] = {"torch": vars(torch), "torch.nn.functional": vars(F)}
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


# What stood in the namespaces at the import, without functions that others had put there.
_FIRST = {name: {k: v for k, v in s.items() if _is_torchs(v)} for name, s in _SPACES.items()}


def replaced() -> Iterator[Part]:
    """The functions in the namespaces of torch that are not torch's own, each under its full name."""
    for name, space in _SPACES.items():
        first = _FIRST[name]
        for key, value in list(space.items()):
            was = first.get(key, replaced)
            if was is value or (was is replaced and _is_torchs(value)) or not callable(value):
                continue
            if not str(getattr(value, "__module__", None)).startswith("functionalize"):
                yield Part(f"{name}.{key}", value, key)


def _decimals() -> Any:
    context = decimal.getcontext()
    return context.prec, context.rounding, context.Emin, context.Emax


def _of_numpy(name: str) -> Callable[[], Any]:
    return lambda: getattr(sys.modules["numpy"], name)() if "numpy" in sys.modules else None


def _cudnn() -> Any:
    flags = torch.backends.cudnn
    return flags.enabled, flags.benchmark, flags.deterministic, flags.allow_tf32


_SETTINGS: dict[str, Callable[[], Any]] = {
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
