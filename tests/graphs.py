"""FX graphs as text for snapshots, compilers that keep the graphs of AOTAutograd, lowered programs as functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
from torch import Tensor, fx

import functionalize as fz
from examples import compare
from examples.resize_program import ResizeProgram
from functionalize.program.printer import node_text


def graph_text(name: str, graph: fx.Graph) -> str:
    """`name(its inputs):` and a line per node."""
    inputs = ", ".join(n.name for n in graph.find_nodes(op="placeholder"))
    lines = [node_text(n) for n in graph.nodes if n.op != "placeholder"]
    return "\n    ".join([f"{name}({inputs}):", *lines])


class Kept:
    """Pass-through compilers; `forward` and `backward` are the graphs that they were given."""

    def __init__(self) -> None:
        self.graphs: dict[str, fx.Graph] = {}

    def compiler(self, name: str) -> Callable[..., Any]:
        """A compiler that keeps its graph under `name` and runs it as it is."""

        def keep(gm: fx.GraphModule, inputs: Any) -> Any:
            self.graphs[name] = gm.graph
            return make_boxed_func(gm.forward)

        return keep

    def options(self) -> dict[str, Any]:
        """What `aot_function` is given."""
        return {"fw_compiler": self.compiler("forward"), "bw_compiler": self.compiler("backward")}

    def __str__(self) -> str:
        return "\n".join(graph_text(name, graph) for name, graph in self.graphs.items())

    def saved(self, outputs: int) -> list[fx.Node]:
        """What the forward graph returns for the backward, after its own `outputs`."""
        (end,) = self.graphs["forward"].find_nodes(op="output")
        return list(end.args[0][outputs:])


def kept_by_aot_function(program: ResizeProgram) -> list[Kept]:
    """The graphs of each function of a program, forward and backward; the program ran as in eager."""
    kept = [Kept() for _ in program.fns]
    pairs = zip(program.fns, kept, strict=True)
    compiled = [fz.functions.aot_function(fn, **each.options()) for fn, each in pairs]
    compare.assert_bitwise_equal(compare.execute(program, compiled), compare.run_eager(program))
    return kept


def lowered(fn: Callable[..., Any], *args: Tensor) -> Callable[..., Any]:
    """The lowered program of `fn` as a function like it."""
    program = fz.functions.trace(fn, *args)
    module = program.lower()

    def run(*args: Tensor) -> Any:
        with torch.no_grad():
            outputs = module(*args)
        return torch.utils._pytree.tree_unflatten(list(outputs), program.out_spec)

    return run
