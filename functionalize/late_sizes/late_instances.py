"""Programs of a template some of whose sizes are known only while the graph runs.

    instances = LateInstances.made(template, sizes, first, rules)      or a `Mismatch`
    program = instances.at((37,))                 a `LateInstance`, for 37 tokens and any computed sizes

    late_guards(program)        one for each size of a result that was counted and does not follow from arguments
    late_places(symbols, 3)     their places among the symbols, in the same order; 3: how many there are
    first_late(symbols)         the number of the first symbol that is known late

In the key of a recording its late sizes stand at the end (`with_late_sizes`), so their symbols are the last ones.

The code of these programs (`_LateCode`) learns sizes of results while the graph runs, and computes of them the integers
of later ops. `late` is the `Admission` of the replay:

    late.begin()
    v7 = op2(v6)                     counts what the mask selects
    s0 = late.define(0, v7)          the size, or one that the program takes
    i5 = 2*s0 + 1
    v8 = op3(v4, [v5])
    v8 = late.admit(1, v8)           the result, of as many elements
    v9 = op4(v8, [i5, 8])
    late.failure()                   after the graph, for its guard: None, or which size does not fit

The recorder counts the elements of a result before the op that makes it runs, and a pass may move neither away.
A replay must not end in the middle of its graph: other ranks wait in its collectives. So a result of a size that does
not fit is repeated, or cut, to one that does, and the graph runs to its end. The guard fails before any write.
Invariants: only arguments of ops depend on sizes that are known late. What a replay looks at before the graph runs and
what it writes after it does not, but for the guards on these sizes. Every op of the graph gets tensors of sizes for
which the functions of the program were compared. An integer is computed as soon as the sizes that it depends on are
known.
Refusals: outputs, writes, and numbers that Python reads which depend on such a size; code that needs an integer earlier
(`TypeError`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from functionalize.ir.commit import is_commit
from functionalize.ir.guards import ValueGuard
from functionalize.ir.ops import Geometry
from functionalize.lengths.instances import (
    Instance,
    Instances,
    VaryingPart,
    varying_formulas,
    varying_parts,
)
from functionalize.program.early_guard import A_SIZE
from functionalize.program.executable import Executable
from functionalize.program.metadata import tensors_of
from functionalize.program.printer import node_text
from functionalize.program.program import Program
from functionalize.run.boxed import BoxedTemplate
from functionalize.run.windows import NO_WINDOWS
from functionalize.templates.call_keys import LATE
from functionalize.templates.fitting import Formula, Sizes, evaluator
from functionalize.templates.leaves import PARTS, ReplacedParts
from functionalize.templates.symbols import Symbols
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
        late: _LateCode,
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
            late = _LateCode.of(template, first, names, found.sized)
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


# -- code that learns sizes ------------------------------------------------------------------------

_TOO_EARLY = "an op needs a size before it is known"
# Ops that take as many elements as a mask selects: they fail where the values are another number of these.
_TAKES_A_MASK = ("index_put", "_unsafe_index_put", "_index_put_impl", "masked_scatter")


@dataclass
class _LateCode:
    """ops: those with such results, in the order of the graph. names: of the integers that are computed late.

    first: the number of the first symbol that is a size of a result.
    """

    first: int
    ops: list[SizedOp] = field(default_factory=list)
    names: Mapping[Formula, str] = field(default_factory=dict)
    _numbers: dict[fx.Node, int] = field(default_factory=dict)
    # The integers that are known once a symbol is, by its number.
    _follow: dict[int, list[tuple[str, Formula]]] = field(default_factory=dict)
    _unmade: set[str] = field(default_factory=set)  # as the code is made

    @staticmethod
    def of(
        template: Template, first: int, names: Mapping[Formula, str], sized: Mapping[fx.Node, Any]
    ) -> _LateCode:
        """names: of all integers that vary. sized: for each op whose result has a size that depends on data, what it
        returns, with `SymbolicInt`s in the places of integers that vary.
        """
        formulas = {name: formula for formula, name in names.items()}
        late = {f: name for f, name in names.items() if max(f.symbols) >= first}
        code = _LateCode(first, names=late)
        known, count = set(range(first)), len(template.symbols.names)
        counts = _counts(template)
        for node in template.reference.graph.nodes:
            if node in counts:
                new = counts[node].symbols - known
                known |= new
                code._add(node, (), count, counts[node], next(iter(new), None))
            elif node in sized:
                shapes = [
                    tuple([_formula(size, formulas) for size in geometry.size])
                    for geometry in _geometries(sized[node])
                ]
                if any(not f.symbols <= known for shape in shapes for f in shape):
                    raise TypeError(_TOO_EARLY)
                code._add(node, shapes, count)
        code._follow = _by_last_symbol(code.ops, late, first)
        return code

    def _add(
        self,
        node: fx.Node,
        shapes: Sequence[tuple[Formula, ...]],
        symbols: int,
        count: Formula | None = None,
        symbol: int | None = None,
    ) -> None:
        dims, flat = tuple(map(len, shapes)), [f for shape in shapes for f in shape]
        self._numbers[node] = len(self.ops)
        evaluate = evaluator(flat, symbols)
        self.ops.append(SizedOp(f"`{node_text(node)}`", dims, evaluate, count, symbol))

    def begin(self) -> Sequence[str]:
        self._unmade = set(self.names.values())
        return ["late.begin()"]

    def after(self, node: fx.Node, name: str) -> Sequence[str]:
        number = self._numbers.get(node)
        if number is None:
            return ()
        symbol = self.ops[number].symbol
        if symbol is None:
            return [f"{name} = late.admit({number}, {name})"]
        integers = self._follow.get(symbol, ())
        self._unmade.difference_update(integer for integer, _ in integers)
        lines = [f"{integer} = {formula}" for integer, formula in integers]
        return [f"s{symbol} = late.define({number}, {name})", *lines]

    def call(self, node: fx.Node, call: str, name: Callable[[fx.Node], str]) -> str:
        target = getattr(node.target, "__name__", "")
        if not target.startswith(_TAKES_A_MASK):
            return call
        first: Any = node.args[0]
        return f"{call} if late.fits else {name(first)}"

    def check(self, number: SymbolicInt) -> None:
        if repr(number) in self._unmade:
            raise TypeError(_TOO_EARLY)


def _by_last_symbol(
    ops: Sequence[SizedOp], names: Mapping[Formula, str], first: int
) -> dict[int, list[tuple[str, Formula]]]:
    """The integers that can be computed once a symbol is known, by its number; those of unknown sizes by none."""
    order = {op.symbol: at for at, op in enumerate(ops) if op.symbol is not None}
    found: dict[int, list[tuple[str, Formula]]] = {}
    for formula, name in names.items():
        late = [symbol for symbol in formula.symbols if symbol >= first]
        if all(symbol in order for symbol in late):
            found.setdefault(max(late, key=order.__getitem__), []).append((name, formula))
    return found


def _counts(template: Template) -> dict[fx.Node, Formula]:
    """The ops that count elements of results, and what they give."""
    program = template.reference
    places = iter(late_places(template.symbols, len(late_guards(program))))
    (output,) = (node for node in program.graph.nodes if node.op == "output")
    commit = next((node for node in program.graph.nodes if is_commit(node)), None)
    found: dict[fx.Node, Formula] = {}
    for at, guard in enumerate(program.value_guards):
        if guard.what == A_SIZE:
            node: Any = output.args[0][guard.slot] if commit is None else commit.args[at]
            _, symbol, constant = next(places)
            formula = Formula(constant) if symbol < 0 else Formula(0, ((1, (symbol,)),))
            found.setdefault(node, formula)  # passes merge equal counts
    return found


def _formula(size: int, formulas: Mapping[str, Formula]) -> Formula:
    return formulas[repr(size)] if type(size) is SymbolicInt else Formula(int(size))


def _geometries(value: Any) -> Iterator[Geometry]:
    """Those in what `size_by_data` returns, with other integers."""
    if value and isinstance(value[0], Geometry):
        yield value[0]
    else:
        for each in value:
            yield from _geometries(each)


# -- the sizes of one replay -----------------------------------------------------------------------


class Rules(Protocol):
    """What is known of the sizes of a class of calls: `LateClass`."""

    def why_refused(self, symbol: int, size: int) -> str | None:
        """Why a size is none that the program takes, by itself; None: it takes it."""
        ...

    def compared_size(self, symbol: int, arguments: Sizes) -> int:
        """A size that it takes. arguments: the sizes of those of the call."""
        ...

    def why_not(self, sizes: Sizes) -> str | None:
        """Why the program does not hold for all sizes of a call; None: it does."""
        ...


@dataclass(frozen=True, slots=True)
class SizedOp:
    """An op whose result has a size that depends on data, or that counts the elements of one.

    dims: the number of dimensions of each tensor of its result. evaluate: from all sizes to those of these tensors.
    count: of an op that counts: the function that gives its result. symbol: the size that this result defines.
    """

    text: str
    dims: tuple[int, ...]
    evaluate: Callable[..., tuple[int, ...]]
    count: Formula | None = None
    symbol: int | None = None


class Admission:
    """arguments: the sizes of the arguments. count: of all symbols."""

    def __init__(self, ops: Sequence[SizedOp], rules: Rules, arguments: Sizes, count: int) -> None:
        self._ops, self._rules, self._arguments = ops, rules, arguments
        self._count = count
        self.begin()

    def begin(self) -> None:
        """A replay begins."""
        self._sizes = [*self._arguments, *[0] * (self._count - len(self._arguments))]
        self._why: str | None = None

    @property
    def fits(self) -> bool:
        """Whether all sizes so far do."""
        return self._why is None

    def admit(self, number: int, value: Any) -> Any:
        """The result of an op, or one of another size in its place."""
        op, sizes = self._ops[number], self._sizes
        if op.count is not None and op.count.value(tuple(sizes)) != value:
            self._refuse(f"the result of {op.text}: it is {value}, expected was another size")
        tensors, found = list(tensors_of(value)), iter(op.evaluate(*sizes))
        shapes = [tuple(islice(found, dims)) for dims in op.dims]
        if all(t.shape == shape for t, shape in zip(tensors, shapes, strict=True)):
            return value
        if self.fits:
            other = [tuple(t.shape) for t in tensors]
            self._refuse(f"the result of {op.text}: its size is {other}, expected was {shapes}")
        resized = map(_resized, tensors, shapes)
        return _replaced(value, lambda: next(resized))

    def define(self, number: int, size: int) -> int:
        """The size that an op has counted, or one that fits in its place."""
        op = self._ops[number]
        assert op.symbol is not None
        if (why := self._rules.why_refused(op.symbol, size)) is not None:
            self._refuse(f"the result of {op.text}: its size {size} {why}")
            size = self._rules.compared_size(op.symbol, self._arguments)
        self._sizes[op.symbol] = size
        return size

    def _refuse(self, why: str) -> None:
        self._why = self._why or why

    def failure(self) -> str | None:
        """Why the sizes of this replay do not fit the program, or None."""
        return self._why or self._rules.why_not(tuple(self._sizes))


@dataclass(frozen=True, slots=True, eq=False)
class LateSizeGuard:
    """A guard that the sizes of results fit the program, in the place of one on the count of one result.

    slot, where: of that. is_last: whether it asks; the others pass.
    """

    slot: int
    where: str
    admission: Admission
    is_last: bool

    @property
    def value(self) -> str:
        """What is expected, for texts."""
        return "any size that fits"

    @property
    def what(self) -> str:
        """What it is on, for texts."""
        return A_SIZE

    def failure_of(self, results: Any) -> str | None:
        """Why the sizes do not fit, or None."""
        return self.admission.failure() if self.is_last else None


def _resized(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """A tensor of another size with the same elements, some of them several times; zeros if there are none."""
    for dim, (now, size) in enumerate(zip(tensor.shape, shape, strict=True)):
        if now != size and now:
            tensor = tensor.index_select(dim, torch.arange(size, device=tensor.device) % now)
    return tensor if tensor.shape == shape else tensor.new_zeros(shape)


def _replaced(value: Any, following: Callable[[], Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return following()
    if isinstance(value, (list, tuple)):
        return tuple([_replaced(each, following) for each in value])
    return value


# -- guards and symbols of late sizes --------------------------------------------------------------


def late_guards(program: Executable) -> list[ValueGuard]:
    """The guards on sizes of results that are known only while the graph runs."""
    return [guard for guard in program.value_guards if guard.what == A_SIZE]


def late_places(symbols: Symbols, count: int) -> Sequence[tuple[str, int, int]]:
    """For each of the last sizes: its name, the number of its symbol, or -1 and its constant."""
    return symbols.places[len(symbols.places) - count :]


def first_late(symbols: Symbols) -> int:
    """The number of the first symbol that is known late; of none: the number of all symbols."""
    late = (n for n, name in enumerate(symbols.names) if name.endswith(f"`{LATE}`"))
    return next(late, len(symbols.names))
