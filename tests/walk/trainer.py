"""A model that is trained by eager and by a captured step, while a number changes that the step reads in Python."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import functionalize as fz

CALLS, CHANGED_AT = 8, 4


class Trainer:
    """A model that is trained by a number: what `number(value)` returns."""

    def __init__(self, value: Any, number: Callable[[Any], Any]) -> None:
        torch.manual_seed(0)
        self.model, self.value, self.number = nn.Linear(3, 1), value, number
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self, x: Tensor) -> Tensor:
        loss = self.model(x).mean() * self.number(self.value)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def faithful(
    make: Callable[[], Any],
    number: Callable[[Any], Any],
    change: Callable[[Any], Any] | None = None,
    trainer: Callable[..., Any] = Trainer,
) -> Any:
    """Train by eager and by a captured step, which must agree at every call; returns the captured step."""
    ours, eager = trainer(make(), number), trainer(make(), number)
    captured = fz.capture(ours.step, on_uncapturable="eager")
    generators: dict[int, Any] = {}
    seen = []
    for i in range(CALLS):
        if i == CHANGED_AT and change is not None:
            for each in (ours, eager):
                changed = change(each.value)
                each.value = each.value if changed is None else changed
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(i))
        results = []
        for each, run in ((ours, captured), (eager, eager.step)):
            random.setstate(generators.get(id(each), random.getstate()))
            results.append(run(x.clone()))
            generators[id(each)] = random.getstate()
        assert torch.equal(*results), (i, results, captured.explain())
        assert torch.equal(ours.model.weight, eager.model.weight), i
        seen.append(results[0])
    return captured
