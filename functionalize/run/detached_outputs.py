"""Outputs that have an autograd history in eager and none in a replay: their backward raises.

A step returns its loss after `loss.backward()`; in eager a second backward from it raises. A replayed loss requires a
gradient, too, and its backward raises. Otherwise a backward outside the step would silently compute no gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from functionalize.errors import UncapturableError
from functionalize.util import structure


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


def refuse_backward(result: Any, had_grad_fn: Sequence[bool]) -> Any:
    """`result`, where leaves that had a `grad_fn` in eager get one whose backward raises."""
    if not any(had_grad_fn) or not torch.is_grad_enabled():
        return result
    leaves, spec = structure.flatten(result, result=True)
    anchor = torch.empty(0, requires_grad=True)
    leaves = [
        _RefuseBackward.apply(leaf, anchor) if refuse and not leaf.requires_grad else leaf
        for leaf, refuse in zip(leaves, had_grad_fn, strict=True)
    ]
    return structure.unflatten(leaves, spec)
