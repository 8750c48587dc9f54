"""Code that learns sizes of results while the graph runs, and computes of them the integers of later ops.

    v7 = op2(v6)                     counts what the mask selects
    s0 = late.define(0, v7)
    i5 = 2*s0 + 1
    v8 = op3(v4, [v5])
    v8 = late.admit(1, v8)
    v9 = op4(v8, [i5, 8])

    code = LateCode.of(template, first, names, sized)
    BoxedTemplate.of(..., late=code)

The recorder counts the elements of a result before the op that makes it runs, and a pass may move neither away.
Invariant: an integer is computed as soon as the sizes that it depends on are known. Code that needs one earlier is not
made: `TypeError`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from functionalize.ir.commit import is_commit
from functionalize.ir.ops import Geometry
from functionalize.late_sizes.admission import SizedOp
from functionalize.late_sizes.late_guards import late_guards, late_places
from functionalize.program.early_guard import A_SIZE
from functionalize.program.printer import node_text
from functionalize.templates.fitting import Formula, evaluator
from functionalize.templates.template import SymbolicInt, Template

_TOO_EARLY = "an op needs a size before it is known"
# Ops that take as many elements as a mask selects: they fail where the values are another number of these.
_TAKES_A_MASK = ("index_put", "_unsafe_index_put", "_index_put_impl", "masked_scatter")


@dataclass
class LateCode:
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
    ) -> LateCode:
        """names: of all integers that vary. sized: for each op whose result has a size that depends on data, what it
        returns, with `SymbolicInt`s in the places of integers that vary.
        """
        formulas = {name: formula for formula, name in names.items()}
        late = {f: name for f, name in names.items() if max(f.symbols) >= first}
        code = LateCode(first, names=late)
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
