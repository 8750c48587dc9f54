"""Live numbers: what Python reads from a tensor during a recording is remembered, not frozen.

    step = state["step"].item()           a LiveFloat: looks like 3.0, remembers where it is from
    size = lr / (1 - beta1**step)         another one, remembers the arithmetic
    p.addcdiv_(m, v, value=-size)         the record holds the expression, the program computes it
    if size > 1: ...                      a plain bool; a guard on the comparison, not on the number
    f"{size:.3f}", float(size)            plain; a guard on the text, on the number

A live number is a `torch.SymFloat` or `SymInt` around a `Number` of ours, so that torch's own functions take
it; C++ asks the `Number` by the names of torch's `SymNode` (`guard_float`, `wrap_float`, `add`, ...).

Invariant: what Python or C++ learns of a live number as a plain value is guarded when it learns it; when the
recording has ended, a live number is a constant and nothing is remembered.
Refusal: a number of one recording that is used in another one, inside it.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from functionalize._compat import CapturedTraceback, pytree
from functionalize.core.inputs import Source
from functionalize.core.numbers import Applied, Given, LiveNumber, Read, is_expression
from functionalize.core.ops import OpRecord


class Fact:
    """That an expression has the value it had, and where the step learned it."""

    __slots__ = ("expression", "traceback", "value")

    def __init__(self, expression: Any, value: Any) -> None:
        self.expression, self.value = expression, value
        self.traceback = CapturedTraceback.extract()


class Ledger:
    """The live numbers of one recording. facts: what the step learned of them, each once.

    unfaithful: where to say what a replay could not repeat.
    """

    def __init__(self, unfaithful: list[str]) -> None:
        self.active = True
        self.facts: dict[Any, Fact] = {}
        self.handed: Handed | None = None  # see Note [Handed over]
        self._unfaithful = unfaithful

    def close(self) -> None:
        """The recording has ended: its numbers are constants from now on."""
        self.active = False

    def read(self, record: OpRecord, value: float) -> torch.SymFloat | torch.SymInt:
        """The number that `record` gave Python."""
        return _shown(Number(Read(record), value, self))

    def given(self, source: Source, name: str, value: float) -> torch.SymFloat | torch.SymInt:
        """A number that Python kept, which every call looks up again."""
        return _shown(Number(Given(source, name, value), value, self))

    def learn(self, expression: Any, value: Any) -> None:
        """The step knows from here on that `expression` is `value`."""
        key = expression
        if isinstance(expression, Applied):
            parts = (a if is_expression(a) else (type(a), repr(a)) for a in expression.args)
            key = (expression.function, *parts)
        if self.active and key not in self.facts:
            self.facts[key] = Fact(expression, value)

    def foreign(self) -> None:
        """A number of another recording came in."""
        text = "a number that another recording reads is used in this one"
        if text not in self._unfaithful:
            self._unfaithful.append(text)


class Number:
    """What is behind a live number: its expression and its value now. Constants have no expression.

    The methods without an underscore that are not described here are those of torch's `SymNode`.
    """

    __slots__ = ("expression", "hint", "ledger")

    def __init__(self, expression: Any, hint: Any, ledger: Ledger) -> None:
        self.expression, self.hint, self.ledger = expression, hint, ledger

    @property
    def alive(self) -> bool:
        """Whether it changes from call to call."""
        return self.ledger.active and is_expression(self.expression)

    def settle(self) -> Any:
        """The plain value, which is a constant of the program from now on."""
        if self.alive:
            self.ledger.learn(self.expression, self.hint)
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
        return Number(value, value, self.ledger)

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
    ledger = _ledger_of(operands)
    hints = [o.hint if type(o) is Number else o for o in operands]
    if ledger is None:
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
    return Number(_applied(ledger, function, operands), value, ledger)


def learned(function: Callable[..., Any], *operands: Any) -> Any:
    """The plain value of `function` of plain numbers and `Number`s, which the step knows from now on."""
    ledger = _ledger_of(operands)
    value = function(*[o.hint if type(o) is Number else o for o in operands])
    if ledger is not None:
        ledger.learn(_applied(ledger, function, operands), value)
    return value


def _applied(ledger: Ledger, function: Callable[..., Any], operands: tuple[Any, ...]) -> Applied:
    return Applied.of(function, *[_expression_in(ledger, o) for o in operands])


def _ledger_of(operands: tuple[Any, ...]) -> Ledger | None:
    return next((o.ledger for o in operands if type(o) is Number and o.alive), None)


def _expression_in(ledger: Ledger, operand: Any) -> Any:
    """What an operand is in a recording: an expression, or a constant."""
    if type(operand) is not Number:
        return operand
    if operand.ledger is ledger or not operand.alive:
        return operand.expression if operand.alive else operand.hint
    ledger.foreign()
    return operand.settle()


def _settle(operands: tuple[Any, ...]) -> None:
    for o in operands:
        if type(o) is Number:
            o.settle()


# -- what C++ asks for -----------------------------------------------------------------------------

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
        return value if type(value) is Number else Number(value, value, self.ledger)

    return method


for _how, _table in ((computed, _COMPUTED), (learned, _LEARNED)):
    for _function, _names in _table.items():
        for _name in _names.split():
            setattr(Number, _name, _asked(_how, _function))


# -- what the user sees ----------------------------------------------------------------------------


def _operands(*values: Any) -> tuple[Any, ...] | None:
    """The `Number` of each live value; None if one is no number of Python's."""
    if not all(is_live(v) or isinstance(v, (int, float)) for v in values):
        return None
    return tuple(v.node if is_live(v) else v for v in values)


def _answer(function: Callable[..., Any], *values: Any) -> Any:
    """What `values[0] + values[1]` gives; at least one of them is live."""
    operands = _operands(*values)
    if operands is not None:
        return shown(computed(function, *operands))
    if function is operator.pow and _needs_a_plain_base(*values):
        return values[1].__rpow__(plain(values[0]))
    if all(isinstance(v, numbers.Number) for v in values):
        return function(*map(plain, values))
    return NotImplemented


def _needs_a_plain_base(base: Any, exponent: Any) -> bool:
    """Whether autograd would take the logarithm of a live number, which torch has not implemented."""
    return isinstance(exponent, Tensor) and exponent.requires_grad and torch.is_grad_enabled()


def _forward(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *others: _answer(function, self, *others)


def _reflected(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, other: _answer(function, other, self)


def _compared(function: Callable[..., Any]) -> Callable[..., Any]:
    def compare(self: Any, other: Any) -> Any:
        operands = _operands(self, other)
        if operands is not None:
            return learned(function, *operands)
        number = isinstance(other, numbers.Number)
        return function(plain(self), other) if number else NotImplemented

    return compare


class _Shown:
    """What `LiveFloat` and `LiveInt` have in common."""

    node: Any

    __hash__ = lambda self: hash(plain(self))  # type: ignore[assignment]  # noqa: E731
    __bool__ = lambda self: learned(operator.truth, self.node)  # noqa: E731
    __float__ = lambda self: float(plain(self))  # noqa: E731
    __int__ = lambda self: learned(int, self.node)  # noqa: E731
    __repr__ = __str__ = lambda self: learned(repr, self.node)  # noqa: E731
    __format__ = lambda self, spec: learned(format, self.node, spec)  # noqa: E731
    __copy__ = lambda self: self  # noqa: E731
    __deepcopy__ = lambda self, memo: self  # noqa: E731
    __reduce_ex__ = lambda self, protocol: (type(self.node.hint), (plain(self),))  # noqa: E731
    __divmod__ = lambda self, other: (self // other, self % other)  # type: ignore[operator]  # noqa: E731
    __rdivmod__ = lambda self, other: (other // self, other % self)  # noqa: E731
    __sym_int__ = lambda self: math.trunc(self)  # type: ignore[call-overload]  # noqa: E731

    def __round__(self, digits: Any = None) -> Any:
        return _answer(round, self) if digits is None else _answer(round, self, digits)

    def __pow__(self, other: Any, modulo: Any = None) -> Any:
        if modulo is None:
            return _answer(operator.pow, self, other)
        return pow(plain(self), plain(other), plain(modulo))

    def conjugate(self) -> Any:
        return self

    @property
    def real(self) -> Any:
        return self

    @property
    def imag(self) -> Any:
        return type(self.node.hint)(0)

    def __getattr__(self, name: str) -> Any:
        """What else a float or an int can do, it does as a plain number."""
        if name.startswith("__") or not hasattr(type(self.node.hint), name):
            raise AttributeError(name)
        return getattr(plain(self), name)


_BINARY = {n: getattr(operator, n) for n in ("add", "sub", "mul", "truediv", "floordiv", "mod")}
_BITS = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}
_BITS |= {"lshift": operator.lshift, "rshift": operator.rshift}
_UNARY = {"neg": operator.neg, "pos": operator.pos, "abs": operator.abs, "invert": operator.invert}
_UNARY |= {"trunc": math.trunc, "floor": math.floor, "ceil": math.ceil, "sym_float": float}

for _name, _function in (_BINARY | _BITS).items():
    setattr(_Shown, f"__{_name}__", _forward(_function))
    setattr(_Shown, f"__r{_name}__", _reflected(_function))
for _name, _function in _UNARY.items():
    setattr(_Shown, f"__{_name}__", _forward(_function))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(_Shown, f"__{_name}__", _compared(getattr(operator, _name)))
_Shown.__rpow__ = _reflected(operator.pow)  # type: ignore[attr-defined]


class LiveFloat(_Shown, torch.SymFloat):
    """A float that changes from call to call; to `isinstance` it is a float."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # type: ignore[override]
        return float

    def is_integer(self) -> bool:
        return bool(learned(float.is_integer, self.node))

    def as_integer_ratio(self) -> tuple[int, int]:
        return float(self).as_integer_ratio()

    def hex(self) -> str:
        return float(self).hex()


class LiveInt(_Shown, torch.SymInt):
    """An int that changes from call to call; to `isinstance` it is an int."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # type: ignore[override]
        return int

    __index__ = lambda self: int(plain(self))  # noqa: E731

    def as_integer_ratio(self) -> tuple[Any, int]:
        return self, 1

    def bit_length(self) -> int:
        return int(self).bit_length()


_SHOWN = frozenset({LiveFloat, LiveInt})
SYMBOLIC = frozenset({LiveFloat, LiveInt, torch.SymFloat, torch.SymInt})


def _shown(number: Number) -> Any:
    return (LiveFloat if type(number.hint) is float else LiveInt)(number)


def shown(value: Any) -> Any:
    """A live number in its own clothes: as torch gives it back, it is a `torch.SymFloat` around ours."""
    if type(value) is Number:
        return _shown(value)
    if type(value) in SYMBOLIC and type(value.node) is Number:
        return value if type(value) in _SHOWN else _shown(value.node)
    return value


def is_live(value: Any) -> bool:
    """Whether a value is a live number, of a recording under way or ended."""
    return type(value) in SYMBOLIC and type(value.node) is Number


def plain(value: Any) -> Any:
    """The number that a live number stands for (a fact of its recording); anything else as it is."""
    return value.node.settle() if is_live(value) else value


def plain_tree(tree: Any) -> Any:
    """A result with plain numbers in the place of live ones."""
    if not any(map(is_live, pytree.tree_leaves(tree))):
        return tree
    return pytree.tree_map(lambda leaf: leaf.node.hint if is_live(leaf) else leaf, tree)


def expression_of(value: Any, ledger: Ledger | None) -> Any:
    """The expression of a value that is a live number of a recording, else None."""
    mine = is_live(value) and value.node.ledger is ledger
    return value.node.expression if mine and is_expression(value.node.expression) else None


# -- what ops are given ----------------------------------------------------------------------------

# By the schema: arguments that no shape depends on. A number for a `Tensor` is one that torch has wrapped.
_TAKEN_LIVE = frozenset({"number", "Optional[number]", "List[number]", "Tensor", "Optional[Tensor]"})
_SIZED_BY_NUMBERS = ("aten::arange", "aten::range")


def take_numbers(ledger: Ledger, record: OpRecord) -> None:
    """Replace the live numbers in a record: by `LiveNumber`s where the op can be given them, else by constants."""
    schema = record.target._schema
    record.live = True
    sized = schema.name.startswith(_SIZED_BY_NUMBERS)
    args = list(record.args)
    for at, argument in enumerate(schema.arguments):
        live = not sized and str(argument.type) in _TAKEN_LIVE
        if at < len(args):
            args[at] = _taken(ledger, args[at], live)
        elif argument.name in record.kwargs:
            record.kwargs[argument.name] = _taken(ledger, record.kwargs[argument.name], live)
    record.args = tuple(args)
    if ledger.handed is not None and ledger.handed.op == schema.name:
        ledger.handed.take(record)


def _taken(ledger: Ledger, arg: Any, live: bool) -> Any:
    if isinstance(arg, list):
        return [_taken(ledger, a, live) for a in arg]
    if not is_live(arg):
        return arg
    number: Number = arg.node
    if live and number.alive and number.ledger is ledger:
        return LiveNumber(number.expression, number.hint)
    if number.alive and number.ledger is not ledger:
        ledger.foreign()
    return number.settle() if number.ledger is ledger else number.hint


class Handed:
    """Note [Handed over]

    Two callers take live numbers to an op by a way that only plain ones can go. The fused optimizers take `lr`
    as a C++ double. DTensor would keep the number in its caches of shardings, compare by it, and give it
    to ops when no recording is left that knows it. So the caller is given plain numbers, the ledger keeps
    the live ones by the names of the arguments, and the record of the op gets them back there. One that no record
    got is a constant of the program.
    """

    def __init__(self, op: str, arguments: Mapping[str, Any]) -> None:
        self.op = op
        self._arguments = {k: v for k, v in arguments.items() if has_live(v)}
        self._taken: set[str] = set()

    def take(self, record: OpRecord) -> None:
        """Put the numbers back into a record of the op."""
        args = list(record.args)
        for at, argument in enumerate(record.target._schema.arguments):
            name = argument.name
            if name not in self._arguments:
                continue
            now = args[at] if at < len(args) else record.kwargs.get(name)
            value = _put_back(self._arguments[name], now)
            if value is None:
                continue
            self._taken.add(name)
            if at < len(args):
                args[at] = value
            else:
                record.kwargs[name] = value
        record.args = tuple(args)

    def close(self) -> None:
        """What was not put back is a constant."""
        for name in self._arguments.keys() - self._taken:
            settled(self._arguments[name])


@contextmanager
def handing_over(ledger: Ledger, op: str, arguments: Mapping[str, Any]) -> Iterator[None]:
    """Inside, records of `op` get back the live numbers that are in `arguments`."""
    before, ledger.handed = ledger.handed, Handed(op, arguments)
    try:
        yield
        ledger.handed.close()
    finally:
        ledger.handed = before


def _put_back(handed: Any, now: Any) -> Any:
    """`now` with the live numbers of `handed` in their places; None if these are not the same numbers."""
    if is_live(handed):
        number: Number = handed.node
        same = type(now) is type(number.hint) and repr(now) == repr(number.hint)
        return LiveNumber(number.expression, number.hint) if same and number.alive else None
    if isinstance(handed, (list, tuple)):
        if not isinstance(now, (list, tuple)) or len(now) != len(handed):
            return None
        parts = [_put_back(h, n) for h, n in zip(handed, now, strict=True)]
        return None if any(part is None for part in parts) else parts
    return now


def has_live(arg: Any) -> bool:
    """Whether there is a live number in an argument."""
    if isinstance(arg, (list, tuple)):
        return any(map(has_live, arg))
    return type(arg) in SYMBOLIC and is_live(arg)


def settled(arg: Any) -> Any:
    """An argument with plain numbers, which are constants of the program from now on."""
    if type(arg) in (list, tuple):
        return type(arg)(map(settled, arg))
    return plain(arg)


def run_with(ledger: Ledger, arg: Any) -> Any:
    """An argument as the op is run with it: plain numbers for those of the ledger, and for constants."""
    kind = type(arg)
    if kind in SYMBOLIC and is_live(arg):
        theirs = arg.node.ledger
        return arg.node.hint if theirs is ledger or not theirs.active else arg
    if kind is list or kind is tuple:
        return kind(run_with(ledger, a) for a in arg)
    if kind is dict:
        return {k: run_with(ledger, a) for k, a in arg.items()}
    return arg
