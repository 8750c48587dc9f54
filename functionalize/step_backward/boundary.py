"""The autograd node of a captured forward: one node of the user's graph, which runs the captured backward.

    outputs ──grad_fn──▶ _Boundary ──▶ the arguments and parameters that require a gradient, an anchor
                            │
                            └ captured.backward(tangents, requested, keep)      a nested run, recorded or replayed

Parameters and arguments are inputs of the node, so that autograd accumulates into their `.grad`, runs the hooks on
them and computes `torch.autograd.grad` as for any other op. FSDP2's own backward, and leaves inside a reentrant
checkpoint, run inside the node. The anchor is an empty tensor whose gradient autograd requests only in a backward over
all leaves: the node then computes all gradients, also those of leaves that are not its inputs.
The callable runs on detached arguments (`DetachedLeaves`), so that its own graph ends at them.

Refusals: a differentiable backward (`create_graph=True`); one backward through several forwards of an
FSDP2 model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from functionalize._compat.autograd import (
    OwnHook,
    accumulator_of,
    below_autograd,
    graph_is_kept,
    hook_tables,
    leaf_of,
    nodes_of,
    will_execute,
)
from functionalize.errors import UncapturableError
from functionalize.state.arguments import flatten_result, unflatten_result
from functionalize.tape.grad_access import GradAccess

aten = torch.ops.aten
_BEYOND_ARGUMENTS = (
    "runs a backward that goes on beyond an argument, into the graph of the caller: pass the argument detached, or "
    "run that backward outside"
)


class DetachedLeaves(list[Any]):
    """The leaves of a call. Tensors that require a gradient are detached from the user's graph.

    originals: the leaves before detaching. detached: the indices of leaves that were detached.
    """

    def __init__(self, originals: Sequence[Any]) -> None:
        records_graph = torch.is_grad_enabled()
        super().__init__(_detached(leaf) if records_graph else leaf for leaf in originals)
        self.originals = originals
        self.detached = [i for i, leaf in enumerate(originals) if leaf is not self[i]]

    def connect(self, refusing: Sequence[Callable[[str], None]]) -> None:
        """Let a gradient that a backward accumulates into a detached leaf go on into the graph of its original.

        The backward of the boundary's node returns such gradients instead. Other backwards reach a detached leaf inside
        the callable, or later through what an attribute holds. refusing: called with the reason at each such gradient.
        """
        for i in self.detached:
            hook = OwnHook(_pass_on, self.originals[i], refusing)
            self[i].register_post_accumulate_grad_hook(hook)

    def with_originals(self, result: Any) -> Any:
        """A result without an autograd history of its own, with the caller's tensors instead of the detached ones."""
        if not self.detached:
            return result
        flat, spec = flatten_result(result)
        own = {id(self[i]): self.originals[i] for i in self.detached}
        return unflatten_result([own.get(id(leaf), leaf) for leaf in flat], spec)


def _pass_on(original: Tensor, refusing: Sequence[Callable[[str], None]], leaf: Tensor) -> None:
    gradient, leaf.grad = leaf.grad, None
    for refuse in refusing:
        refuse(_BEYOND_ARGUMENTS)
    # The running backward may need the graph of the original once more.
    torch.autograd.backward(
        original, gradient, retain_graph=True, create_graph=torch.is_grad_enabled()
    )


def _detached(leaf: Any) -> Any:
    if isinstance(leaf, Tensor) and leaf.requires_grad:
        return leaf.detach().requires_grad_()
    return leaf


def is_output(leaf: Any) -> bool:
    """Whether a leaf of a result is the output of an autograd graph."""
    return isinstance(leaf, Tensor) and leaf.requires_grad and leaf.grad_fn is not None


class RequestedGradients(NamedTuple):
    """The gradients that autograd requests in one backward.

    everything: whether those of all leaves. inputs: for each input of the node, whether its gradient is requested.
    """

    everything: bool
    inputs: tuple[bool, ...]


class CapturedBackward(Protocol):
    """The backward of one forward, as its node calls it."""

    @property
    def reduced_together(self) -> WeakSet[Any]:
        """The autograd nodes of all forwards whose gradients eager would reduce in one backward."""
        ...

    def watch(self, outputs: Sequence[Tensor]) -> None:
        """Hold detached aliases of the returned outputs, which share their version counters: these count writes."""
        ...

    def backward(
        self, tangents: Sequence[Tensor | None], requested: RequestedGradients, keep: bool
    ) -> Sequence[Tensor | None]:
        """The gradients of arguments and parameters; keep: it may be called again (`retain_graph=True`)."""
        ...


class _Boundary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, captured: CapturedBackward, values: Sequence[Tensor], *inputs: Tensor
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.captured = captured
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise UncapturableError(
                "differentiates the backward of a captured forward (`create_graph=True`), which is a program "
                "without a graph of its own: take the second derivative inside the captured function"
            )
        others = (node for node in ctx.captured.reduced_together if node is not ctx)
        if any(map(will_execute, others)):
            raise UncapturableError(
                "runs one backward through several captured forwards of an FSDP2 model; eager reduces "
                "their gradients together, these would be reduced one by one, which rounds differently: call "
                "backward on each by itself, or capture one function that runs all of them"
            )
        first, *rest = (node is not None and will_execute(node) for node, _ in ctx.next_functions)
        requested = RequestedGradients(first, tuple(rest))
        return None, None, None, *ctx.captured.backward(tangents, requested, graph_is_kept())


def with_backward(
    result: Any,
    has_grad_fn: Sequence[bool],
    captured: CapturedBackward,
    leaves: DetachedLeaves,
    inputs: Sequence[Tensor],
) -> Any:
    """`result`, whose outputs have one node as their `grad_fn`; arguments that it holds are the caller's own."""
    flat, spec = flatten_result(result)
    outputs = {id(leaf): leaf for leaf, yes in zip(flat, has_grad_fn, strict=True) if yes}
    new: dict[int, Any] = {id(leaves[i]): leaves.originals[i] for i in leaves.detached}
    new |= zip(outputs, _attached(captured, list(outputs.values()), inputs), strict=True)
    return unflatten_result([new.get(id(leaf), leaf) for leaf in flat], spec)


def _attached(
    captured: CapturedBackward, values: Sequence[Tensor], inputs: Sequence[Tensor]
) -> Sequence[Tensor]:
    """Aliases of `values` that are outputs of one node, whose inputs are `inputs`."""
    with torch.no_grad():
        with below_autograd():  # no views: they may be written in place as eager's may
            fresh = [value.detach() for value in values]
        captured.watch([value.detach() for value in fresh])  # these count the writes to them
    anchor = torch.empty(0, requires_grad=True)
    # Autograd cannot be queried for a requested gradient of a leaf, only for a node that will run: alias the leaves.
    nodes = [aten.alias.default(t) if t.is_leaf else t for t in (anchor, *inputs)]
    result: Sequence[Tensor] = _Boundary.apply(captured, fresh, *nodes)
    captured.reduced_together.update(t.grad_fn for t in result[:1])
    return result


def leaves_of(outputs: Sequence[Tensor]) -> list[Tensor]:
    """The leaves into which a backward from `outputs` would accumulate, each once."""
    leaves = (leaf_of(node) for node in nodes_of(outputs))
    found = {id(leaf): leaf for leaf in leaves if leaf is not None}
    return list(found.values())


def run_backward(
    outputs: Sequence[Tensor],
    tangents: Sequence[Tensor | None],
    inputs: Sequence[Tensor],
    requested: RequestedGradients,
    keep: bool,
) -> tuple[list[Tensor | None], str | None]:
    """The gradients of `inputs`, which are leaves, and why a replay could not compute them (or None).

    The leaves' own `.grad` and hooks are not touched: autograd accumulates and runs hooks later, in the user's graph.
    """
    pairs = [(o, t) for o, t in zip(outputs, tangents, strict=True) if t is not None]
    roots, seeds = [o for o, _ in pairs], [t for _, t in pairs]
    if requested.everything:
        with _without_hooks(inputs), GradAccess(inputs) as access:
            torch.autograd.backward(roots, seeds, retain_graph=keep)
            gradients = access.gradients()
        return gradients, access.found
    selected = [t for t, yes in zip(inputs, requested.inputs, strict=True) if yes]
    if not selected:
        return [None] * len(inputs), None
    with _without_hooks(selected), GradAccess(selected) as access:
        found = iter(
            torch.autograd.grad(roots, selected, seeds, retain_graph=keep, allow_unused=True)
        )
    return [next(found) if yes else None for yes in requested.inputs], access.found


@contextmanager
def _without_hooks(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Remove the hooks of `leaves` inside the `with`; undo what hooks on the nodes do that accumulate the gradients.

    The user's graph runs these hooks later. Those of nodes cannot be removed: they run twice while recorded.
    """
    tables = [table for leaf in leaves for table in hook_tables(leaf)]
    hooks = [dict(table) for table in tables]
    handles: list[Any] = []
    try:
        for table in tables:
            table.clear()
        for leaf in leaves:
            handles += _keep_gradient(leaf)
        yield
    finally:
        for handle in handles:
            handle.remove()
        for table, were in zip(tables, hooks, strict=True):
            table.update(were)


def _keep_gradient(leaf: Tensor) -> Iterator[Any]:
    """Two hooks: the node that accumulates a leaf's gradient gets what arrives, whatever its other hooks return."""
    # Empty again before the node runs, which would copy a gradient that is held.
    arrived: list[Tensor] = []

    def after_others(gradients: Any) -> Any:
        first = arrived.pop() if arrived else None
        return None if first is None or first is gradients[0] else (first,)

    yield leaf.register_hook(arrived.append)
    yield accumulator_of(leaf).register_prehook(after_others)
