"""What the Python code of a step has learned of sizes in one run, as a value that other sizes are tested against.

    facts.difference((37,))        None: at s0 = 37 Python would learn the same, and so do the same
    facts.difference((600,))       "`s0 > 512` is True, was False"
    facts.uses_like(other, ...)    see `coverage.py`

Invariant: two runs with equal `SizeFacts` have learned the same of sizes, in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from functionalize.ir.scalars import Applied, bottom_up, expression_text, is_expression
from functionalize.templates.fitting import Formula, Sizes
from functionalize.templates.leaves import constant_token


@dataclass(frozen=True, slots=True)
class Size:
    """The leaf of an expression: a size as a function of the sizes of arguments."""

    formula: Formula


@dataclass(frozen=True, slots=True)
class ComputedSize:
    """A number that the step computed of earlier ones. args: ("part", index), or ("constant", value, token)."""

    function: Any
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class SizeFacts:
    """parts: sizes, and what was computed of them. facts: (part, its value, as text). used: parts that torch got."""

    parts: tuple[Formula | ComputedSize, ...]
    facts: tuple[tuple[int, Any, str], ...]
    used: tuple[int, ...]

    @staticmethod
    def of(facts: Sequence[tuple[Any, Any]], uses: Mapping[Any, int]) -> SizeFacts:
        """facts: expressions on leaves `Size`, and their values. uses: computed integers that torch got."""
        numbers: dict[Any, int] = {}
        parts: list[Formula | ComputedSize] = []
        for expression in (*(e for e, _ in facts), *uses):
            for each in bottom_up(expression, numbers):
                numbers[each] = len(parts)
                parts.append(_part(each, numbers))
        found = [
            (numbers[e], constant_token(value), f"`{expression_text(e)}`") for e, value in facts
        ]
        return SizeFacts(tuple(parts), tuple(found), tuple(numbers[e] for e in uses))

    def values(self, sizes: Sizes) -> list[Any]:
        """The value of each part; raises the errors of its functions."""
        found: list[Any] = []
        for part in self.parts:
            if isinstance(part, Formula):
                found.append(part.value(sizes))
            else:
                args = [found[a[1]] if a[0] == "part" else a[1] for a in part.args]
                found.append(part.function(*args))
        return found

    def difference(self, values: Sequence[Any]) -> str | None:
        """A fact that does not hold for the values of parts at other sizes."""
        for at, was, text in self.facts:
            if constant_token(values[at]) != was:
                return f"{text} is {values[at]!r}, was another value"
        return None


def _part(expression: Any, numbers: Mapping[Any, int]) -> Formula | ComputedSize:
    if isinstance(expression, Applied):
        args = [
            ("part", numbers[a]) if is_expression(a) else ("constant", a, type(a))
            for a in expression.args
        ]
        return ComputedSize(expression.function, tuple(args))
    size: Size = expression.source
    return size.formula
