"""Recompute views of emptied parameters in backward, so that what is saved is the parameter itself.

    forward    t = aten.t(w); return out, t         return out, w
    backward   mm = aten.mm(tangents, t)            t = aten.t(w); mm = aten.mm(tangents, t)

A view of a parameter must not be saved if the parameter's storage is empty between forward and backward: making
the view fails (most view ops check the bounds of the storage), and a compiler may materialise it. Saving the
parameter itself costs no memory, and in backward its storage is full again.
`RecomputeViews` rewrites a joint graph; `partition` does so around one of torch's partitioners.

Note [Which storages are empty]
A joint graph does not record this: AOTAutograd traces on functional tensors, whose storages are full even if
the caller's are empty, and the fake kernel of a view grows an empty one. Recomputing a view of an input costs
nothing, and it occupies the memory of the input, which is saved either way. So by default every input counts as one
that may be emptied.

Note [Side effects on primals]
torch's partitioners put into backward whatever can be computed there. A
`resize_storage_bytes_(w, 0)` at the end of the forward can, once `w` is saved, and would free the
weight that was just refilled. So `partition` takes the forward's side effects out, returns their
operands as additional outputs of the forward, and puts them back at the end of the forward alone.

Invariant: only view ops move. A recomputed view is made of the same tensor by the same ops in the same order.
Refusals: a view that the forward reads stays in the forward, too; a view of an input that keeps its
storage (not in `emptied`) is unchanged; a forward that reads an input after writing it (`PassError`).
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from functionalize.analysis.aliases import Aliases, is_view, results, written_nodes
from functionalize.errors import PassError
from functionalize.passes.base import Pass
from functionalize.program.program import Program

Partitioner = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]

_BASES = {"min_cut": "min_cut_rematerialization_partition", "default": "default_partition"}
_BACKWARD_TAGS = ("is_backward", "must_be_in_backward")
_FORWARD_TAGS = ("is_forward", "must_be_in_forward")


@dataclass(frozen=True)
class RecomputeViews(Pass):
    """Recompute views of inputs in backward, so that forward and backward share none.

    outputs: the number of results of the joint graph that are the forward's (None: unknown; backward
    is then every node that depends on a tangent or is tagged as backward).
    emptied: names of the placeholders that may be empty between forward and backward (None: all,
    see Note [Which storages are empty]).
    """

    name: ClassVar[str] = "recompute_views"
    outputs: int | None = None
    emptied: tuple[str, ...] | None = None

    def apply(self, program: Program) -> int:
        graph = program.graph
        emptied = primals(graph) if self.emptied is None else named(graph, self.emptied)
        return len(recompute(graph, emptied, self.outputs))


def partition(
    joint_module: fx.GraphModule,
    joint_inputs: Any,
    *,
    num_fwd_outputs: int,
    base: Partitioner | None = None,
    emptied: Collection[str | int] | None = None,
    **kwargs: Any,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward of a joint graph as `base` splits it, but no view of an input is saved.

    A `partition_fn` for `functorch.compile.aot_function`. base: None is torch's min-cut. emptied: names or indices
    of the placeholders that may be empty in between; by default all. Other arguments are passed to `base`.
    Raises `PassError` if the forward reads an input after writing it.
    """
    graph = joint_module.graph
    nodes = primals(graph) if emptied is None else named(graph, emptied)
    effects = SideEffects(joint_module, num_fwd_outputs)
    forward_outputs = num_fwd_outputs + len(effects.operands)
    recompute(graph, nodes, forward_outputs)
    base = base or _torch_partitioner("min_cut")
    if base is not _torch_partitioner("default"):
        # Min-cut merges common subexpressions and saves the cheapest values; the "recompute" mark
        # survives both. The default partitioner splits by position and may call min-cut if it sees a mark.
        for view in views_of(graph, nodes):
            view.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    graph.lint()
    joint_module.recompile()
    forward, backward = base(joint_module, joint_inputs, num_fwd_outputs=forward_outputs, **kwargs)
    effects.put_back(forward)
    return forward, backward


def partitioner(base: str = "min_cut") -> Partitioner:
    """`partition` around torch's `min_cut_rematerialization_partition` or `default_partition`.

    >>> from functorch.compile import make_boxed_func
    >>> def compiler(gm, inputs):
    ...     return make_boxed_func(gm.forward)
    >>> x = torch.ones(2, requires_grad=True)
    >>> split = fz.passes.partitioner("default")
    >>> function = fz.functions.aot_function(lambda x: x.sin(), compiler, partition_fn=split)
    >>> function(x).sum().backward()
    """
    if base not in _BASES:
        raise PassError(f"no partitioner {base!r}; there are {', '.join(_BASES)}")
    return functools.partial(partition, base=_torch_partitioner(base))


def _torch_partitioner(name: str) -> Partitioner:
    """torch's own partitioner; imported here, since it brings in 400 modules that no other pass needs."""
    found: Partitioner = getattr(importlib.import_module("functorch.compile"), _BASES[name])
    return found


# -- which inputs ----------------------------------------------------------------------------------


def primals(graph: fx.Graph) -> list[fx.Node]:
    """The inputs of the forward: every placeholder that is not a tangent."""
    return [n for n in graph.find_nodes(op="placeholder") if "tangents" not in n.name]


def _origin(node: fx.Node) -> fx.Node:
    """The value that a chain of views starts from."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def named(graph: fx.Graph, chosen: Iterable[str | int]) -> list[fx.Node]:
    """Placeholders by name or index; raises `PassError` for a name or index that does not exist."""
    placeholders = graph.find_nodes(op="placeholder")
    by_name = {n.name: n for n in placeholders}
    found = []
    for each in chosen:
        node = (
            by_name.get(each)
            if isinstance(each, str)
            else (placeholders[each] if 0 <= each < len(placeholders) else None)
        )
        if node is None:
            raise PassError(f"no placeholder {each!r}; there are {', '.join(by_name)}")
        found.append(node)
    return found


def views_of(graph: fx.Graph, origins: Collection[fx.Node]) -> list[fx.Node]:
    """The views of `origins`, and views of those, in the order of the graph."""
    found = dict.fromkeys(origins)
    views = []
    for node in graph.nodes:
        if node not in found and is_view(node) and node.all_input_nodes[0] in found:
            found[node] = None
            views.append(node)
    return views


# -- which nodes are backward ----------------------------------------------------------------------


def _is_tagged_backward(node: fx.Node) -> bool:
    return node.meta.get("partitioner_tag") in _BACKWARD_TAGS


def backward_nodes(graph: fx.Graph, outputs: int | None) -> set[fx.Node]:
    """The backward nodes: tagged as backward, computed from a tangent, or needed by no forward output."""
    forward: set[fx.Node] = set()
    stack = [n for n in results(graph)[:outputs] if isinstance(n, fx.Node)]
    while outputs is not None and stack:
        node = stack.pop()
        if node not in forward:
            forward.add(node)
            stack += node.all_input_nodes
    found: set[fx.Node] = set()
    for node in graph.nodes:
        late = any(n in found or "tangents" in n.name for n in node.all_input_nodes)
        tag = node.meta.get("partitioner_tag")
        unclaimed = outputs is not None and node not in forward and tag not in _FORWARD_TAGS
        unclaimed &= node.op == "call_function"
        if node.op != "output" and (tag in _BACKWARD_TAGS or late or unclaimed):
            found.add(node)
    return found


def recompute(graph: fx.Graph, emptied: Collection[fx.Node], outputs: int | None) -> list[fx.Node]:
    """Make separate views of `emptied` for backward; returns these views.

    A view that is tagged as backward is kept. A forward view without readers left in forward is erased.
    """
    if not emptied:
        return []
    backward = backward_nodes(graph, outputs)
    chain = {n: None for n in views_of(graph, emptied) if not _is_tagged_backward(n)}
    made: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if node not in backward or node in chain:
            continue
        for view in [n for n in node.all_input_nodes if n in chain]:
            node.replace_input_with(view, _recomputed(graph, view, node, chain, made))
    for view in reversed(chain):
        if not view.users:
            graph.erase_node(view)
    return list(made.values())


def _recomputed(
    graph: fx.Graph,
    view: fx.Node,
    user: fx.Node,
    chain: Collection[fx.Node],
    made: dict[fx.Node, fx.Node],
) -> fx.Node:
    """A copy of `view` and of the chain that leads to it, made before `user` at its first use and then shared."""
    missing = []
    while view in chain and view not in made:
        missing.append(view)
        view = view.all_input_nodes[0]
    new = made.get(view, view)
    for each in reversed(missing):
        with graph.inserting_before(user):
            new = graph.node_copy(each, lambda n, each=each, new=new: new)  # type: ignore[misc]
        new.meta["partitioner_tag"] = "is_backward"
        new.meta.pop("recompute", None)
        made[each] = new
    return new


# -- side effects ----------------------------------------------------------------------------------


class SideEffects:
    """The forward's writes to its inputs: removed from a joint graph, and put back into the forward graph.

    operands: the nodes that the writes read. Until `put_back`, the joint graph returns them after its
    forward outputs.
    late_views: indices of forward outputs that are views made after the first write; `put_back` moves
    them after the writes.
    """

    def __init__(self, joint_module: fx.GraphModule, num_fwd_outputs: int) -> None:
        self.at = num_fwd_outputs
        self.calls: list[tuple[Any, Any, Any, str, dict[str, Any]]] = []
        self.operands: list[fx.Node] = []
        graph = joint_module.graph
        found = _side_effects(graph)
        _check_order(graph, found, num_fwd_outputs)
        self.late_views = _late_views(graph, found, num_fwd_outputs)
        for node, target in found:
            node.replace_all_uses_with(target)
            self.calls.append((node.target, node.args, node.kwargs, node.name, node.meta))
            self.operands += [
                n for n in node.all_input_nodes if n.op != "placeholder" and n not in self.operands
            ]
            graph.erase_node(node)
        if self.operands:
            self._extend(graph)

    def _extend(self, graph: fx.Graph) -> None:
        (output,) = graph.find_nodes(op="output")
        outs: list[Any] = list(output.args[0])
        output.args = ([*outs[: self.at], *self.operands, *outs[self.at :]],)
        if (described := output.meta.get("desc")) is not None:
            extra = [None] * len(self.operands)
            output.meta["desc"] = [*described[: self.at], *extra, *described[self.at :]]

    def put_back(self, forward: fx.GraphModule) -> None:
        """Append the side effects to the forward, and remove their operands from its outputs."""
        (output,) = forward.graph.find_nodes(op="output")
        outs: list[Any] = list(output.args[0])
        end = self.at + len(self.operands)
        env: dict[str, Any] = {n.name: n for n in forward.graph.find_nodes(op="placeholder")}
        env |= {n.name: now for n, now in zip(self.operands, outs[self.at : end], strict=True)}
        with forward.graph.inserting_before(output):
            for target, args, kwargs, name, meta in self.calls:
                args, kwargs = fx.node.map_arg((args, kwargs), lambda n: env[n.name])
                node = forward.graph.create_node("call_function", target, args, kwargs, name)
                node.meta = meta
        output.args = ((*outs[: self.at], *outs[end:]),)
        _move_to_end(forward.graph, [outs[i] for i in self.late_views])
        for key in ("desc", "output_stack_traces"):
            if (entries := output.meta.get(key)) is not None:
                output.meta[key] = [*entries[: self.at], *entries[end:]]
        forward.graph.lint()
        forward.recompile()


def _side_effects(graph: fx.Graph) -> list[tuple[fx.Node, fx.Node]]:
    """(node, written node) for every write of the forward to an input or a view of one."""
    found: list[tuple[fx.Node, fx.Node]] = []
    written: dict[fx.Node, fx.Node] = {}  # in-place op -> the node that it wrote and returns
    late = backward_nodes(graph, None)
    for node in graph.nodes:
        targets = [written.get(n, n) for _, n in written_nodes(node)]
        if len(targets) == 1 and node not in late and _origin(targets[0]).op == "placeholder":
            found.append((node, targets[0]))
            written[node] = targets[0]
    return found


def _late_views(
    graph: fx.Graph, effects: Sequence[tuple[fx.Node, fx.Node]], outputs: int
) -> list[int]:
    """Indices of the forward outputs that are views of an input, made after a side effect."""
    if not effects:
        return []
    place = {node: i for i, node in enumerate(graph.nodes)}
    first = min(place[node] for node, _ in effects)
    inputs = {*graph.find_nodes(op="placeholder"), *(node for node, _ in effects)}
    return [
        i
        for i, node in enumerate(results(graph)[:outputs])
        if isinstance(node, fx.Node)
        and is_view(node)
        and place[node] > first
        and _origin(node) in inputs
    ]


def _move_to_end(graph: fx.Graph, views: Iterable[fx.Node]) -> None:
    """Move these views of inputs, and the views they are made of, to the end, unless another node reads them."""
    (output,) = graph.find_nodes(op="output")
    chain: set[fx.Node] = set()
    for view in views:
        while is_view(view):
            chain.add(view)
            view = view.all_input_nodes[0]
    ordered = [n for n in graph.nodes if n in chain]
    last = {output}
    for node in reversed(ordered):
        if node.users.keys() <= last:
            last.add(node)
    for node in ordered:
        if node in last:
            output.prepend(node)


def _check_order(graph: fx.Graph, effects: Sequence[tuple[fx.Node, fx.Node]], outputs: int) -> None:
    """Side effects are moved to the end of the forward: refuse one whose result the forward reads."""
    if not effects:
        return
    aliases, late = Aliases(graph), backward_nodes(graph, outputs)
    pending = dict(effects)
    changed: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node in pending:
            changed.setdefault(aliases.of(pending[node]), pending[node])
        elif node.op == "call_function" and node not in late and not is_view(node):
            for read in node.all_input_nodes:
                written = pending.get(read) or changed.get(aliases.of(read))
                if written is not None:
                    raise PassError(
                        f"`{node.name}` reads `{read.name}` after the forward wrote `{written.name}`: "
                        "functionalize the function first, so that its writes come last"
                    )
