"""The signatures of several recordings as one, whose sizes are functions of the sizes of arguments.

    template = SignatureTemplate.of([SignatureTokens(signature), ...], sizes)     or a `Mismatch`: at which op they part
    template.at((37,))                                     the op stream that is expected for 37 tokens, or text

Invariant: `at` for sizes of which one was recorded equals it. For others it returns text, and no signature, where the
windows of a storage relate to each other otherwise than in the recordings (`relations.py`): torch and the engine may
then decide otherwise. Storages have the numbers of the first recording.
Refusals: other ops, constants, sources, facts on numbers, or moved places; integers without a function of the sizes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import zip_longest
from typing import Any

import torch

from functionalize.audit.signature import GroupName, Row, Signature
from functionalize.ir.ops import Geometry, TensorRef
from functionalize.ir.scalars import Applied, LiveNumber, ScalarInput, bottom_up, is_expression
from functionalize.lengths.observed_sizes import KnownSizes
from functionalize.lengths.relations import has_one_layout, layout_of, relations
from functionalize.templates.fitting import Formula, Sizes, evaluator
from functionalize.templates.leaves import constant_token, identity
from functionalize.templates.makers import Maker, joined, leaf_maker
from functionalize.templates.template import Mismatch, Unfitted, fitted

Leaf = int | Geometry


class SignatureTokens:
    """One signature as tokens and leaves. ends: for each row, how many leaves there are up to it.

    windows: for each storage, by its number in the order of first uses, the indices of the leaves on it.
    """

    def __init__(self, signature: Signature) -> None:
        self.signature = signature
        self.leaves: list[Leaf] = []
        self.ends: list[int] = []
        self.windows: dict[int, list[int]] = {}
        self._storages: dict[int, int] = {}
        self._reads = {row.read: i for i, row in enumerate(signature.rows) if row.read is not None}
        self._expressions: dict[Any, int] = {}
        self._computed: list[Any] = []
        self.rows: list[Any] = []
        for row in signature.rows:
            self.rows.append(self._row(row))
            self.ends.append(len(self.leaves))
        self.rest = (
            ("results", self._form(signature.leaves), str(signature.spec)),
            (
                "facts on numbers",
                [(self._of(f.expression), self._fact(f.value)) for f in signature.facts],
            ),
            ("computed numbers", self._computed),
            ("numbers", [(identity(n.source), type(n.hint)) for n in signature.numbers]),
            ("sources", {self._number(s): identity(source) for s, _, source in signature.sources}),
            ("literals", {self._number(s): found for s, found in signature.literals.items()}),
            ("slots", [identity(slot) for _, slot in signature.slots], signature.assigned),
            (
                "live numbers",
                signature.lifted,
                [(name, id(optimizer)) for name, optimizer in signature.optimizers.items()],
            ),
            ("moved places", _places(signature)),
        )

    def _row(self, row: Row) -> Any:
        resized = tuple([(self._number(s), self._leaf(nbytes)) for s, nbytes in row.resized])
        parts = (self._form(row.args), self._form(row.kwargs), self._form(row.outputs))
        return row.target, parts, resized, row.gradients, row.read is None

    def _leaf(self, value: Leaf) -> str:
        self.leaves.append(value)
        return "a size"

    def _fact(self, value: Any) -> str:
        """An integer that the step relies on may be a size that an op made: the program has a guard on its function."""
        return self._leaf(value) if type(value) is int else repr(value)

    def _number(self, storage: int) -> int:
        return self._storages.setdefault(storage, len(self._storages))

    def _form(self, value: Any) -> Any:
        kind = type(value)
        if kind is TensorRef:
            number, g = self._number(value.storage), value.geometry
            self.windows.setdefault(number, []).append(len(self.leaves))
            self._leaf(g)
            return number, len(g.size), g.dtype, g.conj, g.neg
        if kind is int:
            return self._leaf(value)
        if isinstance(value, (list, tuple)):
            return kind is list, tuple([self._form(each) for each in value])
        if kind is dict:
            return tuple([(key, self._form(each)) for key, each in value.items()])
        if kind is LiveNumber:
            return "a number", self._of(value.expression)
        return value if kind is GroupName else constant_token(value)

    def _of(self, expression: Any) -> Any:
        """The number of an expression, equal in two signatures if it is computed alike of the same numbers."""
        if not is_expression(expression):
            return constant_token(expression)
        done = self._expressions
        for part in bottom_up(expression, done):
            done[part] = len(done)
            if isinstance(part, Applied):
                args = [done[a] if is_expression(a) else constant_token(a) for a in part.args]
                self._computed.append((part.function, *args))
            elif isinstance(part, ScalarInput):
                self._computed.append((identity(part.source), type(part.hint)))
            else:
                self._computed.append(("read", self._reads.get(part)))
        return done[expression]

    def relations(self) -> tuple[Any, ...]:
        """How the windows of each storage relate to each other, in the order of first uses."""
        several: Any = ([self.leaves[at] for at in places] for places in self.windows.values())
        return tuple([relations(list(dict.fromkeys(windows))) for windows in several])


def _places(signature: Signature) -> Any:
    moving = signature.moving
    if moving is None:
        return None
    return set(moving.live.values), set(moving.live.lists), identity(moving.generators)


@dataclass(frozen=True)
class SignatureTemplate:
    """reference: the first signature. columns: for each of its leaves, the number of its function.

    functions: a formula, or a geometry with one for each of its integers. ends: see `SignatureTokens`.
    storages: the leaves on each storage with windows that vary. related: their relations in all recordings.
    symbols: how many there are.
    """

    reference: Signature
    columns: tuple[int, ...]
    functions: tuple[Formula | tuple[Geometry, tuple[Formula, ...]], ...]
    ends: tuple[int, ...]
    storages: tuple[tuple[int, ...], ...]
    related: tuple[Any, ...]
    symbols: int

    @staticmethod
    def of(
        forms: Sequence[SignatureTokens], sizes: Sequence[Sizes]
    ) -> SignatureTemplate | Mismatch:
        """The template of the signatures of one step, at different sizes. forms: of these."""
        first = forms[0]
        for number, other in enumerate(forms[1:], 1):
            pairs = enumerate(zip_longest(first.rows, other.rows))
            at = next((i for i, (mine, theirs) in pairs if mine != theirs), None)
            if at is not None:
                return Mismatch(number, f"op {at + 1} of {len(first.rows)}", "it is another one")
            for mine, theirs in zip(first.rest, other.rest, strict=True):
                if mine != theirs:
                    return Mismatch(number, f"the {mine[0]}", "they differ")
        found: dict[Any, int] = {}
        functions: list[Any] = []
        columns = []
        for column in zip(*(form.leaves for form in forms), strict=True):
            if column not in found:
                function = _function(column, sizes)
                if isinstance(function, Unfitted):
                    return Mismatch(1, "the op stream", str(function))
                found[column] = len(functions)
                functions.append(function)
            columns.append(found[column])
        varying = {i for i, f in enumerate(functions) if _varies(f)}
        windows = {
            tuple(dict.fromkeys([columns[at] for at in places]))
            for places in first.windows.values()
        }
        storages = tuple(sorted(each for each in windows if varying.intersection(each)))
        template = SignatureTemplate(
            first.signature,
            tuple(columns),
            tuple(functions),
            tuple(first.ends),
            storages,
            (),
            len(sizes[0]),
        )
        related = template._relations(template._values(sizes[0]))
        for number, own in enumerate(sizes[1:], 1):
            if template._relations(template._values(own)) != related:
                return Mismatch(
                    number, "the op stream", "the windows of a storage relate otherwise"
                )
        return replace(template, related=related)

    def at(self, sizes: Sizes) -> Callable[[], Signature] | str:
        """What makes the signature for these sizes; text: why none is predicted."""
        values = self._values(sizes)
        if self._relations(values) != self.related:
            return "tensors on one storage relate to each other otherwise than in the recordings"
        return partial(self._filled, values)

    def predicts(self, forms: SignatureTokens, sizes: Sizes) -> bool:
        """Whether a signature of equal tokens is the one for these sizes."""
        values = self._values(sizes)
        return [values[number] for number in self.columns] == forms.leaves

    def _filled(self, values: Sequence[Any]) -> Signature:
        rows, leaves, facts = self._makers
        found = list(self.reference.rows)
        for at, make in rows:
            found[at] = make(values)
        learned = list(self.reference.facts)
        for at, number in facts:
            learned[at] = learned[at]._replace(value=values[number])
        made = self.reference.leaves if leaves is None else leaves(values)
        return replace(self.reference, rows=tuple(found), leaves=made, facts=tuple(learned))

    @cached_property
    def _makers(
        self,
    ) -> tuple[list[tuple[int, Maker]], Maker | None, list[tuple[int, int]]]:
        """Of each row that varies: its number, and what makes it of the values of the functions; that of the leaves.

        And of each fact whose value varies: its number, and that of the function.
        """
        varying = {i for i, _, _ in self._varying}
        numbers = iter([n if n in varying else None for n in self.columns])
        rows = [_row_maker(row, numbers) for row in self.reference.rows]
        leaves = leaf_maker(self.reference.leaves, numbers)
        values = [next(numbers) if type(f.value) is int else None for f in self.reference.facts]
        facts = [(at, number) for at, number in enumerate(values) if number is not None]
        return [(at, make) for at, make in enumerate(rows) if make is not None], leaves, facts

    def formulas(self) -> Iterator[Formula]:
        """The functions of all integers."""
        for function in self.functions:
            yield from [function] if isinstance(function, Formula) else function[1]

    def digest(self, rows: Sequence[Any] = ()) -> str:
        """Equal in processes whose torch runs the same ops on tensors of the same sizes, on the same kind of processor.

        Numbers that do not vary are left out, as are such offsets: they may be a rank. rows: those of one recording.
        """
        texts = [_text_of(function) for function in self.functions]
        machine = (
            torch.__version__,
            torch.backends.cpu.get_cpu_capability(),
            torch.get_num_threads(),
        )
        rows = rows or SignatureTokens(self.reference).rows
        whole = repr((machine, rows, [texts[number] for number in self.columns]))
        return hashlib.sha256(whole.encode()).hexdigest()

    @cached_property
    def lengths(self) -> frozenset[Formula]:
        """The functions that are sizes of tensors."""
        pairs = [each for each in self.functions if not isinstance(each, Formula)]
        return frozenset(f for geometry, found in pairs for f in found[: len(geometry.size)])

    def known_at(self, sizes: Sizes) -> KnownSizes:
        """The sizes of tensors in a call; of its first symbols alone, those that are functions of these."""
        found: dict[int, list[Formula]] = {}
        for each in self.lengths:
            if each.symbols and max(each.symbols) >= len(sizes):
                continue
            found.setdefault(each.value(sizes), []).append(each)
        alone = {value: several[0] for value, several in found.items() if len(several) == 1}
        varying = {value: each for value, each in alone.items() if each.terms}
        return KnownSizes(varying, frozenset(alone.keys() - varying.keys()))

    @cached_property
    def _varying(self) -> list[tuple[int, Geometry | None, int]]:
        """Of each function that varies: its number, a geometry like the one it gives, how many integers that has."""
        return [
            (i, None, 1) if isinstance(f, Formula) else (i, f[0], len(f[1]))
            for i, f in enumerate(self.functions)
            if _varies(f)
        ]

    @cached_property
    def _evaluate(self) -> Callable[..., tuple[int, ...]]:
        """From the sizes to the integers of all functions that vary."""
        functions = [self.functions[i] for i, _, _ in self._varying]
        formulas = [
            f for each in functions for f in ([each] if isinstance(each, Formula) else each[1])
        ]
        return evaluator(formulas, self.symbols)

    @cached_property
    def _constants(self) -> list[Leaf]:
        """The value of each function at some sizes."""
        return [value_at(function, (2,) * self.symbols) for function in self.functions]

    def _values(self, sizes: Sizes) -> list[Leaf]:
        found, numbers, start = self._constants.copy(), self._evaluate(*sizes), 0
        for index, geometry, count in self._varying:
            own = numbers[start : start + count]
            start += count
            found[index] = own[0] if geometry is None else _shaped(geometry, own)
        return found

    def layout_is_known(self, function: int) -> bool:
        """Whether a window has one layout at all sizes. function: its number."""
        return function in self._layouts

    def _relations(self, values: Sequence[Any]) -> tuple[Any, ...]:
        layouts = self._layouts.copy()
        for each in self.storages:
            for at in each:
                if at not in layouts:
                    layouts[at] = layout_of(values[at])
        return tuple(
            [
                relations([values[at] for at in each], [layouts[at] for at in each])
                for each in self.storages
            ]
        )

    @cached_property
    def _layouts(self) -> dict[int, Any]:
        """Of windows on these storages that have one layout at all sizes: by the number of the function."""
        found = {}
        for at in {at for each in self.storages for at in each}:
            geometry, formulas = self.functions[at]  # type: ignore[misc]
            dims = len(geometry.size)
            if has_one_layout(formulas[:dims], formulas[dims:-1]) or not _varies(
                self.functions[at]
            ):
                found[at] = layout_of(self._constants[at])  # type: ignore[arg-type]
        return found


def _integers(leaf: Leaf) -> Sequence[int]:
    return [leaf] if type(leaf) is int else [*leaf.size, *leaf.stride, leaf.offset]  # type: ignore[union-attr]


def _function(column: Sequence[Leaf], sizes: Sequence[Sizes]) -> Any:
    found = fitted(sizes, list(map(_integers, column)))
    if isinstance(found, Unfitted):
        return found
    return found[0] if type(column[0]) is int else (column[0], found)


def _varies(function: Any) -> bool:
    formulas = [function] if isinstance(function, Formula) else function[1]
    return any(formula.terms for formula in formulas)


def _text_of(function: Any) -> str:
    """The functions of a leaf, without numbers that may be a rank."""
    if isinstance(function, Formula):
        return str(function) if function.terms else ""
    geometry, (*formulas, offset) = function
    return repr((list(map(str, formulas)), _text_of(offset), geometry[3:]))


def value_at(function: Any, sizes: Sizes) -> Leaf:
    """What a function gives for these sizes."""
    if isinstance(function, Formula):
        return function.value(sizes)
    geometry, formulas = function
    return _shaped(geometry, tuple([formula.value(sizes) for formula in formulas]))


def _shaped(geometry: Geometry, numbers: tuple[int, ...]) -> Geometry:
    """A geometry with other sizes, strides and offset."""
    count = len(geometry.size)
    return Geometry(numbers[:count], numbers[count:-1], numbers[-1], *geometry[3:])


def _row_maker(row: Row, numbers: Iterator[int | None]) -> Maker | None:
    """What makes a row of the values of functions; None: nothing in it varies. numbers: of the functions of its leaves.

    None for those that do not vary.
    """
    resized = [_resize_maker(storage, next(numbers)) for storage, _ in row.resized]
    makers = {"resized": joined(row.resized, resized, tuple)}  # in the order of `SignatureTokens`
    makers |= {
        name: leaf_maker(getattr(row, name), numbers) for name in ("args", "kwargs", "outputs")
    }
    return joined(row, [makers.get(name) for name in Row._fields], Row._make)


def _resize_maker(storage: int, number: int | None) -> Maker | None:
    return None if number is None else lambda values: (storage, values[number])
