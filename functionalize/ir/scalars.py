"""Numbers that change from call to call: the Python computation on them, recorded as an expression.

    step = state["step"].item()              Read(record of _local_scalar_dense)
    lr = group["lr"]                         ScalarInput(source, "optimizer.lr_0", 0.1)
    lr / (1 - 0.9**step)                     Applied(truediv, (ScalarInput, Applied(sub, (1, Applied(pow, ...)))))

The record of an op with such an argument holds a `LiveNumber`; the program computes the number with the same
Python functions in the same order, so it is the same number bit for bit.

Invariant: the type of an expression's value depends on the types of its leaves alone (an expression such as `2**n`,
for which that is not so, is guarded when it is recorded). Expressions are shared, never copied: identity is equality.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from functionalize.ir.inputs import Source
    from functionalize.ir.ops import OpRecord

# In a program a number that Python holds is a tensor of one element of this dtype.
NUMBER_DTYPES: Mapping[type, torch.dtype] = {float: torch.float64, int: torch.int64}
# The functions of `math` whose results are live for live numbers.
_OF_MATH = "exp expm1 log log2 log10 log1p sqrt pow sin cos tan tanh atan fabs"
OF_MATH = tuple(_OF_MATH.split())


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Read:
    """The number that an op returned to Python (`tensor.item()`)."""

    record: OpRecord

    def __repr__(self) -> str:
        return expression_text(self)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ScalarInput:
    """A number that Python code holds (a learning rate): an input of the program, as a tensor of one element.

    source: where every call looks it up. hint: its value while the step was recorded.
    """

    source: Source
    name: str
    hint: Any

    def __repr__(self) -> str:
        return expression_text(self)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Applied:
    """A Python function applied to numbers. known_before_run: whether no leaf is a `Read`."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    known_before_run: bool

    def __repr__(self) -> str:
        return expression_text(self)

    @staticmethod
    def of(function: Callable[..., Any], *args: Any) -> Applied:
        """`function` of expressions and constants."""
        return Applied(function, args, all(is_known_before_run(a) for a in args))


Expression = Read | ScalarInput | Applied
_KINDS = (Read, ScalarInput, Applied)


@dataclass(frozen=True, slots=True, eq=False)
class LiveNumber:
    """An argument of an op that is computed at every call. hint: its value while the step was recorded."""

    expression: Expression
    hint: Any


_sum = sum  # the original: while a step is recorded, another function has its name


def summed(start: Any, *terms: Any) -> Any:
    """`sum(terms, start)`: since Python 3.12 it rounds once, where additions round each time."""
    return _sum(terms, start)


def is_expression(value: Any) -> bool:
    """Whether a value is an expression, computed at every call; all others are constants."""
    return isinstance(value, _KINDS)


def is_known_before_run(value: Any) -> bool:
    """Whether the value of an expression can be computed before the graph runs."""
    return not isinstance(value, Read) and getattr(value, "known_before_run", True)


def bottom_up(expression: Any, done: Mapping[Any, Any]) -> Iterator[Any]:
    """The subexpressions of `expression` that are not in `done`, in post-order; the caller adds each to `done`.

    Not recursive: a sum over many numbers is as deep as it is long.
    """
    todo = [expression] if is_expression(expression) else []
    while todo:
        top = todo[-1]
        parts = top.args if isinstance(top, Applied) else ()
        missing = [a for a in parts if is_expression(a) and a not in done]
        if missing:
            todo += missing
            continue
        todo.pop()
        if top not in done:
            yield top


def evaluated(expression: Any, leaf: Callable[[Any], Any]) -> Any:
    """The current value of an expression; raises the error of its functions (`ZeroDivisionError`).

    leaf: returns the current value of a `Read` or a `ScalarInput`.
    """
    done: dict[Any, Any] = {}
    for part in bottom_up(expression, done):
        if isinstance(part, Applied):
            done[part] = part.function(*[done[a] if is_expression(a) else a for a in part.args])
        else:
            done[part] = leaf(part)
    return done[expression] if is_expression(expression) else expression


def with_hints(arg: Any) -> Any:
    """`arg` with every live number replaced by its hint."""
    kind = type(arg)
    if kind is LiveNumber:
        return arg.hint
    if kind is list or kind is tuple:
        return kind(with_hints(a) for a in arg)
    if kind is dict:
        return {k: with_hints(a) for k, a in arg.items()}
    return arg


def map_numbers(fn: Callable[[LiveNumber], Any], arg: Any) -> Any:
    """`arg` with `fn` applied to every live number, through lists, tuples and dicts."""
    kind = type(arg)
    if kind is LiveNumber:
        return fn(arg)
    if kind is list or kind is tuple:
        # A fused optimizer has one live number, and lists of hundreds of values: these are passed over inline.
        new = [map_numbers(fn, a) if type(a) in _MAPPED else a for a in arg]
        return new if kind is list else tuple(new)
    if kind is dict:
        return {k: map_numbers(fn, a) for k, a in arg.items()}
    return arg


_MAPPED = frozenset({LiveNumber, list, tuple, dict})


# -- as text ---------------------------------------------------------------------------------------

_INFIX: Mapping[Any, str] = {
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.truediv: "/",
    operator.floordiv: "//",
    operator.mod: "%",
    operator.pow: "**",
    operator.lt: "<",
    operator.le: "<=",
    operator.gt: ">",
    operator.ge: ">=",
    operator.eq: "==",
    operator.ne: "!=",
}


def expression_text(expression: Any) -> str:
    """An expression as Python source; a number that was read from a tensor is `item`."""
    done: dict[Any, str] = {}
    for part in bottom_up(expression, done):
        if isinstance(part, Applied):
            args = [_in_brackets(a, done) if is_expression(a) else repr(a) for a in part.args]
            called = f"{part.function.__name__}({', '.join(args)})"
            done[part] = applied_text(part.function, args) or called
        else:
            done[part] = part.name if isinstance(part, ScalarInput) else "item"
        if len(done[part]) > _LONGEST:
            done[part] = "..."
    return done[expression] if is_expression(expression) else repr(expression)


_LONGEST = 200


def _in_brackets(part: Any, texts: Mapping[Any, str]) -> str:
    nested = isinstance(part, Applied) and _unbounded(part.function) in _INFIX
    return f"({texts[part]})" if nested else texts[part]


def _unbounded(function: Any) -> Any:
    """The function of Python's that one stands for whose results are bounded, in a program of a file."""
    return getattr(function, "__wrapped__", function)


def applied_text(function: Any, args: list[str]) -> str | None:
    """`a / b` or `round(a, 2)`; None for a function that is no operator and not from `math` or `builtins`."""
    function = _unbounded(function)
    if function in _INFIX and len(args) == 2:
        return f"{args[0]} {_INFIX[function]} {args[1]}"
    if function is operator.neg:
        return f"-{args[0]}"
    if function is summed:
        return f"sum(({', '.join(args[1:])}), {args[0]})"
    if getattr(function, "__module__", "") in ("_operator", "math", "builtins"):
        return f"{function.__name__.strip('_')}({', '.join(args)})"
    return None
