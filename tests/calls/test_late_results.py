"""A number that a scheduler's step has set, in the result of the step: a replay reads it after that call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, lr_scheduler

import functionalize as fz


class Record(NamedTuple):
    """What a step returns."""

    loss: Tensor
    rates: list[float]


def _one(loss: Tensor, optimizer: Any, scheduler: Any) -> Any:
    scheduler.step()
    return loss, scheduler.get_last_lr()[0]


def _all(loss: Tensor, optimizer: Any, scheduler: Any) -> Any:
    before = scheduler.get_last_lr()[0]
    scheduler.step()
    return {"loss": loss, "lr": scheduler.get_last_lr(), "before": before}


def _of_group(loss: Tensor, optimizer: Any, scheduler: Any) -> Any:
    scheduler.step()
    return loss, optimizer.param_groups[0]["lr"], scheduler.last_epoch


def _computed(loss: Tensor, optimizer: Any, scheduler: Any) -> Any:
    scheduler.step()
    return Record(loss, [optimizer.param_groups[0]["lr"] * 0.5 + 1, scheduler.get_last_lr()[0]])


def _of_two_steps(loss: Tensor, optimizer: Any, scheduler: Any) -> Any:
    scheduler.step()
    first = scheduler.get_last_lr()[0]
    scheduler.step()
    return loss, first, scheduler.get_last_lr()[0] - first


def _of_two_steps_of_a_group(loss: Tensor, optimizer: Any, scheduler: Any) -> Any:
    scheduler.step()
    first = optimizer.param_groups[0]["lr"]
    scheduler.step()
    return loss, first, optimizer.param_groups[0]["lr"]


RESULTS = (_one, _all, _of_group, _computed, _of_two_steps, _of_two_steps_of_a_group)


def _make(after: Callable[..., Any], warmup: bool = False) -> Callable[[Tensor], Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler: Any = lr_scheduler.CosineAnnealingLR(optimizer, 10)
    if warmup:
        scheduler = lr_scheduler.SequentialLR(
            optimizer,
            [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=6), scheduler],
            milestones=[6],
        )

    def step(x: Tensor) -> Any:
        loss = model(x).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return after(loss.detach(), optimizer, scheduler)

    return step


@pytest.mark.parametrize("audit", [False, "auto"])
@pytest.mark.parametrize("after", RESULTS)
def test_a_learning_rate_is_returned_after_the_scheduler_has_stepped(after, audit):
    eager, step = _make(after), fz.capture(_make(after), audit=audit)
    for i in range(24):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(i))
        assert repr(step(x)) == repr(eager(x))
    assert step.stats.captures == 1 and step.stats.replays >= 20
    assert not step.stats.audit_failures


def test_a_scheduler_of_schedulers():
    eager, step = _make(_one, warmup=True), fz.capture(_make(_one, warmup=True), audit=False)
    for i in range(16):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(i))
        assert repr(step(x)) == repr(eager(x))
    assert step.stats.replays >= 12


def _multiplied(loss: Tensor, optimizer: Any, scheduler: Any) -> Any:
    scheduler.step()
    return loss * scheduler.get_last_lr()[0]


def test_an_op_of_such_a_number_is_refused_with_an_edit_that_works():
    step = fz.capture(_make(_multiplied), audit=False, on_uncapturable="raise")
    with pytest.raises(
        fz.errors.FunctionalizeError, match="and return or print the number as it is"
    ):
        for _ in range(6):
            step(torch.randn(3, 4))
