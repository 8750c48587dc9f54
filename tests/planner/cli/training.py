"""A script as a user writes it: two small layers under FSDP2; and steps that fail in the ways that users' do."""

from __future__ import annotations

import sys
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(layers=2, width=16):
    print("a model is built")
    warnings.warn("a warning of the script's", stacklevel=1)
    model = Net(layers, width)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), fused=True)


def inputs(batch=4, width=16):
    return (torch.randn(batch, width),)


def step(model, optimizer, x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def reads_data(model, optimizer, x):
    return torch.equal(model(x), x)


def wrong_shape(model, optimizer, x):
    return model(x[:, :3])


def prints(model, optimizer, x):
    sys.stdout.write("a step runs\n")
    return step(model, optimizer, x)


def stops(model, optimizer, x):
    raise SystemExit("no data left")


def interrupted(model, optimizer, x):
    raise KeyboardInterrupt


def constant_inputs(batch=4, width=16):
    return (torch.randn(batch, width), torch.arange(3.0))


def with_constant(model, optimizer, x, more):
    return step(model, optimizer, x)


not_a_function = 3
