"""A bare `GraphModule` as a program, so that passes can rewrite the graphs of other compilers.

    program_of(gm, example_inputs).graph is gm.graph

Refusal: `PassError` for a graph without fake values, where no example inputs are passed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from functionalize._compat.dispatch import disable_current_modes
from functionalize._compat.fakes import FakeTensor
from functionalize._compat.graphs import pytree
from functionalize.analysis.aliases import results
from functionalize.discharge.rules.resizes import RESIZE_STORAGE
from functionalize.errors import PassError
from functionalize.ir.fake_mode import fake_like, fake_mode
from functionalize.ir.fakes import Fakes
from functionalize.ir.inputs import Argument, InputSpec
from functionalize.ir.ops import geometry_of
from functionalize.ir.outputs import Result
from functionalize.passes.metadata import describe, is_detached, value_of
from functionalize.program.metadata import fake_input
from functionalize.program.program import Program


def program_of(gm: fx.GraphModule, example_inputs: Sequence[Any] | None = None) -> Program:
    """A `Program` around the graph of `gm` itself, not a copy of it; it has no guards.

    example_inputs: needed only where nodes have no `val` yet. Raises `PassError` if they are
    missing.
    """
    _fill_values(gm, example_inputs)
    placeholders = gm.graph.find_nodes(op="placeholder")
    specs = tuple(_spec_of(i, node) for i, node in enumerate(placeholders))
    slots = results(gm.graph)
    return Program(
        graph=gm.graph,
        constants={str(n.target): None for n in gm.graph.find_nodes(op="get_attr")},
        inputs=specs,
        outputs=tuple(Result(i) for i, each in enumerate(slots) if isinstance(each, fx.Node)),
        epilogue=(),
        guards=(),
        value_guards=(),
        in_spec=None,
        out_spec=pytree.tree_structure(slots),
        _module=gm,
        _described=True,
    )


def _fill_values(gm: fx.GraphModule, example_inputs: Sequence[Any] | None) -> None:
    bare = [n for n in gm.graph.nodes if n.op != "output" and "val" not in n.meta]
    if bare:
        if example_inputs is None:
            raise PassError(
                f"`{bare[0].name}` has no fake value in its `meta['val']`, and a pass decides by "
                "size, stride and memory: give example_inputs"
            )
        known = [t for t in example_inputs if isinstance(t, FakeTensor)]
        mode = known[0].fake_mode if known else fake_mode(allow_non_fake_inputs=True)
        inputs = [
            fake_like(mode, x) if isinstance(x, Tensor) and not known else x for x in example_inputs
        ]
        FakeTensorProp(gm, mode).propagate_dont_convert_inputs(*inputs)
    elif any(is_detached(node) for node in gm.graph.nodes):
        _refill_values(gm)
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and "tensor_meta" not in node.meta:
            describe(node, value)


def _refill_values(gm: fx.GraphModule) -> None:
    """Make fake values that share memory as the graph does, from the geometry of its inputs."""
    fakes = Fakes()
    with disable_current_modes(), torch.no_grad():
        for i, node in enumerate(gm.graph.nodes):
            if node.op == "placeholder":
                describe(node, fake_input(fakes, _spec_of(i, node)))
            elif node.op == "get_attr":
                describe(node, fake_like(fakes.mode, getattr(gm, str(node.target))))
            elif node.op == "call_function" and node.target is not RESIZE_STORAGE:
                args, kwargs = value_of((node.args, node.kwargs))
                describe(node, fakes.run(node.target, args, kwargs))


def _spec_of(index: int, node: fx.Node) -> InputSpec:
    value = node.meta.get("val")
    source = Argument(index)
    if not isinstance(value, Tensor):
        return InputSpec(str(node.target), value, 0, torch.device("cpu"), source)  # type: ignore[arg-type]
    nbytes = value.untyped_storage().nbytes()
    return InputSpec(str(node.target), geometry_of(value), nbytes, value.device, source)
