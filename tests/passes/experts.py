"""A model whose experts are spread over ranks: tokens travel to them and back, by `all_to_all_single`."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import functionalize as fz
from functionalize._compat.distributed import fake_process_group
from tests.fsdp.twins import compare_twins
from tests.ranks import run_on_ranks
from tests.steps import make_loss_step, program_of

WIDTH, TOKENS = 8, 4


def exchanged(x: Tensor) -> Tensor:
    """Half of the tokens to each of two ranks."""
    half = [x.shape[0] // 2] * 2
    return funcol.all_to_all_single_autograd(x, half, half, dist.group.WORLD)


class Expert(nn.Module):
    """The expert of this rank, with the way to it and back."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return exchanged(self.down(self.up(exchanged(x)).relu()))


class Block(nn.Module):
    """A dense layer, sharded by FSDP2, with dropout; and an expert. checkpointed: it runs again in the backward."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.dense, self.moe, self.drop = nn.Linear(WIDTH, WIDTH), Expert(), nn.Dropout(0.2)
        self.checkpointed = checkpointed

    def part(self, x: Tensor) -> Tensor:
        return self.moe(self.drop(self.dense(x).tanh()))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = (
            checkpoint(self.part, x, use_reentrant=False) if self.checkpointed else self.part(x)
        )
        return x + out


def build(checkpointed: bool = False, layers: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model, equal on all ranks, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(checkpointed) for _ in range(layers)))
    for block in model:
        fully_shard(block.dense)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def program(layers: int = 2) -> fz.Program:
    """The program of a step, on the first of two ranks that do not exist."""
    with fake_process_group(0, 2):
        found = program_of(*build(layers=layers), torch.randn(TOKENS, WIDTH))
        found.describe()
    return found


def trained(pipeline: str, checkpointed: bool) -> tuple[list[str], int, str]:
    """On a rank: the differences from eager after passes, the replays, the program."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    batches = [(torch.randn(TOKENS, WIDTH, generator=generator),) for _ in range(6)]

    def make_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        return make_loss_step(lambda x: model(x).square().mean(), optimizer)

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        return build(checkpointed)

    verdict = compare_twins(made, make_step, batches, passes=pipeline, allowance=None)
    return verdict.differences, verdict.replays, verdict.program


@functools.cache
def trained_program(pipeline: str, checkpointed: bool) -> str:
    """The program of the first of two ranks after passes."""
    return run_on_ranks(trained, pipeline, checkpointed)[0][2]
