"""`capture(step, compile="inductor")`: stretches of the graph through Inductor, the rest by the boxed runner.

    all_gather_into_tensor, wait_tensor         unchanged
    split, view, addmm, gelu, addmm, add   ->   region(...): compiled once for all identical layers
    bernoulli, _local_scalar_dense, commit      unchanged
    _fused_adamw_                               unchanged

Identical layers share a kind of region (`regions.py`), so compile time does not grow with depth. Not compiled are
random ops (which draw the same numbers as eager), numbers that Python reads, generators, barriers, ops that write
inputs, and list ops over all parameters (`_foreach_*`, `_fused_*`). Where an op at stage INPLACE writes memory that
the graph itself made, its functional form is compiled (`undone.py`).

Invariant: random ops, collectives and writes keep the order of the graph; values are freed after their last use.
Results are not bitwise equal to eager: Inductor fuses ops and rounds at other places.
Refusals: `CompileError`, naming the ops that cannot be compiled, before anything ran; there is no silent fallback.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from functionalize._compat.compilers import inductor_region
from functionalize.analysis.aliases import written_nodes
from functionalize.errors import CompileError
from functionalize.ir.generators import is_random
from functionalize.program.program import Program
from functionalize.run.boxed import BoxedCall, Runner, boxed
from functionalize.run.regions import Region, canonical, regions_of
from functionalize.run.undone import undone

_LIST_OPS = (
    "_foreach_",
    "_fused_",
)  # one call over all parameters: it would make every region unique


@dataclass(frozen=True)
class Options:
    """How a graph is divided into regions.

    collectives: whether regions contain collectives; regions are then larger, and fewer are identical.
    least: the fewest computing ops (neither views nor `getitem`) that are compiled as a region.
    most: the most nodes of a region; a longer stretch is cut.
    """

    collectives: bool = False
    least: int = 3
    most: int = 400


def inductor(program: Program, options: Options = Options()) -> Runner:
    """The runner: compiles every kind of region, then runs the graph around them as `boxed` does.

    Raises `CompileError` if Inductor cannot, or if there is no compiler for it.
    """
    program.describe()
    plan = plan_of(program, options)
    return boxed(replace(program, graph=plan.graph, _module=None, _run=None))


@dataclass(slots=True, eq=False)
class RegionPlan:
    """A graph in which every region is one call; the number of regions, and of their kinds."""

    graph: fx.Graph
    regions: int
    kinds: int


def plan_of(program: Program, options: Options) -> RegionPlan:
    """Compile the regions of a program's graph, each kind once."""
    functional = undone(program)

    def accepts(node: fx.Node) -> bool:
        return _accepts(node, functional, options.collectives)

    regions = regions_of(program.graph, accepts, options.least, options.most)
    within = {node: region for region in regions for node in region.nodes}
    kinds: dict[str, BoxedCall] = {}
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()

    def copy(node: fx.Node) -> None:
        if node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        for user in (
            node.users
        ):  # copy `getitem`s with their tuple: a region may read a part before their place
            if user.target is operator.getitem and user not in within:
                copy(user)

    for node in program.graph.find_nodes(op="get_attr"):
        copy(node)
    for node in program.graph.nodes:
        region = within.get(node)
        if region is None:
            copy(node)
        elif region.nodes[0] is node:
            _call(graph, region, _compiled(region, functional, kinds), copies)
    return RegionPlan(graph, len(regions), len(kinds))


def _call(graph: fx.Graph, region: Region, code: BoxedCall, copies: dict[fx.Node, fx.Node]) -> None:
    """Insert one call for a region, and map the region's outputs to its results in `copies`."""
    inputs = [copies[node] for node in region.inputs]
    call = graph.create_node("call_function", code, (inputs,), {}, name="region")
    for i, node in enumerate(region.outputs):
        copies[node] = graph.call_function(operator.getitem, (call, i))


def _compiled(
    region: Region, functional: Mapping[fx.Node, Any], kinds: dict[str, BoxedCall]
) -> BoxedCall:
    text, graph = canonical(region, functional)
    if text not in kinds:
        like = [node.meta["val"] for node in region.inputs]
        results = [node.meta["val"] for node in region.outputs]
        try:
            kinds[text] = BoxedCall(inductor_region(graph, like, results))
        except Exception as error:
            raise CompileError(_why(region, error)) from error
    return kinds[text]


def _why(region: Region, error: Exception) -> str:
    first, last = region.nodes[0], region.nodes[-1]
    message = next(iter(str(error).strip().splitlines()), "")
    advice = "run the step without `compile`, or report the error to the authors of Inductor"
    if "compiler" in type(error).__name__.lower():
        advice = "install a C++ compiler (g++ or clang++), or run the step without `compile`"
    return (
        f"compile='inductor' cannot compile the {len(region.nodes)} ops from `{first.name}` to `{last.name}`: "
        f"{type(error).__name__}: {message}\n  {advice}"
    )


# -- what goes into a region -------------------------------------------------------------------------


def _accepts(node: fx.Node, functional: Mapping[fx.Node, Any], collectives: bool) -> bool:
    target: Any = node.target
    if not hasattr(target, "_schema") or not _are_plain_tensors(node):
        return False
    if target.namespace == "_c10d_functional":
        return collectives and not written_nodes(node)
    if target.namespace not in ("aten", "prims"):
        return False
    if target._schema.name.partition("::")[2].startswith(_LIST_OPS):
        return False
    if is_random(node) and not _is_without_dropout(node):
        return False
    return node in functional or not (target._schema.is_mutable or written_nodes(node))


def _are_plain_tensors(node: fx.Node) -> bool:
    """Whether all arguments and results are strided real tensors on one device; no number is a node."""
    values = [node.meta.get("val"), *(n.meta.get("val") for n in node.all_input_nodes)]
    tensors = [
        t for value in values for t in (value if isinstance(value, (list, tuple)) else [value])
    ]
    return len({t.device for t in tensors if isinstance(t, Tensor)}) == 1 and all(
        each is None
        or (isinstance(each, Tensor) and each.layout is torch.strided and not each.is_complex())
        for each in tensors
    )


def _is_without_dropout(node: fx.Node) -> bool:
    """Whether an attention op has a dropout probability of 0, and therefore draws no random numbers."""
    target: Any = node.target
    for at, argument in enumerate(target._schema.arguments):
        if argument.name == "dropout_p":
            probability = node.args[at] if at < len(node.args) else argument.default_value
            return bool(node.kwargs.get("dropout_p", probability) == 0)
    return False
