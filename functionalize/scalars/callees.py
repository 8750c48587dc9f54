"""How code names the function that it calls, and which function that is in a frame.

    Attribute(Global("logger"), "info")        callee_of(site, frame): the function `Logger.info`

Invariant: no code runs to find it; where that would be needed, the answer is None.
"""

from __future__ import annotations

import inspect
import types
from types import FrameType
from typing import Any, NamedTuple


class Global(NamedTuple):
    """A global or built-in name."""

    name: str


class Local(NamedTuple):
    """A local variable, or one of a closure."""

    name: str


class Attribute(NamedTuple):
    """An attribute of another callee."""

    of: Any
    name: str


def root(name: Any) -> Any:
    """What the first name of a chain of attributes stands for."""
    while type(name) is Attribute:
        name = name.of
    return name


def is_name(value: Any) -> bool:
    """Whether a value on the stack is known by a name."""
    return type(root(value)) in (Global, Local)


def callee_of(site: Any, frame: FrameType) -> Any:
    """The function that a `CallSite` calls in this frame, without running code; None if that takes code to find out."""
    if _found(Global("str"), frame)[0] is not str:
        return None
    return _found(site.callee, frame)[0]


def _found(name: Any, frame: FrameType) -> tuple[Any, bool]:
    """(the object of that name, True); a method as its function."""
    if type(name) is Global:
        for names in (frame.f_globals, frame.f_builtins):
            if name.name in names:
                return names[name.name], True
        return None, False
    if type(name) is Local:
        table = frame.f_locals
        return table.get(name.name), name.name in table
    owner, is_there = _found(name.of, frame)
    if not is_there:
        return None, False
    if type(owner) is types.ModuleType:
        return vars(owner).get(name.name), name.name in vars(owner)
    try:
        found = inspect.getattr_static(owner, name.name)
    except AttributeError:
        return None, False
    if isinstance(found, (classmethod, staticmethod)):
        found = found.__func__
    is_plain = not hasattr(type(found), "__get__") or type(found) is types.FunctionType
    return (found, True) if is_plain else (None, False)
