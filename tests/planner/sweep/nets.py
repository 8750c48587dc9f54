"""A net with tied weights and views, one sharding of it, its optimizer and a step; the figures of a plan."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from tests.planner.sweep.blocks import WIDTH, Block


class Net(nn.Module):
    """Two blocks, a head that is tied to one of their weights, and a table that is a view of a larger one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.head.weight
        self.table = torch.ones(8, WIDTH)[2:4]
        self.register_buffer("other_rows", self.table[:1])

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        x = self.tied(self.head(self.blocks(x))) * self.table[:1] * self.other_rows
        return {"loss": (x * scale).sum()}


def shard(model: Any) -> None:
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)


def step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    loss = model(x)["loss"]
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        [{"params": [model.head.weight]}, {"params": model.blocks.parameters(), "lr": 1e-5}],
        fused=True,
    )


def figures(sweep: Any) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k != "planned in"} for row in sweep.rows()]
