"""`Program`: a captured callable, printed, lowered, saved and replayed.

program(*args)                replay                    program.lower()       a graph module with the epilogue
program.print_readable()      graph and epilogue        program.save(path)    a file, for `functionalize.load`
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from torch import fx

from functionalize.program.executable import Executable
from functionalize.program.lower import lower
from functionalize.program.printer import program_text
from functionalize.program.program_file import save_program


@dataclass(eq=False)
class Program(Executable):
    """A captured callable as a value; `Executable` lists its fields."""

    def copy(self) -> Program:
        """A copy with a separate graph: passes may rewrite one without changing the other.

        Nodes keep their names; each has its own `meta` dict, whose fake values and whose constants are
        shared and are never written to.
        """
        graph = fx.Graph()
        copied: dict[fx.Node, fx.Node] = {}
        for node in self.graph.nodes:
            copied[node] = graph.node_copy(node, copied.__getitem__)
        return replace(self, graph=graph, constants=dict(self.constants), _module=None, _run=None)

    def print_readable(self, print_output: bool = True) -> str:
        """The graph, then the epilogue, as text. print_output: also print it."""
        text = program_text(self)
        if print_output:
            print(text)
        return text

    def lower(self) -> fx.GraphModule:
        """A `GraphModule` over the tensor leaves of the arguments, with the epilogue as ops at its end.

        Raises `UncapturableError` for a program whose inputs are found otherwise (a captured step's).
        """
        return lower(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a program whose inputs are arguments, for `functionalize.load`; raises `SaveError`."""
        save_program(self, path)
