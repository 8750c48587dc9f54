"""A captured step under FSDP2 and its eager twin, compared after every call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

import functionalize as fz
from tests.fsdp.sharded import build_mlp
from tests.fsdp.steps import pairs
from tests.fsdp.twins import differences, state_of


def step_of(model: Any, optimizer: Any, numbers: bool = True) -> Callable[[Tensor, Tensor], Tensor]:
    """A training step. numbers: whether it reads the loss."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        if numbers and loss.item() > 1e6:
            raise ValueError("the loss is too large")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


class Pair:
    """A captured step and its eager twin, which must be equal after every call."""

    def __init__(self, numbers: bool = True, **options: Any) -> None:
        self.ours, self.twin = build_mlp(), build_mlp()
        self.captured = fz.capture(step_of(*self.ours, numbers), **options)
        self.eager = step_of(*self.twin, numbers)
        self.differences: list[str] = []

    def call(self, i: int, rows: int) -> None:
        """Both, on the same batch of this many rows."""
        (batch,) = pairs(1, rows=rows)
        losses = {"loss": self.captured(*batch)}, {"loss": self.eager(*batch)}
        self.differences += differences(i, *losses)
        self.differences += differences(i, state_of(*self.ours), state_of(*self.twin))
