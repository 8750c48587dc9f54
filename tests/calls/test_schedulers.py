"""`scheduler.step()` in a step: replays call the scheduler itself."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

import functionalize as fz

from .twins import Twin, batch, compared, refused, replayed


def steps(loss: Tensor, twin: Any) -> None:
    twin.scheduler.step()


def steps_by_metric(loss: Tensor, twin: Any) -> None:
    twin.scheduler.step(loss.item())


def steps_by_tensor(loss: Tensor, twin: Any) -> None:
    twin.scheduler.step(loss)


class Decay(lr_scheduler.LRScheduler):
    """A scheduler of the user."""

    def get_lr(self) -> Any:
        return [lr * 0.9**self.last_epoch for lr in self.base_lrs]


def sequence(o: Any) -> Any:
    parts = [lr_scheduler.LinearLR(o, 0.1, total_iters=4), lr_scheduler.OneCycleLR(o, 0.3, 20)]
    return lr_scheduler.SequentialLR(o, parts, [5])


def chain(o: Any) -> Any:
    return lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, 0.1, total_iters=4), lr_scheduler.ExponentialLR(o, 0.9)]
    )


SCHEDULERS = [
    lambda o: lr_scheduler.StepLR(o, 3, 0.5),
    lambda o: lr_scheduler.MultiStepLR(o, [2, 7]),
    lambda o: lr_scheduler.ConstantLR(o, 0.5, 4),
    lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=4),
    lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    lambda o: lr_scheduler.PolynomialLR(o, 8),
    lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.95**epoch),
    lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.95),
    lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 3, cycle_momentum=True),
    lambda o: lr_scheduler.OneCycleLR(o, 0.3, 20),
    lambda o: SWALR(o, 0.05, 3),
    sequence,
    chain,
    Decay,
]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_replays_step_every_scheduler(scheduler: Any) -> None:
    replayed(steps, scheduler=scheduler)


@pytest.mark.parametrize("after", [steps_by_metric, steps_by_tensor])
def test_replays_step_by_a_metric(after: Any) -> None:
    replayed(after, scheduler=lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1, factor=0.5))


def test_audits_step_once() -> None:
    captured = compared(steps, scheduler=SCHEDULERS[0], audit=1)
    assert captured.stats.audits >= 6


# -- what the step reads of it -----------------------------------------------------------------------


def prints_before(loss: Tensor, twin: Any) -> None:
    print(f"{twin.scheduler.get_last_lr()[0]:.6f}", twin.scheduler.last_epoch)
    twin.scheduler.step()


def prints_after(loss: Tensor, twin: Any) -> None:
    print("before", loss.item())
    twin.scheduler.step()
    group = twin.optimizer.param_groups[0]
    print(f"{twin.scheduler.get_last_lr()[0]:.6f} {group['lr']}", group["lr"] * 2)
    twin.scheduler.step()
    print(twin.scheduler.get_last_lr(), twin.scheduler.last_epoch)


def branches_before(loss: Tensor, twin: Any) -> None:
    if twin.scheduler.last_epoch % 4 == 3:
        print("an epoch")
    twin.scheduler.step()


@pytest.mark.parametrize("after", [prints_before, prints_after])
def test_numbers_of_a_scheduler_are_live(after: Any) -> None:
    replayed(after, scheduler=SCHEDULERS[0])


def test_a_branch_on_a_number_of_a_scheduler_is_guarded() -> None:
    captured = compared(branches_before, scheduler=SCHEDULERS[0], calls=20)
    assert captured.stats.replays >= 10


def uses_lr_after(loss: Tensor, twin: Any) -> None:
    twin.scheduler.step()
    loss.mul_(twin.optimizer.param_groups[0]["lr"])


def optimizes_after(loss: Tensor, twin: Any) -> None:
    twin.scheduler.step()
    twin.model.weight.grad = torch.ones(3, 3)
    twin.optimizer.step()
    twin.optimizer.zero_grad()


def branches_after(loss: Tensor, twin: Any) -> None:
    twin.scheduler.step()
    if twin.scheduler.last_epoch > 100:
        loss.mul_(2)


def mixes_after(loss: Tensor, twin: Any) -> None:
    twin.scheduler.step()
    print(twin.scheduler.get_last_lr()[0] * loss.item())


def reads_all(loss: Tensor, twin: Any) -> None:
    twin.scheduler.state_dict()
    twin.scheduler.step()


def sets_lr(loss: Tensor, twin: Any) -> None:
    twin.optimizer.param_groups[0]["lr"] = 0.01
    twin.scheduler.step()


def sets_an_attribute(loss: Tensor, twin: Any) -> None:
    twin.scheduler.last_epoch = 3


def counts_and_steps(loss: Tensor, twin: Any) -> None:
    twin.scheduler._step_count += 1
    twin.scheduler.step()


def counts_a_step(loss: Tensor, twin: Any) -> None:
    twin.scheduler._step_count += 1
    loss.mul_(twin.scheduler._step_count)
    twin.scheduler._step_count += twin.scheduler.last_epoch


def test_a_number_that_the_step_assigns_is_assigned_by_replays() -> None:
    replayed(counts_a_step, scheduler=SCHEDULERS[0])


@pytest.mark.parametrize(
    ("after", "what"),
    [
        (uses_lr_after, "reads `optimizer` group 0: lr after a call that sets it"),
        (optimizes_after, "reads `optimizer` group 0: lr after a call that sets it"),
        (branches_after, "reads `last_epoch` of a StepLR after a call that sets it"),
        (mixes_after, "reads `_last_lr` of a StepLR after a call that sets it"),
        (reads_all, "reads `__dict__` of a StepLR"),
        (sets_lr, "after the step has set lr"),
        (sets_an_attribute, "sets `last_epoch` of a StepLR to a number of its own"),
        (counts_and_steps, "steps a scheduler whose numbers it has assigned"),
    ],
)
def test_a_scheduler_that_ops_depend_on_is_refused(after: Any, what: str) -> None:
    message = refused(after, scheduler=SCHEDULERS[0])
    assert what in message


def test_a_learning_rate_that_is_a_tensor_is_refused() -> None:
    message = refused(steps, scheduler=SCHEDULERS[0], lr=torch.tensor(0.1), foreach=False)
    assert "steps a scheduler of hyperparameters that are tensors at " in message


def test_two_prints_with_a_step_between() -> None:
    def after(loss: Tensor, twin: Any) -> None:
        print(f"first {loss.item():.3f}")
        twin.scheduler.step()
        print("second", loss.item(), twin.scheduler.get_last_lr())

    replayed(after, scheduler=SCHEDULERS[4])


def test_another_scheduler_and_a_loaded_state_are_seen() -> None:
    twins = [Twin(steps, SCHEDULERS[0]) for _ in range(2)]
    captured = fz.capture(twins[1].step)
    for i in range(16):
        for twin in twins:
            if i == 5:
                twin.scheduler.load_state_dict({**twin.scheduler.state_dict(), "last_epoch": 1})
            if i == 8:
                twin.scheduler = SCHEDULERS[4](twin.optimizer)
        assert torch.equal(twins[0].step(batch(i)), captured(batch(i)))
        assert twins[0].state() == twins[1].state()
    assert captured.stats.replays >= 8
    assert captured.stats.guard_failures == ["`self.scheduler` is another ExponentialLR"] or any(
        "scheduler" in text for text in captured.stats.guard_failures
    )


def test_the_warning_about_the_order_names_the_line_of_the_step() -> None:
    def wrong_order(twin: Twin) -> Any:
        def step(x: Tensor) -> None:
            twin.scheduler.step()

        return step

    found = []
    for capture in (lambda fn: fn, lambda fn: fz.capture(fn, on_uncapturable="eager")):
        step = capture(wrong_order(Twin(steps, SCHEDULERS[0])))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for i in range(4):
                step(batch(i))
        found.append([(str(w.message), w.filename, w.lineno) for w in caught])
    assert found[0] == found[1] != []
    assert found[0][0][1] == __file__
