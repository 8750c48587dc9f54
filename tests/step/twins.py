"""A small model with buffers and random numbers, twice from one seed: one twin runs eagerly, one is captured."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Model(nn.Module):
    """Batch norm (buffers that change) and dropout (random numbers)."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 2)
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.drop(F.relu(self.norm(self.a(x)))))


def twins(**optimizer: Any) -> list[tuple[Model, torch.optim.Optimizer]]:
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        model = Model()
        options = {"lr": 1e-2, "fused": True, **optimizer}
        found.append((model, torch.optim.AdamW(model.parameters(), **options)))
    return found


def batch(i: int, rows: int = 5) -> Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(i))


def same_state(a: nn.Module, b: nn.Module) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return all(torch.equal(left[k], right[k]) for k in left)
