"""The models that torch tests FSDP2 with, and steps for them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer
from torch.testing._internal.common_fsdp import MLP, MLPStack
from torch.testing._internal.distributed._tensor.common_dtensor import ModelArgs, Transformer

from tests.fsdp.models import Built, adamw, mesh, momentum
from tests.fsdp.steps import STEPS, Step, finish

WIDTH = 8


def mlp() -> Built:
    torch.manual_seed(0)
    model = MLP(WIDTH, with_buffer=True)
    fully_shard(model.in_proj)
    fully_shard(model.out_proj)
    fully_shard(model)
    return model, adamw(model.parameters())


def mlp_stack() -> Built:
    torch.manual_seed(0)
    model = MLPStack(WIDTH)
    for child in model:
        fully_shard(child)
    fully_shard(model)
    return model, adamw(model.parameters())


def mlp_stack_in_parallel() -> Built:
    both = mesh(2, 2)
    torch.manual_seed(0)
    model = MLPStack(WIDTH, with_seq_parallel=True)
    model.parallelize(both["inner"], both["outer"], use_activation_checkpointing=False)
    return model, momentum(model.parameters())


def transformer(dropout: float = 0.1) -> Built:
    torch.manual_seed(0)
    model = Transformer(ModelArgs(dropout_p=dropout))
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model, adamw(model.parameters())


def squared(model: Any, optimizer: Optimizer) -> Step:
    def step(x: Tensor) -> Tensor:
        out = model(x)
        loss = (out.to_local() if hasattr(out, "to_local") else out).square().sum()
        loss.backward()
        finish(optimizer)
        return loss.detach()

    return step


def next_token(model: Any, optimizer: Optimizer) -> Step:
    def step(tokens: Tensor) -> Tensor:
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        finish(optimizer)
        return loss.detach()

    return step


def sequences() -> list[tuple[Tensor]]:
    """Other data for each group of ranks that shares a batch; within it, the same."""
    pair = dist.get_rank() // 2 if dist.get_world_size() == 4 else dist.get_rank()
    g = torch.Generator().manual_seed(pair)
    return [(torch.randn(2, 4, WIDTH, generator=g),) for _ in range(STEPS)]


def tokens() -> list[tuple[Tensor]]:
    g = torch.Generator().manual_seed(dist.get_rank())
    return [(torch.randint(0, 8, (2, 9), generator=g),) for _ in range(STEPS)]
