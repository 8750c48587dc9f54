"""Whether code may pass a number to C code that accepts exact floats and ints only, and no other object.

    Decimal(loss.item()), timedelta(seconds=loss.item()), yaml.dump(values)   True
    if type(value) is float: ...                                              True
    def __float__(self): return self.value                                    True
    np.exp(loss.item()), round(value, 2), f"{value:.3f}", type(self).__name__ False

Such code raises `TypeError` for a live number, or takes the other branch, where eager does neither. So a number that it
may reach is a constant with a guard (Note [Numbers that C reads] in `scalars/live_scalars.py`).
Invariant: the answer decides what is live and never what is guarded: to overlook a use is no silent error, except for a
comparison of types. Looked at are the functions on the stack inside of the step and the user's functions that they
name, in variables, defaults, attributes and small containers; not modules, nor functions of installed packages.
"""

from __future__ import annotations

import builtins
import datetime
import decimal
import marshal
import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, lru_cache, partial
from itertools import takewhile
from types import (
    BuiltinFunctionType,
    CodeType,
    FrameType,
    FunctionType,
    MethodType,
    ModuleType,
)
from typing import Any

from torch import Tensor, nn

from functionalize.util.added_up import added_up, original
from functionalize.util.bytecode import read
from functionalize.util.code_objects import is_generated
from functionalize.util.packages import is_installed_file, is_standard_file, is_users
from functionalize.util.user_stack import is_internal, is_own

_EXACT_CALLABLES = (
    *(type, pow),  # `pow(2, number, 5)`
    *(decimal.Decimal, datetime.timedelta, marshal.dumps, marshal.dump, math.ldexp),
    *(time.sleep, time.gmtime, time.localtime, time.ctime),
)
_EXACT = frozenset(map(id, _EXACT_CALLABLES))
# Since Python 3.12 C's `sum` adds up exact floats in a way of its own. A recording replaces it by its name alone.
_SUM_IS_EXACT = sys.version_info >= (3, 12)
_SUMS = (
    added_up.__code__
)  # of ours, and between the user's function and a generator that it sums up
_EXACT_NAMES = frozenset(
    {"Decimal", "timedelta", "from_float", "create_decimal", "datetime64", "timedelta64"}
)
_EXACT_NAMES |= {"fromtimestamp", "utcfromtimestamp", "fromordinal", "create_decimal_from_float"}
# Packages that look at the exact type of what they write.
_WRITERS = frozenset({"marshal", "yaml", "orjson", "ujson", "rapidjson", "msgpack", "sqlite3"})
_WRITERS |= {"h5py", "pandas", "polars", "pyarrow", "wandb"}
# Methods of which C code accepts an exact float or int as the result, and raises `TypeError` for anything else.
_EXACT_RESULTS = frozenset({"__float__", "__int__", "__index__", "__hash__"})
_MOST = 300  # functions that are looked at


def may_need_exact_number(frame: FrameType | None, known: dict[tuple[CodeType, ...], bool]) -> bool:
    """Whether a number that the function of `frame` reads may reach such code before the step returns.

    known: the answers to earlier questions, by the functions on the stack.
    """
    if frame is None or is_internal_code(frame.f_code):
        return False  # torch computes with the number itself
    todo: list[Code] = []
    while frame is not None and (frame.f_code is _SUMS or not is_own(frame.f_code.co_filename)):
        if not _is_librarys(frame.f_code):
            todo.append((frame.f_code, frame.f_globals, frame.f_locals))
        frame = frame.f_back
    if frame is None:  # a recorder without a step: where its user's code begins is not known
        del todo[1:]
    key = tuple(code for code, _, _ in todo)
    if key not in known:
        known[key] = _any_needs_exact(todo)
    return known[key]


def any_needs_exact(functions: Iterable[FunctionType]) -> bool:
    """The same of a number that any of these functions of the user's, or one that they name, may read."""
    return _any_needs_exact([each for function in functions for each in _functions(function)])


Code = tuple[CodeType, Mapping[str, Any], Mapping[str, Any]]


def _any_needs_exact(todo: list[Code]) -> bool:
    seen: set[CodeType] = set()
    while todo and len(seen) < _MOST:
        code, scope, inner = todo.pop()
        if code in seen:
            continue
        if code.co_name in _EXACT_RESULTS:
            return True
        seen.add(code)
        for name, path in _loads(code):
            if not _EXACT_NAMES.isdisjoint(path):
                return True
            found = _value(name, scope, inner) if name else None
            if path and (found is float or found is int):  # `float.hex(number)`
                return True
            if _SUM_IS_EXACT and (name in inner or name in scope) and _holds_sum(found):
                return True
            for attribute in ("", *path):
                found = _attribute(found, attribute) if attribute else found
                if id(found) in _EXACT or _package(found) in _WRITERS:
                    return True
            todo += _functions(found)
    return False


def _holds_sum(value: Any) -> bool:
    """Whether a variable is Python's `sum`, or a small container with it."""
    if type(value) is dict:
        value = list(value.values()) if len(value) <= _MOST_ELEMENTS else ()
    is_container = type(value) in (list, tuple) and len(value) <= _MOST_ELEMENTS
    return any(each is original for each in value) if is_container else value is original


def _attribute(value: Any, name: str) -> Any:
    """An attribute of a Python module or of an object of the user, found without code of the user; None: unknown."""
    kind = type(value)  # `isinstance` asks a weak proxy, whose object may be dead
    if issubclass(kind, ModuleType):
        return getattr(value, name, None)
    kind = value if issubclass(kind, type) else kind
    if not is_users(kind.__module__) or issubclass(kind, (nn.Module, Tensor)):
        return vars(kind).get(name) if is_users(kind.__module__) else None
    try:
        table = object.__getattribute__(value, "__dict__") if kind is not value else {}
    except AttributeError:  # it has slots alone
        table = {}
    if name in table:
        return table[name]
    found = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)
    return MethodType(found, value) if type(found) is FunctionType else found


def _functions(value: Any, depth: int = 2) -> Iterator[Code]:
    """The user's functions that a call of `value`, or of something in it, may run."""
    kind = type(value)
    if kind is FunctionType:
        yield from _function(value)
    elif kind is MethodType and type(value.__func__) is FunctionType:
        for code, scope, inner in _function(value.__func__):
            yield (
                code,
                scope,
                {**inner, **dict(zip(code.co_varnames[:1], [value.__self__], strict=False))},
            )
    elif kind in (list, tuple, dict) and depth and len(value) <= _MOST_ELEMENTS:
        for each in value.values() if kind is dict else value:
            yield from _functions(each, depth - 1)
    elif kind in _HOLDERS:
        for name in _HOLDERS[kind]:
            yield from _functions(getattr(value, name), depth)
    elif is_users(kind.__module__) and not issubclass(kind, nn.Module):
        yield from _functions(_attribute(value, "__call__"), 0)
    elif (
        isinstance(value, type) and is_users(value.__module__) and not issubclass(value, nn.Module)
    ):
        yield from _functions(_attribute(value, "__init__"), 0)


def _function(value: FunctionType) -> Iterator[Code]:
    """The code of a function of the user's, with its globals, its closure and its defaults."""
    code = value.__code__
    if _is_librarys(code):
        return
    cells = zip(code.co_freevars, value.__closure__ or (), strict=False)
    inner = {name: _content(cell) for name, cell in cells}
    defaults = value.__defaults__ or ()
    optional = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    inner |= {**dict(zip(optional, defaults, strict=False)), **(value.__kwdefaults__ or {})}
    yield code, value.__globals__, inner


def _package(value: Any) -> str:
    """The package of a module, or of a function or class."""
    kind = type(value)
    if issubclass(kind, ModuleType):
        return str(value.__name__).partition(".")[0]
    plain = issubclass(kind, (type, FunctionType, BuiltinFunctionType))
    return str(value.__module__).partition(".")[0] if plain else ""


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _value(name: str, scope: Mapping[str, Any], inner: Mapping[str, Any]) -> Any:
    for names in (inner, scope, vars(builtins)):
        if name in names:
            return names[name]
    return None


@lru_cache(maxsize=1024)
def _loads(code: CodeType) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Name and attributes of each name that is loaded, here or in a nested function: ("self", ("meter", "update")).

    The name is "" for attributes of something else. `type(self)` and `type(cls)` are left out: their argument is no
    number.
    """
    found: dict[tuple[str, tuple[str, ...]], None] = {}
    steps = read(code)
    for step in steps:
        following = takewhile(lambda s: s.op in _ATTRIBUTES, steps[step.at + 1 :])
        path = tuple(str(s.value) for s in following)
        then = steps[step.at + 1] if step.at + 1 < len(steps) else step
        if step.op in ("import", "import_from"):
            writer = str(step.value).partition(".")[0] in _WRITERS
            found["", ("Decimal" if writer else str(step.value),)] = None
        elif step.op in _LOADS:
            own = then.op == "local" and then.value in _OWN
            if not (step.value == "type" and own):
                found[str(step.value), path] = None
        elif step.op in _ATTRIBUTES:
            found["", (str(step.value),)] = None
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found.update(dict.fromkeys(_loads(constant)))
    return tuple(found)


_LOADS = frozenset({"global", "name", "deref", "local", "save_local", "cell"})
_ATTRIBUTES = frozenset({"attribute", "method", "super"})
_HOLDERS: dict[type, tuple[str, ...]] = {
    partial: ("func", "args"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget",),
}
_MOST_ELEMENTS = 64  # of a container whose elements are looked at
_OWN = ("self", "cls")


def _is_librarys(code: CodeType) -> bool:
    return _is_librarys_file(code.co_filename) or is_internal_code(code)


@cache
def _is_librarys_file(file: str) -> bool:
    return is_installed_file(file) or is_standard_file(file)


def is_internal_code(code: CodeType) -> bool:
    """Whether code is torch's, this library's or generated; a script's that was given to `exec` or `-c` is none."""
    if code.co_filename == "<string>":
        return is_generated(code)
    return is_internal(code.co_filename)
