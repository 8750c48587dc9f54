"""Autograd: the node and the backward that are running, hooks of tensors, its dispatch keys."""

from __future__ import annotations

from typing import Any

import torch
from torch._C import (  # a replay has no use for autograd's kernels, and they cost time
    _AutoDispatchBelowAutograd as below_autograd,
)

__all__ = [
    "below_autograd",
]  # names of torch that are used elsewhere

BACKWARD, RECOMPUTE = "backward", "recompute"


_current_node, _current_task = torch._C._current_autograd_node, torch._C._current_graph_task_id


def autograd_position() -> tuple[int, str | None, str | None]:
    """The sequence number of autograd's node for the op at hand; its name, and the phase, if it runs in a backward.

    In a forward the node was made just before the op is dispatched, and the counter stands one further. The
    callbacks at the end of a backward run in no node. A backward that is not kept records gradients only where it
    runs a forward again, as activation checkpointing does.
    """
    node = _current_node()
    if node is None:
        inside = _current_task() != -1
        return torch.autograd._get_sequence_nr() - 1, None, BACKWARD if inside else None
    again = torch.is_grad_enabled() and not graph_is_kept()
    return node._sequence_nr(), node.name(), RECOMPUTE if again else BACKWARD


Position = tuple[int | None, str]


def backward_position() -> Position | None:
    """The number of autograd's node that the op at hand runs in, and the phase; None outside of a backward."""
    if _graph_task() == -1:
        return None
    node = _node_at_hand()
    if node is None:
        return None, BACKWARD
    again = torch.is_grad_enabled() and not graph_is_kept()
    return node._sequence_nr(), RECOMPUTE if again else BACKWARD


_graph_task, _node_at_hand = torch._C._current_graph_task_id, torch._C._current_autograd_node


# The function that calls autograd's engine: the innermost Python below nodes that are not Python's.
ENGINE = torch.autograd.graph._engine_run_backward.__code__


FIRST_OF_LEAVES = (
    2**62
)  # nodes that accumulate a leaf's gradient have a number above every other one's


def graph_task() -> int:
    """The number of the backward that is running; none has the number of another."""
    return int(torch._C._current_graph_task_id())


def next_node_number() -> int:
    """The number that autograd gives the next node of this thread."""
    return int(torch.autograd._get_sequence_nr())


def in_backward() -> bool:
    """Whether this thread is inside a backward."""
    return bool(torch._C._current_graph_task_id() != -1)


def current_node_leaf() -> torch.Tensor | None:
    """The leaf that the node at hand accumulates a gradient into, if it does."""
    node = torch._C._current_autograd_node()
    return None if node is None else leaf_of(node)


def hooks_of(tensor: torch.Tensor) -> tuple[int, int]:
    """How many hooks autograd runs for a tensor: on its gradient, and after it was accumulated."""
    after = getattr(tensor, "_post_accumulate_grad_hooks", None)
    return len(tensor._backward_hooks or ()), len(after or ())


def hook_tables(tensor: torch.Tensor) -> list[dict[Any, Any]]:
    """Where those hooks are kept."""
    after = getattr(tensor, "_post_accumulate_grad_hooks", None)
    return [table for table in (tensor._backward_hooks, after) if table is not None]


def leaf_of(node: Any) -> torch.Tensor | None:
    """The leaf that a node of autograd accumulates into, if it does."""
    return getattr(node, "variable", None) if node.name().endswith("AccumulateGrad") else None


def will_execute(node: Any) -> bool:
    """Whether the backward that is running will come to a node; no public function tells."""
    return torch._C._will_engine_execute_node(node)


def graph_is_kept() -> bool:
    """Whether the backward that is running was asked to retain its graph."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def hook_functions(tensor: torch.Tensor) -> list[Any]:
    """Those hooks."""
    after = getattr(tensor, "_post_accumulate_grad_hooks", None)
    return [*(tensor._backward_hooks or {}).values(), *(after or {}).values()]


def saved_tensor_hooks() -> tuple[Any, ...]:
    """The functions that autograd packs and unpacks what it saves with, if any (torch 2.11 to 2.13)."""
    found = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return tuple(found) if found is not None else ()


def forward_mode_is_on() -> bool:
    """Whether a tensor may have a tangent of forward-mode AD now: torch has no public name for it (2.11 to 2.15)."""
    from torch.autograd import forward_ad

    return bool(forward_ad._current_level >= 0)
