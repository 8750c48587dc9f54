"""Optimizers as users make them, on two real ranks: one capture, every number that they read stays live.

Default `AdamW` reads its step count with `.item()`, a scheduler sets another learning rate after every
step, a gradient scaler decides by a number whether the optimizer runs at all. Each case runs a captured and
an eager twin with the same batches; losses, shards, optimizer state and RNG state are compared bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, Adam, AdamW, Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

import functionalize as fz
from tests.fsdp.models import Net, mesh
from tests.fsdp.steps import pairs
from tests.fsdp.twins import differences, flat, state_of, unequal
from tests.ranks import run_on_ranks

# Fused SGD is not here: DTensor has no sharding rule for it, so eager refuses it.
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "sgd_foreach": lambda p: SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "sgd_single": lambda p: SGD(p, lr=0.1, momentum=0.9, foreach=False, nesterov=True),
    "adam": lambda p: Adam(p),
    "adam_foreach": lambda p: Adam(p, foreach=True, amsgrad=True),
    "adam_single": lambda p: Adam(p, foreach=False, weight_decay=0.1),
    "adam_fused": lambda p: Adam(p, fused=True),
    "adamw": lambda p: AdamW(p),
    "adamw_foreach": lambda p: AdamW(p, foreach=True),
    "adamw_single": lambda p: AdamW(p, foreach=False),
    "adamw_fused": lambda p: AdamW(p, lr=1e-2, fused=True),
}
SCHEDULERS: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "step": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 9),
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
}


@dataclass
class Ran:
    """What one rank saw."""

    differences: list[str] = field(default_factory=list)
    captures: int = 0
    replays: int = 0
    guard_failures: list[str] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)


def built(make: Callable[[Any], Optimizer]) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = Net()
    for block in model.blocks:
        fully_shard(block, mesh=mesh(2))
    fully_shard(model, mesh=mesh(2))
    return model, make(model.parameters())


def plain_step(model: Any, optimizer: Optimizer) -> Callable[..., Any]:
    def step(x: Tensor, y: Tensor) -> Any:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), loss.item()

    return step


def train(
    optimizer: str,
    scheduler: str | None = None,
    make_step: Callable[..., Any] = plain_step,
    steps: int = 8,
    **options: Any,
) -> Ran:
    """Train both twins on one rank; the scheduler steps outside."""
    twins = [built(OPTIMIZERS[optimizer]) for _ in range(2)]
    (model, mine), (eager_model, theirs) = twins
    schedulers = [SCHEDULERS[scheduler](o) for _, o in twins] if scheduler is not None else []
    step, eager = fz.capture(make_step(model, mine), **options), make_step(eager_model, theirs)
    ran = Ran()
    for i, batch in enumerate(pairs(steps)):
        expected, actual = eager(*batch), step(*batch)
        ran.differences += differences(i, flat(actual), flat(expected))
        ran.differences += unequal(i, {"loss": actual[1]}, {"loss": expected[1]})
        ran.differences += differences(i, state_of(model, mine), state_of(eager_model, theirs))
        ran.rates.append(mine.param_groups[0]["lr"])
        for each in schedulers:
            each.step()
    ran.captures, ran.replays = step.stats.captures, step.stats.replays
    ran.guard_failures = step.stats.guard_failures
    return ran


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_replays_every_form_of_an_optimizer(optimizer: str) -> None:
    for ran in run_on_ranks(train, optimizer):
        assert ran.differences == []
        assert (ran.captures, ran.guard_failures) == (1, [])
        assert ran.replays >= 5


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adamw_fused"])
@pytest.mark.parametrize("scheduler", ["step", "cosine"])
def test_replays_under_a_scheduler_of_the_learning_rate(scheduler: str, optimizer: str) -> None:
    for ran in run_on_ranks(train, optimizer, scheduler):
        assert ran.differences == []
        assert (ran.captures, ran.guard_failures) == (1, [])
        assert ran.replays >= 5
        assert len(set(ran.rates)) >= 4


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adamw_fused"])
def test_a_scheduler_that_cycles_momentum_too_costs_one_more_capture(optimizer: str) -> None:
    for ran in run_on_ranks(train, optimizer, "one_cycle", plain_step, 12):
        assert ran.differences == []
        assert ran.captures == 2
        assert ran.replays >= 7


def accumulated_by_tokens(model: Any, optimizer: Optimizer) -> Callable[..., Any]:
    """Divides by a count that is read from a tensor, clips by a norm that is."""

    def step(x: Tensor, y: Tensor) -> Any:
        tokens = (y > 0).sum().item()
        bound = (y.abs().mean() * 2).item()
        loss = (model(x) - y).square().sum() / tokens
        if loss.item() > 1e9:
            raise ValueError("diverged")
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), bound)
        optimizer.step()
        optimizer.zero_grad()
        return norm.full_tensor(), loss.item() / tokens

    return step


def test_replays_numbers_that_the_step_reads_and_computes_with() -> None:
    for ran in run_on_ranks(train, "adamw", "cosine", accumulated_by_tokens):
        assert ran.differences == []
        assert (ran.captures, ran.guard_failures) == (1, [])
        assert ran.replays >= 5


def test_replays_after_the_passes_have_run() -> None:
    for ran in run_on_ranks(train_with_passes):
        assert ran.differences == []
        assert (ran.captures, ran.guard_failures) == (1, [])


def train_with_passes() -> Ran:
    return train("adamw", "step", passes="default")


# -- gradient scalers ------------------------------------------------------------------------------


def scaled_twins(optimizer: str, infinite: int) -> Ran:
    """Both twins under a `GradScaler` that agrees on overflows; one batch overflows."""
    model, mine = built(OPTIMIZERS[optimizer])
    eager_model, theirs = built(OPTIMIZERS[optimizer])
    (make, scaler), (make_eager, eager_scaler) = scaled(), scaled()
    step, eager = fz.capture(make(model, mine)), make_eager(eager_model, theirs)
    ran = Ran()
    for i, (x, y) in enumerate(pairs(12)):
        if i == infinite:
            y = torch.full_like(y, math.inf if dist.get_rank() else 1.0)
        expected, actual = eager(x, y), step(x, y)
        ran.differences += differences(i, flat(actual), flat(expected))
        ran.differences += differences(i, state_of(model, mine), state_of(eager_model, theirs))
        ran.differences += unequal(
            i, {"scale": scaler.get_scale()}, {"scale": eager_scaler.get_scale()}
        )
        ran.rates.append(scaler.get_scale())
    ran.captures, ran.replays = step.stats.captures, step.stats.replays
    ran.guard_failures = step.stats.guard_failures
    return ran


def scaled() -> tuple[Callable[..., Any], torch.amp.GradScaler]:
    """A scaler, and a step that finds out together with the other ranks whether a gradient overflowed."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)

    def make(model: Any, optimizer: Optimizer) -> Callable[..., Any]:
        def step(x: Tensor, y: Tensor) -> Any:
            loss = F.mse_loss(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            for flag in scaler._found_inf_per_device(optimizer).values():
                dist.all_reduce(flag)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            return loss.detach()

        return step

    return make, scaler


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_gradient_scaler_skips_the_step_with_an_overflow(optimizer: str) -> None:
    for ran in run_on_ranks(scaled_twins, optimizer, 6):
        assert ran.differences == []
        assert ran.replays >= 5
        assert any(b < a for a, b in zip(ran.rates, ran.rates[1:], strict=False))
        assert all(math.isfinite(rate) for rate in ran.rates)
