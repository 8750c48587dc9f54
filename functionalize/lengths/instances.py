"""Programs for new sizes of a class, made of its template by a few integers, without a graph and without compiling.

    instances = Instances.of(template, programs)     the code is compiled once, the integers that vary are its arguments
    program = instances.at((37,))                    an `Instance`: a `Program` whose graph is made when it is read

Invariant: an instance replays as `template.at(sizes)` run by `boxed` would. Shared with other instances are the code
and all inputs, guards, outputs and actions in which no integer varies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import fx

from functionalize.ir.generators import is_random
from functionalize.ir.guards import Guard, Miss
from functionalize.ir.inputs import Call, InputSpec
from functionalize.ir.outputs import OutputRole
from functionalize.program.known_inputs import KnownInputs
from functionalize.program.program import Program
from functionalize.run.boxed import BoxedTemplate, CodeWithRanges, Runner, boxed
from functionalize.run.windows import NO_WINDOWS, KnownResults, ViewForm, Windows, windows
from functionalize.templates.fitting import Formula, Sizes, evaluator
from functionalize.templates.leaves import PARTS, ReplacedParts
from functionalize.templates.makers import Maker, maker
from functionalize.templates.template import SymbolicInt, Template, Unfitted, fitted

_MOST_FACTS = 8  # as many recordings of a kind are made


class Instance(Program):
    """A program whose graph is made at first use."""

    _template: Template | None = None
    _sizes: Sizes = ()
    _own_graph: fx.Graph | None = None
    _count = 0
    _shared: SharedInputs | None = None
    _own_guards: tuple[Guard, ...] = ()

    @property
    def graph(self) -> fx.Graph:
        """The graph for these sizes."""
        if self._own_graph is None:
            assert self._template is not None
            self._own_graph = self._template.at(self._sizes).graph
        return self._own_graph

    @graph.setter
    def graph(self, graph: fx.Graph | None) -> None:
        self._own_graph = graph

    @property
    def with_graph(self) -> Program:
        """The recorded program, until the graph for these sizes is made."""
        return self if self._template is None else self._template.reference

    def print_readable(self, print_output: bool = True, provenance: bool = False) -> str:
        """As for any program; without `provenance`, symbols stand for integers that vary."""
        if provenance or self._template is None:
            return super().print_readable(print_output, provenance)
        names = zip(self._template.symbols.names, self._sizes, strict=True)
        values = [f"# s{number} = {size}: {name}\n" for number, (name, size) in enumerate(names)]
        text = "".join([*values, self._template.text()])
        if print_output:
            print(text)
        return text

    def nodes(self) -> int:
        return self._count or super().nodes()

    def known(self, leaves: Sequence[Any], asks_numbers_first: bool = False) -> Call | Miss | None:
        """As for any program; what is known of the last call of another instance counts, too."""
        if self._shared is None:
            return super().known(leaves, asks_numbers_first)
        call = self._shared.call(self, leaves)
        if not isinstance(call, Call):
            return call
        for guard in self._own_guards:
            failure = guard.failure(call)
            if failure is not None:
                return Miss.of(failure)
        return call

    def resolve_anew(self, leaves: Sequence[Any]) -> Call | str:
        if self._shared is None:
            return super().resolve_anew(leaves)
        call, failure = self.ask(leaves)
        if isinstance(failure, Miss) or failure is None:
            self._shared.learn(self, call, self._own_guards)
        return call if failure is None else failure


@dataclass(frozen=True, slots=True)
class _Common:
    """What instances share of what `KnownInputs` reads."""

    facts: Sequence[Guard]
    inputs: Sequence[InputSpec]
    guards: Sequence[Guard]
    outputs: Sequence[OutputRole]


class SharedInputs:
    """The inputs of the last call of any instance, see `KnownInputs`: which argument has which size stands apart.

    Those of each recording apart, whose facts are other objects: recorded sizes alternate with predicted ones.
    """

    def __init__(self) -> None:
        self._known: list[tuple[Sequence[Guard], KnownInputs]] = []  # with the facts

    def call(self, program: Program, leaves: Sequence[Any]) -> Call | Miss | None:
        """The call with its inputs, if all guards hold but those with sizes that vary; None: it is not known.

        A miss: a number is another one.
        """
        return self._of(program).call(leaves)

    def learn(self, program: Program, call: Call, own: Sequence[Guard]) -> None:
        """Take note of a call for which all guards have passed. own: the guards with sizes that vary."""
        guards = [each for each in program.guards if all(each is not other for other in own)]
        self._of(program).learn(
            _Common(program.facts, program.inputs, guards, program.outputs), call
        )

    def _of(self, program: Program) -> KnownInputs:
        known = next((known for facts, known in self._known if facts is program.facts), None)
        if known is None:
            known = KnownInputs()
            self._known = [*self._known[1 - _MOST_FACTS :], (program.facts, known)]
        return known


@dataclass(frozen=True, slots=True)
class VaryingPart:
    """One part of a program in which integers vary. name, index: its place. make: from all integers that vary to it."""

    name: str
    index: int
    make: Maker


class Instances:
    """The programs of one template. code: None if its graph cannot be compiled for all sizes at once."""

    def __init__(
        self, template: Template, code: BoxedTemplate | None, parts: Sequence[VaryingPart]
    ) -> None:
        self.template, self._code, self._parts = template, code, parts
        reference = template.reference
        self.reference = reference
        self._random = any(is_random(node) for node in reference.graph.nodes)
        self._count = reference.nodes()
        self._shared = SharedInputs()

    @cached_property
    def _evaluate(self) -> Callable[..., tuple[int, ...]]:
        """From the sizes to the integers that vary."""
        return evaluator(varying_formulas(self.template), len(self.template.symbols.names))

    @staticmethod
    def of(
        template: Template, sizes: Sequence[Sizes], programs: Sequence[Program] = ()
    ) -> Instances:
        """sizes: those of the recordings. programs: for these sizes; else the template makes them."""
        programs = programs or list(map(template.at, sizes))
        numbers = {f: number for number, f in enumerate(varying_formulas(template))}
        names = {f: f"i{number}" for f, number in numbers.items()}
        pairs = zip(template.formulas, template.predicted(sizes[0]), strict=True)
        integers = [SymbolicInt(v, names[f], numbers[f]) if f.terms else v for f, v in pairs]
        try:
            found = ReplacedParts.of(template.reference, iter(integers))
            parts = list(varying_parts(template.reference, found.parts))
            views = _windows(programs, sizes, template.reference.graph, names)
            code = BoxedTemplate.of(template.reference, found.arguments, [*names.values()], views)
        except TypeError:  # a size in an object of which no code can be made
            return Instances(template, None, ())
        return Instances(template, code, parts)

    def at(self, sizes: Sizes) -> Program:
        """The program for these sizes."""
        template, code = self.template, self._code
        if code is None or template.reference.runner is not boxed:
            return template.at(sizes)
        numbers = self._evaluate(*sizes)
        return self.filled(Instance, sizes, numbers, code.at(numbers, _ranges))

    def filled(
        self, kind: type[Instance], sizes: Sizes, numbers: Sequence[int], run: Runner
    ) -> Instance:
        """The program for these sizes, which runs this code. numbers: the integers that vary in its other parts."""
        template, reference = self.template, self.template.reference
        changed: dict[str, list[Any]] = {}
        for part in self._parts:
            if part.name not in changed:
                changed[part.name] = list(getattr(reference, part.name))
            changed[part.name][part.index] = part.make(numbers)
        fields = {f: getattr(reference, f) for f in _FIELDS} | {
            name: tuple(several) for name, several in changed.items()
        }
        made = kind(graph=None, **fields)  # type: ignore[arg-type]
        made._template, made._sizes = template, sizes
        made._count, made._random = self._count, self._random
        made._shared = self._shared
        own = [part.index for part in self._parts if part.name == "guards"]
        made._own_guards = tuple(made.guards[index] for index in own)
        made._run = run
        return made


def programs_at(several: Sequence[Instances], sizes: Sizes) -> list[Program] | None:
    """The programs; None if an argument is the whole of its storage at these sizes only, or not at them."""
    programs = [each.at(sizes) for each in several]
    for program, each in zip(programs, several, strict=True):
        for spec, was in zip(program.inputs, each.reference.inputs, strict=True):
            if spec is not was and _is_whole(spec) != _is_whole(was):
                return None
    return programs


def _is_whole(spec: InputSpec) -> bool:
    return spec.geometry.end == spec.nbytes


# What an instance shares with the reference; the rest is made for it, or at its first replay.
_FIELDS = tuple(
    each.name
    for each in dataclasses.fields(Program)
    if each.init and each.name not in ("graph", "notes") and not each.name.startswith("_")
)


def _ranges(program: Program) -> Any:
    """The code with ranges for a profiler."""
    return CodeWithRanges(program.graph)(program)


def varying_formulas(template: Template) -> list[Formula]:
    """The functions of the integers that vary, each once."""
    return list(dict.fromkeys(f for f in template.formulas if f.terms))


def varying_parts(
    reference: Program, with_symbols: Mapping[str, Sequence[Any]]
) -> Iterator[VaryingPart]:
    """The parts of a program beside its graph in which an integer varies. with_symbols: the parts, by name."""
    for name in PARTS:
        pairs = zip(with_symbols[name], getattr(reference, name), strict=True)
        for index, (new, was) in enumerate(pairs):
            make = maker(new, was)
            if make is not None:
                yield VaryingPart(name, index, make)


def _windows(
    programs: Sequence[Program],
    sizes: Sequence[Sizes],
    graph: fx.Graph,
    names: Mapping[Formula, str],
) -> Windows:
    """The windows of the programs for these sizes as one: with symbols; none if an integer in them has no symbol.

    graph: whose nodes they are.
    """
    known: KnownResults = {}
    found = [_at(graph, windows(each, known), each.graph) for each in programs]
    made: dict[fx.Node, ViewForm] = {}
    whole: dict[fx.Node, ViewForm] = {}
    for node in found[0].made:
        if any(node not in each.made for each in found):
            return NO_WINDOWS
        forms = [each.made[node] for each in found]
        own = _fitted(sizes, forms, names)
        base = _fitted(
            sizes, [each.forms[f.of] for each, f in zip(found, forms, strict=True)], names
        )
        if own is None or base is None:
            return NO_WINDOWS
        made[node], whole[own.of] = own, base._replace(of=own.of)
    skipped = found[0].skipped
    if any(len(each.made) != len(made) or each.skipped != skipped for each in found):
        return NO_WINDOWS
    return Windows(made, skipped, whole)


def _at(graph: fx.Graph, found: Windows, own: fx.Graph) -> Windows:
    """The windows of a graph at the nodes of an equal one. own: the graph; its names and order may be others."""
    by_name = {node.name: node for node in graph.nodes}
    order: list[fx.Node] = list(graph.nodes)
    if by_name.keys() == {node.name for node in own.nodes}:
        order = [by_name[node.name] for node in own.nodes]
    pairs: dict[fx.Node, fx.Node] = dict(zip(own.nodes, order, strict=True))
    made, forms = (
        {pairs[node]: form._replace(of=pairs[form.of]) for node, form in each.items()}
        for each in (found.made, found.forms)
    )
    return Windows(made, frozenset(pairs[node] for node in found.skipped), forms)


def _fitted(
    sizes: Sequence[Sizes], forms: Sequence[ViewForm], names: Mapping[Formula, str]
) -> ViewForm | None:
    first = forms[0]
    if any(each.of is not first.of or len(each.size) != len(first.size) for each in forms):
        return None
    formulas = fitted(sizes, [[*each.size, *each.stride, each.offset] for each in forms])
    if isinstance(formulas, Unfitted) or any(f.terms and f not in names for f in formulas):
        return None
    values = [SymbolicInt(f.value(sizes[0]), names[f]) if f.terms else f.constant for f in formulas]
    count = len(first.size)
    size, stride = tuple(values[:count]), tuple(values[count:-1])
    return first._replace(size=size, stride=stride, offset=values[-1])
