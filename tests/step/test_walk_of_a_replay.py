"""How far one replay walks through `functionalize/step/`: few calls, in few files."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functionalize as fz
from functionalize import step as package

HERE = str(Path(package.__file__).parent)
MOST_CALLS, MOST_FILES = 8, 2


def walk(step: Any, *args: Any) -> Counter[tuple[str, str]]:
    """The Python calls of one call of a step into the files of `functionalize/step`, by file and name."""
    found: Counter[tuple[str, str]] = Counter()

    def profile(frame: Any, event: str, arg: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and str(path.parent) == HERE:
            found[path.name, frame.f_code.co_name] += 1

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        step(*args)
    finally:
        sys.setprofile(before)
    return found


def trained(**options: Any) -> Any:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.Adam(model.parameters())

    def train_step(x: Tensor, scale: float) -> Tensor:
        loss = model(x).square().mean() * scale
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return fz.capture(train_step, **options)


@pytest.mark.parametrize("options", [{}, {"dynamic": False}, {"audit": False}], ids=str)
def test_one_replay_makes_eight_calls_in_two_files(options: dict[str, Any]) -> None:
    step, x = trained(**options), torch.randn(2, 3)
    for _ in range(12):
        step(x, 2.0)
    replays = step.stats.replays
    found = walk(step, x, 2.0)
    assert step.stats.replays == replays + 1
    assert found.total() <= MOST_CALLS, found
    assert len({file for file, _ in found}) <= MOST_FILES, found


def test_a_second_kind_of_call_walks_as_far() -> None:
    step = trained(dynamic=False)
    for rows in (2, 2, 2, 5, 5, 5, 5):
        step(torch.randn(rows, 3), 2.0)
    for rows in (2, 5):
        step(torch.randn(rows, 3), 2.0)
        found = walk(step, torch.randn(rows, 3), 2.0)
        assert found.total() <= MOST_CALLS, found
