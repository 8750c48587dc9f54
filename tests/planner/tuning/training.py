"""A step of four equal layers under `fully_shard`, with what `tune` searches as parameters."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

WIDTH, LAYERS = 32, 4


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.dropout(F.gelu(self.up(self.norm(x))), 0.1, self.training))


class Net(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def build(width=WIDTH, layers=LAYERS, mesh=None):
    model = Net(width, layers)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters())


def inputs(batch=1, accumulate=1):
    return tuple(torch.randint(0, 64, (batch, 128)) for _ in range(accumulate))


def step(model, optimizer, *microbatches):
    for tokens in microbatches:
        loss = model(tokens) / len(microbatches)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def build_split(mesh=None):
    """The same with the two large layers of each block split over the dimension `tp` of the mesh, if it has one."""
    model, rest = Net(WIDTH, LAYERS), mesh
    if "tp" in mesh.mesh_dim_names:
        rest = mesh[tuple(name for name in mesh.mesh_dim_names if name != "tp")]
        ways = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], ways)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=rest)
    return model, torch.optim.AdamW(model.parameters())


def build_offloaded(width=WIDTH, layers=LAYERS, mesh=None, offload=False):
    """The same with an `offload_policy`."""
    model = Net(width, layers)
    policy = CPUOffloadPolicy() if offload else OffloadPolicy()
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, offload_policy=policy)
    return model, torch.optim.AdamW(model.parameters())
