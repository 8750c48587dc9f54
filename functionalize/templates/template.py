"""Several programs of one step as one program whose integers are functions of the sizes of its arguments.

    template = Template.of(step.programs)      or a `Mismatch`: what differs, at which node
    template.symbols                           ("size 1 of `tokens`",): s0
    template.predicted((37,))                  the integers of the program for 37 tokens
    template.text()                            the graph, with `s0` in the place of integers

The programs are aligned node by node, integers that differ are fitted (`fitting.py`). A template describes, it is never
executed: which branch a length takes in Python, and which kernel in torch, is known only where it was recorded.
Refusals: fewer than three programs, other ops, constants or integers without a function, sizes of 0 or 1 beside
others, since torch treats those in its own way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from functionalize.ir.inputs import Argument
from functionalize.program.printer import program_text
from functionalize.program.program import Program
from functionalize.templates.fitting import Formula, Sizes, fit
from functionalize.templates.leaves import INTEGER, Leaves, leaves_of, with_integers

FEWEST = 3


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Why programs are not one. program: the index of the first one that differs from the first program."""

    program: int
    place: str
    why: str

    def __str__(self) -> str:
        return f"{self.place}: {self.why}"


@dataclass(frozen=True, slots=True)
class Template:
    """Programs as one. symbols: the sizes that vary, `s0` first. formulas: for each integer of `reference`."""

    reference: Program
    symbols: tuple[str, ...]
    formulas: tuple[Formula, ...]

    @staticmethod
    def of(programs: Sequence[Program]) -> Template | Mismatch:
        """The template of programs of one step, at different sizes."""
        if len(programs) < FEWEST:
            return Mismatch(0, "the programs", f"{len(programs)} of at least {FEWEST}")
        leaves = [leaves_of(program) for program in programs]
        for number, other in enumerate(leaves[1:], 1):
            difference = _first_difference(leaves[0], other)
            if difference is not None:
                return Mismatch(number, *difference)
        names, sizes = _symbols(programs)
        for number, own in enumerate(sizes):
            if any((a < 2) != (b < 2) for a, b in zip(own, sizes[0], strict=True)):
                return Mismatch(number, "the arguments", "a size is 0 or 1, and greater elsewhere")
        formulas: dict[tuple[int, ...], Formula | None] = {}
        columns = list(zip(*(own.integers for own in leaves), strict=True))
        for at, column in enumerate(columns):
            if column not in formulas:
                formulas[column] = fit(sizes, column)
            if formulas[column] is None:
                place = leaves[0].place(leaves[0].at[at])
                return Mismatch(1, place, f"no function of the sizes {sizes} gives {column}")
        found = tuple(formula for c in columns if (formula := formulas[c]) is not None)
        return Template(programs[0], names, found)

    @property
    def varying(self) -> int:
        """The number of integers that are not constant."""
        return sum(bool(formula.terms) for formula in self.formulas)

    def predicted(self, sizes: Sizes) -> tuple[int, ...]:
        """The integers of the program for these sizes, one for each symbol."""
        return tuple(formula.value(sizes) for formula in self.formulas)

    def text(self) -> str:
        """The graph of the reference, with formulas in the place of the integers that vary."""
        values = leaves_of(self.reference).integers
        shown = [
            SymbolicInt(value, str(formula)) if formula.terms else value
            for value, formula in zip(values, self.formulas, strict=True)
        ]
        return program_text(with_integers(self.reference, shown))


class SymbolicInt(int):
    """An integer that is printed as a formula."""

    _text: str

    def __new__(cls, value: int, text: str) -> SymbolicInt:
        made = super().__new__(cls, value)
        made._text = text
        return made

    def __repr__(self) -> str:
        return self._text


def _first_difference(a: Leaves, b: Leaves) -> tuple[str, str] | None:
    for i, (one, other) in enumerate(zip(a.tokens, b.tokens, strict=False)):
        if one != other:
            if INTEGER in (one, other) or not isinstance(one, tuple):
                return a.place(i), "a constant differs"
            return a.place(i), f"the other program has {b.place(i)}"
    if len(a.tokens) != len(b.tokens):
        shorter = min(len(a.tokens), len(b.tokens)) - 1
        return a.place(shorter), "one of the programs ends"
    return None


def _symbols(programs: Sequence[Program]) -> tuple[tuple[str, ...], list[Sizes]]:
    """The sizes of arguments that differ, one name for those that are always equal; their values in each program."""
    columns: dict[tuple[int, ...], str] = {}
    for number, spec in enumerate(programs[0].inputs):
        if not isinstance(spec.source, Argument):
            continue
        for dim in range(len(spec.geometry.size)):
            column = tuple(p.inputs[number].geometry.size[dim] for p in programs)
            if len(set(column)) > 1:
                columns.setdefault(column, f"size {dim} of `{spec.name}`")
    sizes: list[Any] = list(zip(*columns, strict=True)) if columns else [()] * len(programs)
    return tuple(columns.values()), sizes
