"""Live numbers: a number that Python reads from a tensor during a recording keeps its expression and is no constant.

    step = state["step"].item()           a LiveFloat: prints as 3.0; its expression is the read of the tensor
    size = lr / (1 - beta1**step)         another one; its expression is the arithmetic
    p.addcdiv_(m, v, value=-size)         the record holds the expression, and the program computes it
    if size > 1: ...                      a plain bool; a guard on the comparison, not on the number
    f"{size:.3f}", float(size)            plain values; a guard on the text, and on the number
    math.exp(size)                        another live number; `math.isfinite(size)`: a plain bool, and a guard on it
    np.exp(size), size * timedelta(1)     what eager computes, of the plain number; a guard on the number

A live number is a `torch.SymFloat` or `SymInt` around a `Number` (see scalar_log.py), so that torch's own functions
accept it. For `isinstance` it is a float or an int, and it has all methods of these types.
Invariant: every plain value that Python derives from a live number is a fact of its recording, which a guard checks.

Note [Numbers that C reads]
A live number is no instance of a subclass of float or int, because C code reads the value of such an instance without
a call that could be noticed, and a replay would repeat the old value. C code that asks for an exact float or int
(`Decimal(n)`, `timedelta(seconds=n)`, `type(n) is float`) therefore cannot be served by a live number at all; numbers
that may come there are plain from the start, see `util/number_uses.py`.
"""

from __future__ import annotations

import importlib
import math
import numbers
import operator
import re
import weakref
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from functionalize.ir.scalars import is_expression, summed
from functionalize.scalars.live_text import is_formatted, text_of
from functionalize.scalars.scalar_log import Number, ScalarLog, computed, learned
from functionalize.util import structure
from functionalize.util.added_up import added_up


def _operands(*values: Any) -> tuple[Any, ...] | None:
    """The values, with live ones replaced by their `Number`; None if one is neither live nor an int or a float."""
    if not all(is_live(v) or isinstance(v, (int, float)) for v in values):
        return None
    return tuple(v.node if is_live(v) else v for v in values)


def _apply(function: Callable[..., Any], *values: Any) -> Any:
    """Apply `function`, such as `operator.add`, to values of which at least one is live."""
    operands = _operands(*values)
    if operands is not None:
        return as_live(computed(function, *operands))
    if function is operator.pow and _needs_a_plain_base(*values):
        return values[1].__rpow__(plain(values[0]))
    if all(isinstance(v, numbers.Number) for v in values):
        return function(*map(plain, values))
    return NotImplemented


def _needs_a_plain_base(base: Any, exponent: Any) -> bool:
    """Whether autograd would compute the logarithm of a live number, which torch does not implement."""
    return isinstance(exponent, Tensor) and exponent.requires_grad and torch.is_grad_enabled()


def _unary(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self: _apply(function, self)


def _forward(function: Callable[..., Any], reflected: str) -> Callable[..., Any]:
    """The method for `number + other`. reflected: the name of the method that Python calls next, such as `__radd__`."""

    def forward(self: Any, other: Any) -> Any:
        result = _apply(function, self, other)
        if result is not NotImplemented or isinstance(other, Tensor):
            return result
        method = getattr(type(other), reflected, None)
        result = NotImplemented if method is None else method(other, self)
        return function(plain(self), other) if result is NotImplemented else result

    return forward


def _reflected(function: Callable[..., Any]) -> Callable[..., Any]:
    """The method for `other + number`, where `other` does not know live numbers."""

    def reflected(self: Any, other: Any) -> Any:
        result = _apply(function, other, self)
        if result is not NotImplemented or isinstance(other, Tensor):
            return result
        return function(other, plain(self))

    return reflected


def _compared(function: Callable[..., Any]) -> Callable[..., Any]:
    def compare(self: Any, other: Any) -> Any:
        operands = _operands(self, other)
        if operands is not None:
            return learned(function, *operands)
        number = isinstance(other, numbers.Number)
        return function(plain(self), other) if number else NotImplemented

    return compare


class _LiveMethods:
    """The methods that `LiveFloat` and `LiveInt` share."""

    node: Number
    plain_type: type

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A live number around a `Number`; a plain one for `type(number)(3)`."""
        if args and type(args[0]) is Number:
            return super().__new__(cls)
        return cls.plain_type(*settled(args), **kwargs)

    def __hash__(self) -> int:
        return hash(plain(self))

    def __bool__(self) -> bool:
        return bool(learned(operator.truth, self.node))

    def __float__(self) -> float:
        return float(self.node.shown_by(float) if is_formatted(self.node, float) else plain(self))

    def __int__(self) -> int:
        return int(
            self.node.shown_by(int) if is_formatted(self.node, int) else learned(int, self.node)
        )

    def __repr__(self) -> str:
        return text_of(self.node, repr)

    def __str__(self) -> str:
        return text_of(self.node, repr)

    def __format__(self, spec: str) -> str:
        return text_of(self.node, format, spec)

    def __copy__(self) -> Any:
        return self if self.node.alive else self.node.settle()

    def __deepcopy__(self, memo: Any) -> Any:
        return self if self.node.alive else self.node.settle()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.node.kind, (plain(self),)

    def __divmod__(self, other: Any) -> Any:
        if _operands(other) is None:
            return divmod(plain(self), other)
        return _apply(operator.floordiv, self, other), _apply(operator.mod, self, other)

    def __rdivmod__(self, other: Any) -> Any:
        if _operands(other) is None:
            return divmod(other, plain(self))
        return _apply(operator.floordiv, other, self), _apply(operator.mod, other, self)

    def __sym_int__(self) -> Any:
        return _apply(math.trunc, self)

    def __round__(self, digits: Any = None) -> Any:
        return _apply(round, self) if digits is None else _apply(round, self, digits)

    def __sym_max__(self, other: Any) -> Any:
        return torch.sym_max(plain(self), plain(other))

    def __sym_min__(self, other: Any) -> Any:
        return torch.sym_min(plain(self), plain(other))

    def __pow__(self, other: Any, modulo: Any = None) -> Any:
        if modulo is None:
            return _power(self, other)
        return pow(plain(self), plain(other), plain(modulo))

    def conjugate(self) -> Any:
        return self if self.node.alive else self.node.settle()

    @property
    def real(self) -> Any:
        return self if self.node.alive else self.node.settle()

    @property
    def imag(self) -> Any:
        return self.node.kind(0)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        """numpy asks for an array that holds the number: `np.array([number])`, `np.mean([number, 1])`."""
        return importlib.import_module("numpy").asarray(plain(self), dtype=dtype)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """`np.exp(number)`, `np.ones(2) * number`, `np.float32(2) * number`; `np.isnan(number)` is a fact."""
        decides = DECISIONS.get(ufunc.__name__)
        if decides is not None and method == "__call__" and len(inputs) == 1 and not kwargs:
            return importlib.import_module("numpy").bool_(learned(decides, self.node))
        return getattr(ufunc, method)(*settled(inputs), **settled(kwargs))

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """`np.round(number, 2)`, `np.linspace(0, number, 3)`."""
        return function(*settled(args), **settled(kwargs))

    def __conform__(self, protocol: Any) -> Any:
        """sqlite3 asks for what it stores."""
        return plain(self)

    def __dir__(self) -> list[str]:
        return dir(self.plain_type)

    def __getattr__(self, name: str) -> Any:
        """Any other attribute of a float or an int: that of the plain number."""
        if name == "node" or not hasattr(self.plain_type, name):
            raise AttributeError(
                f"{self.plain_type.__name__!r} object has no attribute {name!r}",
                name=name,
                obj=self,
            )
        return getattr(plain(self), name)


# The functions of `math` that answer yes or no: a branch on the answer needs no guard on the number.
DECISIONS = {name: getattr(math, name) for name in ("isfinite", "isnan", "isinf")}
_BINARY: dict[str, Callable[..., Any]] = {
    n: getattr(operator, n) for n in ("add", "sub", "mul", "truediv", "floordiv", "mod")
}
_BITS = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}
_BITS |= {"lshift": operator.lshift, "rshift": operator.rshift}
_UNARY: dict[str, Callable[..., Any]] = {
    n: getattr(operator, n) for n in ("neg", "pos", "abs", "invert")
}
_UNARY |= {n: getattr(math, n) for n in ("trunc", "floor", "ceil")}
_UNARY["sym_float"] = float

_power = _forward(operator.pow, "__rpow__")
for _name, _function in (_BINARY | _BITS).items():
    setattr(_LiveMethods, f"__{_name}__", _forward(_function, f"__r{_name}__"))
    setattr(_LiveMethods, f"__r{_name}__", _reflected(_function))
for _name, _function in _UNARY.items():
    setattr(_LiveMethods, f"__{_name}__", _unary(_function))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(_LiveMethods, f"__{_name}__", _compared(getattr(operator, _name)))
setattr(_LiveMethods, "__rpow__", _reflected(operator.pow))  # noqa: B010 (with the others)


class LiveFloat(_LiveMethods, torch.SymFloat):
    """A float that changes from call to call; to `isinstance` it is a float."""

    plain_type = float

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return float

    def is_integer(self) -> bool:
        return bool(learned(float.is_integer, self.node))

    def as_integer_ratio(self) -> tuple[int, int]:
        return float(self).as_integer_ratio()

    def hex(self) -> str:
        return float(self).hex()


class LiveInt(_LiveMethods, torch.SymInt):
    """An int that changes from call to call; to `isinstance` it is an int."""

    plain_type = int

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return int

    def __index__(self) -> int:
        return int(plain(self))

    def as_integer_ratio(self) -> tuple[Any, int]:
        return self, 1

    def bit_length(self) -> int:
        return int(self).bit_length()


def for_live(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of `math`, such as `math.exp`, whose result is live if an argument is; of `DECISIONS`: a fact."""

    def call(*args: Any) -> Any:
        if not any(map(is_live, args)):
            return function(*args)
        if function.__name__ in DECISIONS and len(args) == 1:
            return bool(learned(function, args[0].node))
        result = _apply(function, *args)
        return function(*args) if result is NotImplemented else result

    call.__name__, call.__doc__ = function.__name__, function.__doc__
    return call


def of_extremes(function: Callable[..., Any]) -> Callable[..., Any]:
    """`min` or `max`, live if one of several numbers of one type is: which one it is, each call decides anew.

    Of an int and a float the type of the result would be decided, too: there the comparison is a fact.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        values = args[0] if len(args) == 1 and type(args[0]) in (list, tuple) else args
        if kwargs or len(values) < 2 or not any(map(is_live, values)):
            return function(*args, **kwargs)
        kinds = {each.node.kind if is_live(each) else type(each) for each in values}
        if len(kinds) > 1 or not kinds <= {int, float}:
            return function(*args)
        return _apply(function, *values)

    call.__name__, call.__doc__ = function.__name__, function.__doc__
    return call


def live_sum(iterable: Iterable[Any], /, start: Any = 0) -> Any:
    """`sum`, live if a number is."""
    return added_up(iterable, start, is_live, plain, _sum_of_numbers)


def _sum_of_numbers(start: Any, terms: list[Any]) -> Any:
    """The sum of numbers of which some are live.

    From the first float on C adds up what the additions lose by rounding: of two numbers, that changes nothing.
    """
    every = [start, *terms]
    first = next((at for at, each in enumerate(every) if isinstance(each, float)), len(every))
    operands = _operands(*every) if len(every) - first > _EXACT_TERMS else None
    if operands is not None:
        return as_live(computed(summed, *operands))
    for each in terms:
        start = start + each
    return start


_EXACT_TERMS = 2


_LIVE_TYPES = frozenset({LiveFloat, LiveInt})
SYMBOLIC = frozenset({LiveFloat, LiveInt, torch.SymFloat, torch.SymInt})


def _wrap(number: Number) -> Any:
    live = (LiveFloat if number.kind is float else LiveInt)(number)
    number.log.made.append(weakref.ref(live))
    return live


def as_live(value: Any) -> Any:
    """Wrap a `Number`, or a bare `torch.SymFloat` around one, as torch returns it, in a `LiveFloat` or `LiveInt`."""
    if type(value) is Number:
        return _wrap(value)
    if type(value) in SYMBOLIC and type(value.node) is Number:
        return value if type(value) in _LIVE_TYPES else _wrap(value.node)
    return value


def is_live(value: Any) -> bool:
    """Whether a value is a live number, of a recording that is active or has ended."""
    return type(value) in SYMBOLIC and type(value.node) is Number


def plain(value: Any) -> Any:
    """The plain value of a live number, which becomes a fact of its recording; any other value unchanged."""
    return value.node.settle() if is_live(value) else value


def settled(arg: Any) -> Any:
    """An argument with live numbers, also in containers, replaced by plain ones, which are constants from now on."""
    kind = type(arg)
    if kind is list or kind is tuple:
        return kind(map(settled, arg))
    if kind is dict:
        return {settled(k): settled(v) for k, v in arg.items()}
    return plain(arg)


def left_behind(value: Any) -> Any:
    """The plain value of a live number, for a place of which something else keeps the expression; adds no fact."""
    return value.node.left_behind() if is_live(value) else value


def plain_tree(tree: Any) -> Any:
    """A result with live numbers replaced by plain ones, also those in objects: in place. Adds no facts."""
    leaves = structure.flatten(tree, result=True)[0]
    live = [leaf for leaf in leaves if is_live(leaf)]
    if not live:
        return tree
    return structure.with_others(tree, {id(each): left_behind(each) for each in live})


def plain_keys(result: Any) -> None:
    """Replace live numbers that are keys of dicts or members of sets in a result; to hash one has added its fact."""
    kind = type(result)
    if kind in (list, tuple):
        for each in result:
            plain_keys(each)
    elif kind is set and any(map(is_live, result)):
        members = [plain(each) for each in result]
        result.clear()
        result.update(members)
    elif kind in (dict, OrderedDict, defaultdict, Counter):
        if any(map(is_live, result)):
            items = [(plain(key), value) for key, value in result.items()]
            result.clear()
            for key, value in items:
                result[key] = value
        for value in result.values():
            plain_keys(value)


# Torch says so of a function of a symbolic number that it does not have, as `NYI negate symbolic float`.
_NOT_IN_TORCH = re.compile(r"\bNYI\b.*\bsymbolic\b")


def was_refused(error: BaseException) -> bool:
    """Whether C code raised this error for a live number, where it accepts a float or an int; notes it on the error."""
    text = str(error)
    if not any(kind.__name__ in text for kind in _LIVE_TYPES) and not _NOT_IN_TORCH.search(text):
        return False
    error.add_note(
        "functionalize: this call was recorded, and the number that the step read by .item() is no plain float or "
        "int then. From the next call on, numbers that the step reads are plain."
    )
    return True


def expression_of(value: Any, log: ScalarLog | None) -> Any:
    """The expression of a value, if it is a live number of the recording with this log, else None."""
    own = is_live(value) and value.node.log is log
    return value.node.expression if own and is_expression(value.node.expression) else None
