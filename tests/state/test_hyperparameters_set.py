"""A step that sets a hyperparameter to a value of its call's kind: it stays set, whatever it was before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functionalize as fz

RATES = {"large": 0.5, "small": 0.1}
SEQUENCE = (
    ["large"] * 4 + ["small"] * 4 + [None] * 3 + ["small", "large", None, None, "large", "small"]
)


def losses(wrap: Callable[[Any], Any], name: str, by_text: bool) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(x: Tensor, rate: Any = None) -> Tensor:
        if rate is not None:
            optimizer.param_groups[0][name] = RATES[rate] if by_text else rate
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    called, found = wrap(step), []
    for i, rate in enumerate(SEQUENCE):
        given = rate if by_text or rate is None else RATES[rate]
        loss = called(torch.full((3, 4), i * 0.1), given)
        found.append((loss.item(), model.weight.tolist(), optimizer.param_groups[0][name]))
    return found


@pytest.mark.parametrize("options", [{}, {"allowance": None, "audit": False}], ids=["", "at once"])
@pytest.mark.parametrize("by_text", [False, True], ids=["number", "text"])
@pytest.mark.parametrize("name", ["lr", "weight_decay"])
def test_it_is_what_the_step_has_set(name, by_text, options):
    eager = losses(lambda step: step, name, by_text)
    assert losses(lambda step: fz.capture(step, **options), name, by_text) == eager
