"""A tensor that was computed from a leaf before the step: its backward leaves the step."""

from __future__ import annotations

import types

import pytest
import torch
from torch import Tensor, nn

import functionalize as fz
from functionalize.errors import UncapturableError


def _calls(step, holder: types.SimpleNamespace, raw: Tensor, count: int = 4) -> list[Tensor | None]:
    found = []
    for i in range(count):
        raw.grad = None
        holder.w = raw * (1 / (1 + i))
        step(torch.ones(2, 6))
        found.append(raw.grad)
    return found


@pytest.mark.parametrize("view", [False, True])
def test_a_backward_through_it_is_refused_by_name(view):
    raw, holder = nn.Parameter(torch.randn(3, 6)), types.SimpleNamespace()

    def step(x):
        w = holder.w[:2] if view else holder.w
        nn.functional.linear(x, w).square().mean().backward()

    with pytest.raises(UncapturableError, match=r"goes through `.*w`.* or detach it"):
        _calls(fz.capture(step), holder, raw)


def test_it_runs_eagerly_where_that_is_allowed():
    raw, holder = nn.Parameter(torch.randn(3, 6)), types.SimpleNamespace()

    def step(x):
        nn.functional.linear(x, holder.w).square().mean().backward()

    want = _calls(step, holder, raw)
    got = _calls(fz.capture(step, on_uncapturable="eager"), holder, raw)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def test_a_detached_use_is_captured():
    raw, holder = nn.Parameter(torch.randn(3, 6)), types.SimpleNamespace()
    model = nn.Linear(6, 3)

    def step(x):
        model.zero_grad()
        (model(x) @ holder.w.detach()).square().mean().backward()

    captured = fz.capture(step)
    _calls(captured, holder, raw, 6)
    assert captured.stats.replays > 0
