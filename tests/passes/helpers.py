"""What the tests of passes share: graphs as text, replays compared bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx

import functionalize as fz
from functionalize import passes
from functionalize.program.printer import node_text

aten = torch.ops.aten


def graph_text(gm: fx.GraphModule) -> str:
    """A graph as the printer prints one, its inputs included."""
    nodes = list(gm.graph.nodes)
    names = ", ".join(n.name for n in nodes if n.op == "placeholder")
    body = [f"    {node_text(n)}" for n in nodes if n.op != "placeholder"]
    return "\n".join([f"graph({names}):", *body])


def seen(program: fz.Program, make: Callable[[], tuple[Tensor, ...]]) -> list[Any]:
    """Everything a caller sees of a replay: outputs, then inputs (None: freed)."""
    args = make()
    torch.manual_seed(0)
    outs = pytree.tree_leaves(program(*args))
    return [_contents(t) for t in (*outs, *args)]


def _contents(t: Any) -> Any:
    if not isinstance(t, Tensor):
        return t
    if t.untyped_storage().nbytes() == 0 and t.numel():
        return None
    layout = (tuple(t.shape), t.stride(), t.dtype, t.untyped_storage().nbytes())
    return (layout, t.detach().contiguous().view(-1).view(torch.uint8).tolist())


def rewrite(
    fn: Callable[..., Any], make: Callable[[], tuple[Tensor, ...]], each: passes.Pass
) -> tuple[int, fz.Program]:
    """Trace `fn`, run one pass twice: the rewrites of the first run, and the program after it.

    The second run must find nothing, and replay must give the same bits before and after.
    """
    before = fz.functions.trace(fn, *make())
    after = passes.run(before, [each])
    again = passes.run(after, [each])
    assert count(again) == 0, again.history
    assert seen(after, make) == seen(before, make)
    assert str(passes.run(before, [each]).print_readable(False)) == after.print_readable(False)
    return count(after), after


def count(program: fz.Program) -> int:
    """The rewrites of the last pass."""
    return int(program.history[-1].rpartition(": ")[2])


def built(*steps: tuple[object, ...], size: tuple[int, ...] = (4, 6)) -> fx.GraphModule:
    """A graph that applies ops one after the other to `x * 2`, and takes the sine of the last."""
    graph = fx.Graph()
    value = graph.call_function(aten.mul.Tensor, (graph.placeholder("x"), 2))
    for target, *args in steps:
        value = graph.call_function(target, (value, *args))
    graph.output((graph.call_function(aten.sin.default, (value,)),))
    return fx.GraphModule(torch.nn.Module(), graph)
