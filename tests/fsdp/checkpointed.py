"""A model with dropout whose blocks, or the insides of them, are called through a function: a way to checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

Run = Callable[[nn.Module, Tensor], Tensor]


class Block(nn.Module):
    """A residual block with dropout; `run` calls what is inside."""

    def __init__(self, run: Run | None = None) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 8))
        self.drop, self.run = nn.Dropout(0.1), run

    def forward(self, x: Tensor) -> Tensor:
        inner = self.inner(x) if self.run is None else self.run(self.inner, x)
        return x + self.drop(inner)


class Model(nn.Module):
    """Two blocks and a head; `run` calls a block."""

    def __init__(self, run: Run | None = None, inside: Run | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(inside) for _ in range(2))
        self.head, self.run = nn.Linear(8, 3), run

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.run is None else self.run(block, x)
        return self.head(F.dropout(x, 0.2, self.training))


def sharded(model: Model, **options: Any) -> Model:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)
