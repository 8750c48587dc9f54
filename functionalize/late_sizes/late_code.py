"""Code that learns sizes of results while the graph runs, and computes of them the integers of later ops.

    v8 = op3(v4, [v7])
    v8, s0, = late.admit(0, v8)
    i5 = 2*s0 + 1
    v9 = op4(v8, [i5, 8])

    code = LateCode.of(template, first, names, sized)
    BoxedTemplate.of(..., late=code)

Invariant: an integer is computed as soon as the sizes that it depends on are known, and code that needs one earlier is
not made: `check` raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from functionalize.ir.commit import is_commit
from functionalize.ir.ops import Geometry
from functionalize.late_sizes.admission import Definition, SizedOp
from functionalize.program.early_guard import A_SIZE
from functionalize.program.printer import node_text
from functionalize.templates.fitting import Formula, evaluator
from functionalize.templates.template import SymbolicInt, Template

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
    _follow: dict[int, list[tuple[str, Formula]]] = field(
        default_factory=dict
    )  # integers, by the last op they need
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
                code._numbers[node] = len(code.ops)
                code.ops.append(_counting(node, counts[node], known))
            if node not in sized:
                continue
            shapes = [
                tuple([_formula(size, formulas) for size in geometry.size])
                for geometry in _geometries(sized[node])
            ]
            defines = list(_definitions(shapes, known))
            code._numbers[node] = len(code.ops)
            dims = tuple(map(len, shapes))
            evaluate = evaluator([f for shape in shapes for f in shape], count)
            code.ops.append(SizedOp(f"`{node_text(node)}`", tuple(defines), dims, evaluate))
        code._follow = _by_last_op(code.ops, late, first)
        return code

    def begin(self) -> Sequence[str]:
        self._unmade = set(self.names.values())
        return ["late.begin()"]

    def after(self, node: fx.Node, name: str) -> Sequence[str]:
        number = self._numbers.get(node)
        if number is None:
            return ()
        new = [f"s{each.symbol}" for each in self.ops[number].defines]
        integers = self._follow.get(number, ())
        self._unmade.difference_update(integer for integer, _ in integers)
        lines = [f"{integer} = {formula}" for integer, formula in integers]
        return [f"{', '.join([name, *new])}, = late.admit({number}, {name})", *lines]

    def call(self, node: fx.Node, call: str, name: Callable[[fx.Node], str]) -> str:
        target = getattr(node.target, "__name__", "")
        if not target.startswith(_TAKES_A_MASK):
            return call
        first: Any = node.args[0]
        return f"{call} if late.fits else {name(first)}"

    def check(self, number: SymbolicInt) -> None:
        if repr(number) in self._unmade:
            raise TypeError("an op needs a size before it is known")


def _by_last_op(
    ops: Sequence[SizedOp], names: Mapping[Formula, str], first: int
) -> dict[int, list[tuple[str, Formula]]]:
    """The integers that can be computed after each op, by its number; those of unknown sizes after none."""
    known = dict.fromkeys(range(first), -1)
    known |= {each.symbol: number for number, op in enumerate(ops) for each in op.defines}
    found: dict[int, list[tuple[str, Formula]]] = {}
    for formula, name in names.items():
        if all(symbol in known for symbol in formula.symbols):
            found.setdefault(max(known[n] for n in formula.symbols), []).append((name, formula))
    return found


def _counts(template: Template) -> dict[fx.Node, Formula]:
    """The ops that count elements of results, and what they give."""
    program = template.reference
    guards = [each for each in program.value_guards if each.what == A_SIZE]
    places = iter(template.symbols.places[len(template.symbols.places) - len(guards) :])
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


def _counting(node: fx.Node, count: Formula, known: set[int]) -> SizedOp:
    """known: symbols; gets that of the count."""
    new = sorted(count.symbols - known)
    known.update(new)
    defines = tuple([Definition(symbol, -1, 0, 1, Formula(0)) for symbol in new])
    return SizedOp(f"`{node_text(node)}`", defines, (), lambda *sizes: (), count)


def _formula(size: int, formulas: Mapping[str, Formula]) -> Formula:
    return formulas[repr(size)] if type(size) is SymbolicInt else Formula(int(size))


def _geometries(value: Any) -> Iterator[Geometry]:
    """Those in what `size_by_data` returns, with other integers."""
    if value and isinstance(value[0], Geometry):
        yield value[0]
    else:
        for each in value:
            yield from _geometries(each)


def _definitions(shapes: Sequence[Sequence[Formula]], known: set[int]) -> Iterator[Definition]:
    """Where each size that is not known yet can be read. known: symbols; gets those that are found."""
    for tensor, shape in enumerate(shapes):
        for dim, formula in enumerate(shape):
            unknown = formula.symbols - known
            if formula.operator or len(unknown) != 1:
                continue
            (symbol,) = unknown
            own = [c for c, factors in formula.terms if factors == (symbol,)]
            rest = tuple([term for term in formula.terms if symbol not in term[1]])
            if len(own) == 1 and len(rest) == len(formula.terms) - 1:
                known.add(symbol)
                yield Definition(symbol, tensor, dim, own[0], Formula(formula.constant, rest))
