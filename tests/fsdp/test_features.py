"""Features of FSDP2 beyond the plain step: each replays bitwise like an eager twin, or refuses by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import functionalize as fz
from functionalize.errors import FunctionalizeError
from tests.fsdp.test_capture import build_mlp, pairs, zero_last
from tests.fsdp.twins import MakeStep, Verdict, compare_twins
from tests.ranks import run_on_ranks

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def clipped(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., Tensor]:
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def accumulating(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., Tensor]:
    def step(x: Tensor, y: Tensor) -> Tensor:
        for i, (a, b) in enumerate(zip(x.chunk(2), y.chunk(2), strict=True)):
            model.set_requires_gradient_sync(i == 1)
            loss = F.mse_loss(model(a), b)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def two_forwards(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., Tensor]:
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y) + model(x * 2).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def reading_a_number(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., Tensor]:
    def step(x: Tensor, y: Tensor) -> Tensor:
        scale = 2.0 if bool((x[0, 0] > 50).item()) else 1.0
        loss = F.mse_loss(model(x), y) * scale
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def frozen() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    model[0].requires_grad_(False)
    fully_shard(model[0])
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


FEATURES: dict[str, tuple[Any, MakeStep]] = {
    "mixed_precision": (lambda: build_mlp(mp_policy=BF16), zero_last),
    "cpu_offload": (
        lambda: build_mlp(offload_policy=CPUOffloadPolicy(pin_memory=False)),
        zero_last,
    ),
    "clip_grad_norm": (build_mlp, clipped),
    "accumulation_inside_the_step": (build_mlp, accumulating),
    "two_forwards": (build_mlp, two_forwards),
    "frozen_block": (frozen, zero_last),
}


def feature(name: str) -> Verdict:
    build, make_step = FEATURES[name]
    return compare_twins(build, make_step, pairs())


@pytest.mark.parametrize("name", FEATURES)
def test_feature(name: str) -> None:
    for verdict in run_on_ranks(feature, name):
        assert verdict.differences == []
        assert (verdict.captures, verdict.guard_failures) == (1, [])
        assert verdict.replays >= 4


def number_on_one_rank() -> Verdict:
    """Rank 1 alone reads another number in the fifth step: both must run it again, together."""
    batches = pairs(8)
    if dist.get_rank() == 1:
        batches[4][0][0, 0] = 99.0
    return compare_twins(build_mlp, reading_a_number, batches)


def test_a_number_that_differs_on_one_rank_does_not_part_the_ranks() -> None:
    first, second = run_on_ranks(number_on_one_rank)
    for verdict in (first, second):
        assert verdict.differences == []
        assert verdict.replays >= 3
    assert first.guard_failures[0] == "a number that Python reads differs on another rank"
    assert second.guard_failures[0].startswith("a tensor's value read at ")
    assert first.replays == second.replays


def with_a_barrier() -> str:
    model, optimizer = build_mlp()

    def step(x: Tensor, y: Tensor) -> Tensor:
        dist.barrier()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    captured = fz.capture(step)
    try:
        for batch in pairs():
            captured(*batch)
    except FunctionalizeError as error:
        return str(error)
    return "not refused"


def test_an_unknown_collective_is_refused_by_name() -> None:
    for message in run_on_ranks(with_a_barrier):
        assert message.startswith("c10d.barrier.default is a communication op without a rule")
