"""State in Python that a step of a sharded model moves, on two gloo ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import functionalize as fz
from tests.ranks import run_on_ranks
from tests.step.moving_steps import STEPS, World, difference

NAMES = (
    "attribute", "average_meter", "total_of_losses", "losses", "history_of_records", "history_of_tensors", "metrics",
    "moving_average_of_parameters", "loss_before", "attributes_of_a_module", "list_of_a_module",
)  # fmt: skip


class ShardedWorld(World):
    """The same with `fully_shard`."""

    def made_model(self) -> nn.Module:
        model: Any = super().made_model()
        fully_shard(model[0])
        fully_shard(model)
        return model  # type: ignore[no-any-return]


def local(value: Any) -> Any:
    """The state with the local parts of its DTensors."""
    if isinstance(value, DTensor):
        return str(value.placements), value.to_local()
    if isinstance(value, dict):
        return {k: local(v) for k, v in value.items()}
    return type(value)(map(local, value)) if type(value) in (list, tuple) else value


def twins(name: str) -> tuple[list[str], int]:
    eager, ours = ShardedWorld(STEPS[name], "AdamW"), ShardedWorld(STEPS[name], "AdamW")
    captured, found = fz.capture(ours.step, audit=False), []
    for i in range(10):
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(10 * i + dist.get_rank()))
        results = [eager.step(x), captured(x)]
        each = difference([results[0], local(eager.state())], [results[1], local(ours.state())])
        found += [f"call {i}: {each}"] if each is not None else []
    return found, captured.stats.replays


@pytest.mark.parametrize("name", NAMES)
def test_a_replay_moves_state_as_eager_does(name: str) -> None:
    for found, replays in run_on_ranks(twins, name):
        assert not found and replays >= 5, (found, replays)
