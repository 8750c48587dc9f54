"""Functional forms for in-place ops at stage INPLACE whose write is not observable: a compiler needs a pure graph.

    mul = aten.mul.Tensor(x, 2)                    mul = aten.mul.Tensor(x, 2)
    add_ = aten.add_.Tensor(mul, 1)           ->   add = aten.add.Tensor(mul, 1)
    return add_                                    return add

Invariant: after the op, the written memory is read only through the op's own result, so results are equal.
Refusals: memory of an input or a constant; a functional result whose layout differs from the written tensor's;
ops with several results.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from functionalize.analysis.aliases import Aliases, written_nodes
from functionalize.discharge.rules.mutations import functional_form, is_mutating
from functionalize.errors import UnsupportedOpError
from functionalize.ir.ops import geometry_of
from functionalize.program.program import Program


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
