"""`float(tensor)` in a step: the number is live, as that of `tensor.item()`.

    losses.append(float(loss))          [...] appended by a replay
    self.total += float(norm)           live, where C's `float` would return a plain number and add a guard on it

    scopes = float_scopes(functions)    the globals of their modules
    with live_floats(scopes): ...       `float` is a function there

C's `float` returns nothing but an exact float, so while numbers are live a function of its name stands in the globals
of the modules of the step's functions, before Python's own.
Invariant: it does so only in modules of which all functions use the name in calls of it alone. `isinstance(x, float)`,
`type(x) is float` or `float.fromhex(x)` in a module, or code that has no file, keep Python's. Functions that declare
command-line options (`add_argument("--lr", type=float)`) do not run in a step, and do not count.
"""

from __future__ import annotations

import inspect
import linecache
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

import torch

from functionalize.scalars.live_scalars import as_live, is_live, plain
from functionalize.scalars.scalar_log import ScalarLog
from functionalize.util.annotations import Place, evaluated_in
from functionalize.util.bytecode import read
from functionalize.util.packages import is_users

Scope = dict[str, Any]
_NAME = "float"
_USERS: Counter[int] = Counter()  # by id of the scope
_LOCK = threading.Lock()


def float_scopes(functions: Iterable[FunctionType]) -> tuple[Scope, ...]:
    """The globals of those functions' modules in which `float` may be another function."""
    found: dict[int, Scope] = {}
    for function in functions:
        scope, code = function.__globals__, function.__code__
        file = scope.get("__file__")
        if id(scope) not in found and code.co_filename == file and _names_it(code):
            # Another recording may have put its function there.
            is_free = _NAME not in scope or scope[_NAME] is _float
            if is_users(scope.get("__name__")) and is_free:
                later = _annotations_with_it(file, _age_of(file))
                if later is not None and _are_evaluated(scope, later):
                    found[id(scope)] = scope
    return tuple(found.values())


@contextmanager
def live_floats(scopes: Sequence[Scope], log: ScalarLog | None) -> Iterator[None]:
    """A context in which `float` of a tensor is live in these globals. log: of the recording; None: no number is."""
    if log is None or log.plain_reads:
        scopes = ()
    with _LOCK:
        for scope in scopes:
            _USERS[id(scope)] += 1
            scope[_NAME] = _float
    try:
        yield
    finally:
        with _LOCK:
            for scope in scopes:
                _USERS[id(scope)] -= 1
                if not _USERS[id(scope)]:
                    del _USERS[id(scope)]
                    scope.pop(_NAME, None)


def _float(*args: Any) -> Any:
    value = args[0] if len(args) == 1 else None
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
        value = as_live(value.item())
        if is_live(value) and not value.node.log.is_live_for(sys._getframe(1)):
            value = plain(value)
        args = (value,)
    return torch.sym_float(value) if is_live(value) else float(*args)


@lru_cache(maxsize=4096)
def _names_it(code: CodeType) -> bool:
    return any(_NAME in each.co_names for each in (code, *(inner for inner, _ in _functions(code))))


def _age_of(file: str) -> int:
    """When a file was last written; 0: there is no such file."""
    try:
        return os.stat(file).st_mtime_ns
    except OSError:
        return 0


@lru_cache(maxsize=256)
def _annotations_with_it(file: str, age: int) -> frozenset[Place] | None:
    """None: a function in a file, as it was written at this time, uses the name in other ways than calls of it.

    Else the functions that evaluate annotations with the name: since Python 3.14 they run when somebody asks. Those of
    functions inside of functions count as the latter's code, as they do before.
    """
    linecache.checkcache(file)  # the module may have been changed and loaded again
    source = "".join(linecache.getlines(file))
    try:
        code = compile(source, file, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return None
    later: set[Place] = set()
    for each, is_inner in _functions(code):
        if not _calls_it(each):
            if is_inner or each.co_name != "__annotate__":
                return None
            later.add((each.co_qualname, each.co_firstlineno))
    return frozenset(later) if source else None


def _are_evaluated(scope: Scope, later: frozenset[Place]) -> bool:
    """Whether these annotations have their values already, and cannot take another function for `float`."""
    return not later or (scope.get(_NAME) is not _float and later <= {*evaluated_in(scope)})


def _functions(code: CodeType, is_inner: bool = False) -> Iterator[tuple[CodeType, bool]]:
    """The code of every function in a code object, also of nested functions and of classes in functions.

    With whether it is inside of another function.
    """
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            is_function = bool(constant.co_flags & inspect.CO_OPTIMIZED)
            if is_function or is_inner:
                yield constant, is_inner
            yield from _functions(constant, is_inner or is_function)


def _calls_it(code: CodeType) -> bool:
    """Whether code loads the name only to call it."""
    if _NAME not in code.co_names or "add_argument" in code.co_names:
        return True
    return all(
        step.op == "global" and step.number == 1
        for step in read(code)
        if step.value == _NAME and step.op != "constant"
    )
