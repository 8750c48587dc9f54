"""Where the text of a formatted value goes: into an argument of one call, unmodified, or anywhere else.

    print(f"loss {loss:.3f}", flush=True)     site_at(code, position of the formatting of `loss`):
        CallSite(position of the call, Global("print"), (Text("loss ", at),), {"flush": None})
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

    f"loss {loss:.3f}"                    Text(("loss ", at))
    [f"{a}", "b"]                         _BuiltItems((Text((at,)), _CodeConstant("b")))
    (f"{v:.3f}" for v in values)          _Comprehension(position of the call that makes it, is_generator=True)
    ", ".join(...) of the two             Text((at, ", ", "b")), Text((at of the call of `join`, ""))

Each of them is known by the position of its step in the code (`util/bytecode.py`): of the formatting, of the call, of
the list that a comprehension makes in line; -1 stands for an unknown text.
Invariant: where a step is not known, or where code would have to run to find the function that is called, the answer is
None.
"""

from __future__ import annotations

import inspect
import string
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any, NamedTuple

from functionalize.util.bytecode import ENDS, Step, block_of, may_repeat, read, running

# An attribute of functions whose calls a replay makes again.
TAKES_TEXT = "__functionalize_takes_text__"


@dataclass(frozen=True, slots=True)
class CallSite:
    """A call. at: its position. callee: how it was loaded. args, keywords: None for those that are no `Text`.

    conversions: for steps that format by `!r` or `!s`, the specification that follows.
    formats: for steps that format by `%`, the text on its left.
    made_at: of an element of a comprehension in line, the position of what makes the list; None for all others.
    """

    at: int
    callee: Any
    args: tuple[Text | None, ...]
    keywords: Mapping[str, Text | None]
    conversions: Mapping[int, str]
    formats: Mapping[int, str]
    made_at: int | None = None


# The callee of a `CallSite` in the code of a comprehension: the text becomes an element, and goes nowhere else.
ELEMENT = object()
_NULL = object()
_OTHER = object()


class _NotKnown(Exception):
    """The bytecode is not understood."""


@lru_cache(maxsize=4096)
def site_at(code: CodeType, at: int) -> CallSite | None:
    """The call that receives the text which the step at this position formats; None if it may go elsewhere."""
    steps, loop = block_of(code, at)
    if loop is not None and (loop.kind != "list" or may_repeat(code, loop.at)):
        return None  # see `CallSite.made_at`: of which list an element is would not be known
    run = _straight(steps, at)
    try:
        return _Run(code, at, loop).of(run)
    except _NotKnown:
        return None


def _straight(steps: Sequence[Step], at: int) -> list[Step]:
    """The steps around `at` that always run one after the other."""
    found: list[Step] = []
    is_there = False
    for each in steps:
        if each.is_target:
            if is_there:
                break
            found = []
        found.append(each)
        is_there = is_there or each.at == at
        if each.op in ENDS:
            if is_there:
                break
            found = []
    return found if is_there else []


class _Run:
    """The stack along one run of steps, as far as it is known. target: the position of the formatting."""

    def __init__(self, code: CodeType, target: int, loop: Step | None) -> None:
        self.code, self.target, self.loop = code, target, loop
        self.formats: dict[int, str] = {}
        self.is_made = False
        self.stack: list[Any] = []
        self.conversions: dict[int, str] = {}

    def of(self, run: list[Step]) -> CallSite | None:
        for step in run:
            site = self._step(step)
            if site is not None:
                return site
            self.is_made = self.is_made or step.at == self.target
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

    def _step(self, step: Step) -> CallSite | None:
        op, value = step.op, step.value
        if op == "set_local" and self._is_on_top():
            return self._stored(step, self._pop()[0])
        if op == "local":
            self._push(Text((step.at,)) if step.at == self.target else Local(value))
        elif op == "deref":
            self._push(Local(value))
        elif op == "constant":
            self._push(_CodeConstant(value))
        elif op == "global":
            self._push(*[_NULL] * step.number, Global(value))
        elif op == "null":
            self._push(_NULL)
        elif op in ("attribute", "method"):
            (owner,) = self._pop()
            is_known = _is_name(owner) or _is_constant_text(owner)
            found = Attribute(owner, value) if is_known else _OTHER
            self._push(*([_NULL] if op == "method" else []), found)
        elif op == "convert":
            self._convert(step)
        elif op == "format":
            self._format(step)
        elif op == "binary":
            self._push(self._operated(step, *self._pop(2)))
        elif op == "join":
            self._push(self._joined(self._pop(step.number)))
        elif op == "call":
            return self._call(step)
        elif op == "build" and step.kind in ("list", "tuple"):
            self._push(_BuiltItems(tuple(self._pop(step.number))))
        elif (
            op == "function" and step.number <= 1
        ):  # one value below the code: variables it encloses
            *_, code = self._pop(1 + step.number)
            self._push(code)
        elif op == "function_part" and step.number == _CLOSURE:
            _, code = self._pop(2)
            self._push(code)
        elif op == "inlined":
            self._pop()
            is_list = step.kind == "list"
            self._push(_Comprehension(step.at, is_generator=False) if is_list else _OTHER)
        elif self._is_element(step):
            text = self._pop()[0]
            made_at = self.loop.at if self.loop is not None else None
            return CallSite(
                step.at, ELEMENT, (text,), {}, dict(self.conversions), self.formats, made_at
            )
        elif op in _EFFECTS or op == "build":
            pops = _EFFECTS[op] if op in _EFFECTS else 1 - step.effect
            self._pop(pops)
            self._push(*[_OTHER] * (pops + step.effect))
        elif self.is_made:
            raise _NotKnown
        else:  # what is on the stack now is not known, and what is pushed later is
            self.stack = []
        return None

    def _is_element(self, step: Step) -> bool:
        """Whether a step makes the text an element of what a comprehension makes."""
        if not self._is_on_top():
            return False
        if step.op == "yield":
            return self.code.co_name == "<genexpr>"
        if step.op != "add" or step.kind != "list":
            return False
        if self.loop is None:
            return self.code.co_name == "<listcomp>" and step.number > 1
        # Below the element are the iterators of the loops around it, and then the list.
        loops = [s for s in self.loop.body if s.op == "for" and s.target is not None]
        return step.number == 2 + sum(s.at < step.at < (s.target or 0) for s in loops)

    def _is_on_top(self) -> bool:
        """Whether the text is the topmost value."""
        return (
            bool(self.stack) and type(self.stack[-1]) is Text and self._has_target(self.stack[-1])
        )

    def _convert(self, step: Step) -> None:
        """`!r` and `!s`: they make the text, and a specification that follows formats it."""
        value, *above = self._pop(1 + step.number)
        if type(value) is not Text:
            self.conversions[step.at] = ""
            value = Text((step.at,))
        elif step.kind != "str":
            if self._has_target(value):
                raise _NotKnown
            value = Text((step.at,))
        self._push(value, *above)

    def _format(self, step: Step) -> None:
        spec = self._pop()[0] if step.number else _CodeConstant("")
        (value,) = self._pop()
        if type(value) is not Text:
            if self._has_target(value):
                raise _NotKnown
            self._push(Text((step.at,)))
        elif spec == _CodeConstant(""):  # of a text: the same one
            self._push(value)
        else:
            (at,) = value.parts if len(value.parts) == 1 else (None,)
            is_known = type(spec) is _CodeConstant and isinstance(at, int)
            if is_known and not self.conversions.get(at):  # type: ignore[arg-type]
                self.conversions[at] = str(spec.value)  # type: ignore[index]
                self._push(value)
                return
            if self._has_target(value) or self._has_target(spec):
                raise _NotKnown
            self._push(Text((step.at,)))

    def _operated(self, step: Step, left: Any, right: Any) -> Any:
        """`"%.3f" % value`, and texts that are added."""
        if step.kind == "%" and _is_constant_text(left) and not self._has_target(right):
            self.formats[step.at] = left.value
            return Text((step.at,))
        if step.at == self.target:
            raise _NotKnown
        is_sum = step.kind == "+" and all(
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

    def _stored(self, step: Step, text: Text) -> CallSite | None:
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

    def _call(self, step: Step) -> CallSite | None:
        values, pair, names = self._pop(step.number), self._pop(2), step.keywords
        callees = [each for each in pair if each is not _NULL]
        if not step.number and type(pair[0]) is _CodeConstant and type(pair[0].value) is CodeType:
            is_generator = bool(pair[0].value.co_flags & inspect.CO_GENERATOR)
            self._push(_Comprehension(step.at, is_generator))
            return None
        is_text = all(type(each) is Text for each in values if self._has_target(each))
        if not is_text or not any(map(self._has_target, values)):
            callee = callees[0] if len(callees) == 1 else None
            made = self._made(step.at, callee, values, names)
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
            step.at,
            callees[0],
            tuple(texts[:split]),
            keywords,
            dict(self.conversions),
            self.formats,
        )


def _only_use(code: CodeType, store: Step) -> int | None:
    """The position of the one step that loads what `store` stores; None if a variable may hold another text."""
    steps, name = read(code), store.value
    of_name = [s for s in steps if s.value == name and s.op in _OF_VARIABLES]
    loads = [s.at for s in of_name if s.op == "local"]
    flags = code.co_flags
    arguments = code.co_argcount + code.co_kwonlyargcount + bool(flags & 4) + bool(flags & 8)
    is_argument = name in code.co_varnames[:arguments]
    sees_all = {"locals", "vars", "eval", "exec", "dir"} & set(code.co_names)
    if (
        len(of_name) != 2
        or len(loads) != 1
        or is_argument
        or sees_all
        or may_repeat(code, store.at)
    ):
        return None
    site = site_at(code, loads[0])
    base = _root(site.callee) if site is not None else None
    is_fixed = type(base) is Global or (
        type(base) is Local
        and base.name in code.co_varnames
        and not any(s.op in _STORES and s.value == base.name for s in steps)
    )
    return loads[0] if is_fixed and loads[0] > store.at else None


_STORES = frozenset({"set_local", "set_deref", "set_global", "set_name", "set_attribute"})
_OF_VARIABLES = frozenset(
    {"local", "set_local", "del_local", "save_local", "cell", "make_cell", "deref", "set_deref"}
    | {"del_deref"}
)


def drops_result(frame: FrameType) -> bool:
    """Whether the function of a frame does not use the result of the call that it makes now."""
    steps, at = read(frame.f_code), running(frame).at + 1
    return at < len(steps) and steps[at].op == "pop"


# -- what is on the stack of a function that puts a text together ----------------------------------


class Text(NamedTuple):
    """A text put together: constants, and the positions of the steps that format values; -1: an unknown text."""

    parts: tuple[str | int, ...]


class _CodeConstant(NamedTuple):
    """A constant of the code."""

    value: Any


class _BuiltItems(NamedTuple):
    """A list or tuple that is put together."""

    values: tuple[Any, ...]


class _Comprehension(NamedTuple):
    """A generator expression, or the list of a list comprehension. at: the position of what makes it."""

    at: int
    is_generator: bool


def _is_constant_text(value: Any) -> bool:
    """Whether this is a constant text."""
    return type(value) is _CodeConstant and type(value.value) is str


def _parts_of_join(at: int, separator: str, joined: Any) -> tuple[str | int, ...] | None:
    """The parts of the text that `separator.join(joined)` makes at `at`; None if it is not known what is joined.

    The elements of a comprehension have one position: of the call during which its code runs, or of its list. The empty
    text beside it says that a format of the whole is no format of each.
    """
    if type(joined) is _Comprehension:
        return (at if joined.is_generator else joined.at, "")
    if type(joined) is not _BuiltItems:
        return None
    found: list[str | int] = []
    for value in joined.values:
        found += [separator] if found else []
        constant = value.value if _is_constant_text(value) else -1
        found += value.parts if type(value) is Text else [constant]
    return tuple(found)


# How many values other steps take from the stack.
_EFFECTS = {
    "name": 0, "cell": 0, "iterate": 1, "unary": 1, "subscript": 2, "compare": 2, "contains": 2, "is": 2,
    "set_local": 1, "set_deref": 1, "set_global": 1, "pop": 1, "set_attribute": 2, "set_subscript": 3,
}  # fmt: skip
_CLOSURE = 8  # of a function: the cells of variables that it encloses, below its code


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
