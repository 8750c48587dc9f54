"""Whether code may pass a number to C code that accepts exact floats and ints only, and no other object.

    Decimal(loss.item()), timedelta(seconds=loss.item()), yaml.dump(values)   True
    if type(value) is float: ...                                              True
    np.exp(loss.item()), round(value, 2), f"{value:.3f}", type(self).__name__ False

Such code raises `TypeError` for a live number, or takes the other branch, where eager does neither. So a number that it
may reach is a constant with a guard (Note [Numbers that C reads] in `scalars/live_scalars.py`).
Invariant: the answer decides what is live and never what is guarded: to overlook a use is no silent error, except for a
comparison of types. Looked at are the functions on the stack inside of the step and the user's functions that they
name; not functions of installed packages, nor those that only data leads to.
"""

from __future__ import annotations

import builtins
import datetime
import decimal
import dis
import marshal
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from functionalize.util.packages import is_installed_file, is_standard_file
from functionalize.util.user_stack import is_internal, is_own

_EXACT_CALLABLES = (
    *(type, pow),  # `pow(2, number, 5)`
    *(decimal.Decimal, datetime.timedelta, marshal.dumps, marshal.dump, math.ldexp),
    *(time.sleep, time.gmtime, time.localtime, time.ctime),
)
_EXACT = frozenset(map(id, _EXACT_CALLABLES))
_EXACT_NAMES = frozenset(
    {"Decimal", "timedelta", "from_float", "create_decimal", "datetime64", "timedelta64"}
)
_EXACT_NAMES |= {"fromtimestamp", "utcfromtimestamp", "fromordinal", "create_decimal_from_float"}
# Packages that look at the exact type of what they write.
_WRITERS = frozenset({"marshal", "yaml", "orjson", "ujson", "rapidjson", "msgpack", "sqlite3"})
_WRITERS |= {"h5py", "pandas", "polars", "pyarrow", "wandb"}
_MOST = 300  # functions that are looked at


def may_need_exact_number(frame: FrameType | None, known: dict[tuple[CodeType, ...], bool]) -> bool:
    """Whether a number that the function of `frame` reads may reach such code before the step returns.

    known: the answers to earlier questions, by the functions on the stack.
    """
    if frame is None or is_internal(frame.f_code.co_filename):
        return False  # torch computes with the number itself
    todo: list[tuple[CodeType, Mapping[str, Any], Mapping[str, Any]]] = []
    while frame is not None and not is_own(frame.f_code.co_filename):
        if not _is_librarys(frame.f_code.co_filename):
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
    return _any_needs_exact([each for function in functions for each in _function(function)])


def _any_needs_exact(todo: list[tuple[CodeType, Mapping[str, Any], Mapping[str, Any]]]) -> bool:
    seen: set[CodeType] = set()
    while todo and len(seen) < _MOST:
        code, scope, inner = todo.pop()
        if code in seen:
            continue
        seen.add(code)
        for name, attribute in _loads(code):
            if attribute in _EXACT_NAMES:
                return True
            if not name:
                found = getattr(type(inner.get("self")), attribute, None)
            else:
                found = _value(name, scope, inner)
                method = found is float or found is int  # `float.hex(number)`
                needs_exact = attribute != "" if method else id(found) in _EXACT
                if needs_exact:
                    return True
                if attribute and isinstance(found, ModuleType):
                    found = getattr(found, attribute, None)
            if id(found) in _EXACT or _package(found) in _WRITERS:
                return True
            todo += _function(found)
    return False


def _function(value: Any) -> Iterator[tuple[CodeType, Mapping[str, Any], Mapping[str, Any]]]:
    """The code of a function of the user's, with its globals and its closure."""
    value = getattr(value, "__func__", value)
    if not isinstance(value, FunctionType) or _is_librarys(value.__code__.co_filename):
        return
    cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=False)
    yield value.__code__, value.__globals__, {name: _content(cell) for name, cell in cells}


def _package(value: Any) -> str:
    """The package of a module, or of a function or class."""
    if isinstance(value, ModuleType):
        return value.__name__.partition(".")[0]
    plain = isinstance(value, (type, FunctionType, BuiltinFunctionType))
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


@cache
def _loads(code: CodeType) -> tuple[tuple[str, str], ...]:
    """(name, attribute) of each name that is loaded, here or in a nested function; ("", attribute) of other attributes.

    `type(self)` and `type(cls)` are left out: their argument is no number.
    """
    found: dict[tuple[str, str], None] = {}
    steps = [s for s in dis.get_instructions(code) if s.opname not in ("CACHE", "EXTENDED_ARG")]
    for step, then in zip(steps, [*steps[1:], None], strict=True):
        following = then.opname if then is not None else ""
        attribute = str(then.argval) if then and following in ("LOAD_ATTR", "LOAD_METHOD") else ""
        if step.opname in ("IMPORT_NAME", "IMPORT_FROM"):
            writer = str(step.argval).partition(".")[0] in _WRITERS
            found["", "Decimal" if writer else str(step.argval)] = None
        elif step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF"):
            own = then is not None and following.startswith("LOAD_FAST") and then.argval in _OWN
            if not (step.argval == "type" and own):
                found[str(step.argval), attribute] = None
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            found["", str(step.argval)] = None
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found.update(dict.fromkeys(_loads(constant)))
    return tuple(found)


_OWN = ("self", "cls")


@cache
def _is_librarys(file: str) -> bool:
    return is_installed_file(file) or is_standard_file(file) or is_internal(file)
