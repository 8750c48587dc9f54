"""The passes run once for all sizes of a class: on two of its programs, and the result is a template again.

    found = rewritten(template, signatures, compared, apply)       a `Template`; text: why there is none

A pass sees the integers of one program. What it decides by their being equal (two values are one, a view leads back to
its base, a slice is the whole) holds for all sizes if it holds at *generic* ones: there two integers are equal only
if they are the same function of the sizes. So the passes run at two generic sizes, the largest compared ones if
these are generic. One of the two is odd, since some passes ask for alignment. If both programs are one graph, each
integer that differs must be one of the functions that are known from the recordings.

Invariants: the programs for both sizes equal, leaf for leaf, those that the passes have made. Which order is best
for the memory, which copy is worth it, is decided at the first ones: any such choice is right for all sizes.
Refusals: no two generic sizes (`n % 4` is never one); programs that differ; integers that a pass has computed. Where a
pass promises a number of bytes, or is not of this package, it runs for each size (`CaptureOptions.why_apart`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress

from functionalize.analysis.last_write import last_write
from functionalize.errors import FunctionalizeError
from functionalize.ir.epilogue import Copy
from functionalize.lengths.signature_template import SignatureTemplate
from functionalize.program.program import Program
from functionalize.templates.fitting import Formula, Sizes
from functionalize.templates.leaves import leaves_of, no_copy
from functionalize.templates.template import Template, first_difference

_MOST_TRIED = 256


def rewritten(
    template: Template,
    signatures: SignatureTemplate,
    compared: Sequence[Sizes],
    apply: Callable[[Program], Program],
) -> Template | str:
    """The template of what `apply` makes of the programs. compared: sizes between which calls are as predicted."""
    may_be_sizes = compress(template.formulas, leaves_of(template.reference).sizes)
    known = frozenset([*may_be_sizes, *signatures.formulas()])
    varying = [each for each in known if each.terms]
    constants = {each.constant for each in known if not each.terms}
    chosen = _Generic(signatures, varying, constants).two(list(_candidates(compared)))
    if chosen is None:
        return "no two sizes at which equal integers are equal at all sizes"
    try:
        first, second = (apply(template.at(sizes)) for sizes in chosen)
    except (FunctionalizeError, RuntimeError) as error:
        return f"the passes fail at other sizes than the recorded ones: {error}"
    one = leaves_of(first)
    other = leaves_of(second, [node.name for node in first.graph.nodes])
    difference = first_difference(one, other)
    if difference is not None:
        return f"the passes decide by sizes, at {': '.join(difference)}"
    functions = {tuple(each.value(sizes) for sizes in chosen): each for each in varying}
    formulas = []
    for at, values in enumerate(zip(one.integers, other.integers, strict=True)):
        formula = Formula(values[0]) if values[0] == values[1] else functions.get(values)
        if formula is None:
            return f"a pass has computed an integer, in {one.place(one.at[at])}"
        if formula.terms and at in one.fixed:
            return no_copy(one.fixed[at])
        formulas.append(formula)
    return Template(first, template.symbols, tuple(formulas))


def _candidates(compared: Sequence[Sizes]) -> Iterator[Sizes]:
    """Sizes from the largest compared ones down to the smallest, then larger ones; no two symbols in step."""
    low, high = ([pick(column) for column in zip(*compared, strict=True)] for pick in (min, max))
    for k in range(_MOST_TRIED):
        found = tuple(n - _step(i, k) for i, n in enumerate(high))
        if any(n < least for n, least in zip(found, low, strict=True)):
            break
        yield found
    larger = [tuple(n + _step(i, k) for i, n in enumerate(high)) for k in range(1, _MOST_TRIED)]
    yield from larger
    for each in larger:  # where many sizes vary, few of these are all odd, or all even
        yield tuple(n | 1 for n in each)
        yield tuple(n + n % 2 for n in each)


def _step(symbol: int, k: int) -> int:
    return k + symbol * (k // 2)


@dataclass(frozen=True, slots=True)
class _Generic:
    """Sizes at which integers are equal only if they are so at all sizes. varying: functions. constants: the others."""

    signatures: SignatureTemplate
    varying: Sequence[Formula]
    constants: set[int]

    def two(self, candidates: Sequence[Sizes]) -> tuple[Sizes, Sizes] | None:
        """Two generic sizes, the first one odd, the second one even if it can be, at which every function differs."""
        first = next((s for s in candidates if all(n % 2 for n in s) and self._is_generic(s)), None)
        if first is None:
            return None
        ordered = sorted(candidates, key=lambda sizes: sum(n % 2 for n in sizes))
        others = (s for s in ordered if self._differs(first, s) and self._is_generic(s))
        second = next(others, None)
        return None if second is None else (first, second)

    def _is_generic(self, sizes: Sizes) -> bool:
        """Whether it is so, and tensors on one storage relate as in the recordings."""
        values = {each.value(sizes) for each in self.varying}
        is_unique = len(values) == len(self.varying) and values.isdisjoint(self.constants)
        return is_unique and not isinstance(self.signatures.at(sizes), str)

    def _differs(self, one: Sizes, other: Sizes) -> bool:
        return all(each.value(one) != each.value(other) for each in self.varying)


def needs_no_copies(program: Program) -> bool:
    """Whether a program before its passes writes in place, as eager does: it makes no new states beside old ones."""
    if not any(isinstance(action, Copy) for action in program.epilogue):
        return True
    return last_write(program) is not None
