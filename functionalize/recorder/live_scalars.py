"""Live numbers: a number that Python reads from a tensor during a recording keeps its expression and is no constant.

    step = state["step"].item()           a LiveFloat: prints as 3.0; its expression is the read of the tensor
    size = lr / (1 - beta1**step)         another one; its expression is the arithmetic
    p.addcdiv_(m, v, value=-size)         the record holds the expression, and the program computes it
    if size > 1: ...                      a plain bool; a guard on the comparison, not on the number
    f"{size:.3f}", float(size)            plain values; a guard on the text, and on the number

A live number is a `torch.SymFloat` or `SymInt` around a `Number` (see scalar_log.py), so that torch's own functions
accept it. For `isinstance` it is a float or an int, and it has all methods of these types.
Invariant: every plain value that Python derives from a live number is a fact of its recording, which a guard checks.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from functionalize._compat.graphs import pytree
from functionalize.ir.scalars import is_expression
from functionalize.recorder.scalar_log import Number, ScalarLog, computed, learned


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


def _forward(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *others: _apply(function, self, *others)


def _reflected(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, other: _apply(function, other, self)


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

    def __hash__(self) -> int:
        return hash(plain(self))

    def __bool__(self) -> bool:
        return bool(learned(operator.truth, self.node))

    def __float__(self) -> float:
        return float(plain(self))

    def __int__(self) -> int:
        return int(learned(int, self.node))

    def __repr__(self) -> str:
        return str(learned(repr, self.node))

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return str(learned(format, self.node, spec))

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(self.node.hint), (plain(self),)

    def __divmod__(self, other: Any) -> Any:
        return _apply(operator.floordiv, self, other), _apply(operator.mod, self, other)

    def __rdivmod__(self, other: Any) -> Any:
        return _apply(operator.floordiv, other, self), _apply(operator.mod, other, self)

    def __sym_int__(self) -> Any:
        return _apply(math.trunc, self)

    def __round__(self, digits: Any = None) -> Any:
        return _apply(round, self) if digits is None else _apply(round, self, digits)

    def __pow__(self, other: Any, modulo: Any = None) -> Any:
        if modulo is None:
            return _apply(operator.pow, self, other)
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
        """Any other attribute of a float or an int: that of the plain number."""
        if name.startswith("__") or not hasattr(type(self.node.hint), name):
            raise AttributeError(name)
        return getattr(plain(self), name)


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

for _name, _function in (_BINARY | _BITS).items():
    setattr(_LiveMethods, f"__{_name}__", _forward(_function))
    setattr(_LiveMethods, f"__r{_name}__", _reflected(_function))
for _name, _function in _UNARY.items():
    setattr(_LiveMethods, f"__{_name}__", _forward(_function))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(_LiveMethods, f"__{_name}__", _compared(getattr(operator, _name)))
setattr(_LiveMethods, "__rpow__", _reflected(operator.pow))  # noqa: B010 (with the others)


class LiveFloat(_LiveMethods, torch.SymFloat):
    """A float that changes from call to call; to `isinstance` it is a float."""

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

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return int

    def __index__(self) -> int:
        return int(plain(self))

    def as_integer_ratio(self) -> tuple[Any, int]:
        return self, 1

    def bit_length(self) -> int:
        return int(self).bit_length()


_LIVE_TYPES = frozenset({LiveFloat, LiveInt})
SYMBOLIC = frozenset({LiveFloat, LiveInt, torch.SymFloat, torch.SymInt})


def _wrap(number: Number) -> Any:
    return (LiveFloat if type(number.hint) is float else LiveInt)(number)


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


def plain_tree(tree: Any) -> Any:
    """A result with live numbers replaced by plain ones. Adds no facts."""
    if not any(map(is_live, pytree.tree_leaves(tree))):
        return tree
    return pytree.tree_map(lambda leaf: leaf.node.hint if is_live(leaf) else leaf, tree)


def expression_of(value: Any, log: ScalarLog | None) -> Any:
    """The expression of a value, if it is a live number of the recording with this log, else None."""
    own = is_live(value) and value.node.log is log
    return value.node.expression if own and is_expression(value.node.expression) else None
