"""Hooks that read or assign `.grad` while a captured backward runs: the results are eager's, and no program is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functionalize as fz
from functionalize.errors import UncapturableError

Hook = Callable[[nn.Linear, list[Any]], None]


def reads(layer: nn.Linear, seen: list[Any]) -> None:
    grad = layer.weight.grad
    seen.append(None if grad is None else grad.clone())


def assigns(layer: nn.Linear, seen: list[Any]) -> None:
    layer.weight.grad = torch.full_like(layer.weight, 2.0)


def scales(layer: nn.Linear, seen: list[Any]) -> None:
    if layer.weight.grad is not None:
        layer.weight.grad.mul_(0.5)


def clears(layer: nn.Linear, seen: list[Any]) -> None:
    del layer.weight.grad


def train(hook: Hook, is_captured: bool, calls: int = 6) -> list[Any]:
    """Gradients accumulate over all calls; the hook runs when the gradient of the layer's output is there."""
    torch.manual_seed(0)
    layer, seen = nn.Linear(2, 2), list[Any]()

    def forward(x: Tensor) -> Tensor:
        out = layer(x)
        out.register_hook(lambda grad: hook(layer, seen))
        return out.square().sum()

    run = fz.capture(forward, backward=True, on_uncapturable="eager") if is_captured else forward
    for i in range(calls):
        run(torch.randn(3, 2, generator=torch.Generator().manual_seed(i))).backward()
        assert layer.weight.grad is not None
        seen.append(layer.weight.grad.clone())
    return seen


@pytest.mark.parametrize("hook", [reads, assigns, scales, clears])
def test_a_hook_finds_the_gradient_that_eager_has(hook: Hook) -> None:
    eager, ours = train(hook, False), train(hook, True)
    assert len(ours) == len(eager)
    for i, (a, b) in enumerate(zip(eager, ours, strict=True)):
        assert (a is None and b is None) or torch.equal(a, b), (i, a, b)
    assert "grad" not in vars(torch.Tensor)


def test_the_refusal_names_the_line() -> None:
    layer, seen = nn.Linear(2, 2), list[Any]()

    def forward(x: Tensor) -> Tensor:
        out = layer(x)
        out.register_hook(lambda grad: reads(layer, seen))
        return out.sum()

    captured = fz.capture(forward, backward=True, on_uncapturable="raise")
    captured(torch.ones(3, 2)).backward()
    with pytest.raises(
        UncapturableError, match=r"reads or assigns the `.grad` of a leaf \(\[2, 2\]\)"
    ):
        captured(torch.ones(3, 2)).backward()
    assert "test_grad_access.py" in captured.explain()
