"""Objects that take turns in one place, with numbers, tensors and lists that the step moves in each of them."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functionalize as fz


class Config:
    def __init__(self, scale: float) -> None:
        self.scale, self.n, self.is_odd = scale, 0, False
        self.last = torch.zeros(())
        self.kept: list[Any] = []
        self.recent = collections.deque([0.0, 0.0], maxlen=2)
        self.pair = torch.zeros(2), torch.zeros(2)
        self.table = {"n": 0, "mean": torch.zeros(())}

    def state(self) -> Any:
        return (
            (self.scale, self.n, self.is_odd, self.last.item(), list(map(float, self.kept))),
            (*self.recent, [each.tolist() for each in self.pair]),
            (self.table["n"], float(self.table["mean"])),
        )


def reads(config: Config, loss: Tensor) -> Tensor:
    return loss * config.scale


def counts(config: Config, loss: Tensor) -> Tensor:
    config.n += 1
    return loss * config.n


def turns(config: Config, loss: Tensor) -> Tensor:
    config.is_odd = not config.is_odd
    return loss * 2 if config.is_odd else loss


def keeps(config: Config, loss: Tensor) -> Tensor:
    before, config.last = config.last, loss.detach()
    return loss + before


def appends(config: Config, loss: Tensor) -> Tensor:
    config.kept.append(loss.item())
    return loss


def goes_round(config: Config, loss: Tensor) -> Tensor:
    config.recent.append(loss.item())
    return loss * sum(config.recent)


def replaces_a_pair(config: Config, loss: Tensor) -> Tensor:
    loss = loss + config.pair[0].sum()
    config.pair = config.pair[1] + 1, config.pair[0] + loss.detach()
    return loss


def in_a_table(config: Config, loss: Tensor) -> Tensor:
    config.table["n"] += 1
    config.table["mean"] = config.table["mean"] * 0.9 + loss.detach()
    return loss * config.table["n"]


USES = (reads, counts, turns, keeps, appends, goes_round, replaces_a_pair, in_a_table)


class Trainer:
    def __init__(self, use: Callable[[Config, Tensor], Tensor]) -> None:
        torch.manual_seed(0)
        self.model, self.use = nn.Linear(4, 4), use
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.configs = [Config(2.0), Config(3.0), Config(4.0)]
        self.config = self.configs[0]

    def step(self, x: Tensor) -> Tensor:
        loss = self.use(self.config, self.model(x).square().mean())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def run(trainer: Trainer, step: Callable[..., Any], turn: int, makes_new: bool) -> list[Any]:
    """turn: for how many calls the same object is there. makes_new: each turn brings another one."""
    generator, found = torch.Generator().manual_seed(1), []
    for i in range(48):
        if makes_new and i % turn == 0:
            trainer.configs.append(Config(2.0 + i % 3))
            trainer.config = trainer.configs[-1]
        elif not makes_new:
            trainer.config = trainer.configs[i // turn % 3]
        loss = step(torch.randn(3, 4, generator=generator)).item()
        state = [config.state() for config in trainer.configs]
        found.append((loss, state, [p.tolist() for p in trainer.model.parameters()]))
    return found


@pytest.mark.parametrize("makes_new", [False, True], ids=["in turn", "new"])
@pytest.mark.parametrize("turn", [1, 5])
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_each_call_reads_and_moves_its_own(use, turn, makes_new):
    eager, mine = Trainer(use), Trainer(use)
    step = fz.capture(mine.step, audit=False, allowance=None)
    assert run(mine, step, turn, makes_new) == run(eager, eager.step, turn, makes_new)
    if turn > 1 and not makes_new and use is not appends:
        assert step.stats.replays > 20, step.stats
