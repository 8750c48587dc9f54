"""Where autograd meets a captured forward: one node of the user's graph, with the captured backward behind it.

    outputs ──grad_fn──▶ Boundary ──▶ the arguments and parameters that require a gradient, an anchor
                            │
                            └ behind.backward(tangents, wanted, keep)      a nested run, recorded or replayed

Parameters and arguments are inputs of the node, so that autograd accumulates into their `.grad`, runs the hooks on
them and answers `torch.autograd.grad` as for any other op. What FSDP2 does in its own backward, and leaves inside
a reentrant checkpoint, happens behind the node: the anchor says whether it is wanted.

Refusals: a backward that is to be differentiated (`create_graph=True`); one through several forwards of an FSDP2
model at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from functionalize._compat import (
    below_autograd,
    graph_is_kept,
    hook_tables,
    leaf_of,
    will_execute,
)
from functionalize.errors import UncapturableError

aten = torch.ops.aten


class Wanted(NamedTuple):
    """What a run of the backward is asked for: everything, or these gradients of arguments and parameters."""

    everything: bool
    inputs: tuple[bool, ...]


class Behind(Protocol):
    """The backward of one forward."""

    @property
    def reduced_together(self) -> WeakSet[Any]:
        """The nodes of all forwards whose gradients eager would reduce together, in one backward."""
        ...

    def watch(self, outputs: Sequence[Tensor]) -> None:
        """Tensors without a history that share storages and version counters with what the user is given."""
        ...

    def backward(
        self, tangents: Sequence[Tensor | None], wanted: Wanted, keep: bool
    ) -> Sequence[Tensor | None]:
        """The gradients of arguments and parameters; keep: it may be asked again (`retain_graph=True`)."""
        ...


class _Boundary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, behind: Behind, values: Sequence[Tensor], *inputs: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.behind = behind
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise UncapturableError(
                "differentiates the backward of a captured forward (`create_graph=True`), which is a program "
                "without a graph of its own: take the second derivative inside the captured function"
            )
        others = (node for node in ctx.behind.reduced_together if node is not ctx)
        if any(map(will_execute, others)):
            raise UncapturableError(
                "goes backward through several captured forwards of an FSDP2 model at once, whose gradients "
                "eager reduces together and these would reduce one by one, which rounds differently: go backward "
                "from each by itself, or capture one function that does all of them"
            )
        first, *rest = (node is not None and will_execute(node) for node, _ in ctx.next_functions)
        wanted = Wanted(first, tuple(rest))
        return None, None, None, *ctx.behind.backward(tangents, wanted, graph_is_kept())


def attach(behind: Behind, values: Sequence[Tensor], inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Tensors on the storages of `values` that are `behind`'s outputs, with `inputs` before it in the graph."""
    with torch.no_grad():
        with below_autograd():  # no views: they may be written in place as eager's may
            fresh = [value.detach() for value in values]
        behind.watch([value.detach() for value in fresh])  # these count the writes to them
    anchor = torch.empty(0, requires_grad=True)
    # autograd does not tell whether it wants a leaf's gradient, but whether it will run the node before it
    nodes = [aten.alias.default(t) if t.is_leaf else t for t in (anchor, *inputs)]
    result: Sequence[Tensor] = _Boundary.apply(behind, fresh, *nodes)
    behind.reduced_together.update(t.grad_fn for t in result[:1])
    return result


def leaves_of(outputs: Sequence[Tensor]) -> list[Tensor]:
    """The leaves that a backward from `outputs` would accumulate into, each once."""
    found: dict[int, Tensor] = {}
    seen: set[Any] = set()
    todo = [t.grad_fn for t in outputs]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = leaf_of(node)
        if leaf is not None:
            found.setdefault(id(leaf), leaf)
        todo += [following for following, _ in node.next_functions]
    return list(found.values())


def run_backward(
    outputs: Sequence[Tensor],
    tangents: Sequence[Tensor | None],
    inputs: Sequence[Tensor],
    wanted: Wanted,
    keep: bool,
) -> list[Tensor | None]:
    """Go backward from `outputs`; the gradients of `inputs`, leaves whose own `.grad` and hooks stay out of it."""
    pairs = [(o, t) for o, t in zip(outputs, tangents, strict=True) if t is not None]
    roots, seeds = [o for o, _ in pairs], [t for _, t in pairs]
    if wanted.everything:
        with _set_aside(inputs):
            torch.autograd.backward(roots, seeds, retain_graph=keep)
            return [t.grad for t in inputs]
    asked = [t for t, yes in zip(inputs, wanted.inputs, strict=True) if yes]
    if not asked:
        return [None] * len(inputs)
    with _set_aside(asked):
        found = iter(torch.autograd.grad(roots, asked, seeds, retain_graph=keep, allow_unused=True))
    return [next(found) if yes else None for yes in wanted.inputs]


@contextmanager
def _set_aside(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Without the gradients and hooks of `leaves`: they are the user's graph's, which comes to them later."""
    gradients = [leaf.grad for leaf in leaves]
    tables = [table for leaf in leaves for table in hook_tables(leaf)]
    hooks = [dict(table) for table in tables]
    try:
        for leaf in leaves:
            leaf.grad = None
        for table in tables:
            table.clear()
        yield
    finally:
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = gradient
        for table, were in zip(tables, hooks, strict=True):
            table.update(were)
