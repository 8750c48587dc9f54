"""A guard, a source or the walk that looks for state finds it or not, and makes none."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functionalize as fz

OPTIONS: list[dict[str, Any]] = [{}, {"audit": False}, {"audit": 1}]


class Momentum(torch.optim.Optimizer):
    """It asks whether a parameter has a state, not whether the state has a key."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One update."""
        for group in self.param_groups:
            for p in group["params"]:
                if p not in self.state:
                    self.state[p] = {"exp_avg": torch.zeros_like(p)}
                self.state[p]["exp_avg"].mul_(0.9).add_(p.grad)
                p.sub_(self.state[p]["exp_avg"], alpha=group["lr"])


Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "of a script": lambda params: Momentum(params, 0.1),
    "SGD": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
    "Adam": lambda params: torch.optim.Adam(params, 0.1),
    "AdamW": lambda params: torch.optim.AdamW(params, 0.1, foreach=True),
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_a_state_that_was_cleared(make: Make, options: dict[str, Any]) -> None:
    """A warm restart: `optimizer.state.clear()` between two calls."""

    def run(wrap: Callable[[Any], Any]) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        optimizer = make(model.parameters())

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        found, wrapped = [], wrap(step)
        for i in range(12):
            if i == 8:
                optimizer.state.clear()
            if i == 10:
                del optimizer.state[model.bias]
            found.append(wrapped(torch.full((2, 6), float(i % 3))).item())
        return [*found, len(optimizer.state)]

    assert run(lambda step: fz.capture(step, **options)) == run(lambda step: step)


class Averages(defaultdict[str, Any]):
    """A user's table of averages that begin at a value of its own, and that counts those that it makes."""

    made = 0

    def __missing__(self, key: str) -> Any:
        self.made += 1
        return super().__missing__(key)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("make", [lambda: torch.zeros(2), lambda: 0.5, lambda: [0.5]])
def test_a_key_of_a_users_table_that_vanished(make: Any, options: dict[str, Any]) -> None:
    """The step asks `in`, and an entry that somebody else has made is taken for one of its own."""

    class Trainer:
        """With a table that makes what is asked for."""

        def __init__(self) -> None:
            self.table = Averages(make)
            self.table["x"] = make()

        def step(self, x: Tensor) -> Tensor:
            """It reads an entry, if there is one."""
            if "x" not in self.table:
                return x * 100
            value = self.table["x"]
            return x * (value[0] if isinstance(value, list) else value)

    def run(wrap: Callable[[Any], Any]) -> list[Any]:
        trainer, found = Trainer(), []
        step = wrap(trainer.step)
        for i in range(10):
            if i == 6:
                del trainer.table["x"]
            found.append(step(torch.full((2,), float(i))).tolist())
            if i >= 6:
                found.append((len(trainer.table), trainer.table.made))
        return found

    assert run(lambda step: fz.capture(step, **options)) == run(lambda step: step)
