"""Code objects as values that can be compared: equal for functions that were compiled to the same instructions."""

from __future__ import annotations

import contextlib
import functools
import types
from typing import Any

from functionalize.util.bytecode import read


def compiled(code: types.CodeType) -> tuple[Any, ...]:
    """The compiled form of a function, nested functions included, without file names and line numbers."""
    return (
        code.co_code,
        code.co_names,
        code.co_varnames,
        code.co_freevars,
        code.co_flags,
        [_constant(c) for c in code.co_consts],
    )


def _constant(value: Any) -> Any:
    if isinstance(value, types.CodeType):
        return compiled(value)
    return sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value)


def is_generated(code: types.CodeType) -> bool:
    """Whether the code is of a method that `dataclasses` made.

    Code that a script gives to `exec` or to `python -c` has the same file name, and another qualified name.
    """
    if code.co_filename.endswith(("dataclasses.py", "reprlib.py")):
        return True
    return code.co_filename == "<string>" and code.co_qualname.startswith("__create_fn__.")


# -- closures as data ------------------------------------------------------------------------------


def enclosed(function: Any) -> list[Any]:
    """What a function encloses, as far as it is assigned and not None; nothing of another object."""
    found = []
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # an empty cell
            found.append(cell.cell_contents)
    return [each for each in found if each is not None]


class _Globals:
    """The globals of a function, compared by identity."""

    __slots__ = ("table",)

    def __init__(self, table: dict[str, Any]) -> None:
        self.table = table

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Globals) and other.table is self.table

    def __hash__(self) -> int:
        return id(self.table)


@functools.lru_cache(maxsize=1024)
def _emptied(code: types.CodeType, space: _Globals) -> types.FunctionType:
    cells = tuple(types.CellType() for _ in code.co_freevars)
    return types.FunctionType(code, space.table, code.co_name, None, cells)


def opened_function(
    function: types.FunctionType,
) -> tuple[types.FunctionType, tuple[Any, ...]] | None:
    """A function without its defaults and the variables that it encloses, and these; `closed_function` is the inverse.

    The former is the same object for all functions that one `def` or `lambda` makes. None if the function is more than
    these parts, or if its code assigns to an enclosed variable.
    """
    code, cells = function.__code__, function.__closure__ or ()
    is_nested = "<locals>" in code.co_qualname
    if not is_nested or function.__kwdefaults__ or vars(function) or _assigns(code):
        return None
    try:
        contents = tuple(cell.cell_contents for cell in cells)
    except ValueError:  # an empty cell
        return None
    return _emptied(code, _Globals(function.__globals__)), (function.__defaults__, *contents)


def closed_function(
    emptied: types.FunctionType, defaults: tuple[Any, ...] | None, *contents: Any
) -> types.FunctionType:
    """A function with these defaults that encloses these values."""
    cells = tuple(map(types.CellType, contents))
    return types.FunctionType(
        emptied.__code__, emptied.__globals__, emptied.__name__, defaults, cells
    )


@functools.lru_cache(maxsize=1024)
def _assigns(code: types.CodeType) -> bool:
    """Whether a function, or one nested in it, assigns to variables that it encloses."""
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    own = (step for step in read(code) if step.op in ("set_deref", "del_deref"))
    return any(step.value in code.co_freevars for step in own) or any(map(_assigns, inner))
