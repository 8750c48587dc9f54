"""Outputs that have an autograd history in eager and none in a replay: their backward raises.

A step returns its loss after `loss.backward()`; in eager a second backward from it raises. A replayed loss requires a
gradient, too, and its backward raises. Otherwise a backward outside the step would silently compute no gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from functionalize.errors import UncapturableError


class _RefuseBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise UncapturableError(
            "goes backward from an output of a captured step, which has no autograd history when it is "
            "replayed: call backward inside the step"
        )


def refusing_backward(had_grad_fn: Sequence[bool]) -> Callable[[list[Any]], None] | None:
    """What gives leaves that had a `grad_fn` in eager one whose backward raises; None: there are none.

    had_grad_fn: of the leaves of the result, which come first.
    """
    if not any(had_grad_fn) or not torch.is_grad_enabled():
        return None

    def refuse(leaves: list[Any]) -> None:
        anchor = torch.empty(0, requires_grad=True)
        made: dict[int, Any] = {}
        for at, had in enumerate(had_grad_fn):
            leaf = leaves[at]
            if had and id(leaf) in made:
                leaves[at] = made[id(leaf)]
            elif had and not leaf.requires_grad:
                leaves[at] = made[id(leaf)] = _RefuseBackward.apply(leaf, anchor)

    return refuse
