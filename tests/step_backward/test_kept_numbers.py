"""A captured forward that keeps a number in an object of C code, whose contents are a fact and no place."""

from __future__ import annotations

import operator
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import functionalize as fz
from functionalize.step.step_state import EntryState

KEPT = {
    "array of objects": lambda number: np.array([number, None], dtype=object),
    "getter": operator.itemgetter,
    "method": lambda number: types.MethodType(max, (number, 0)),
}


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("backward", [True, False])
def test_it_runs_eagerly(kept: str, backward: bool) -> None:
    make: Callable[[Any], Any] = KEPT[kept]
    own, model = types.SimpleNamespace(kept=None), nn.Linear(4, 2)

    def forward(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        own.kept = make(loss.item())
        if not backward:
            loss.backward()
        return loss if backward else loss.detach()

    captured = fz.capture(forward, backward=backward)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fz.errors.UncapturableWarning)
        for i in range(12):
            loss = captured(torch.ones(3, 4) * i)
            if backward:
                loss.backward()
    assert captured.stats.replays == 0


def test_a_bug_of_a_comparison_is_no_error_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise TypeError("not comparable")

    model = nn.Linear(4, 2)
    captured = fz.capture(lambda x: model(x).square().mean(), backward=True)
    monkeypatch.setattr(EntryState, "changed", fail)
    with pytest.warns(
        fz.errors.UncapturableWarning, match="a bug in functionalize: TypeError: not compar"
    ):
        for i in range(12):
            captured(torch.ones(3, 4) * i).backward()
            assert model.weight.grad is not None
    assert captured.stats.replays == 0
