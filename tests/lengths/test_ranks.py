"""`dynamic=True` under FSDP2 on two ranks with other lengths on each: bit for bit as eager after every call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import functionalize as fz
from tests.fsdp.twins import differences, state_of
from tests.ranks import run_on_ranks
from tests.steps import make_loss_step


def build() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.1), nn.Linear(8, 4)
    )
    for part in (*model, model):
        fully_shard(part)
    return model, torch.optim.AdamW(model.parameters(), fused=True)


def trained(calls: int, passes: str) -> tuple[list[str], Any]:
    """Twins, one of them captured, on random lengths that differ between ranks."""
    (model, optimizer), (twin, twin_optimizer) = build(), build()
    captured = fz.capture(
        make_loss_step(lambda x: model(x).square().mean(), optimizer),
        dynamic=True,
        passes=passes,
        max_programs=64,
    )
    eager = make_loss_step(lambda x: twin(x).square().mean(), twin_optimizer)
    generator = torch.Generator().manual_seed(dist.get_rank())
    found: list[str] = []
    for i in range(calls):
        length = int(torch.randint(2, 12, (1,), generator=generator))
        x = torch.randn(2, length, 8, generator=generator)
        losses = []
        for step in (captured, eager):
            torch.manual_seed(i)
            losses.append(step(x))
        found += differences(i, {"loss": losses[0]}, {"loss": losses[1]})
        found += differences(i, state_of(model, optimizer), state_of(twin, twin_optimizer))
    return found, captured.stats


@pytest.mark.parametrize("passes", ["", "default"])
def test_random_lengths_of_each_rank(passes: str) -> None:
    for found, stats in run_on_ranks(trained, 40, passes, world=2):
        assert found == []
        assert (
            stats.captures <= 6
        )  # four of one class; a length that equals a width is one of its own
        assert stats.mispredictions == stats.audit_failures == 0
        assert stats.predictions >= 2
        assert stats.replays >= 15
