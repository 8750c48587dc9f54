"""What a recording knows of its live numbers: the expression of each, and what the step learned of them.

    Number      an expression and its value now; C++ reads it by the methods of torch's `SymNode`
    computed    `a + b`: a `Number` with the expression of the sum
    learned     `a < b`: a plain value, and a fact that a guard will check
    ScalarLog   the facts of one recording

Invariant: what Python or C++ learns of a number as a plain value is a fact of the log; when the recording
has ended, numbers are constants and nothing is learned.
Refusal: a number of one recording that is used in another one, inside it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from functionalize._compat.stacks import CapturedTraceback
from functionalize.ir.inputs import Source
from functionalize.ir.ops import OpRecord
from functionalize.ir.scalars import Applied, Read, ScalarInput, is_expression

FOREIGN_NUMBER = "a number that another recording reads is used in this one"


class Fact:
    """That an expression has the value it had, and where the step learned it."""

    __slots__ = ("expression", "traceback", "value")

    def __init__(self, expression: Any, value: Any) -> None:
        self.expression, self.value = expression, value
        self.traceback = CapturedTraceback.extract()


class FrozenScalar:
    """A number that `record` yielded to Python, and that is not live: a constant of the program, guarded."""

    __slots__ = ("record", "value")

    def __init__(self, record: OpRecord, value: Any) -> None:
        self.record, self.value = record, value


class ScalarLog:
    """The live numbers of one recording. facts: what the step learned of them, each once.

    active: whether the numbers are live; when the recording has ended they are constants. note: takes a reason why no
    replay could repeat the step.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self.active = True
        self.facts: dict[Any, Fact] = {}
        self._note = note

    def close(self) -> None:
        """The recording has ended: its numbers are constants from now on."""
        self.active = False

    def read(self, record: OpRecord, value: float) -> Number:
        """The number that `record` yields to Python."""
        return Number(Read(record), value, self)

    def given(self, source: Source, name: str, value: float) -> Number:
        """A number that Python keeps at `source`, and that every call reads there again."""
        return Number(ScalarInput(source, name, value), value, self)

    def learn(self, expression: Any, value: Any) -> None:
        """Note a fact: from here on the step relies on `expression` being `value`."""
        key = expression
        if isinstance(expression, Applied):
            parts = (a if is_expression(a) else (type(a), repr(a)) for a in expression.args)
            key = (expression.function, *parts)
        if self.active and key not in self.facts:
            self.facts[key] = Fact(expression, value)

    def foreign(self) -> None:
        """A number of another recording is used in this one."""
        self._note(FOREIGN_NUMBER)


class Number:
    """The node of a live number: its expression and its value in this run. The expression of a constant is its value.

    The methods without an underscore and without a docstring are those of torch's `SymNode`, by which C++ reads it.
    """

    __slots__ = ("expression", "hint", "log")

    def __init__(self, expression: Any, hint: Any, log: ScalarLog) -> None:
        self.expression, self.hint, self.log = expression, hint, log

    @property
    def alive(self) -> bool:
        """Whether it changes from call to call."""
        return self.log.active and is_expression(self.expression)

    def settle(self) -> Any:
        """The plain value, which is a constant of the program from now on."""
        if self.alive:
            self.log.learn(self.expression, self.hint)
        return self.hint

    def is_int(self) -> bool:
        return type(self.hint) is int

    def is_float(self) -> bool:
        return type(self.hint) is float

    def is_bool(self) -> bool:
        return type(self.hint) is bool

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
        return None if self.alive else int(self.hint)

    def constant_bool(self) -> bool | None:
        return None if self.alive else bool(self.hint)

    def maybe_as_int(self) -> int | None:
        return self.constant_int()

    def guard_int(self, file: str, line: int) -> int:
        return int(self.settle())

    def guard_float(self, file: str, line: int) -> float:
        return float(self.settle())

    def guard_bool(self, file: str, line: int) -> bool:
        return bool(learned(operator.truth, self))

    def statically_known_true(self, file: str, line: int) -> bool:
        return not self.alive and bool(self.hint)

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
    """`function` of plain numbers and `Number`s: a `Number` where the result changes with them, else plain.

    What Python raises passes through; that it was raised is then a fact about the operands.
    """
    log = _log_of(operands)
    hints = [o.hint if type(o) is Number else o for o in operands]
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
    """The plain value of `function` of plain numbers and `Number`s; that it is this value becomes a fact."""
    log = _log_of(operands)
    value = function(*[o.hint if type(o) is Number else o for o in operands])
    if log is not None:
        log.learn(_applied(log, function, operands), value)
    return value


def _applied(log: ScalarLog, function: Callable[..., Any], operands: tuple[Any, ...]) -> Applied:
    return Applied.of(function, *[_expression_in(log, o) for o in operands])


def _log_of(operands: tuple[Any, ...]) -> ScalarLog | None:
    return next((o.log for o in operands if type(o) is Number and o.alive), None)


def _expression_in(log: ScalarLog, operand: Any) -> Any:
    """The expression of an operand in a recording; a constant is its own."""
    if type(operand) is not Number:
        return operand
    if operand.log is log or not operand.alive:
        return operand.expression if operand.alive else operand.hint
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


def _asked(how: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Number]:
    def method(self: Number, *others: Any) -> Number:
        value = how(function, self, *others)
        return value if type(value) is Number else Number(value, value, self.log)

    return method


for _how, _table in ((computed, _COMPUTED), (learned, _LEARNED)):
    for _function, _names in _table.items():
        for _name in _names.split():
            setattr(Number, _name, _asked(_how, _function))
