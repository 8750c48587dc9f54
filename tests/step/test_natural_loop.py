"""A training step as people write it: a scheduler, counters, meters, kept losses and printed lines, all in the step."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functionalize as fz
from functionalize.program.executable import Executable

pytestmark = pytest.mark.usefixtures("ample_allowance")

log = logging.getLogger("tests.natural_loop")


class Meter:
    """A running average."""

    def __init__(self) -> None:
        self.value, self.total, self.count, self.average = 0.0, 0.0, 0, 0.0

    def update(self, value: float, n: int) -> None:
        self.value = value
        self.total += value * n
        self.count += n
        self.average = self.total / self.count


class Trainer:
    """What a training script holds."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        self.global_step, self.meter, self.last = 0, Meter(), torch.zeros(())
        self.losses: list[float] = []
        self.metrics = {"loss": 0.0}

    def step(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss: Tensor = self.model(x).square().mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.global_step += 1
        value = loss.item()
        self.losses.append(value)
        self.metrics["loss"] = value
        self.meter.update(value, len(x))
        self.last = loss.detach()
        log.info("loss %.4f", value)
        if self.global_step % 3 == 0:
            rate = self.scheduler.get_last_lr()[0]
            print(f"step {self.global_step}: {value:.4f}, {self.meter.average:.5f}")
            print(f"norm {norm.item():.3f}, lr {rate:.6f}")
        return loss.detach()

    @property
    def state(self) -> list[Any]:
        """All that a step changes, but the tensors."""
        return [
            *(self.global_step, vars(self.meter), self.losses, self.metrics),
            *(self.scheduler.state_dict(), self.optimizer.param_groups[0]["lr"]),
        ]

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that a step changes."""
        moments = [v for state in self.optimizer.state.values() for v in state.values()]
        return [*self.model.parameters(), *moments, self.last]


def test_moving_state_does_not_make_replays_ask_every_guard(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Numbers in attributes, of a module too, and in a closure are others at every call."""
    slow: list[int] = []
    ask = Executable.ask

    def counted(self: Any, leaves: Any) -> Any:
        slow.append(1)
        return ask(self, leaves)

    monkeypatch.setattr(Executable, "ask", counted)
    trainer, count = Trainer(), 0
    trainer.model.seen = 0  # type: ignore[assignment]

    def step(x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        trainer.model.seen += 1  # type: ignore[operator]
        loss: Tensor = trainer.model(x).square().mean()
        loss.backward()
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        trainer.scheduler.step()
        trainer.meter.update(loss.item(), len(x))
        trainer.losses.append(loss.item())
        return loss.detach()

    captured = fz.capture(step, audit=False)
    for i in range(16):
        captured(torch.full((4, 4), float(i)))
    assert captured.stats.replays >= 12, captured.explain()
    assert len(slow) <= 2
    assert (count, trainer.model.seen) == (16, 16)


def test_a_step_with_all_that_a_script_does_is_replayed(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    eager, ours = Trainer(), Trainer()
    captured = fz.capture(ours.step)
    for i in range(24):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(i))
        found = []
        for step in (eager.step, captured):
            caplog.clear()
            with caplog.at_level(logging.INFO, log.name):
                loss = step(x)
            records = [(r.name, r.lineno, r.funcName, r.getMessage()) for r in caplog.records]
            ours_only = [r for r in records if r[0] == log.name]
            found.append((loss.item(), capsys.readouterr(), ours_only))
        assert found[0] == found[1], i
        assert eager.state == ours.state, i
        assert all(map(torch.equal, eager.tensors, ours.tensors)), i
    assert captured.stats.replays >= 16, captured.explain()
    assert captured.stats.audits == 1 and captured.stats.audit_failures == 0
