"""`capture(step, compile="inductor")`: stretches of the graph through Inductor, the rest by the boxed runner.

    all_gather_into_tensor, wait_tensor         unchanged
    split, view, addmm, gelu, addmm, add   ->   region(...): compiled once for all identical layers
    bernoulli, _local_scalar_dense, commit      unchanged
    _fused_adamw_                               unchanged

A region consists of consecutive nodes; only `getitem`s are moved, to where their tuple is made. A stretch that is too
long is cut where it repeats itself (identical layers become identical regions), else where the fewest values are live.
Identical layers share a kind of region, so compile time does not grow with depth. Not compiled are random ops (which
draw the same numbers as eager), numbers that Python reads, generators, barriers, ops that write inputs, list ops over
all parameters (`_foreach_*`, `_fused_*`), and a stretch of fewer than `least` computing ops: calling compiled code
would cost more.

A compiler needs a pure graph. Where an op at stage INPLACE writes memory that the graph itself made, and which is then
read only through the op's own result, its functional form is compiled:

    mul = aten.mul.Tensor(x, 2)                 mul = aten.mul.Tensor(x, 2)
    add_ = aten.add_.Tensor(mul, 1)        ->   add = aten.add.Tensor(mul, 1)
    return add_                                 return add

Memory of an input or a constant, a functional result whose layout differs from the written tensor's, and ops with
several results are left as they are.

Invariants: random ops, collectives and writes keep the order of the graph; values are freed after their last use. A
region returns every value that a node outside reads. Regions of one class have one graph: names of nodes do not count.
Linear in nodes and edges. Results are not bitwise equal to eager: Inductor fuses ops and rounds at other places.
Refusals: `CompileError`, naming the ops that cannot be compiled, before anything ran; there is no silent fallback.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, fx

from functionalize._compat.compilers import inductor_region
from functionalize.analysis.aliases import Aliases, is_view, written_nodes
from functionalize.discharge.rules.mutations import functional_form, is_mutating
from functionalize.errors import CompileError, UnsupportedOpError
from functionalize.ir.generators import is_random
from functionalize.ir.ops import geometry_of
from functionalize.program.program import Program
from functionalize.repeats import runs
from functionalize.run.boxed import BoxedCall, Runner, boxed

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


# -- regions ---------------------------------------------------------------------------------------

_CONTEXT = 12  # consecutive equal ops that count as a repetition
_SHORTEST = 6  # the shortest period that counts as a layer


@dataclass(slots=True, eq=False)
class Region:
    """Nodes that are compiled together.

    inputs: the values from outside that they read. outputs: their values that nodes outside read.
    """

    nodes: list[fx.Node]
    inputs: list[fx.Node]
    outputs: list[fx.Node]


def regions_of(
    graph: fx.Graph, accepts: Callable[[fx.Node], bool], least: int, most: int
) -> list[Region]:
    """The regions of a graph, in order, of nodes that the compiler `accepts`.

    least: the fewest computing ops of a region. most: the most nodes of a region; a longer stretch is cut.
    """
    found = []
    for stretch in _stretches(graph, accepts):
        for part in _cut(stretch, most) if len(stretch) > most else [stretch]:
            nodes = [each for node in part for each in (node, *_parts(node))]
            if sum(_computes(node) for node in nodes) >= least:
                found.append(_region(nodes))
    return found


def _stretches(graph: fx.Graph, accepts: Callable[[fx.Node], bool]) -> Iterator[list[fx.Node]]:
    """Runs of consecutive accepted nodes, without `getitem`s, which are moved to their tuple."""
    stretch: list[fx.Node] = []
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr") or node.target is operator.getitem:
            continue
        if node.op == "call_function" and accepts(node):
            stretch.append(node)
        elif stretch:
            yield stretch
            stretch = []


def _parts(node: fx.Node) -> Iterator[fx.Node]:
    """The `getitem` nodes of a node's tuple, and those of nested tuples."""
    if not isinstance(node.meta["val"], Tensor):
        for user in node.users:
            if user.target is operator.getitem:
                yield user
                yield from _parts(user)


def _computes(node: fx.Node) -> bool:
    return node.target is not operator.getitem and not is_view(node)


def _region(nodes: list[fx.Node]) -> Region:
    inside = set(nodes)
    inputs = dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside)
    outputs = [
        node
        for node in nodes
        if isinstance(node.meta["val"], Tensor) and any(u not in inside for u in node.users)
    ]
    return Region(nodes, list(inputs), outputs)


# -- where a long stretch is cut ---------------------------------------------------------------------


def _cut(stretch: list[fx.Node], most: int) -> Iterator[list[fx.Node]]:
    """Parts of at most `most` nodes: one repetition each where the stretch repeats itself."""
    live = _live(stretch)
    cuts = {0, len(stretch)}
    numbers: dict[str, int] = {}
    keys = [numbers.setdefault(_signature(n), len(numbers)) for n in stretch]
    for start, period, end in runs(keys, _CONTEXT):
        if _SHORTEST <= period <= most:
            phase = min(range(start, start + period), key=live.__getitem__)
            cuts.update(range(phase, end + 1, period))
    ends = sorted(cuts)
    for start, end in pairwise(ends):
        while end - start > most:
            at = min(range(start + most // 2, start + most + 1), key=live.__getitem__)
            yield stretch[start:at]
            start = at
        yield stretch[start:end]


def _live(stretch: list[fx.Node]) -> list[int]:
    """For each position, the number of values made before it and read at it or later."""
    place = {node: i for i, node in enumerate(stretch)}
    steps = [0] * (len(stretch) + 1)
    for i, node in enumerate(stretch):
        readers = [u for part in (node, *_parts(node)) for u in part.users]
        last = max((place.get(u, len(stretch)) for u in readers), default=i)
        steps[i + 1] += 1
        if last < len(stretch):
            steps[last + 1] -= 1
    return list(accumulate(steps))


def _signature(node: fx.Node) -> str:
    """A text that is equal for the corresponding ops of identical layers."""
    value = node.meta["val"]
    return f"{node.target} {geometry_of(value) if isinstance(value, Tensor) else ''}"


# -- one form for all regions of a class -------------------------------------------------------------


def canonical(region: Region, functional: Mapping[fx.Node, Any]) -> tuple[str, fx.Graph]:
    """(a text that is equal for regions of one class, the region as a separate graph).

    functional: for a node whose op is replaced, the functional op.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    lines = []
    for i, node in enumerate(region.inputs):
        copies[node] = graph.placeholder(f"i{i}")
        value = node.meta["val"]
        lines.append(f"{geometry_of(value)._replace(offset=0)} {value.device}")
    for i, node in enumerate(region.nodes):
        target: Any = functional.get(node, node.target)
        copies[node] = graph.create_node(
            "call_function",
            target,
            fx.node.map_arg(node.args, copies.__getitem__),
            fx.node.map_arg(node.kwargs, copies.__getitem__),
            name=f"n{i}",
        )
        lines.append(f"{target} {copies[node].args!r} {copies[node].kwargs!r}")
    graph.output(tuple(copies[node] for node in region.outputs))
    lines.append(" ".join(copies[node].name for node in region.outputs))
    return "\n".join(lines), graph


# -- functional forms of in-place ops --------------------------------------------------------------


def undone(program: Program) -> dict[fx.Node, Any]:
    """The functional op for each op of the graph whose write is not observable. Linear in nodes and edges."""
    nodes = list(program.graph.nodes)
    if program.stage != "INPLACE":
        return {}
    aliases, place = Aliases(program.graph), {node: i for i, node in enumerate(nodes)}
    latest: dict[fx.Node, int] = {}  # group -> the last use of any of its nodes so far
    external = {aliases.of(n) for n in nodes if n.op in ("placeholder", "get_attr")}
    found: dict[fx.Node, Any] = {}
    for node in nodes:
        group = aliases.of(node)
        target = _functional_op(node)
        if target is not None and group not in external and latest.get(group, -1) <= place[node]:
            found[node] = target
        last = max((place[user] for user in node.users), default=place[node])
        latest[group] = max(latest.get(group, -1), last)
    return found


def _functional_op(node: fx.Node) -> Any:
    """The functional op with the same result as this in-place op; None unless both have one result and no more."""
    target: Any = node.target
    if node.op != "call_function" or not hasattr(target, "_schema") or not is_mutating(target):
        return None
    try:
        form = functional_form(target)
    except UnsupportedOpError:
        return None
    written = written_nodes(node)
    if form.dropped or form.order or form.defaults or not form.single or len(written) != 1:
        return None
    result = _result(node, form.target)
    same = isinstance(result, Tensor) and geometry_of(result) == geometry_of(
        written[0][1].meta["val"]
    )
    return form.target if same else None


def _result(node: fx.Node, target: Any) -> Any:
    """The result of the functional op, as a fake tensor."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return target(*args, **kwargs)
