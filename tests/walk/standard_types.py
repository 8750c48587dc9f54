"""What the walk does with every type of the modules of the standard library in which scripts keep state.

    python -m tests.walk.standard_types            prints the table, and the changes that no walk notices
    python -m tests.walk.standard_types --write    writes it into docs/standard_types.md

Every public class of `MODULES`, and what their public factories make (`threading.Lock`, `multiprocessing.Event`), is
made without arguments or by a recipe, and changed: an attribute is added, each plain attribute gets another value, and
each method of `CHANGES` that it has is called. A step that names the object and what is changed decides:

- guarded: every change is another fact, which replays compare;
- moved: some changes are state that code reads by changing it, so that a recording compares it before and after;
- no state: the object takes no change;
- refused: it is opaque, so that a step that names it is refused;
- no object: none is made here, with the reason (`NOT_MADE`).

Invariant: no change waits (each has non-blocking arguments, and an alarm), and none touches state of the process.
"""

from __future__ import annotations

import array
import collections
import concurrent.futures
import contextlib
import contextvars
import ctypes
import dataclasses
import datetime
import enum
import functools
import gc
import importlib
import inspect
import io
import itertools
import logging
import multiprocessing
import queue
import random
import re
import signal
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

from functionalize.walk.walker import PythonState, walked, walked_again
from tests.pages import Part

PART = Part("standard_types.md", "types", "tests.walk.standard_types")
MODULES = (
    *("collections", "functools", "queue", "threading", "multiprocessing", "weakref"),
    *("contextvars", "types", "io", "logging", "random", "decimal", "fractions", "datetime"),
    *("re", "array", "ctypes", "enum", "dataclasses", "concurrent.futures"),
)
_SECONDS = 5.0  # a change that takes longer waits for something


class _Thing:
    def method(self) -> None: ...


THING = _Thing()
_FORK = multiprocessing.get_context("fork")


class _Structure(ctypes.Structure):
    _fields_ = (("value", ctypes.c_double),)


class _Union(ctypes.Union):
    _fields_ = (("value", ctypes.c_double),)


class _Big(ctypes.BigEndianStructure):
    _fields_ = (("value", ctypes.c_double),)


class _Little(ctypes.LittleEndianStructure):
    _fields_ = (("value", ctypes.c_double),)


class _BigUnion(ctypes.BigEndianUnion):
    _fields_ = (("value", ctypes.c_int),)


class _LittleUnion(ctypes.LittleEndianUnion):
    _fields_ = (("value", ctypes.c_int),)


class _Color(enum.Enum):
    RED = 1


class _Plain(int, enum.ReprEnum):
    RED = 1


class _Text(enum.StrEnum):
    RED = "red"


class _Flags(enum.Flag):
    RED = 1


class _IntFlags(enum.IntFlag):
    RED = 1


class _Ints(enum.IntEnum):
    RED = 1


class _Record:
    value: int = dataclasses.field(default=1)


def _numbers() -> Iterator[int]:
    yield 1
    yield 2


async def _coroutine() -> None: ...


async def _asynchronous() -> Any:
    yield 1


def _closed(coroutine: Any) -> Any:
    coroutine.close()
    return coroutine


def _called(function: Any) -> Any:
    function()
    return function


def _set(event: Any) -> Any:
    event.set()
    return event


def _kept(value: Any) -> Any:
    _ALIVE.append(value)
    return value


_ALIVE: list[Any] = []  # what recipes refer to weakly


def _traceback() -> Any:
    try:
        raise ValueError
    except ValueError as error:
        return error.__traceback__


# By module and public name: what makes an object, where the class has no constructor without arguments.
def _filled(table: Any) -> Any:
    table["RED"] = 1
    return table


RECIPES: dict[str, Callable[[], Any]] = {
    "collections.ChainMap": lambda: collections.ChainMap({"b": 1}),
    "collections.Counter": lambda: collections.Counter("abb"),
    "collections.OrderedDict": lambda: collections.OrderedDict(a=1, b=2),
    "collections.UserDict": lambda: collections.UserDict(b=1),
    "collections.UserList": lambda: collections.UserList([1]),
    "collections.defaultdict": lambda: collections.defaultdict(int, b=1),
    "collections.deque": lambda: collections.deque([1]),
    "collections.UserString": lambda: collections.UserString("a"),
    "collections.namedtuple": lambda: collections.namedtuple("Pair", "a b")(1, 2),
    "functools.partial": lambda: functools.partial(int),
    "functools.partialmethod": lambda: functools.partialmethod(int),
    "functools.cached_property": lambda: functools.cached_property(len),
    "functools.singledispatch": lambda: functools.singledispatch(lambda x: x),
    "functools.singledispatchmethod": lambda: functools.singledispatchmethod(lambda s: s),
    "functools.cache": lambda: _called(functools.cache(lambda: 1)),
    "functools.lru_cache": lambda: _called(functools.lru_cache(lambda: 1)),
    "functools.cmp_to_key": lambda: functools.cmp_to_key(lambda a, b: 0)(1),
    "queue.Queue": lambda: queue.Queue(3),
    "threading.Event": lambda: _set(threading.Event()),
    "multiprocessing.Event": lambda: _set(_FORK.Event()),
    "threading.Barrier": lambda: threading.Barrier(1),
    "threading.Timer": lambda: threading.Timer(1, int),
    "threading.ExceptHookArgs": lambda: threading.ExceptHookArgs((ValueError, None, None, None)),
    "multiprocessing.Barrier": lambda: _FORK.Barrier(1),
    "multiprocessing.Value": lambda: _FORK.Value("d", 1.0),
    "multiprocessing.Array": lambda: _FORK.Array("d", [1.0]),
    "multiprocessing.RawValue": lambda: _FORK.RawValue("d", 1.0),
    "multiprocessing.RawArray": lambda: _FORK.RawArray("d", [1.0]),
    "multiprocessing.Pipe": lambda: _FORK.Pipe()[0],
    "weakref.ref": lambda: weakref.ref(THING),
    "weakref.ReferenceType": lambda: weakref.ref(THING),
    "weakref.WeakMethod": lambda: weakref.WeakMethod(THING.method),
    "weakref.proxy": lambda: weakref.proxy(_kept(_Thing())),
    "weakref.ProxyType": lambda: weakref.proxy(_kept(_Thing())),
    "weakref.CallableProxyType": lambda: weakref.proxy(_kept(lambda: 1)),
    "weakref.finalize": lambda: weakref.finalize(_kept(_Thing()), int),
    "weakref.WeakKeyDictionary": lambda: weakref.WeakKeyDictionary({_Thing: 1}),
    "weakref.WeakValueDictionary": lambda: weakref.WeakValueDictionary({1: _Thing}),
    "weakref.WeakSet": lambda: weakref.WeakSet([_Thing]),
    "contextvars.ContextVar": lambda: contextvars.ContextVar("v"),
    "contextvars.Token": lambda: contextvars.ContextVar("v").set(1),
    "types.FunctionType": lambda: lambda: 1,
    "types.LambdaType": lambda: lambda: 1,
    "types.GeneratorType": _numbers,
    "types.CoroutineType": lambda: _closed(_coroutine()),
    "types.AsyncGeneratorType": _asynchronous,
    "types.MethodType": lambda: THING.method,
    "types.BuiltinFunctionType": lambda: len,
    "types.BuiltinMethodType": lambda: [].append,
    "types.WrapperDescriptorType": lambda: object.__init__,
    "types.MethodWrapperType": lambda: object().__str__,
    "types.MethodDescriptorType": lambda: str.join,
    "types.ClassMethodDescriptorType": lambda: dict.__dict__["fromkeys"],
    "types.GetSetDescriptorType": lambda: types.FunctionType.__code__,
    "types.MemberDescriptorType": lambda: types.FunctionType.__globals__,
    "types.CodeType": lambda: _numbers.__code__,
    "types.FrameType": sys._getframe,
    "types.TracebackType": _traceback,
    "types.ModuleType": lambda: types.ModuleType("made"),
    "types.MappingProxyType": lambda: types.MappingProxyType({"a": 1}),
    "types.CellType": lambda: types.CellType(1),
    "types.GenericAlias": lambda: list[int],
    "types.UnionType": lambda: int | str,
    "types.EllipsisType": lambda: ...,
    "io.FileIO": lambda: io.FileIO(__file__),
    "io.open": functools.partial(io.open, __file__, encoding="utf-8"),
    "io.TextIOWrapper": lambda: io.TextIOWrapper(io.BytesIO(b"abc")),
    "io.BufferedReader": lambda: io.BufferedReader(io.BytesIO(b"abc")),
    "io.BufferedWriter": lambda: io.BufferedWriter(io.BytesIO(b"abc")),
    "io.BufferedRandom": lambda: io.BufferedRandom(io.BytesIO(b"abc")),
    "io.BufferedRWPair": lambda: io.BufferedRWPair(io.BytesIO(b"abc"), io.BytesIO()),
    "io.BytesIO": lambda: io.BytesIO(b"abc"),
    "io.StringIO": lambda: io.StringIO("abc"),
    "io.IncrementalNewlineDecoder": lambda: io.IncrementalNewlineDecoder(None, True),
    "logging.Logger": lambda: logging.Logger("made"),
    "logging.LoggerAdapter": lambda: logging.LoggerAdapter(logging.Logger("made"), {}),
    "logging.LogRecord": lambda: logging.LogRecord("made", 10, "file", 1, "text", (), None),
    "logging.StreamHandler": lambda: logging.StreamHandler(io.StringIO()),
    "logging.FileHandler": lambda: logging.FileHandler("made.log", delay=True),
    "random.Random": lambda: random.Random(1),
    "decimal.DecimalTuple": lambda: importlib.import_module("decimal").Decimal(1).as_tuple(),
    "datetime.date": lambda: datetime.date(2020, 1, 1),
    "datetime.datetime": lambda: datetime.datetime(2020, 1, 1),
    "datetime.timezone": lambda: datetime.UTC,
    "re.Pattern": lambda: re.compile("a"),
    "re.Match": lambda: re.match("a", "a"),
    "re.error": lambda: re.error("made"),
    "re.RegexFlag": lambda: re.RegexFlag.IGNORECASE,
    "array.array": lambda: array.array("d", [1.0]),
    "array.ArrayType": lambda: array.array("d", [1.0]),
    "ctypes.Array": lambda: (ctypes.c_double * 2)(),
    "ctypes.ARRAY": lambda: (ctypes.c_double * 2)(),
    "ctypes.POINTER": lambda: ctypes.pointer(ctypes.c_int(1)),
    "ctypes.Structure": _Structure,
    "ctypes.Union": _Union,
    "ctypes.BigEndianStructure": _Big,
    "ctypes.LittleEndianStructure": _Little,
    "ctypes.BigEndianUnion": _BigUnion,
    "ctypes.LittleEndianUnion": _LittleUnion,
    "ctypes.CDLL": lambda: ctypes.CDLL(None),
    "ctypes.PyDLL": lambda: ctypes.PyDLL(None),
    "ctypes.LibraryLoader": lambda: ctypes.LibraryLoader(ctypes.CDLL),
    "ctypes.CFUNCTYPE": lambda: ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 1),
    "ctypes.PYFUNCTYPE": lambda: ctypes.PYFUNCTYPE(ctypes.c_int)(lambda: 1),
    "enum.Enum": lambda: _Color.RED,
    "enum.ReprEnum": lambda: _Plain.RED,
    "enum.StrEnum": lambda: _Text.RED,
    "enum.Flag": lambda: _Flags.RED,
    "enum.IntFlag": lambda: _IntFlags.RED,
    "enum.IntEnum": lambda: _Ints.RED,
    "enum.FlagBoundary": lambda: enum.FlagBoundary.KEEP,
    "enum.EnumCheck": lambda: enum.EnumCheck.UNIQUE,
    "enum.EnumDict": lambda: _filled(enum.EnumDict()),  # type: ignore[attr-defined]
    "enum.member": lambda: enum.member(1),
    "enum.nonmember": lambda: enum.nonmember(1),
    "enum.verify": lambda: enum.verify(enum.EnumCheck.UNIQUE),
    "dataclasses.Field": lambda: dataclasses.field(default=1),
    "dataclasses.InitVar": lambda: dataclasses.InitVar(int),
    "dataclasses.dataclass": lambda: dataclasses.dataclass(
        type("Record", (_Record,), {"__annotations__": {"value": int}, "value": 1})
    )(),
    "concurrent.futures.ThreadPoolExecutor": lambda: concurrent.futures.ThreadPoolExecutor(1),
    "concurrent.futures.ProcessPoolExecutor": lambda: concurrent.futures.ProcessPoolExecutor(
        1, mp_context=_FORK
    ),
}
# Public names of which no object is made.
NOT_MADE: dict[str, str] = {
    "multiprocessing.Manager": "it starts a process",
    "multiprocessing.Pool": "it starts processes",
    "types.CapsuleType": "only C code makes one",
    "ctypes.SetPointerType": "a function",
    "concurrent.futures.Executor": "abstract",
}

# What changes an object: the name of a method, and arguments with which it does not wait.
CHANGES: tuple[tuple[str, tuple[Any, ...]], ...] = (
    *(("append", (7,)), ("append", ("x",)), ("appendleft", (7,)), ("add", (7,)), ("set", ())),
    *(("add", (THING,)), ("update", ({"a": 7},)), ("update", ({7},)), ("subtract", ({"a": 7},))),
    *(("extend", ([7.0],)), ("insert", (0, 7.0)), ("pop", ()), ("popleft", ()), ("clear", ())),
    *(("__setitem__", (0, 5.0)), ("__setitem__", ("a", 7)), ("__setitem__", ("a", THING))),
    *(("__setitem__", (THING, 7)), ("put_nowait", (7,)), ("set", (7,)), ("set_result", (7,))),
    *(("cancel", ()), ("abort", ()), ("acquire", (False,)), ("detach", ()), ("close", ())),
    *(("write", ("x",)), ("write", (b"x",)), ("read", (1,)), ("seek", (1,)), ("truncate", (1,))),
    *(("seed", (7,)), ("random", ()), ("__next__", ()), ("send", (None,))),
    *(("setLevel", (10,)), ("setFormatter", (logging.Formatter("%(message)s"),))),
    *(("addFilter", (logging.Filter("x"),)), ("addHandler", (logging.NullHandler(),))),
    *(("move_to_end", ("a",)), ("register", (int, len)), ("cache_clear", ()), ("decode", ("\r",))),
)
# What a step reads that sees such a change, where it is not the method itself.
READS = {"addHandler": "handlers", "addFilter": "filters", "detach": "alive"}
# Names of attributes that code assigns; the values to try.
_NUMBERS = (7, 7.5, "other", b"7", True, False)
# Of an attribute that is no plain value.
ASSIGNED = ("cell_contents", "contents", "value", "args", "default", "fn", "function", "target")
# By name and change: what succeeds and leaves the object as it is.
UNCHANGED = {
    ("threading.Event", "set()"): "it is set",
    ("multiprocessing.Event", "set()"): "it is set",
}
# What changes an object and no walk notices, with the reason. `docs/limits.md` says so too.
KNOWN_GAPS = {
    ("types.FrameType", "__setattr__('f_trace_lines', False)"): "a setting of a debugger",
    ("types.FrameType", "__setattr__('f_trace_opcodes', True)"): "a setting of a debugger",
}


@dataclass
class Row:
    """A public name, what the walk does with its objects, and the changes that it does not notice."""

    module: str
    name: str
    verdict: str
    unnoticed: list[str] = field(default_factory=list)


def public_names(module: str) -> Iterator[tuple[str, Any]]:
    """(name, class or factory) for each public class, and each public function with a recipe or a class's name."""
    space = importlib.import_module(module)
    for name in sorted(getattr(space, "__all__", None) or dir(space)):
        value = getattr(space, name, None)
        if name.startswith("_") or isinstance(value, types.ModuleType):
            continue
        owner = getattr(value, "__module__", None) or ""
        if isinstance(value, type):
            is_imported = not hasattr(space, "__all__") and owner.strip("_") != module
            if not is_imported or module in ("ctypes", "decimal", "array"):
                yield name, value
        elif f"{module}.{name}" in RECIPES or (
            callable(value) and name[:1].isupper() and not name.isupper()
        ):
            yield name, value


def _late(signum: int, frame: Any) -> NoReturn:
    raise TimeoutError("the change waits")


@contextlib.contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, _late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _reader(value: Any, name: str) -> Callable[[], Any]:
    """A step that names the object, and an attribute of it."""
    space = {"value": value, "__name__": "made_here"}
    exec(f"def step():\n    value.{name}\n", space)
    return space["step"]  # type: ignore[return-value]


def noticed(value: Any, name: str, change: Callable[[], Any]) -> str:
    """What a walk that reads `name` sees of a change: "guarded", "moved", "refused" (by it) or "nothing".

    Raises what `change` raises.
    """
    step = _reader(value, name)
    before = walked(step)
    if _is_refused(before):
        change()
        return "refused"
    change()
    after = walked_again(step, (), before, is_replay=False)
    if before.facts != after.facts:
        return "guarded"
    return "nothing" if before.moving == after.moving else "moved"


def _is_refused(state: PythonState) -> bool:
    return any(text.startswith("`value") for text in state.opaque)


def changes(value: Any) -> Iterator[tuple[str, str, tuple[Any, ...]]]:
    """(what a step reads, the method that changes it, its arguments)."""
    yield "k", "__setattr__", ("k", 7)
    for name, args in CHANGES:
        if callable(inspect.getattr_static(type(value), name, None)) or hasattr(type(value), name):
            yield READS.get(name, name), name, args
    for name in sorted(dir(value)):
        if name.startswith("_"):
            continue
        try:
            now = getattr(value, name)
        except Exception:
            continue
        if name in ASSIGNED:
            yield name, "__setattr__", (name, ctypes.c_int(7))
        if type(now) in map(type, _NUMBERS) or name in ASSIGNED:
            for other in _NUMBERS:
                if type(other) is type(now) and other != now:
                    yield name, "__setattr__", (name, other)


def verdict(module: str, name: str, kind: Any) -> Row:
    """What the walk does with the objects of a public name."""
    full = f"{module}.{name}"
    make = RECIPES.get(full, kind)
    if full in NOT_MADE:
        return Row(module, name, f"no object: {NOT_MADE[full]}")
    if isinstance(kind, type) and issubclass(kind, type):
        return Row(module, name, "no object: its objects are classes")
    try:
        first = make()
    except Exception as error:
        return Row(module, name, f"not made: {type(error).__name__}: {error}")
    if _is_refused(walked(_reader(first, "k"))):
        return Row(module, name, "refused")
    seen, unnoticed = set[str](), list[str]()
    for read, method, args in list(changes(first)):
        value = make()
        text = text_of(method, args)
        try:
            with _at_most(_SECONDS):
                found = noticed(value, read, functools.partial(getattr(value, method), *args))
        except TimeoutError:
            unnoticed.append(f"{text} waits")
        except Exception:  # it takes no such change
            continue
        else:
            seen.add(found)
            if found == "nothing" and (full, text) not in UNCHANGED | KNOWN_GAPS:
                unnoticed.append(text)
    for each in ("refused", "moved", "guarded"):
        if each in seen:
            return Row(module, name, each, unnoticed)
    return Row(module, name, "no state", unnoticed)


def text_of(method: str, args: tuple[Any, ...]) -> str:
    """A change, for messages: `set_result(7)`."""
    return f"{method}({', '.join(map(_text, args))})"


def _text(value: Any) -> str:
    return repr(value) if type(value) in map(type, (*_NUMBERS, None)) else type(value).__name__


@functools.cache
def rows(module: str) -> list[Row]:
    """What `verdict` says of each public name of a module."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [verdict(module, name, kind) for name, kind in public_names(module)]
        gc.collect()  # files that are not closed warn here
    return found


COLUMNS = ("guarded", "moved", "no state", "refused", "no object")


def table() -> str:
    """The table for the page."""
    lines = [f"| module | {' | '.join(COLUMNS)} |", f"|{' --- |' * (len(COLUMNS) + 1)}"]
    for module in MODULES:
        found = rows(module)
        cells = [
            ", ".join(f"`{row.name}`" for row in found if row.verdict.partition(":")[0] == column)
            for column in COLUMNS
        ]
        lines.append(f"| `{module}` | {' | '.join(cell or '-' for cell in cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    if not PART.is_written(table()):
        for row in itertools.chain.from_iterable(map(rows, MODULES)):
            if row.unnoticed or row.verdict.startswith("not made"):
                print(f"{row.module}.{row.name}", row.verdict, row.unnoticed)
