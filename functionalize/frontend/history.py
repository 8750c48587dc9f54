"""Outputs that had an autograd history in eager, and have none in a replay.

A step returns its loss after `loss.backward()`; eager lets nobody go backward from it again. A replayed loss
requires a gradient too, and says so when someone tries, rather than giving the model no gradient in silence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from functionalize.errors import UncapturableError
from functionalize.frontend.arguments import flatten_result, unflatten_result


class _NoHistory(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise UncapturableError(
            "goes backward from an output of a captured step, which has no autograd history when it is "
            "replayed: call backward inside the step"
        )


def without_history(result: Any, had: Sequence[bool]) -> Any:
    """`result` with a refusal as the history of every leaf that had one."""
    if not any(had) or not torch.is_grad_enabled():
        return result
    leaves, spec = flatten_result(result)
    anchor = torch.empty(0, requires_grad=True)
    leaves = [
        _NoHistory.apply(leaf, anchor) if refuse and not leaf.requires_grad else leaf
        for leaf, refuse in zip(leaves, had, strict=True)
    ]
    return unflatten_result(leaves, spec)
