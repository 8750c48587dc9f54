"""The instructions of a function in one vocabulary, whichever Python has compiled it: 3.11 to 3.14.

    self.losses.append(x)     local "self", attribute "losses", method "append", local "x", call of 1, pop
    f"{x!r:>9}"               convert by "repr", format: one instruction of 3.11, two since 3.13
    f(x, y=1)                 call of 2 with the keywords ("y",), which are no value on the stack
    x[1:2]                    build of a "slice", subscript: one instruction since 3.12
    return None               constant None, return: one instruction of 3.12 and 3.13
    [f(v) for v in x]         since 3.12 in line: among `blocks(code)` one step "inlined", with its loop as `body`

    read(code)                all steps of a function, in order
    running(frame)            the step that a frame runs now

Instructions without an effect on values (caches, `NOP`, `RESUME`, the `bool()` before a jump) are left out; a jump to
one of them leads to the step after it. No other file imports `dis`.
Invariant: what an instruction does is never guessed. One that the tables below do not have is refused by name, and so
is a Python whose instructions they do not describe.
"""

from __future__ import annotations

import bisect
import dis
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any, Literal, NamedTuple

from functionalize.errors import UncapturableError

VERSIONS = ((3, 11), (3, 12), (3, 13), (3, 14))  # of Python, whose instructions the tables describe

# fmt: off
Op = Literal[
    "null", "constant", "local", "set_local", "del_local", "save_local", "cell", "make_cell",
    "deref", "set_deref", "del_deref", "global", "set_global", "del_global", "name", "set_name", "del_name",
    "attribute", "method", "super", "set_attribute", "del_attribute",
    "subscript", "set_subscript", "del_subscript", "import", "import_from", "match_class",
    "unary", "binary", "compare", "contains", "is", "convert", "format", "join",
    "build", "add", "extend", "call", "call_unpacked", "function", "function_part",
    "pop", "copy", "swap", "iterate", "for", "end_for", "inlined",
    "jump", "branch", "send", "yield", "return", "raise", "other",
]
# fmt: on


class Step(NamedTuple):
    """What one instruction does, or a part of one.

    at: its position among the steps of the code. effect: what it adds to the height of the stack if it does not jump.
    value: the name, or the constant. kind: the symbol of an operator, the function of a conversion, the type of what is
    built or added to.
    number: of a call the arguments; of what is built or joined the values; the depth of a copy, a swap or an addition;
    of a conversion the values above the converted one; of a format the specifications, 0 or 1; of a function the values
    below its code; 1 for a global that is loaded to be called at once.
    keywords: of a call. target: the position of the step to which it may jump. is_target: another one may jump here,
    or an exception lead here. body: of "inlined", the steps of its loop, with those of a loop inside as one.
    """

    op: Op
    at: int
    effect: int
    line: int
    value: Any = None
    kind: str = ""
    number: int = 0
    keywords: tuple[str, ...] = ()
    target: int | None = None
    is_target: bool = False
    body: tuple[Any, ...] = ()


# -- what the instructions of all versions mean ----------------------------------------------------

# Those whose value is a name or a constant.
_NAMED: dict[str, Op] = {
    "LOAD_CONST": "constant", "LOAD_SMALL_INT": "constant",
    "LOAD_FAST": "local", "LOAD_FAST_CHECK": "local", "LOAD_FAST_BORROW": "local",
    "LOAD_FAST_AND_CLEAR": "save_local", "STORE_FAST": "set_local", "DELETE_FAST": "del_local",
    "LOAD_CLOSURE": "cell", "MAKE_CELL": "make_cell",
    "LOAD_DEREF": "deref", "LOAD_CLASSDEREF": "deref", "LOAD_FROM_DICT_OR_DEREF": "deref",
    "STORE_DEREF": "set_deref", "DELETE_DEREF": "del_deref",
    "LOAD_GLOBAL": "global", "STORE_GLOBAL": "set_global", "DELETE_GLOBAL": "del_global",
    "LOAD_NAME": "name", "LOAD_FROM_DICT_OR_GLOBALS": "name", "STORE_NAME": "set_name", "DELETE_NAME": "del_name",
    "LOAD_ATTR": "attribute", "LOAD_METHOD": "method", "LOAD_SUPER_ATTR": "super",
    "STORE_ATTR": "set_attribute", "DELETE_ATTR": "del_attribute",
    "IMPORT_NAME": "import", "IMPORT_FROM": "import_from",
}  # fmt: skip
# Two names in one instruction.
_PAIRS: dict[str, tuple[Op, Op]] = {
    "LOAD_FAST_LOAD_FAST": ("local", "local"),
    "LOAD_FAST_BORROW_LOAD_FAST_BORROW": ("local", "local"),
    "STORE_FAST_LOAD_FAST": ("set_local", "local"),
    "STORE_FAST_STORE_FAST": ("set_local", "set_local"),
}
# Operation and kind; the number is the argument.
_COUNTED: dict[str, tuple[Op, str]] = {
    "BUILD_LIST": ("build", "list"), "BUILD_TUPLE": ("build", "tuple"), "BUILD_SET": ("build", "set"),
    "BUILD_MAP": ("build", "map"), "BUILD_CONST_KEY_MAP": ("build", "map of keys"), "BUILD_SLICE": ("build", "slice"),
    "BUILD_STRING": ("join", ""),
    "LIST_APPEND": ("add", "list"), "SET_ADD": ("add", "set"), "MAP_ADD": ("add", "map"),
    "LIST_EXTEND": ("extend", "list"), "SET_UPDATE": ("extend", "set"),
    "DICT_MERGE": ("extend", "map"), "DICT_UPDATE": ("extend", "map"),
    "CALL_FUNCTION_EX": ("call_unpacked", ""), "SET_FUNCTION_ATTRIBUTE": ("function_part", ""),
    "COPY": ("copy", ""), "SWAP": ("swap", ""), "MATCH_CLASS": ("match_class", ""),
}  # fmt: skip
_PLAIN: dict[str, tuple[Op, str]] = {
    "PUSH_NULL": ("null", ""), "POP_TOP": ("pop", ""), "POP_ITER": ("pop", ""),
    "BINARY_SUBSCR": ("subscript", ""), "STORE_SUBSCR": ("set_subscript", ""), "DELETE_SUBSCR": ("del_subscript", ""),
    "UNARY_POSITIVE": ("unary", "+"), "UNARY_NEGATIVE": ("unary", "-"), "UNARY_NOT": ("unary", "not"),
    "UNARY_INVERT": ("unary", "~"), "CONTAINS_OP": ("contains", ""), "IS_OP": ("is", ""),
    "GET_ITER": ("iterate", ""), "FOR_ITER": ("for", ""), "SEND": ("send", ""),
    "YIELD_VALUE": ("yield", ""), "RETURN_VALUE": ("return", ""),
    "RAISE_VARARGS": ("raise", ""), "RERAISE": ("raise", ""),
    "JUMP_FORWARD": ("jump", ""), "JUMP_BACKWARD": ("jump", ""), "JUMP_BACKWARD_NO_INTERRUPT": ("jump", ""),
}  # fmt: skip
_PLAIN |= {
    f"POP_JUMP_{way}IF_{test}": ("branch", "")
    for way in ("", "FORWARD_", "BACKWARD_")
    for test in ("TRUE", "FALSE", "NONE", "NOT_NONE")
}
_PLAIN |= {f"JUMP_IF_{test}_OR_POP": ("branch", "") for test in ("TRUE", "FALSE")}
# Those that are read in a way of their own, by the methods of `_Reader`.
_PARTICULAR = frozenset(
    {"RETURN_CONST", "BINARY_OP", "BINARY_SLICE", "STORE_SLICE", "COMPARE_OP", "CONVERT_VALUE", "FORMAT_VALUE"}
    | {"FORMAT_SIMPLE", "FORMAT_WITH_SPEC", "KW_NAMES", "PRECALL", "CALL", "CALL_KW", "MAKE_FUNCTION", "END_FOR"}
    | {"CALL_INTRINSIC_1"}
)  # fmt: skip
# Without an effect on values.
_SKIPPED = frozenset(
    {"CACHE", "EXTENDED_ARG", "NOP", "RESUME", "COPY_FREE_VARS", "NOT_TAKEN", "TO_BOOL"}
)
# Known instructions that nobody asks about: no names, and nothing that goes on with a value.
_OTHERS = frozenset(
    {"ASYNC_GEN_WRAP", "BEFORE_ASYNC_WITH", "BEFORE_WITH", "BUILD_INTERPOLATION", "BUILD_TEMPLATE"}
    | {"CALL_INTRINSIC_2", "CHECK_EG_MATCH", "CHECK_EXC_MATCH", "CLEANUP_THROW", "END_ASYNC_FOR", "END_SEND"}
    | {"GET_AITER", "GET_ANEXT", "GET_AWAITABLE", "GET_LEN", "GET_YIELD_FROM_ITER", "IMPORT_STAR", "LIST_TO_TUPLE"}
    | {"LOAD_ASSERTION_ERROR", "LOAD_BUILD_CLASS", "LOAD_COMMON_CONSTANT", "LOAD_LOCALS", "LOAD_SPECIAL"}
    | {"MATCH_KEYS", "MATCH_MAPPING", "MATCH_SEQUENCE", "POP_EXCEPT", "PREP_RERAISE_STAR", "PRINT_EXPR"}
    | {"PUSH_EXC_INFO", "RETURN_GENERATOR", "SETUP_ANNOTATIONS", "UNPACK_EX", "UNPACK_SEQUENCE", "WITH_EXCEPT_START"}
)  # fmt: skip
KNOWN = _SKIPPED | _OTHERS | _PARTICULAR | {*_NAMED, *_PAIRS, *_COUNTED, *_PLAIN}
# Of their two steps it is the second that calls methods.
_LAST = frozenset({"BINARY_SLICE", "STORE_SLICE"})
# In the tables of an interpreter, and in no code object: what it puts there while it runs is not in `co_code`.
NOT_IN_CODE = frozenset({"ENTER_EXECUTOR", "EXIT_INIT_CHECK", "INTERPRETER_EXIT", "RESERVED"})

_CONVERSIONS = ("", "str", "repr", "ascii")
_UNARY_POSITIVE = 5  # of `CALL_INTRINSIC_1`
_HAS_SPECIFICATION = 4  # of `FORMAT_VALUE`


class _Reader:
    """Reads the instructions of one code object. effect: of an instruction on the height of the stack."""

    def __init__(
        self, code: CodeType, version: tuple[int, ...], effect: Callable[[Any], int]
    ) -> None:
        self.code, self.version, self.effect = code, version, effect
        self.cells = {*code.co_cellvars, *code.co_freevars}
        self.steps: list[Step] = []
        self.line = code.co_firstlineno
        self.raw: Any = None
        self.above = 0  # the effect of parts of a call that come before it
        self.keywords: tuple[str, ...] = ()

    def read(self, raws: Iterable[Any], handlers: Iterable[int]) -> Steps:
        """The steps. handlers: the offsets to which exceptions lead."""
        starts: list[int] = []
        first: list[int] = []  # the step of each instruction to which a jump leads
        runs: list[int] = []  # and that in which it calls what others may see
        jumps: dict[int, int] = {}
        for raw in raws:
            starts.append(raw.offset)
            first.append(len(self.steps))
            positions = raw.positions
            self.line = (positions.lineno if positions is not None else None) or self.line
            self.raw = raw
            self._read(raw.opname, raw.arg or 0, raw.argval)
            if raw.opname == "CALL_KW":  # the constant before it is a part of the same step
                first[-1] -= 1
            runs.append(first[-1] + (raw.opname in _LAST))
            if len(self.steps) > first[-1] and self.steps[-1].op in JUMPS:
                jumps[self.steps[-1].at] = raw.argval
        where = dict(zip(starts, first, strict=True))
        leads = {at: where[offset] for at, offset in jumps.items()}
        targets = {*leads.values(), *(where[offset] for offset in handlers)}
        steps = tuple(
            step._replace(target=leads.get(step.at), is_target=step.at in targets)
            if step.at in leads or step.at in targets
            else step
            for step in self.steps
        )
        return Steps(steps, tuple(starts), tuple(first), tuple(runs))

    def _add(self, op: Op, effect: int, **fields: Any) -> None:
        self.steps.append(Step(op, len(self.steps), effect, self.line, **fields))

    def _read(self, name: str, arg: int, value: Any) -> None:
        if name in _SKIPPED:
            return
        if name in _NAMED:
            self._named(_NAMED[name], name, arg, value)
        elif name in _PAIRS:
            for op, each in zip(_PAIRS[name], value, strict=True):
                self._add(self._local(op, each), 1 if op == "local" else -1, value=each)
        elif name in _PLAIN:
            op, kind = _PLAIN[name]
            self._add(op, self.effect(self.raw), kind=kind)
        elif name in _COUNTED:
            op, kind = _COUNTED[name]
            self._add(op, self.effect(self.raw), kind=kind, number=arg)
        elif name in _PARTICULAR:
            self._particular(name, arg, value)
        elif name in _OTHERS:
            self._add("other", self.effect(self.raw))
        else:
            raise UncapturableError(_unknown_instruction(name, self.code, self.line, self.version))

    def _named(self, op: Op, name: str, arg: int, value: Any) -> None:
        effect = self.effect(self.raw)
        if op == "attribute" and self.version >= (3, 12) and arg & 1:
            op = "method"
        self._add(
            self._local(op, value), effect, value=value, number=int(op == "global" and arg & 1)
        )

    def _local(self, op: Op, name: Any) -> Op:
        """Since Python 3.13 one instruction loads local variables, and the cells of variables for a function inside.

        A comprehension in line may have a cell of a name that is a plain variable around it: "cell" stands for both.
        """
        return "cell" if op == "local" and name in self.cells else op

    def _particular(self, name: str, arg: int, value: Any) -> None:
        effect = self.effect(self.raw)
        if name == "RETURN_CONST":
            self._add("constant", 1, value=value)
            self._add("return", -1)
        elif name == "BINARY_OP":
            symbol = self.raw.argrepr
            self._add(
                "subscript" if symbol == "[]" else "binary",
                effect,
                kind="" if symbol == "[]" else symbol,
            )
        elif name in ("BINARY_SLICE", "STORE_SLICE"):
            self._add("build", -1, kind="slice", number=2)
            self._add("subscript" if name == "BINARY_SLICE" else "set_subscript", effect + 1)
        elif name == "COMPARE_OP":
            self._add("compare", effect, kind=value)
        elif name == "CONVERT_VALUE":
            self._add("convert", 0, kind=_CONVERSIONS[arg])
        elif name == "FORMAT_VALUE":
            has_specification = int(bool(arg & _HAS_SPECIFICATION))
            if kind := _CONVERSIONS[arg & 3]:
                self._add("convert", 0, kind=kind, number=has_specification)
            self._add("format", effect, number=has_specification)
        elif name in ("FORMAT_SIMPLE", "FORMAT_WITH_SPEC"):
            self._add("format", effect, number=int(name == "FORMAT_WITH_SPEC"))
        elif name == "MAKE_FUNCTION":
            self._add("function", effect, number=-effect)
        elif name == "END_FOR":
            self._add("end_for", -1)
            if effect == -2:  # of Python 3.12: the iterator, too
                self._add("pop", -1)
        elif name == "CALL_INTRINSIC_1":
            op: Op = "unary" if arg == _UNARY_POSITIVE else "other"
            self._add(op, effect, kind="+" if op == "unary" else "")
        else:
            self._call(name, arg, effect)

    def _call(self, name: str, arg: int, effect: int) -> None:
        """A call, of which older Pythons have up to three instructions: one step."""
        if name == "KW_NAMES":
            self.keywords = self.code.co_consts[arg]
            return
        if name == "PRECALL":
            self.above = effect
            return
        if name == "CALL_KW":
            names = self.steps[-1] if self.steps else None
            if names is None or names.op != "constant" or type(names.value) is not tuple:
                raise UncapturableError(
                    _unknown_instruction(name, self.code, self.line, self.version)
                )
            self.steps.pop()
            self.keywords, self.above = names.value, 1
        self._add("call", effect + self.above, number=arg, keywords=self.keywords)
        self.keywords, self.above = (), 0


# -- steps of a code object ------------------------------------------------------------------------

JUMPS = frozenset({"jump", "branch", "for", "send"})
# After these, or in their place, another step than the next one may follow.
ENDS = JUMPS | {"return", "raise"}
# What pushes a variable or a constant.
LOADS = frozenset({"constant", "local", "cell", "deref", "global", "name"})


class Steps(NamedTuple):
    """What `read` returns. starts: where each instruction of the code begins. first: its step to which a jump leads.

    runs: its step in which it calls methods of the user's objects.
    """

    steps: tuple[Step, ...]
    starts: tuple[int, ...]
    first: tuple[int, ...]
    runs: tuple[int, ...]


@lru_cache(maxsize=2048)
def _read(code: CodeType) -> Steps:
    version = sys.version_info[:2]
    if version not in VERSIONS:
        raise UncapturableError(_unknown_python(version))
    handlers = [target for _, _, target in handlers_of(code)]
    return _Reader(code, version, _effect).read(dis.get_instructions(code), handlers)


def _effect(raw: dis.Instruction) -> int:
    return dis.stack_effect(raw.opcode, raw.arg, jump=False)


def read(code: CodeType) -> tuple[Step, ...]:
    """The steps of a code object, without those of functions inside."""
    return _read(code).steps


def running(frame: FrameType) -> Step:
    """The step that a frame runs: `f_lasti` may point to a part of an instruction, or of a call."""
    steps, starts, _, runs = _read(frame.f_code)
    return steps[runs[max(bisect.bisect_right(starts, frame.f_lasti) - 1, 0)]]


def constants_of(code: CodeType) -> Iterator[Any]:
    """The constants of a code object: since Python 3.14, small integers are in its instructions alone."""
    yield from code.co_consts
    yield from (
        step.value for step in read(code) if step.op == "constant" and type(step.value) is int
    )


def handlers_of(code: CodeType) -> Iterator[tuple[int, int, int]]:
    """Where an exception leads: (start, end, target), as offsets: from instructions at `start <= offset < end`.

    The table is a sequence of numbers, in 6 bits a byte, of which the first of four has the highest bit.
    """
    numbers: list[int] = []
    value = 0
    for byte in code.co_exceptiontable:
        value = (value << 6) | (byte & 63)
        if not byte & 64:
            numbers.append(value)
            value = 0
    for start, length, target in zip(numbers[::4], numbers[1::4], numbers[2::4], strict=True):
        yield 2 * start, 2 * (start + length), 2 * target


def may_repeat(code: CodeType, at: int) -> bool:
    """Whether a jump, or an exception, may lead from a step, or one after it, to it or one before it."""
    steps, starts, first, _ = _read(code)
    if any(s.target is not None and s.target <= at <= s.at for s in steps):
        return True
    where = dict(zip(starts, first, strict=True))
    ends = (
        (first[bisect.bisect_left(starts, end) - 1], where[to]) for _, end, to in handlers_of(code)
    )
    return any(target <= at <= last for last, target in ends)


# -- comprehensions in line ------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def blocks(code: CodeType) -> tuple[Step, ...]:
    """The steps of a code object with one step "inlined" for each comprehension whose loop is among them.

    One whose steps are not understood is no block: its steps stay.
    """
    return _blocks(read(code), 0, len(read(code)))


def _blocks(steps: Sequence[Step], start: int, end: int) -> tuple[Step, ...]:
    found: list[Step] = []
    while start < end:
        block, start = _inlined(steps, start, end) or (steps[start], start + 1)
        found.append(block)
    return tuple(found)


def _inlined(steps: Sequence[Step], start: int, end: int) -> tuple[Step, int] | None:
    """The comprehension that begins at `start`, where its iterator is on the stack, and where it ends.

    Python saves the variables of its own (`save_local`), loops, and restores them:
    save v, swap, build, swap, [iterate], for -> end, the loop, end: end_for, pop, swap, set v
    """
    at = start
    saved: set[Any] = set()
    while at < end and (steps[at].op == "save_local" or (saved and steps[at].op == "make_cell")):
        saved |= {steps[at].value} if steps[at].op == "save_local" else set()
        at += 1
    if not saved or at + 4 > end:
        return None
    under, build, above = steps[at : at + 3]
    loop = steps[at + 3 + (steps[at + 3].op == "iterate")]
    if (under.op, under.number) != ("swap", len(saved) + 1) or (above.op, above.number) != (
        "swap",
        2,
    ):
        return None
    if build.op != "build" or build.number or loop.op != "for" or loop.target is None:
        return None
    after = loop.target
    last = after + 3 + len(saved)
    if last > end or [s.op for s in steps[after : after + 3]] != ["end_for", "pop", "swap"]:
        return None
    restored = {s.value for s in steps[after + 3 : last] if s.op == "set_local"}
    if steps[after + 2].number != len(saved) + 1 or restored != saved:
        return None
    body = _blocks(steps, loop.at + 1, after)
    first = steps[start]
    block = Step(
        "inlined", build.at, 0, first.line, None, build.kind, is_target=first.is_target, body=body
    )
    return block, last


def block_of(code: CodeType, at: int) -> tuple[tuple[Step, ...], Step | None]:
    """The steps among which the step `at` is, inner comprehensions as one each, and the comprehension around them."""
    found, owner = blocks(code), None
    while True:
        inner = next((b for b in found if b.op == "inlined" and b.body and _holds(b, at)), None)
        if inner is None:
            return found, owner
        found, owner = inner.body, inner


def _holds(block: Step, at: int) -> bool:
    last = block.body[-1]
    end = last.at if last.op != "inlined" else last.body[-1].at
    return block.body[0].at <= at <= end


# -- refusals --------------------------------------------------------------------------------------


def _span() -> str:
    first, last = (".".join(map(str, version)) for version in (VERSIONS[0], VERSIONS[-1]))
    return f"Python {first} to {last}"


def _unknown_python(version: tuple[int, ...]) -> str:
    return (
        f"this is Python {'.'.join(map(str, version))}, and functionalize knows the instructions of {_span()}: what "
        "the code of a step reads and changes is not known. Run it with one of these, or install a newer functionalize"
    )


def _unknown_instruction(name: str, code: CodeType, line: int, version: tuple[int, ...]) -> str:
    return (
        f"{code.co_filename}:{line}, in {code.co_name}: Python {'.'.join(map(str, version))} has compiled it to the "
        f"instruction {name}, of which functionalize does not know what it does. Run it with {_span()} as it is"
    )
