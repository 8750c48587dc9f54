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

import dis
import functools
import linecache
import types
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

from functionalize.walk.code_names import codes_of

_STORES = frozenset(
    {"STORE_ATTR", "STORE_GLOBAL", "STORE_NAME", "STORE_DEREF", "DELETE_ATTR", "DELETE_GLOBAL"}
    | {"DELETE_NAME", "DELETE_DEREF"}
)
_NO_READ = frozenset({"STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF", "LOAD_CLOSURE", "MAKE_CELL"})
_LOCAL = frozenset({"LOAD_FAST", "STORE_FAST", "DELETE_FAST", "LOAD_FAST_CHECK", "KW_NAMES"})
_BETWEEN = frozenset({"CACHE", "EXTENDED_ARG", "NOP", "COPY_FREE_VARS"})
_CALLED = ("LOAD_METHOD", "LOAD_ATTR")
_RETURNS = frozenset({"RETURN_VALUE", "RETURN_CONST"})
_METHOD = "LOAD_METHOD" if "LOAD_METHOD" in dis.opmap else "LOAD_ATTR"
_MOVERS = frozenset(
    {"append", "extend", "insert", "update", "setdefault", "pop", "popitem", "remove", "clear", "add"}
    | {"discard", "appendleft", "popleft", "rotate", "sort", "reverse", "write"}
)  # fmt: skip


@functools.lru_cache(maxsize=4096)
def _steps(code: types.CodeType) -> Sequence[dis.Instruction]:
    return [step for step in dis.get_instructions(code) if step.opname not in _BETWEEN]


def _every(codes: Iterable[types.CodeType]) -> Iterator[types.CodeType]:
    yield from dict.fromkeys(each for outer in codes for each in codes_of(outer))


def only_appended(codes: Iterable[types.CodeType], name: str, in_table: bool = False) -> bool:
    """Whether code uses a name only in calls of its method `append`; in_table: of that of its entries.

    A name that code only assigns is none of these.
    """
    is_appended = False
    for code in _every(codes):
        steps = _steps(code)
        for at, step in enumerate(steps):
            if step.opname == "LOAD_CONST" and step.argval == name:  # `getattr(self, name)`
                return False
            if step.argval != name or step.opname in _LOCAL or step.opname in _NO_READ:
                continue
            then = steps[at + 1 : at + 4]
            if in_table:
                if len(then) < 3 or not _is_load(then[0]) or not _is_entry(then[1]):
                    return False
                then = then[2:]
            if not then or then[0].opname != _METHOD or then[0].argval != "append":
                return False
            is_appended = True
    return is_appended


def is_only_stored(codes: Iterable[types.CodeType], name: Any) -> bool:
    """Whether code assigns a name, and uses it nowhere else."""
    uses = {
        step.opname
        for code in _every(codes)
        for step in _steps(code)
        if step.argval == name and step.opname not in _LOCAL
    }
    return not _NO_READ.isdisjoint(uses) and uses <= _NO_READ


def _is_load(step: dis.Instruction) -> bool:
    """Whether an instruction loads a key: a constant or a variable."""
    return step.opname.startswith("LOAD_") and step.opname not in ("LOAD_ATTR", "LOAD_METHOD")


def _is_entry(step: dis.Instruction) -> bool:
    """Whether an instruction reads `table[key]`."""
    return step.opname == "BINARY_SUBSCR" or (step.opname == "BINARY_OP" and step.argrepr == "[]")


def lines_of_changes(codes: Iterable[types.CodeType], name: str) -> list[str]:
    """The lines that assign a name, an entry or an attribute of it, or call a method of it that changes it in place."""

    def is_change(step: dis.Instruction, then: dis.Instruction | None, on_line: set[str]) -> bool:
        if step.opname in ("STORE_SUBSCR", "DELETE_SUBSCR"):
            return name in on_line
        if step.argval != name:
            return step.argval in _MOVERS and step.opname in _CALLED and name in on_line
        return step.opname in _STORES or (then is not None and _changes_owner(then))

    return _lines(codes, is_change)


def _changes_owner(step: dis.Instruction) -> bool:
    """Whether an instruction assigns an attribute of what was loaded, or calls its `add_`, `append`, `step`."""
    if step.opname in ("STORE_ATTR", "DELETE_ATTR"):
        return True
    called = step.argval if step.opname in _CALLED else None
    return isinstance(called, str) and (called in _MOVERS or _is_in_place(called))


def _is_in_place(method: str) -> bool:
    return method.endswith("_") and not method.endswith("__")


def lines_of_uses(codes: Iterable[types.CodeType], name: str) -> list[str]:
    """The lines that read a name."""
    return _lines(codes, lambda step, *_: step.argval == name and step.opname.startswith("LOAD_"))


def lines_of_methods(codes: Iterable[types.CodeType], names: Container[str]) -> list[str]:
    """The lines that assign an attribute, or call a method, of one of these names, of whatever object."""
    return _lines(
        codes,
        lambda step, *_: (
            step.opname in ("STORE_ATTR", *_CALLED)
            and step.argval in names
            and (step.opname == "STORE_ATTR" or step.argval != "data")
        ),
    )


def lines_of_returns(code: types.CodeType) -> list[str]:
    """The lines of one function that return its result."""
    return _lines([code], lambda step, *_: step.opname in _RETURNS, nested=False)


def _lines(
    codes: Iterable[types.CodeType],
    wanted: Callable[[dis.Instruction, dis.Instruction | None, set[str]], bool],
    nested: bool = True,
) -> list[str]:
    """The lines with an instruction that is wanted. wanted: of it, the next one, and the names on the line.

    nested: those of functions inside of these, too.
    """
    found: dict[str, None] = {}
    for code in _every(codes) if nested else codes:
        if code.co_filename == "<string>" and code.co_name.startswith("__"):
            continue  # that a dataclass has generated
        steps, lines, line = _steps(code), [], code.co_firstlineno
        names: dict[int, set[str]] = {}
        for step in steps:
            if step.starts_line is not None:
                line = (step.positions.lineno if step.positions is not None else None) or line
            lines.append(line)
            if isinstance(step.argval, str):
                names.setdefault(line, set()).add(step.argval)
        for step, then, line in zip(steps, [*steps[1:], None], lines, strict=True):
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
            (step.opname in _STORES and step.argval == name)
            or (step.opname == "LOAD_CONST" and step.argval == name)
            for step in _steps(code)
        )
        for constant in code.co_consts
        if type(constant) in (int, float)
    )


_LOADS_OWNER = frozenset({"LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_DEREF", "LOAD_GLOBAL"})


@functools.lru_cache(maxsize=1024)
def _at_offsets(code: types.CodeType) -> tuple[Sequence[dis.Instruction], dict[int, int]]:
    steps = list(dis.get_instructions(code))
    return steps, {step.offset: at for at, step in enumerate(steps)}


def assigned_constant(frame: types.FrameType) -> tuple[type, str] | None:
    """The number, by type and text, that code writes out and `frame` is assigning to an attribute; None: another one.

    `self.n = 0` and `self.state.n = 0`; not `self.n = 0 if x else y`, where code jumps to the assignment.
    """
    steps, offsets = _at_offsets(frame.f_code)
    at = offsets.get(frame.f_lasti, 0)
    if steps[at].opname != "STORE_ATTR":
        return None
    while steps[at].opname in ("STORE_ATTR", "LOAD_ATTR"):
        if steps[at].is_jump_target or at < 2:
            return None
        at -= 1
    owner, value = steps[at], steps[at - 1]
    if owner.opname not in _LOADS_OWNER or owner.is_jump_target:
        return None
    is_number = value.opname.startswith("LOAD_") and type(value.argval) in (int, float)
    return (type(value.argval), repr(value.argval)) if is_number else None
