"""The parameters that a function never reads, whatever it calls: numbers passed for them are no facts.

    def training_step(self, batch, batch_idx): return self.loss(batch)
    arguments = ReadArguments(trainer.training_step)
    arguments.of((batch, 3), {})                  (batch, None), {}

A parameter is unread if no instruction of the function names it, but for `del batch_idx`. Then only code that looks at
the variables of frames finds it.
Invariant: what is not understood is read: parameters of callables that are no Python functions, parameters that nested
functions see, all parameters of functions whose code looks at variables of frames (`locals`, `f_locals`). Whether code
that they call does so is known after a walk: `looks_at_frames`.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

from functionalize.walk.code_names import NameFilter, names_in

# Names by which code reads the variables of a frame: of any, and of its own.
_OF_ANY_FRAME = frozenset({"f_locals", "getargvalues", "capture_locals"})
_OF_ITS_FRAME = frozenset({"locals", "vars", "dir", "eval", "exec"})
_NUMBERS = frozenset({bool, int, float})


class Unread(NamedTuple):
    """Parameters that are not read. positions: among positional arguments. names: as keywords."""

    positions: frozenset[int]
    names: frozenset[str]


_NONE = Unread(frozenset(), frozenset())


class ReadArguments:
    """The arguments of calls of `fn`, without the numbers that it does not read."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        is_bound = type(fn) is types.MethodType
        function = fn.__func__ if isinstance(fn, types.MethodType) else fn
        self._function = function if type(function) is types.FunctionType else None
        self._first = int(is_bound)  # the position of the first argument
        self._code: types.CodeType | None = None
        self._unread = _NONE

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The arguments of a call, with None in the place of numbers that are not read."""
        function = self._function
        if function is None:
            return args, kwargs
        if function.__code__ is not self._code:  # it may be replaced
            self._code = function.__code__
            self._unread = _unread_of(self._code)
        positions, names = self._unread
        if not names:
            return args, kwargs
        kept = tuple(
            None if i in positions and type(each) in _NUMBERS else each
            for i, each in enumerate(args, self._first)
        )
        return kept, {
            key: None if key in names and type(each) in _NUMBERS else each
            for key, each in kwargs.items()
        }

    def read_all(self) -> None:
        """From now on every argument counts as read."""
        self._function = None


def looks_at_frames(names: NameFilter) -> bool:
    """Whether code with these names may look at the variables of the functions that call it."""
    return not _OF_ANY_FRAME.isdisjoint(names.names)


@functools.lru_cache(maxsize=1024)
def _unread_of(code: types.CodeType) -> Unread:
    if not (_OF_ANY_FRAME | _OF_ITS_FRAME).isdisjoint(names_in(code).names):
        return _NONE
    read = set(code.co_cellvars)
    for each in dis.get_instructions(code):
        if each.opname != "DELETE_FAST":
            read |= {each.argval} if isinstance(each.argval, str) else set()
            read |= set(each.argval) if isinstance(each.argval, tuple) else set()
    positional = code.co_varnames[: code.co_argcount]
    named = code.co_varnames[code.co_posonlyargcount : code.co_argcount + code.co_kwonlyargcount]
    names = frozenset(named) - read
    return Unread(frozenset(at for at, name in enumerate(positional) if name in names), names)
