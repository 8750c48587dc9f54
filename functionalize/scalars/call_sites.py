"""Where the text of a formatted value goes: into an argument of one call, unmodified, or anywhere else.

    print(f"loss {loss:.3f}", flush=True)     site_at(code, offset of the formatting of `loss`):
        CallSite(offset of the call, Global("print"), (Text("loss ", offset),), {"flush": None})
    print("loss " + str(loss))                also `"%.3f" % loss`, `"{:.3f}".format(loss)`
    message = f"loss {loss:.3f}"              the call, if no other instruction loads `message`, and no loop or
    log.info(message)                         second assignment may give it another text
    print(", ".join(f"{v:.3f}" for v in m))   the call; in the code of the generator: `ELEMENT`
    print(f"loss {loss:.3f}".upper())         None
    print(f"{a if b else c:.3f}")             None: more than one way leads to the call

    callee_of(site, frame)                    for `Attribute(Global("log"), "info")`: the function `Logger.info`

The bytecode of the calling function decides, in one run of instructions without a jump in or out (in two, for a text
that is stored): nothing else sees the text there. What the run has on its stack is followed as far as it puts texts
together:

    f"loss {loss:.3f}"                    Text(("loss ", offset))
    [f"{a}", "b"]                         _BuiltItems((Text((offset,)), _CodeConstant("b")))
    (f"{v:.3f}" for v in values)          _Comprehension(its code, offset of the call that makes it)
    ", ".join(...) of the two             Text((offset, ", ", "b")), Text((offset of `join`,))

An offset is that of the instruction that formats a value; -1 stands for an unknown text.
Invariant: where an instruction is not known, or where code would have to run to find the function that is called, the
answer is None.
"""

from __future__ import annotations

import bisect
import dis
import inspect
import string
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any, NamedTuple

TAKES_TEXT = (
    "__functionalize_takes_text__"  # an attribute of functions whose calls a replay makes again
)


@dataclass(frozen=True, slots=True)
class CallSite:
    """A call. offset: of its instruction. callee: how it was loaded. args, keywords: None for those that are no `Text`.

    conversions: for instructions that format by `!r` or `!s`, the specification that follows.
    formats: for instructions that format by `%`, the text on its left.
    """

    offset: int
    callee: Any
    args: tuple[Text | None, ...]
    keywords: Mapping[str, Text | None]
    conversions: Mapping[int, str]
    formats: Mapping[int, str]


# The callee of a `CallSite` in the code of a comprehension: the text becomes an element, and goes nowhere else.
ELEMENT = object()
_NULL = object()
_OTHER = object()


class _NotKnown(Exception):
    """The bytecode is not understood."""


def instruction_at(frame: FrameType) -> int:
    """The offset of the instruction that a frame runs: `f_lasti` may point into the cache entries after it.

    In Python 3.11 it may point to the `PRECALL` before a `CALL`, which then calls C functions (`str`) itself.
    """
    starts, offsets = _positions(frame.f_code)
    return offsets[bisect.bisect_right(starts, frame.f_lasti) - 1]


@lru_cache(maxsize=1024)
def _positions(code: CodeType) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where each instruction begins, with its `PRECALL`, and its offset."""
    steps = [s for s in dis.get_instructions(code) if s.opname not in _SKIPPED - {"PRECALL"}]
    pairs = zip(steps, [*steps[1:], *steps[-1:]], strict=True)
    offsets = (then.offset if step.opname == "PRECALL" else step.offset for step, then in pairs)
    return tuple(step.offset for step in steps), tuple(offsets)


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
        self.code, self.constants, self.target = code, code.co_consts, target
        self.formats: dict[int, str] = {}
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
        if type(value) is _BuiltItems:
            return any(map(self._has_target, value.values))
        if type(value) is _Comprehension:
            return value.at == self.target
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
        if name == "STORE_FAST" and self._is_on_top():
            return self._stored(step, self._pop()[0])
        if name == "LOAD_FAST" and step.offset == self.target:
            self._push(Text((step.offset,)))
        elif name == "LOAD_CONST":
            self._push(_CodeConstant(value))
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
            is_known = _is_name(owner) or _is_constant_text(owner)
            found = Attribute(owner, value) if is_known else _OTHER
            self._push(*([_NULL] if is_callee else []), found)
        elif name in ("FORMAT_VALUE", "FORMAT_SIMPLE", "FORMAT_WITH_SPEC", "CONVERT_VALUE"):
            self._format(step, name, arg)
        elif name == "BINARY_OP":
            self._push(self._operated(step, *self._pop(2)))
        elif name == "BUILD_STRING":
            self._push(self._joined(self._pop(arg)))
        elif name == "KW_NAMES":
            self.keywords = tuple(self.constants[arg])
        elif name == "CALL_KW":
            (names,) = self._pop()
            if type(names) is not _CodeConstant:
                raise _NotKnown
            self.keywords = tuple(names.value)
            return self._call(step, arg)
        elif name == "CALL":
            return self._call(step, arg)
        elif name in _EFFECTS:
            pops, pushes = _EFFECTS[name]
            self._pop(pops)
            self._push(*[_OTHER] * pushes)
        elif name in ("BUILD_LIST", "BUILD_TUPLE"):
            self._push(_BuiltItems(tuple(self._pop(arg))))
        elif name == "MAKE_FUNCTION" and not arg & ~_CLOSURE:
            *_, code = self._pop(2 if arg else 1)
            self._push(code)
        elif name == "LOAD_CLOSURE":
            self._push(_OTHER)
        elif self._is_element(name, arg):
            return CallSite(
                step.offset, ELEMENT, (self._pop()[0],), {}, dict(self.conversions), self.formats
            )
        elif name in _BUILDS:
            self._pop(arg * _BUILDS[name] + (name == "BUILD_CONST_KEY_MAP"))
            self._push(_OTHER)
        elif self.is_made:
            raise _NotKnown
        else:  # what is on the stack now is not known, and what is pushed later is
            self.stack = []
        return None

    def _is_element(self, name: str, arg: int) -> bool:
        """Whether an instruction makes the text an element of what a comprehension makes."""
        made_by = {"<genexpr>": "YIELD_VALUE", "<listcomp>": "LIST_APPEND"}.get(self.code.co_name)
        return name == made_by and (name == "YIELD_VALUE" or arg > 1) and self._is_on_top()

    def _is_on_top(self) -> bool:
        """Whether the text is the topmost value."""
        return (
            bool(self.stack) and type(self.stack[-1]) is Text and self._has_target(self.stack[-1])
        )

    def _format(self, step: dis.Instruction, name: str, arg: int) -> None:
        has_spec = name == "FORMAT_WITH_SPEC" or (name == "FORMAT_VALUE" and bool(arg & 4))
        spec = self._pop()[0] if has_spec else _CodeConstant("")
        (value,) = self._pop()
        if name == "CONVERT_VALUE":  # of Python 3.13: the next instruction formats the text
            self.conversions[step.offset] = ""
            self._push(Text((step.offset,)))
        elif type(value) is Text:  # a text that was converted
            (at,) = value.parts if len(value.parts) == 1 else (None,)
            if at is None and spec == _CodeConstant("") and name == "FORMAT_VALUE" and not arg & 2:
                self._push(value)
                return
            if not isinstance(at, int) or type(spec) is not _CodeConstant:
                if self._has_target(value) or self._has_target(spec):
                    raise _NotKnown
                self._push(Text((step.offset,)))
                return
            self.conversions[at] = str(spec.value)
            self._push(value)
        else:
            if name == "FORMAT_VALUE" and arg & 3:
                if type(spec) is not _CodeConstant:
                    if step.offset == self.target:
                        raise _NotKnown
                    spec = _CodeConstant("")
                self.conversions[step.offset] = str(spec.value)
            self._push(Text((step.offset,)))

    def _operated(self, step: dis.Instruction, left: Any, right: Any) -> Any:
        """`"%.3f" % value`, and texts that are added."""
        if step.argrepr == "%" and _is_constant_text(left) and not self._has_target(right):
            self.formats[step.offset] = left.value
            return Text((step.offset,))
        if step.offset == self.target:
            raise _NotKnown
        is_sum = step.argrepr == "+" and all(
            type(e) is Text or _is_constant_text(e) for e in (left, right)
        )
        return self._joined([left, right]) if is_sum else _OTHER

    def _made(self, at: int, callee: Any, values: list[Any], names: tuple[str, ...]) -> Any:
        """What the call at `at` makes: a text by `str(value)` and `"{:.3f}".format(value)`."""
        if callee == Global("str") and len(values) == 1 and not names:
            return Text((at,))
        if type(callee) is Attribute and callee.name == "format" and _is_constant_text(callee.of):
            fields = list(string.Formatter().parse(callee.of.value))
            if not any(conversion or "{" in (spec or "") for _, _, spec, conversion in fields):
                return Text((-1, at, -1))
        if callee == Attribute(getattr(callee, "of", None), "join") and _is_constant_text(
            callee.of
        ):
            parts = _parts_of_join(at, callee.of.value, values[0]) if len(values) == 1 else None
            if parts is not None:
                return Text(parts)
        if at == self.target:
            raise _NotKnown
        return _OTHER

    def _stored(self, step: dis.Instruction, text: Text) -> CallSite | None:
        """The call that receives a text which a local variable holds in between."""
        use = _only_use(self.code, step)
        site = site_at(self.code, use) if use is not None else None
        if site is None:
            return None
        loaded = Text((use,))  # type: ignore[arg-type]
        if sum(each == loaded for each in (*site.args, *site.keywords.values())) != 1:
            return None
        return replace(
            site,
            args=tuple(text if each == loaded else each for each in site.args),
            keywords={k: text if each == loaded else each for k, each in site.keywords.items()},
            conversions=dict(self.conversions),
            formats=self.formats,
        )

    def _joined(self, values: list[Any]) -> Any:
        parts: list[str | int] = []
        for value in values:
            if type(value) is Text:
                parts += value.parts
            elif type(value) is _CodeConstant and type(value.value) is str:
                parts.append(value.value)
            else:
                raise _NotKnown
        return Text(tuple(parts))

    def _call(self, step: dis.Instruction, count: int) -> CallSite | None:
        values = self._pop(count)
        pair = self._pop(2)
        names, self.keywords = self.keywords, ()
        callees = [each for each in pair if each is not _NULL]
        if not count and type(pair[0]) is _CodeConstant and type(pair[0].value) is CodeType:
            self._push(_Comprehension(pair[0].value, step.offset))
            return None
        is_text = all(type(each) is Text for each in values if self._has_target(each))
        if not is_text or not any(map(self._has_target, values)):
            callee = callees[0] if len(callees) == 1 else None
            made = self._made(step.offset, callee, values, names)
            if not is_text and not self._has_target(made):
                raise _NotKnown
            self._push(made)
            return None
        if len(callees) != 1 or not _is_name(callees[0]):
            raise _NotKnown
        texts = [each if type(each) is Text else None for each in values]
        split = len(texts) - len(names)
        keywords = dict(zip(names, texts[split:], strict=True))
        return CallSite(
            step.offset,
            callees[0],
            tuple(texts[:split]),
            keywords,
            dict(self.conversions),
            self.formats,
        )


def _only_use(code: CodeType, store: dis.Instruction) -> int | None:
    """The offset of the one instruction that loads what `store` stores; None if a variable may hold another text."""
    steps, name = _instructions(code), store.argval
    of_name = [
        s for s in steps if s.argval == name or (type(s.argval) is tuple and name in s.argval)
    ]
    of_name = [s for s in of_name if "FAST" in s.opname or "DEREF" in s.opname]
    loads = [s.offset for s in of_name if s.opname == "LOAD_FAST"]
    flags = code.co_flags
    arguments = code.co_argcount + code.co_kwonlyargcount + bool(flags & 4) + bool(flags & 8)
    is_argument = name in code.co_varnames[:arguments]
    repeats = any(
        "JUMP_BACKWARD" in s.opname and s.argval <= store.offset <= s.offset for s in steps
    )
    sees_all = {"locals", "vars", "eval", "exec", "dir"} & set(code.co_names)
    if len(of_name) != 2 or len(loads) != 1 or is_argument or repeats or sees_all:
        return None
    site = site_at(code, loads[0])
    base = _root(site.callee) if site is not None else None
    is_fixed = type(base) is Global or (
        type(base) is Local
        and base.name in code.co_varnames
        and not any("STORE" in s.opname and s.argval == base.name for s in steps)
    )
    return loads[0] if is_fixed and loads[0] > store.offset else None


_LOADS_METHODS = sys.version_info >= (3, 12)  # LOAD_ATTR does, if a bit of its argument is set
_SKIPPED = frozenset({"CACHE", "EXTENDED_ARG", "NOP", "RESUME", "PRECALL", "COPY_FREE_VARS"})
_ENDS = frozenset({"RETURN_VALUE", "RETURN_CONST", "RERAISE", "RAISE_VARARGS", "SEND", "FOR_ITER"})


def drops_result(frame: FrameType) -> bool:
    """Whether the function of a frame does not use the result of the call that it makes now."""
    steps = _instructions(frame.f_code)
    at = bisect.bisect_right(_offsets(frame.f_code), frame.f_lasti)
    return at < len(steps) and steps[at].opname == "POP_TOP"


# -- what is on the stack of a function that puts a text together ----------------------------------


class Text(NamedTuple):
    """A text put together: constants, and the offsets of the instructions that format values; -1: an unknown text."""

    parts: tuple[str | int, ...]


class _CodeConstant(NamedTuple):
    """A constant of the code."""

    value: Any


class _BuiltItems(NamedTuple):
    """A list or tuple that is put together."""

    values: tuple[Any, ...]


class _Comprehension(NamedTuple):
    """A generator expression, or the list of a list comprehension. at: the offset of the call that makes it."""

    code: CodeType
    at: int


def _is_constant_text(value: Any) -> bool:
    """Whether this is a constant text."""
    return type(value) is _CodeConstant and type(value.value) is str


def _parts_of_join(at: int, separator: str, joined: Any) -> tuple[str | int, ...] | None:
    """The parts of the text that `separator.join(joined)` makes at `at`; None if it is not known what is joined.

    The elements of a comprehension have one offset: of the call during which its code runs.
    """
    if type(joined) is _Comprehension:
        is_generator = bool(joined.code.co_flags & inspect.CO_GENERATOR)
        return (at if is_generator else joined.at,)
    if type(joined) is not _BuiltItems:
        return None
    found: list[str | int] = []
    for value in joined.values:
        found += [separator] if found else []
        constant = value.value if _is_constant_text(value) else -1
        found += value.parts if type(value) is Text else [constant]
    return tuple(found)


# What other instructions take from the stack and put on it.
_EFFECTS = {
    "GET_ITER": (1, 1),
    "BINARY_SUBSCR": (2, 1), "COMPARE_OP": (2, 1), "CONTAINS_OP": (2, 1),
    "IS_OP": (2, 1), "UNARY_NEGATIVE": (1, 1), "UNARY_NOT": (1, 1), "UNARY_INVERT": (1, 1),
    "TO_BOOL": (1, 1), "BINARY_SLICE": (3, 1), "STORE_FAST": (1, 0), "STORE_DEREF": (1, 0),
    "STORE_GLOBAL": (1, 0), "POP_TOP": (1, 0), "STORE_ATTR": (2, 0), "STORE_SUBSCR": (3, 0),
}  # fmt: skip
_BUILDS = {"BUILD_SET": 1, "BUILD_SLICE": 1, "BUILD_MAP": 2, "BUILD_CONST_KEY_MAP": 1}
_CLOSURE = 8  # of `MAKE_FUNCTION`: a tuple of cells lies below the code


# -- the function that is called -------------------------------------------------------------------


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


def _root(name: Any) -> Any:
    """What the first name of a chain of attributes stands for."""
    while type(name) is Attribute:
        name = name.of
    return name


def _is_name(value: Any) -> bool:
    """Whether a value on the stack is known by a name."""
    return type(_root(value)) in (Global, Local)


def callee_of(site: CallSite, frame: FrameType) -> Any:
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
    return (found, True) if is_plain or hasattr(found, TAKES_TEXT) else (None, False)
