"""The live numbers of a recording: the expression of each, and the facts that the step derived from them.

    Number      an expression and its value in this run; implements the interface of torch's `SymNode` for C++
    computed    `a + b`: a `Number` with the expression of the sum
    learned     `a < b`: a plain value, and a fact that a guard checks
    ScalarLog   the facts of one recording

Invariant: every plain value that Python or C++ obtains from a live number is a fact of the log. After the recording has
ended, its numbers are constants and no facts are added. So they are in threads other than that of the recording (a
monitor, an exporter), which do not see that they are live; threads of autograd that run a part of the recording do.

Note [Exits of a number]
The value of a `Number` is private to this file, so that nothing else can make a constant of it without a guard. Beside
what is computed or learned from it, it leaves a number by four methods. Only `settle` gives it to the step.

    settle()        to the step or to C++: a fact
    carried()       to a kernel, as a part of the `LiveNumber` that the record of the op holds in that place
    shown_by(f, *a) to a text that goes into a repeated call, or becomes a fact: see live_text.py
    left_behind()   to where Python has it after the recording, while an effect or an output keeps the expression

`tests/scalars/test_number_exits.py` lists who may call the last three.
Refusal: a number of one recording that is used in another recording, nested in it.
"""

from __future__ import annotations

import math
import operator
import threading
import weakref
from collections.abc import Callable, Container, Mapping
from types import CodeType, FrameType
from typing import Any

from functionalize._compat.dispatch import current_modes
from functionalize._compat.stacks import CapturedTraceback
from functionalize.ir.inputs import Source
from functionalize.ir.ops import OpRecord
from functionalize.ir.scalars import Applied, LiveNumber, Read, ScalarInput, is_expression
from functionalize.util.number_uses import is_internal_code, may_need_exact_number

FOREIGN_NUMBER = "a number that another recording reads is used in this one: pass it to the inner step as a tensor"


class Fact:
    """An expression, its value in the recording, and the stack at which the step obtained the value."""

    __slots__ = ("expression", "traceback", "value")

    def __init__(
        self, expression: Any, value: Any, traceback: CapturedTraceback | None = None
    ) -> None:
        self.expression, self.value = expression, value
        self.traceback = traceback or CapturedTraceback.extract()


class FrozenScalar:
    """A number that the op of `record` returned to Python and that is not live: a constant with a guard."""

    __slots__ = ("record", "value")

    def __init__(self, record: OpRecord, value: Any) -> None:
        self.record, self.value = record, value


class ScalarLog:
    """The live numbers of one recording.

    facts: each fact once, by its expression.
    active: whether the numbers are live; after the recording has ended they are constants.
    note: called with a reason why a replay cannot repeat the step.
    made: weak references to the live numbers of the recording.
    plain_reads: numbers that the user's code reads are plain, since C code has refused live ones in an earlier call.
    texts: texts of live numbers that are no facts yet, see live_text.py.
    yields: whether its numbers become constants where they meet live ones of another log.
    """

    yields = False

    def __init__(self, note: Callable[[str], None]) -> None:
        self.active = True
        self._thread = threading.get_ident()
        self.plain_reads = False
        self._exact: dict[tuple[CodeType, ...], bool] = {}
        self.made: list[weakref.ref[Any]] = []
        self.facts: dict[Any, Fact] = {}
        self.texts: list[Any] = []
        self._note = note

    def close(self) -> None:
        """End the recording: its numbers are constants from now on."""
        self.active = False

    @property
    def is_here(self) -> bool:
        """Whether this thread runs a part of the recording: autograd's threads run with its dispatch modes."""
        if threading.get_ident() == self._thread:
            return True
        return any(hasattr(mode, "resize_storage") for mode in current_modes())

    def read(self, record: OpRecord, value: float) -> Number:
        """The live number that the op of `record` returns to Python."""
        return Number(Read(record), value, self)

    def is_live_for(self, reader: FrameType) -> bool:
        """Whether the function that reads a number by `.item()` receives a live one."""
        if is_internal_code(reader.f_code):
            return True
        return not (self.plain_reads or may_need_exact_number(reader, self._exact))

    def from_source(self, source: Source, name: str, value: float) -> Number:
        """The live number that Python holds at `source`, which every call reads again."""
        return Number(ScalarInput(source, name, value), value, self)

    def learn(
        self, expression: Any, value: Any, traceback: CapturedTraceback | None = None
    ) -> None:
        """Add a fact: the step relies on `expression` having the value `value`."""
        # By `repr`: 1, 1.0 and True are equal, but other operands.
        key = expression
        if isinstance(expression, Applied):
            parts = (a if is_expression(a) else (type(a), repr(a)) for a in expression.args)
            key = (expression.function, *parts)
        if self.active and key not in self.facts:
            self.facts[key] = Fact(expression, value, traceback)

    def learn_late(self, number: Number) -> None:
        """Add the fact of a number's value after the recording has ended."""
        self.active, self._thread = True, threading.get_ident()
        try:
            number.settle()
        finally:
            self.active = False

    def escaped(self, held: Container[int]) -> list[Any]:
        """The live numbers that exist still, without those whose ids are in `held`."""
        alive = (number for made in self.made if (number := made()) is not None)
        return [number for number in alive if id(number) not in held]

    def foreign(self) -> None:
        """A number of another recording is used in this one."""
        self._note(FOREIGN_NUMBER)


class Number:
    """The node of a live number: see Note [Exits of a number].

    expression: evaluate the program computes it; for a constant, its value. value: that of this run.
    Methods without an underscore and without a docstring are those of torch's `SymNode`, which C++ calls.
    """

    __slots__ = ("_hint", "expression", "kind", "log")

    def __init__(self, expression: Any, value: Any, log: ScalarLog) -> None:
        self.expression, self.log = expression, log
        self._hint, self.kind = value, type(value)

    @property
    def alive(self) -> bool:
        """Whether the number may differ from call to call, for this thread."""
        log = self.log
        return log.active and is_expression(self.expression) and log.is_here

    def settle(self) -> Any:
        """The plain value, which is a constant of the program from now on: adds a fact."""
        if self.alive:
            self.log.learn(self.expression, self._hint)
        return self._hint

    def carried(self) -> LiveNumber:
        """The number as an argument of a recorded op, whose kernel receives its `hint`."""
        return LiveNumber(self.expression, self._hint)

    def shown_by(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(value, *args)`, which formats the value for a text that is a fact unless a call takes it."""
        return function(self._hint, *args)

    def left_behind(self) -> Any:
        """The value, for a place that the step does not read again, while something else keeps the expression."""
        return self._hint

    def is_int(self) -> bool:
        return self.kind is int

    def is_float(self) -> bool:
        return self.kind is float

    def is_bool(self) -> bool:
        return self.kind is bool

    def is_nested_int(self) -> bool:
        return False

    def nested_int(self) -> None:
        return None

    def is_symbolic(self) -> bool:
        return self.alive

    def is_constant(self) -> bool:
        return not self.alive

    def has_hint(self) -> bool:
        return True

    def constant_int(self) -> int | None:
        return None if self.alive else int(self._hint)

    def constant_bool(self) -> bool | None:
        return None if self.alive else bool(self._hint)

    def maybe_as_int(self) -> int | None:
        return self.constant_int()

    def guard_int(self, file: str, line: int) -> int:
        return int(self.settle())

    def guard_float(self, file: str, line: int) -> float:
        return float(self.settle())

    def guard_bool(self, file: str, line: int) -> bool:
        return bool(learned(operator.truth, self))

    def statically_known_true(self, file: str, line: int) -> bool:
        return not self.alive and bool(self._hint)

    guard_size_oblivious = guard_or_false = guard_or_true = expect_true = guard_bool

    def expect_size(self, file: str, line: int) -> bool:
        return bool(learned(operator.ge, self, 0))

    def int_(self) -> int:
        return self.guard_int("", 0)

    def bool_(self) -> bool:
        return self.guard_bool("", 0)

    def wrap_int(self, value: int) -> Number:
        return Number(value, value, self.log)

    wrap_float = wrap_bool = wrap_int

    def clone(self) -> Number:
        return self

    def str(self) -> Any:
        return repr(self.settle())

    _graph_repr = str

    def sym_sum(self, terms: list[Number]) -> Number:
        total = self.wrap_int(0)
        for term in terms:
            total = total.add(term)  # type: ignore[attr-defined]
        return total


def computed(function: Callable[..., Any], *operands: Any) -> Any:
    """Apply `function` to plain numbers and `Number`s: a `Number` if an operand is live and the result a number.

    If `function` raises, or its result is no number, the operands become constants: the outcome depends on them.
    """
    operands = _of_one_log(operands)
    log = _log_of(operands)
    hints = [o._hint if type(o) is Number else o for o in operands]
    if log is None:
        return function(*hints)
    try:
        value = function(*hints)
    except Exception:
        _settle(operands)
        raise
    if type(value) not in (int, float):
        _settle(operands)
        return value
    if function is operator.pow and type(hints[0]) is type(hints[1]) is int:
        learned(operator.ge, operands[1], 0)  # int**int is a float where the exponent is negative
    return Number(_applied(log, function, operands), value, log)


def learned(function: Callable[..., Any], *operands: Any) -> Any:
    """The plain value of `function` applied to plain numbers and `Number`s; adds a fact about it."""
    return learned_at(None, function, *operands)


def learned_at(
    traceback: CapturedTraceback | None, function: Callable[..., Any], *operands: Any
) -> Any:
    """The same. traceback: where the step has obtained the value; None: here."""
    operands = _of_one_log(operands)
    log = _log_of(operands)
    value = function(*[o._hint if type(o) is Number else o for o in operands])
    if log is not None:
        log.learn(_applied(log, function, operands), value, traceback)
    return value


def _applied(log: ScalarLog, function: Callable[..., Any], operands: tuple[Any, ...]) -> Applied:
    return Applied.of(function, *[_expression_in(log, o) for o in operands])


def _log_of(operands: tuple[Any, ...]) -> ScalarLog | None:
    return next((o.log for o in operands if type(o) is Number and o.alive), None)


def _of_one_log(operands: tuple[Any, ...]) -> tuple[Any, ...]:
    """The operands, with the numbers of a log that yields replaced by constants where another log has some."""
    live = [o for o in operands if type(o) is Number and o.alive]
    if len(live) < 2 or all(o.log is live[0].log for o in live):
        return operands
    given = [o for o in live if o.log.yields]
    return tuple([o.settle() if any(o is each for each in given) else o for o in operands])


def _expression_in(log: ScalarLog, operand: Any) -> Any:
    """The expression of an operand in the recording of `log`; that of a constant is its value."""
    if type(operand) is not Number:
        return operand
    if operand.log is log or not operand.alive:
        return operand.expression if operand.alive else operand._hint
    log.foreign()
    return operand.settle()


def _settle(operands: tuple[Any, ...]) -> None:
    for o in operands:
        if type(o) is Number:
            o.settle()


# -- the methods of SymNode ------------------------------------------------------------------------

_COMPUTED: Mapping[Callable[..., Any], str] = {
    operator.add: "add",
    operator.sub: "sub",
    operator.mul: "mul",
    operator.truediv: "truediv float_truediv int_truediv",
    operator.floordiv: "floordiv int_floordiv",
    operator.mod: "mod",
    operator.pow: "pow float_pow pow_by_natural",
    operator.neg: "neg",
    operator.pos: "pos",
    operator.abs: "abs",
    operator.lshift: "lshift",
    operator.rshift: "rshift",
    float: "sym_float",
    math.trunc: "trunc sym_int",
    math.floor: "floor",
    math.ceil: "ceil",
    round: "round",
    max: "sym_max",
    min: "sym_min",
}
_LEARNED: Mapping[Callable[..., Any], str] = {
    operator.eq: "eq",
    operator.ne: "ne",
    operator.lt: "lt",
    operator.le: "le",
    operator.gt: "gt",
    operator.ge: "ge",
    operator.and_: "and_ sym_and",
    operator.or_: "or_ sym_or",
    operator.not_: "sym_not",
    float.is_integer: "is_integer",
}


def _node_method(
    evaluate: Callable[..., Any], function: Callable[..., Any]
) -> Callable[..., Number]:
    def method(self: Number, *others: Any) -> Number:
        value = evaluate(function, self, *others)
        return value if type(value) is Number else Number(value, value, self.log)

    return method


for _evaluate, _table in ((computed, _COMPUTED), (learned, _LEARNED)):
    for _function, _names in _table.items():
        for _name in _names.split():
            setattr(Number, _name, _node_method(_evaluate, _function))
