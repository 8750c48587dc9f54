"""Where the text of a formatted value goes: into an argument of one call, unmodified, or anywhere else.

    print(f"loss {loss:.3f}", flush=True)     site_at(code, offset of the formatting of `loss`):
        CallSite(offset of the call, Global("print"), (Text("loss ", offset),), {"flush": None})
    message = f"loss {loss:.3f}"              None: the text is stored
    print(f"loss {loss:.3f}".upper())         None
    print(f"{a if b else c:.3f}")             None: more than one way leads to the call

The bytecode of the calling function decides, in one run of instructions without a jump in or out: nothing else sees the
text there. Invariant: where an instruction is not known, the answer is None.
"""

from __future__ import annotations

import bisect
import dis
import inspect
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FrameType
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


class Text(NamedTuple):
    """A text put together: constants, and the offsets of the instructions that format values."""

    parts: tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class CallSite:
    """A call. offset: of its instruction. callee: how it was loaded. args, keywords: None for those that are no `Text`.

    conversions: for instructions that format by `!r` or `!s`, the specification that follows.
    """

    offset: int
    callee: Any
    args: tuple[Text | None, ...]
    keywords: Mapping[str, Text | None]
    conversions: Mapping[int, str]


_NULL = object()
_OTHER = object()


class _Constant(NamedTuple):
    value: Any


class _NotKnown(Exception):
    """The bytecode is not understood."""


def instruction_at(frame: FrameType) -> int:
    """The offset of the instruction that a frame runs: `f_lasti` may point into the cache entries after it."""
    offsets = _offsets(frame.f_code)
    return offsets[bisect.bisect_right(offsets, frame.f_lasti) - 1]


@lru_cache(maxsize=1024)
def _offsets(code: CodeType) -> tuple[int, ...]:
    return tuple(i.offset for i in _instructions(code))


@lru_cache(maxsize=1024)
def _instructions(code: CodeType) -> tuple[dis.Instruction, ...]:
    return tuple(i for i in dis.get_instructions(code) if i.opname not in _SKIPPED)


@lru_cache(maxsize=4096)
def site_at(code: CodeType, offset: int) -> CallSite | None:
    """The call that receives the text which the instruction at `offset` formats; None if it may go elsewhere."""
    run = _straight(code, offset)
    if run is None:
        return None
    try:
        return _Run(code, offset).of(run)
    except _NotKnown:
        return None


def _straight(code: CodeType, offset: int) -> list[dis.Instruction] | None:
    """The instructions around `offset` that always run one after the other."""
    found: list[dis.Instruction] = []
    is_there = False
    for each in _instructions(code):
        if each.is_jump_target:
            if is_there:
                break
            found = []
        found.append(each)
        is_there = is_there or each.offset == offset
        if "JUMP" in each.opname or each.opname in _ENDS:
            if is_there:
                break
            found = []
    return found if is_there else None


class _Run:
    """The stack along one run of instructions, as far as it is known. target: the offset of the formatting."""

    def __init__(self, code: CodeType, target: int) -> None:
        self.constants, self.target = code.co_consts, target
        self.is_made = False
        self.stack: list[Any] = []
        self.keywords: tuple[str, ...] = ()
        self.conversions: dict[int, str] = {}

    def of(self, run: list[dis.Instruction]) -> CallSite | None:
        for step in run:
            site = self._step(step)
            if site is not None:
                return site
            self.is_made = self.is_made or step.offset == self.target
            if self.is_made and not any(map(self._has_target, self.stack)):
                return None
        return None

    def _has_target(self, value: Any) -> bool:
        return type(value) is Text and self.target in value.parts

    def _pop(self, count: int = 1) -> list[Any]:
        """The topmost values, the top at the end."""
        missing = max(0, count - len(self.stack))
        at = len(self.stack) - (count - missing)
        found, self.stack = self.stack[at:], self.stack[:at]
        return [*[_OTHER] * missing, *found]

    def _push(self, *values: Any) -> None:
        self.stack += values

    def _step(self, step: dis.Instruction) -> CallSite | None:
        name, arg, value = step.opname, step.arg or 0, step.argval
        if name == "LOAD_CONST":
            self._push(_Constant(value))
        elif name == "LOAD_GLOBAL":
            self._push(*([_NULL] if arg & 1 else []), Global(value))
        elif name in ("LOAD_FAST_LOAD_FAST", "LOAD_FAST_BORROW_LOAD_FAST_BORROW"):
            self._push(*map(Local, value))
        elif name.startswith("LOAD_FAST") or name == "LOAD_DEREF":
            self._push(Local(value))
        elif name == "LOAD_NAME":
            self._push(_OTHER)
        elif name == "PUSH_NULL":
            self._push(_NULL)
        elif name in ("LOAD_ATTR", "LOAD_METHOD"):
            (owner,) = self._pop()
            is_callee = name == "LOAD_METHOD" or (arg & 1 and _LOADS_METHODS)
            found = Attribute(owner, value) if type(owner) in _NAMES else _OTHER
            self._push(*([_NULL] if is_callee else []), found)
        elif name in ("FORMAT_VALUE", "FORMAT_SIMPLE", "FORMAT_WITH_SPEC", "CONVERT_VALUE"):
            self._format(step, name, arg)
        elif name == "BUILD_STRING":
            self._push(self._joined(self._pop(arg)))
        elif name == "KW_NAMES":
            self.keywords = tuple(self.constants[arg])
        elif name == "CALL_KW":
            (names,) = self._pop()
            if type(names) is not _Constant:
                raise _NotKnown
            self.keywords = tuple(names.value)
            return self._call(step, arg)
        elif name == "CALL":
            return self._call(step, arg)
        elif name in _EFFECTS:
            pops, pushes = _EFFECTS[name]
            self._pop(pops)
            self._push(*[_OTHER] * pushes)
        elif name in _BUILDS:
            self._pop(arg * _BUILDS[name] + (name == "BUILD_CONST_KEY_MAP"))
            self._push(_OTHER)
        elif self.is_made:
            raise _NotKnown
        else:  # what is on the stack now is not known, and what is pushed later is
            self.stack = []
        return None

    def _format(self, step: dis.Instruction, name: str, arg: int) -> None:
        has_spec = name == "FORMAT_WITH_SPEC" or (name == "FORMAT_VALUE" and bool(arg & 4))
        spec = self._pop()[0] if has_spec else _Constant("")
        (value,) = self._pop()
        if name == "CONVERT_VALUE":  # of Python 3.13: the next instruction formats the text
            self.conversions[step.offset] = ""
            self._push(Text((step.offset,)))
        elif type(value) is Text:  # a text that was converted
            (at,) = value.parts if len(value.parts) == 1 else (None,)
            if not isinstance(at, int) or type(spec) is not _Constant:
                raise _NotKnown
            self.conversions[at] = str(spec.value)
            self._push(value)
        else:
            if name == "FORMAT_VALUE" and arg & 3:
                if type(spec) is not _Constant:
                    if step.offset == self.target:
                        raise _NotKnown
                    spec = _Constant("")
                self.conversions[step.offset] = str(spec.value)
            self._push(Text((step.offset,)))

    def _joined(self, values: list[Any]) -> Any:
        parts: list[str | int] = []
        for value in values:
            if type(value) is Text:
                parts += value.parts
            elif type(value) is _Constant and type(value.value) is str:
                parts.append(value.value)
            else:
                raise _NotKnown
        return Text(tuple(parts))

    def _call(self, step: dis.Instruction, count: int) -> CallSite | None:
        values = self._pop(count)
        pair = self._pop(2)
        names, self.keywords = self.keywords, ()
        if not any(map(self._has_target, values)):
            self._push(_OTHER)
            return None
        callees = [each for each in pair if each is not _NULL]
        if len(callees) != 1 or type(callees[0]) not in _NAMES:
            raise _NotKnown
        texts = [each if type(each) is Text else None for each in values]
        split = len(texts) - len(names)
        keywords = dict(zip(names, texts[split:], strict=True))
        return CallSite(
            step.offset, callees[0], tuple(texts[:split]), keywords, dict(self.conversions)
        )


_NAMES = (Global, Local, Attribute)
_LOADS_METHODS = sys.version_info >= (3, 12)  # LOAD_ATTR does, if a bit of its argument is set
_SKIPPED = frozenset({"CACHE", "EXTENDED_ARG", "NOP", "RESUME", "PRECALL", "COPY_FREE_VARS"})
_ENDS = frozenset({"RETURN_VALUE", "RETURN_CONST", "RERAISE", "RAISE_VARARGS", "SEND", "FOR_ITER"})
# What other instructions take from the stack and put on it.
_EFFECTS = {
    "BINARY_OP": (2, 1), "BINARY_SUBSCR": (2, 1), "COMPARE_OP": (2, 1), "CONTAINS_OP": (2, 1),
    "IS_OP": (2, 1), "UNARY_NEGATIVE": (1, 1), "UNARY_NOT": (1, 1), "UNARY_INVERT": (1, 1),
    "TO_BOOL": (1, 1), "BINARY_SLICE": (3, 1), "STORE_FAST": (1, 0), "STORE_DEREF": (1, 0),
    "STORE_GLOBAL": (1, 0), "POP_TOP": (1, 0), "STORE_ATTR": (2, 0), "STORE_SUBSCR": (3, 0),
}  # fmt: skip
_BUILDS = {"BUILD_TUPLE": 1, "BUILD_LIST": 1, "BUILD_SET": 1, "BUILD_SLICE": 1, "BUILD_MAP": 2}
_BUILDS |= {"BUILD_CONST_KEY_MAP": 1}


def drops_result(frame: FrameType) -> bool:
    """Whether the function of a frame does not use the result of the call that it makes now."""
    steps = _instructions(frame.f_code)
    at = bisect.bisect_right(_offsets(frame.f_code), frame.f_lasti)
    return at < len(steps) and steps[at].opname == "POP_TOP"


# -- callees ---------------------------------------------------------------------------------------


def callee_of(site: CallSite, frame: FrameType) -> Any:
    """The function that a site calls in this frame, without running code; None if that takes code to find out."""
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
