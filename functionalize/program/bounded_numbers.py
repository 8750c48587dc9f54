"""What a file's programs compute with numbers, where the result may be far longer than the operands.

    bounded(operator.mul)(2**40000, 2**40000)      OverflowError
    bounded(operator.add)("a" * 70000, "a")        OverflowError

A program that was recorded multiplies integers of 64 bits, a few in a row. Sixty multiplications of a number with
itself, in a file of a few kilobytes, would take all memory. So programs of files call these in the place of Python's.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

_MOST_BITS = _MOST_LETTERS = 2**16


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _sum_bits(a: Any, b: Any) -> int:
    return max(_bits(a), _bits(b)) + 1


def _product_bits(a: Any, b: Any) -> int:
    return _bits(a) + _bits(b)


def _power_bits(a: Any, b: Any) -> int:
    return _bits(a) * b if isinstance(a, int) and isinstance(b, int) and b > 0 else 0


def _shifted_bits(a: Any, b: Any) -> int:
    return _bits(a) + b if isinstance(b, int) and b > 0 and a else 0


_BITS: Mapping[Callable[..., Any], Callable[[Any, Any], int]] = {
    operator.add: _sum_bits,
    operator.mul: _product_bits,
    operator.pow: _power_bits,
    operator.lshift: _shifted_bits,
}


def _made(function: Any, bits: Callable[[Any, Any], int]) -> Any:
    def within(a: Any, b: Any) -> Any:
        texts = [each for each in (a, b) if isinstance(each, (str, bytes))]
        is_joined = function is operator.add and len(texts) == 2
        if texts and not is_joined:
            raise TypeError(f"{function.__name__} of a text")
        if sum(map(len, texts)) > _MOST_LETTERS or (not texts and bits(a, b) > _MOST_BITS):
            raise OverflowError(
                f"the result of {function.__name__} is too long for a program of a file"
            )
        return function(a, b)

    within.__wrapped__ = function  # type: ignore[attr-defined]  # which listings of the program show
    return within


BOUNDED: Mapping[Any, Any] = MappingProxyType({f: _made(f, bits) for f, bits in _BITS.items()})


def bounded(function: Any) -> Any:
    """A function of numbers for a program of a file; others as they are."""
    return BOUNDED.get(function, function)
