"""Several programs of one step as one program whose integers are functions of the sizes of its arguments.

    template = Template.of(step.programs)      or a `Mismatch`: what differs, at which node
    template.symbols.names                     ("size 1 of `tokens`",): s0
    template.predicted((37,))                  the integers of the program for 37 tokens
    template.at((37,))                         the program for 37 tokens
    template.text()                            the graph, with `s0` in the place of integers

The programs are aligned node by node, by names where a pass has ordered them by size: the order of the first program is
an order of all. Integers that differ are fitted (`fitting.py`).
Invariant: the program for sizes of which one was recorded equals it, leaf for leaf. For other sizes it is a prediction:
which branch a length takes in Python, and which kernel in torch, is known only where the step has run.
Refusals: fewer than three programs, other ops, constants or integers without a function, sizes of 0 or 1 beside
others, since torch treats those in its own way; results whose sizes depend on data, if these are not counted before
the call, or by the graph (`MADE`, `LATE` among the names).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from functionalize.ir.inputs import Argument
from functionalize.ir.ops import MASKS, is_sized_by_data
from functionalize.program.early_guard import EarlyGuard
from functionalize.program.printer import node_text, program_text
from functionalize.program.program import Program
from functionalize.templates.call_keys import LATE, MADE
from functionalize.templates.fitting import Formula, Sizes, fit, line
from functionalize.templates.leaves import INTEGER, Leaves, leaves_of, no_copy, with_integers
from functionalize.templates.symbols import Shapes, Symbols

FEWEST = 3
EARLY = 2  # programs of which a template can be made that the next call must confirm


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
    """Programs as one. symbols: the sizes that vary. formulas: for each integer of `reference`."""

    reference: Program
    symbols: Symbols
    formulas: tuple[Formula, ...]

    @staticmethod
    def of(
        programs: Sequence[Program],
        calls: Sequence[Shapes] = (),
        names: Sequence[str] = (),
        leaves: Sequence[Leaves] = (),
        fewest: int = FEWEST,
    ) -> Template | Mismatch:
        """The template of programs of one step, at different sizes.

        calls: for each program, the shapes of the tensors among its arguments, and their names; else those that the
        program reads. leaves: those of each, in one order of nodes. fewest: programs; of `EARLY` see `fitting.line`.
        """
        if len(programs) < fewest:
            return Mismatch(0, "the programs", f"{len(programs)} of at least {fewest}")
        if not leaves:
            order = [node.name for node in programs[0].graph.nodes]
            leaves = [leaves_of(program, order) for program in programs]
        for number, other in enumerate(leaves[1:], 1):
            difference = first_difference(leaves[0], other)
            if difference is not None:
                return Mismatch(number, *difference)
        if not calls:
            calls, names = list(map(_shapes_of, programs)), _names_of(programs[0])
        for node in programs[0].graph.nodes:
            if not {MADE, LATE}.intersection(names) and _is_sized_by_data(node):
                return Mismatch(0, f"`{node_text(node)}`", "its size depends on data")
        symbols = Symbols.of(calls, names)
        sizes: list[Sizes] = []
        for number, shapes in enumerate(calls):
            own = symbols.sizes_of(shapes)
            if isinstance(own, str):
                return Mismatch(
                    number, "the arguments", f"{own}, which torch treats in its own way"
                )
            sizes.append(own)
        found = fitted(sizes, [own.integers for own in leaves])
        if isinstance(found, Unfitted):
            place = leaves[0].place(leaves[0].at[found.at])
            return Mismatch(1, place, str(found))
        fixed = next((kind for at, kind in leaves[0].fixed.items() if found[at].terms), None)
        if fixed is not None:
            return Mismatch(0, "the program", no_copy(fixed))
        return Template(programs[0], symbols, found)

    @property
    def varying(self) -> int:
        """The number of integers that are not constant."""
        return sum(bool(formula.terms) for formula in self.formulas)

    def predicted(self, sizes: Sizes) -> tuple[int, ...]:
        """The integers of the program for these sizes, one for each symbol."""
        return tuple(formula.value(sizes) for formula in self.formulas)

    def at(self, sizes: Sizes) -> Program:
        """The program for these sizes. Its `meta` is filled anew where it is read."""
        program = with_integers(self.reference, self.predicted(sizes))
        for node in program.graph.nodes:
            for key in ("val", "tensor_meta"):
                node.meta.pop(key, None)
        program._values, program._described = None, False
        return program

    def text(self) -> str:
        """The graph of the reference, with formulas in the place of the integers that vary."""
        values = leaves_of(self.reference).integers
        shown = [
            SymbolicInt(value, str(formula)) if formula.terms else value
            for value, formula in zip(values, self.formulas, strict=True)
        ]
        return program_text(with_integers(self.reference, shown))


class SymbolicInt(int):
    """An integer that is printed as a formula. number: among the formulas of a program that vary."""

    number: int
    _text: str

    def __new__(cls, value: int, text: str, number: int = -1) -> SymbolicInt:
        made = super().__new__(cls, value)
        made._text, made.number = text, number
        return made

    def __repr__(self) -> str:
        return self._text


def first_difference(a: Leaves, b: Leaves) -> tuple[str, str] | None:
    """Where two programs differ in more than integers, and in what."""
    for i, (one, other) in enumerate(zip(a.tokens, b.tokens, strict=False)):
        if one != other:
            if INTEGER in (one, other) or not isinstance(one, tuple):
                return a.place(i), "a constant differs"
            return a.place(i), f"the other program has {b.place(i)}"
    if len(a.tokens) != len(b.tokens):
        shorter = min(len(a.tokens), len(b.tokens)) - 1
        return a.place(shorter), "one of the programs ends"
    return None


def _is_sized_by_data(node: fx.Node) -> bool:
    if torch.Tag.dynamic_output_shape not in getattr(node.target, "tags", ()):
        return False
    record = node.meta.get("record")  # until the program is described
    if record is not None and record.target is node.target:
        return is_sized_by_data(record)
    if node.target is not torch.ops.aten.index.Tensor:
        return True
    values = [each.meta.get("val") for each in node.args[1] if each is not None]  # type: ignore[union-attr]
    return any(value is None or value.dtype in MASKS for value in values)


def _arguments(program: Program) -> list[Any]:
    return [spec for spec in program.inputs if isinstance(spec.source, Argument)]


def _shapes_of(program: Program) -> Shapes:
    return [*(spec.geometry.size for spec in _arguments(program)), *_made(program)]


def _names_of(program: Program) -> list[str]:
    return [*(spec.name for spec in _arguments(program)), *(MADE for _ in _made(program))]


def _made(program: Program) -> list[Sequence[int]]:
    """The sizes that ops make of arguments, as of one more tensor, if there are some."""
    guards = (each for each in program.guards if isinstance(each, EarlyGuard))
    return [each.values for each in guards if each.is_on_sizes]


@dataclass(frozen=True, slots=True)
class Unfitted:
    """Integers that no function gives, or more than one. at: which of the integers. values: in each recording."""

    at: int
    sizes: tuple[Sizes, ...]
    values: tuple[int, ...]

    def __str__(self) -> str:
        return f"no one function of the sizes {list(self.sizes)} gives {self.values}"


def fitted(
    sizes: Sequence[Sizes], integers: Sequence[Sequence[int]]
) -> tuple[Formula, ...] | Unfitted:
    """The function of each integer. integers: those of each recording; of `EARLY` see `fitting.line`."""
    formulas: dict[tuple[int, ...], Formula | None] = {}
    find = line if len(sizes) == EARLY and len(sizes[0]) == 1 else fit
    found = []
    for at, column in enumerate(zip(*integers, strict=True)):
        if column not in formulas:
            formulas[column] = find(sizes, column)
        formula = formulas[column]
        if formula is None:
            return Unfitted(at, tuple(sizes), column)
        found.append(formula)
    return tuple(found)
