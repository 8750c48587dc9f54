"""Programs of a template some of whose sizes are known only while the graph runs.

    instances = LateInstances.made(template, sizes, first, rules)      or a `Mismatch`
    program = instances.at((37,))                 a `LateInstance`, for 37 tokens and any computed sizes

Invariant: only arguments of ops depend on sizes that are known late. What a replay looks at before the graph runs and
what it writes after it does not, but for the guards on these sizes, see `admission.py`.
Refusals: outputs, writes, and numbers that Python reads which depend on such a size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from functionalize.late_sizes.admission import Admission, LateSizeGuard, Rules
from functionalize.late_sizes.late_code import LateCode
from functionalize.late_sizes.late_guards import late_guards
from functionalize.lengths.instances import (
    Instance,
    Instances,
    VaryingPart,
    varying_formulas,
    varying_parts,
)
from functionalize.program.early_guard import A_SIZE
from functionalize.program.program import Program
from functionalize.run.boxed import BoxedTemplate
from functionalize.run.windows import NO_WINDOWS
from functionalize.templates.fitting import Sizes, evaluator
from functionalize.templates.leaves import PARTS, ReplacedParts
from functionalize.templates.template import Mismatch, SymbolicInt, Template


class LateInstance(Instance):
    """A program that learns some of its sizes while it runs. owner: what has made it."""

    owner: LateInstances

    @property
    def group(self) -> Any:
        """The `LateClass` that it is a program of."""
        return self.owner.rules

    @property
    def is_current(self) -> bool:
        """Whether its class has the same template still."""
        return self.group.instances is self.owner


class LateInstances(Instances):
    """The programs of one template. late: what computes integers while the graph runs."""

    def __init__(
        self,
        template: Template,
        code: BoxedTemplate,
        parts: list[VaryingPart],
        late: LateCode,
        rules: Rules,
        reference_sizes: Sizes,
    ) -> None:
        super().__init__(template, code, parts)
        early = [f for f in varying_formulas(template) if f not in late.names]
        self._numbers = evaluator(early, late.first)
        self.rules, self._boxed, self._late = rules, code, late
        self._reference_sizes = reference_sizes

    @staticmethod
    def made(
        template: Template, sizes: Sizes, first: int, rules: Rules
    ) -> LateInstances | Mismatch:
        """sizes: of the reference. first: the number of the first symbol that is known late. rules: on these."""
        varying = varying_formulas(template)
        names = {f: f"i{number}" for number, f in enumerate(varying)}
        early = [f for f in varying if max(f.symbols) < first]
        numbers = {f: number for number, f in enumerate(early)}
        pairs = zip(template.formulas, template.predicted(sizes), strict=True)
        integers = [
            SymbolicInt(v, names[f], numbers.get(f, _LATE)) if f.terms else v for f, v in pairs
        ]
        try:
            found = ReplacedParts.of(template.reference, iter(integers))
            late = LateCode.of(template, first, names, found.sized)
            parts = _parts(template.reference, found.parts)
            if isinstance(parts, Mismatch):
                return parts
            taken = [*(names[f] for f in early), *(f"s{n}" for n in range(first)), "late"]
            code = BoxedTemplate.of(template.reference, found.arguments, taken, NO_WINDOWS, late)
        except TypeError as error:
            return Mismatch(0, "the program", str(error))
        return LateInstances(template, code, parts, late, rules, sizes)

    def at(self, sizes: Sizes) -> Program:
        """The program for arguments of these sizes."""
        first, count = self._late.first, len(self.template.symbols.names)
        numbers = self._numbers(*sizes)
        admission = Admission(self._late.ops, self.rules, sizes, count)
        run = self._boxed.at([*numbers, *sizes, admission], None)  # ranges are of code for one size
        whole = (*sizes, *self._reference_sizes[first:])
        made: Any = self.filled(LateInstance, whole, numbers, run)
        made.owner, counts = self, [guard.slot for guard in late_guards(self.reference)]
        made.value_guards = tuple(
            [
                LateSizeGuard(g.slot, g.where, admission, g.slot == counts[-1])
                if g.what == A_SIZE
                else g
                for g in made.value_guards
            ]
        )
        return made


_LATE = -1  # the number of an integer that is known late


class _Early:
    """Stands for the integers that are known before the graph runs; the others cannot be asked for."""

    def __getitem__(self, number: int) -> int:
        if number == _LATE:
            raise LookupError
        return 2


def _parts(reference: Program, with_symbols: Mapping[str, Any]) -> list[VaryingPart] | Mismatch:
    """The parts beside the graph in which an integer varies that is known before it runs."""
    found, late = [], set(map(id, late_guards(reference)))
    for part in varying_parts(reference, with_symbols):
        if id(getattr(reference, part.name)[part.index]) in late:
            continue
        try:
            part.make(_Early())  # type: ignore[arg-type]
        except LookupError:
            what = f"{PARTS[part.name]} {part.index}"
            return Mismatch(0, what, "it depends on the size of a result")
        found.append(part)
    return found
