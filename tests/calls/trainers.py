"""A script whose step draws numbers from generators of its own, run by eager and captured.

    class Drawing(Trainer):                                      adds generators, and their states to `state`
    compare(lambda: Drawing(augment), get, put)                  after each call both have left the same, to the bit

get, put: read and set the generators that both scripts share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import functionalize as fz
from tests.steps import train

CALLS = 16
Between = Callable[[Any, int], Any]


def nothing(trainer: Any, call: int) -> None:
    """What runs between calls by default."""


class Drawer(nn.Module):
    """draw(self, x): the forward, which draws from generators that the module holds."""

    def __init__(self, draw: Callable[[Any, Tensor], Tensor], **held: Any) -> None:
        super().__init__()
        self.draw = draw
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.draw(self, x)


class Trainer:
    """augment: what the step does to a batch."""

    def __init__(self, augment: Callable[[Any, Tensor], Tensor]) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 3)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.augment = augment

    def step(self, x: Tensor) -> Tensor:
        return train(self.model, self.optimizer, self.augment(self, x))

    def state(self) -> list[Any]:
        """All that a step changes."""
        return [p.detach().numpy().tobytes() for p in self.model.parameters()]


def compare(
    make: Callable[[], Trainer],
    get: Callable[[], Any],
    put: Callable[[Any], None],
    between: Between,
    calls: int,
    **options: Any,
) -> Any:
    """The captured step, after calls that left all that eager leaves. between: called before each call."""
    eager, ours = make(), make()
    captured = fz.capture(ours.step, **options)
    for i in range(calls):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(i))
        found, before = [], get()
        for step, each in ((eager.step, eager), (captured, ours)):
            put(before)
            between(each, i)
            loss = step(x)
            found.append((loss.item(), each.state()))
        assert found[0] == found[1], (i, captured.explain())
    assert not captured.stats.differences
    return captured
