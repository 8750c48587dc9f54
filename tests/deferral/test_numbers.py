"""Floats that a loop computes anew in each iteration are inputs of the programs of `fz.lazy`; others are constants."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functionalize as fz
from functionalize.deferral.lazy import Lazy
from tests.deferral.eagerly import poisoned

ITERATIONS = 20
OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, 0.01),
    "adamw foreach": lambda p: torch.optim.AdamW(p, 0.01, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9),
}


@pytest.fixture(autouse=True)
def nothing_is_right_by_chance() -> Any:
    with poisoned():
        yield


def trained(optimizer: str, lazy: Lazy | None) -> list[Tensor]:
    """The losses and the parameters after a loop with a scheduler."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    made = OPTIMIZERS[optimizer](model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(made, 30)
    losses = []
    for _ in range(ITERATIONS):
        x = torch.randn(5, 8)
        with lazy or contextlib.nullcontext():
            made.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            made.step()
            scheduler.step()
        losses.append(torch.tensor(loss.item()))
    return [*losses, *(p.detach().clone() for p in model.parameters())]


@pytest.mark.parametrize("passes", ["", "default"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_loop_settles(optimizer: str, passes: str) -> None:
    """A kind for each place where something looks, not for each iteration; bit for bit as eager."""
    lazy = fz.lazy(passes=passes)
    assert all(map(torch.equal, trained(optimizer, lazy), trained(optimizer, None)))
    kinds = lazy._runs.kinds()
    assert len(kinds) <= 13
    assert sum(kind.replays for kind in kinds) >= 0.85 * sum(kind.runs for kind in kinds)


def scaled(lazy: Lazy, factors: Sequence[float], x: Tensor) -> Tensor:
    """A product that waits until the block ends."""
    with lazy:
        for factor in factors:
            x = x * factor
        return x + 1.5


def test_what_never_changes_is_a_constant() -> None:
    lazy, x = fz.lazy(), torch.randn(4)
    for last in (2.0, 2.0, 2.0, 3.0, 4.0, 5.0):
        assert torch.equal(scaled(lazy, (0.5, last), x), x * 0.5 * last + 1.5)
    kind = lazy._runs.kinds()[-1]
    assert kind.numbers.inputs == (1,) and kind.replays >= 3
    assert lazy._runs.compiles == 2  # the first has constants alone


def test_numbers_that_begin_to_change_one_after_the_other() -> None:
    """All are inputs then, so that not each of them costs a program."""
    lazy, x = fz.lazy(), torch.randn(4)
    factors = [1.0] * 8
    for i in range(20):
        factors[i % 8] += 0.25
        expected = x
        for factor in factors:
            expected = expected * factor
        assert torch.equal(scaled(lazy, factors, x), expected + 1.5)
    assert lazy._runs.compiles <= 4
    assert lazy._runs.kinds()[-1].numbers.inputs == tuple(range(9))


@pytest.mark.parametrize("odd", [-0.0, math.inf, -math.inf, math.nan, 5e-324])
def test_odd_numbers(odd: float) -> None:
    lazy, x = fz.lazy(), torch.tensor([1.0, -2.0, 0.0], dtype=torch.float64)
    for factor in (0.0, 0.0, odd, 0.0, odd, odd):
        with lazy:
            found = (x * factor).add(x, alpha=factor) if math.isfinite(factor) else x * factor
        expected = (x * factor).add(x, alpha=factor) if math.isfinite(factor) else x * factor
        assert torch.equal(found.view(torch.int64), expected.view(torch.int64))


def test_a_float_that_decides_a_size_is_part_of_the_kind() -> None:
    lazy, x = fz.lazy(), torch.randn(2, 3, 4, 4)
    for scale in (2.0, 2.0, 3.0, 2.0):
        with lazy:
            found = nn.functional.interpolate(x * 0.5, scale_factor=scale)
        assert torch.equal(found, nn.functional.interpolate(x * 0.5, scale_factor=scale))


def test_an_error_leaves_numbers_as_they_are() -> None:
    """After an op that raises, the next iterations replay with their own numbers."""
    lazy, x = fz.lazy(), torch.randn(4)
    for i in range(6):
        if i == 3:
            with pytest.raises(RuntimeError), lazy:
                (x * float(i)) @ torch.randn(3)
        assert torch.equal(scaled(lazy, (float(i),), x), x * float(i) + 1.5)
