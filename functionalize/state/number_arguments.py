"""Numbers among the arguments of a step: constants of a program, until a call brings another one.

    step(batch, 0.1); step(batch, 0.1)     one kind of call, whose program has 0.1 as a constant
    step(batch, 0.05)                      from now on the number is an input: one program for all of them

    varying.learn(spec, leaves)            whether numbers differ for the first time from those of the call before
    key = varying.key(exact, leaves)       the key of a call, with the types of numbers that vary in their places
    varying_leaves(key)                    which these are; `NumberArgument` is the source of such an input

Invariant: calls of one key differ in numbers that are inputs, or constants with a guard: a key alone decides nothing.

What code does with an input is guarded, as with a number that Python keeps: `if i < 100` is a fact of the program.
Only positional and keyword arguments themselves vary. In a container, which the step may hold or change, and for a
step whose code hands numbers to C code that takes exact ones alone, each number is a constant.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from functionalize._compat.graphs import pytree
from functionalize.cost.categories import Category
from functionalize.ir.inputs import Call
from functionalize.state.hyperparameters import number_tensor
from functionalize.util import structure
from functionalize.walk.live_places import LIVE_NUMBERS

_STRUCTURES_REMEMBERED = 64
_VARIES = "varies"
BESIDE_LEAVES = 2  # the parts of a key before those of the leaves
_BITS = 63


@dataclass(frozen=True, slots=True)
class NumberArgument:
    """The source of a number that is an argument. leaf: which. kind: its type, int or float."""

    leaf: int
    name: str
    kind: type
    category: ClassVar[Category] = Category.INPUTS

    def resolve(self, call: Call) -> Any:
        return number_tensor(call.leaves[self.leaf], self.kind, f"the argument `{self.name}`")


class VaryingArguments:
    """The numbers among the arguments that were another one at an earlier call, by the structure of the arguments."""

    def __init__(self) -> None:
        self._varying: dict[Any, frozenset[int]] = {}  # the leaves
        self._last: OrderedDict[Any, dict[int, tuple[type, str]]] = OrderedDict()

    def learn(self, spec: pytree.TreeSpec, leaves: Sequence[Any]) -> bool:
        """Whether some numbers of this call are the first ones to differ from those of the call before."""
        numbers = {i: (type(n), repr(n)) for i, n in enumerate(leaves) if type(n) in LIVE_NUMBERS}
        if not numbers:
            return False
        last, known = self._last.get(spec, numbers), self._varying.get(spec, frozenset())
        self._last[spec] = numbers
        self._last.move_to_end(spec)
        if len(self._last) > _STRUCTURES_REMEMBERED:
            self._varying.pop(self._last.popitem(last=False)[0], None)
        differ = {i for i in numbers.keys() & last.keys() if _differ(numbers[i], last[i])} - known
        if differ:
            differ &= {i for i, path in enumerate(structure.paths(spec)) if len(path) == 2}
        if differ:
            self._varying[spec] = known | differ
        return bool(differ)

    def restore(self, key: Any) -> None:
        """Learn from the key of a program that was saved which numbers vary."""
        if at := varying_leaves(key):
            self._varying[key[0]] = self._varying.get(key[0], frozenset()).union(at)

    def key(
        self,
        exact: Any,
        leaves: Sequence[Any],
        has_program: Callable[[Any, Sequence[Any]], bool] | None = None,
    ) -> Hashable:
        """The key of a call, equal for all values of the numbers that vary.

        has_program: whether there is a program of a key; the key stays exact if there is one of these very numbers.
        """
        varying = self._varying.get(exact[0]) if self._varying else None
        if not varying or (has_program is not None and has_program(exact, leaves)):
            return exact
        parts = list(exact)
        for i in varying:
            kind = type(leaves[i])
            if kind in LIVE_NUMBERS:
                parts[BESIDE_LEAVES + i] = _VARIES, kind.__name__
        return tuple(parts)


def varying_leaves(key: Any) -> tuple[int, ...]:
    """The leaves that are numbers which vary, from the key of a call."""
    return tuple(i for i, part in enumerate(key[BESIDE_LEAVES:]) if _is_varying(part))


def number_arguments(
    varying: Iterable[int], leaves: Sequence[Any], names: Sequence[str]
) -> tuple[NumberArgument, ...]:
    """The sources of those leaves that can be inputs of a program. names: of all leaves."""
    return tuple(NumberArgument(i, names[i], type(leaves[i])) for i in varying if _fits(leaves[i]))


def with_numbers(
    args: tuple[Any, ...], kwargs: dict[str, Any], spec: pytree.TreeSpec, numbers: Mapping[int, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of that structure, with other numbers in the places of some leaves."""
    if not numbers:
        return args, kwargs
    positional, named = list(args), dict(kwargs)
    paths = structure.paths(spec)
    for leaf, number in numbers.items():
        which, at = paths[leaf]
        if which.idx == 0:
            positional[at.idx] = number
        else:
            named[at.key] = number
    return tuple(positional), named


def _differ(now: tuple[type, str], was: tuple[type, str]) -> bool:
    return now[0] is was[0] and now[1] != was[1]


def _is_varying(part: Any) -> bool:
    return type(part) is tuple and len(part) == 2 and part[0] == _VARIES


def _fits(number: Any) -> bool:
    """Whether a number can be an input of a program: of 64 bits."""
    return type(number) is float or -(1 << _BITS) <= number < 1 << _BITS
