"""Weights that autocast casts have a category of their own, with eager's lifetimes and with the program's."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import functionalize as fz
from functionalize._compat.distributed import fake_process_group
from functionalize.cost.categories import Category
from functionalize.planner.report.text import Memory
from functionalize.planner.timeline.timeline import Timeline

ELEMENTS = 8 * 16 + 16 + 16 * 4 + 4  # of the weights and biases


def memory_of(sharded: bool, autocast: bool, twice: bool = False) -> Memory:
    """The memory of a step of two layers in bfloat16, by autocast or by FSDP2's policy."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    if sharded:
        policy = MixedPrecisionPolicy(None if autocast else torch.bfloat16)
        for layer in model:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(x: torch.Tensor) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(x).float().square().mean()
            if twice:
                loss = loss + model(x + 1).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    captured = fz.capture(step, memory=True)
    for _ in range(4):
        captured(torch.ones(2, 8))
    assert captured.memory is not None, captured.explain()
    return captured.memory


def cast(timeline: Timeline) -> list[int]:
    """The bytes of each cast parameter."""
    return [a.nbytes for a in timeline.allocations if a.category is Category.CAST_PARAMETERS]


@pytest.mark.parametrize("sharded", [False, True])
def test_weights_that_autocast_casts(sharded: bool) -> None:
    with fake_process_group(0, 2):
        memory = memory_of(sharded, autocast=True)
    for timeline in (memory.timeline("eager"), memory.timeline("program")):
        assert sorted(cast(timeline)) == [8, 32, 128, 256] and sum(cast(timeline)) == 2 * ELEMENTS
        stacked = timeline.stacked()
        sums = [sum(column) for column in zip(*stacked.values(), strict=True)]
        assert sums == timeline.bytes and Category.UNKNOWN not in stacked
        assert (Category.UNSHARDED_PARAMETERS in stacked) == sharded
    # autocast keeps every cast until it ends, a program until its last use
    held = [max(t.stacked()[Category.CAST_PARAMETERS]) for t in memory.timelines.values()]
    assert held[0] == 2 * ELEMENTS > held[1] > 0


def test_a_weight_is_cast_once_for_two_forwards() -> None:
    timeline = memory_of(sharded=False, autocast=True, twice=True).timeline("eager")
    assert sum(cast(timeline)) == 2 * ELEMENTS


def test_the_casts_of_fsdp2_are_buffers_of_its_gathers() -> None:
    with fake_process_group(0, 2):
        memory = memory_of(sharded=True, autocast=False)
    for timeline in memory.timelines.values():
        assert not cast(timeline) and Category.ALL_GATHER_BUFFERS in timeline.stacked()
