"""`Program`: a captured callable, printed, lowered, saved and replayed.

program(*args)                replay                    program.lower()       a graph module with the epilogue
program.print_readable()      graph and epilogue        program.save(path)    a file, for `functionalize.load`
program.forward_of(node)      of a backward op          program.backward_of(node)    of a forward op
program.gradient_of(name)     of a parameter            program.tape()               autograd's nodes
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from functionalize._compat.graphs import NodeWriter
from functionalize.ir.ops import Geometry
from functionalize.program.executable import Executable
from functionalize.program.lower import lower
from functionalize.program.printer import program_text
from functionalize.program.program_file import save_program
from functionalize.tape.queries import backward_of, forward_of, gradient_of
from functionalize.tape.tape import Tape


@dataclass(eq=False, repr=False)
class Program(Executable):
    """A captured callable as a value; `Executable` lists its fields.

    geometries: what passes have read of fake values (`passes/views.py`), shared by copies.

    >>> program = fz.functions.trace(lambda x: x.sin(), torch.ones(2))
    >>> _ = program.print_readable()
    program(
        x: float32[2],
    ):
        sin = aten.sin.default(x)
        return sin
    <BLANKLINE>
    >>> torch.equal(program(torch.zeros(2)), torch.zeros(2))
    True
    """

    geometries: dict[int, tuple[Any, Geometry | None]] = field(
        default_factory=dict, init=False, repr=False
    )

    @property
    def with_graph(self) -> Program:
        """A program with the same ops whose graph need not be made first: sizes in it may be others."""
        return self

    def copy(self) -> Program:
        """A copy with a separate graph: passes may rewrite one without changing the other.

        Nodes keep their names; each has its own `meta` dict, whose fake values and whose constants are
        shared and are never written to.
        """
        if self._values is not None:
            self._values.finish()
        graph = fx.Graph()
        copied: dict[fx.Node, fx.Node] = {}
        of, copy = copied.__getitem__, NodeWriter(graph).copy
        for node in self.graph.nodes:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), of)
            new = copied[node] = copy(node, args, kwargs)
            new.meta.update(node.meta)
        made = replace(self, graph=graph, constants=dict(self.constants), _module=None, _run=None)
        made.geometries = self.geometries
        return made

    def print_readable(self, print_output: bool = True, provenance: bool = False) -> str:
        """The graph, then the epilogue, as text. print_output: also print it.

        provenance: with a comment where the phase, the module or the role for FSDP2 of the ops changes.
        """
        if provenance:
            self.describe()
        text = program_text(self, where=provenance)
        if print_output:
            print(text)
        return text

    def forward_of(self, node: fx.Node | str) -> list[fx.Node]:
        """The ops that made the autograd node in which a backward op ran, in the order of the graph.

        For the backward of a view without a node of its own, the op that reads the view. Empty for an op that ran in
        no autograd node, and in one that no op of this graph made: of a leaf, of an `autograd.Function` without ops.
        node: a node of the graph, or its name. Raises `LookupError` for a name of none.
        """
        self.describe()
        return forward_of(self.graph, node)

    def backward_of(self, node: fx.Node | str) -> list[fx.Node]:
        """The ops that ran in the autograd node that an op made, in the order of the graph; see `forward_of`."""
        self.describe()
        return backward_of(self.graph, node)

    def gradient_of(self, parameter: str) -> fx.Node:
        """The node whose value autograd has accumulated last as the gradient of a parameter: FSDP2 reduces it.

        parameter: its name, from any module on: `layers.0.wq.weight`. Raises `LookupError` if no gradient has this
        name, or those of several parameters have.
        """
        self.describe()
        return gradient_of(self.graph, parameter)

    def tape(self) -> Tape:
        """The autograd nodes of the step's backwards in the order in which they ran, with their edges, lines and ops.

        `print(program.tape())`. Empty for traced functions without a backward, and for captured forwards.
        """
        self.describe()
        return Tape.of(self.backwards, self.graph)

    def lower(self) -> fx.GraphModule:
        """A `GraphModule` over the tensor leaves of the arguments, with the epilogue as ops at its end.

        Raises `UncapturableError` for a program whose inputs are found otherwise (a captured step's).
        """
        return lower(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a program whose inputs are arguments, for `functionalize.load`; raises `SaveError`."""
        save_program(self, path)
