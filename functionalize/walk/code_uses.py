"""How code uses one name, by its bytecode: whether it only appends to it, where it changes it, what it stores.

    only_appended(codes, "losses")     True for `self.losses.append(x)` alone, False as soon as code reads it otherwise
    is_only_stored(codes, "last")      True for `self.last = x` alone
    only_appended(codes, "history", True)     the same for `self.history["loss"].append(x)`
    lines_of_changes(codes, "n")       ["train.py:12, in step: self.n += 1"]
    lines_of_uses(codes, "rng")        ["train.py:13, in step: x = x * self.rng.random()"]
    lines_of_methods(codes, {"data"})  ["train.py:14, in step: p.data = new"]
    lines_of_returns(code)             ["train.py:15, in step: return loss"]
    stored_constants(codes, "n")       {(int, "0")} for `self.n = 0`
    assigned_constant(frame)           (int, "0") while `self.n = 0` runs in it

Invariant: what is not understood counts as a read.
"""

from __future__ import annotations

import linecache
import types
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

from functionalize.util.bytecode import LOADS, Step, constants_of, read, running
from functionalize.util.code_objects import is_generated
from functionalize.walk.code_names import codes_of

_STORES = frozenset(
    {
        "set_attribute",
        "set_global",
        "set_name",
        "set_deref",
        "del_attribute",
        "del_global",
        "del_name",
        "del_deref",
    }
)
_NO_READ = frozenset({"set_attribute", "set_global", "set_deref", "cell", "make_cell"})
_LOCAL = frozenset({"local", "set_local", "del_local", "save_local"})
_CALLED = ("method", "attribute", "super")
_READS = LOADS | {"attribute", "method", "super"}
_MOVERS = frozenset(
    {"append", "extend", "insert", "update", "setdefault", "pop", "popitem", "remove", "clear", "add"}
    | {"discard", "appendleft", "popleft", "rotate", "sort", "reverse", "write"}
)  # fmt: skip


def _every(codes: Iterable[types.CodeType]) -> Iterator[types.CodeType]:
    yield from dict.fromkeys(each for outer in codes for each in codes_of(outer))


def only_appended(codes: Iterable[types.CodeType], name: str, in_table: bool = False) -> bool:
    """Whether code uses a name only in calls of its method `append`; in_table: of that of its entries.

    A name that code only assigns is none of these. Of methods that `dataclasses` has made, which name every field, see
    `generated_reads.py`.
    """
    is_appended = False
    for code in _every(codes):
        if is_generated(code):
            continue
        steps = read(code)
        for step in steps:
            if step.op == "constant" and step.value == name:  # `getattr(self, name)`
                return False
            if step.value != name or step.op in _LOCAL or step.op in _NO_READ:
                continue
            then = steps[step.at + 1 : step.at + 4]
            if in_table:
                if len(then) < 3 or then[0].op not in LOADS or then[1].op != "subscript":
                    return False
                then = then[2:]
            if not then or then[0].op != "method" or then[0].value != "append":
                return False
            is_appended = True
    return is_appended


def texts_in(code: types.CodeType) -> Iterator[str]:
    """The texts that code writes out, also in tuples, but for names."""
    pending = [constant for each in codes_of(code) for constant in each.co_consts]
    while pending:
        constant = pending.pop()
        if type(constant) is str:
            yield constant
        elif type(constant) in (tuple, frozenset):
            pending += constant


def is_only_stored(codes: Iterable[types.CodeType], name: Any) -> bool:
    """Whether code assigns a name, and uses it nowhere else. A key that is no text is no name."""
    if type(name) is not str:
        return False
    uses = {
        step.op
        for code in _every(codes)
        for step in read(code)
        if step.value == name and step.op not in _LOCAL
    }
    return not _NO_READ.isdisjoint(uses) and uses <= _NO_READ


def lines_of_changes(codes: Iterable[types.CodeType], name: str) -> list[str]:
    """The lines that assign a name, an entry or an attribute of it, or call a method of it that changes it in place."""

    def is_change(step: Step, then: Step | None, on_line: set[str]) -> bool:
        if step.op in ("set_subscript", "del_subscript"):
            return name in on_line
        if step.value != name:
            return step.op in _CALLED and step.value in _MOVERS and name in on_line
        return step.op in _STORES or (then is not None and _changes_owner(then))

    return _lines(codes, is_change)


def _changes_owner(step: Step) -> bool:
    """Whether a step assigns an attribute of what was loaded, or calls its `add_`, `append`, `step`."""
    if step.op in ("set_attribute", "del_attribute"):
        return True
    called = step.value if step.op in _CALLED else None
    return isinstance(called, str) and (called in _MOVERS or _is_in_place(called))


def _is_in_place(method: str) -> bool:
    return method.endswith("_") and not method.endswith("__")


def lines_of_uses(codes: Iterable[types.CodeType], name: str) -> list[str]:
    """The lines that read a name."""
    return _lines(codes, lambda step, *_: step.value == name and step.op in _READS)


def lines_of_methods(codes: Iterable[types.CodeType], names: Container[str]) -> list[str]:
    """The lines that assign an attribute, or call a method, of one of these names, of whatever object."""
    return _lines(
        codes,
        lambda step, *_: (
            step.op in ("set_attribute", *_CALLED)
            and step.value in names
            and (step.op == "set_attribute" or step.value != "data")
        ),
    )


def lines_of_returns(code: types.CodeType) -> list[str]:
    """The lines of one function that return its result."""
    return _lines([code], lambda step, *_: step.op == "return", nested=False)


def _lines(
    codes: Iterable[types.CodeType],
    wanted: Callable[[Step, Step | None, set[str]], bool],
    nested: bool = True,
) -> list[str]:
    """The lines with a step that is wanted. wanted: of it, the next one, and the names on the line.

    nested: those of functions inside of these, too.
    """
    found: dict[str, None] = {}
    for code in _every(codes) if nested else codes:
        if code.co_filename == "<string>" and code.co_name.startswith("__"):
            continue  # that a dataclass has generated
        steps = read(code)
        names: dict[int, set[str]] = {}
        for step in steps:
            if isinstance(step.value, str):
                names.setdefault(step.line, set()).add(step.value)
        for step, then in zip(steps, [*steps[1:], None], strict=True):
            line = step.line
            if wanted(step, then, names.get(line, set())):
                text = linecache.getline(code.co_filename, line).strip()
                found[f"{code.co_filename}:{line}, in {code.co_name}: {text}"] = None
    return list(found)


def stored_constants(codes: Iterable[types.CodeType], name: str) -> frozenset[tuple[type, str]]:
    """The numbers, by type and text, in code that assigns a name."""
    return frozenset(
        (type(constant), repr(constant))
        for code in _every(codes)
        if any(
            step.value == name and (step.op in _STORES or step.op == "constant")
            for step in read(code)
        )
        for constant in constants_of(code)
        if type(constant) in (int, float)
    )


_OWNERS = frozenset({"local", "deref", "global"})


def assigned_constant(frame: types.FrameType) -> tuple[type, str] | None:
    """The number, by type and text, that code writes out and `frame` is assigning to an attribute; None: another one.

    `self.n = 0` and `self.state.n = 0`; not `self.n = 0 if x else y`, where code jumps to the assignment.
    """
    step, steps = running(frame), read(frame.f_code)
    if step.op != "set_attribute":
        return None
    while step.op in ("set_attribute", "attribute"):
        if step.is_target or step.at < 2:
            return None
        step = steps[step.at - 1]
    value = steps[step.at - 1]
    if step.op not in _OWNERS or step.is_target or step.at < 1:
        return None
    is_number = value.op == "constant" and type(value.value) in (int, float)
    return (type(value.value), repr(value.value)) if is_number else None
