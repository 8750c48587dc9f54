"""What programs of files compute with numbers is bounded in length."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functionalize as fz
from functionalize.program.bounded_numbers import BOUNDED, bounded

LARGE = 2**40000


@pytest.mark.parametrize(
    ("function", "args", "error"),
    [
        (operator.mul, (LARGE, LARGE), OverflowError),
        (operator.pow, (7, 10**9), OverflowError),
        (operator.pow, (LARGE, 2), OverflowError),
        (operator.lshift, (1, 10**9), OverflowError),
        (operator.add, (2**65536, 1), OverflowError),
        (operator.add, ("a" * 70000, "a"), OverflowError),
        (operator.mul, ("a", 10**9), TypeError),
        (operator.mul, (10**9, "a"), TypeError),
    ],
)
def test_what_grows_is_refused(function: Any, args: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        bounded(function)(*args)


@pytest.mark.parametrize("function", BOUNDED)
def test_numbers_of_64_bits_are_as_in_python(function: Any) -> None:
    for a, b in ((2**62, 3), (-7, 2), (True, 5), (3, 0)):
        assert bounded(function)(a, b) == function(a, b)
    if function is not operator.lshift:
        assert bounded(function)(2.5, -1) == function(2.5, -1)
        assert bounded(function)(2, -1.0) == function(2, -1.0)


def test_a_step_of_a_file_computes_with_numbers_and_is_saved_again(tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor, n: int) -> Any:
            loss = model(x).square().mean() * (0.9**n)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach(), n * n + 1, 2.0**n

        return model, step

    x = torch.ones(3, 4)
    (_, first), (_, eager), (_, loaded) = build(), build(), build()
    recorded = fz.capture(first, audit=False)
    for n in range(6):
        recorded(x, n)
    path = tmp_path / "step.fzp"
    recorded.save(path)
    for again in range(2):
        step = fz.capture(loaded, audit=False)
        if not again:  # FSDP2 and optimizers make their state at the first call
            assert step(x, 1)[0] == eager(x, 1)[0]
            step = fz.capture(loaded, audit=False)
        step.load(path)
        for n in range(7, 10):
            assert repr(step(x, n)) == repr(eager(x, n))
        assert step.stats.replays == 3, step.explain()
        path = tmp_path / "again.fzp"
        step.save(path)
