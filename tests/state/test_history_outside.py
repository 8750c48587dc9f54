"""A tensor that was computed from a leaf before the step: its backward leaves the step."""

from __future__ import annotations

import re
import types
from dataclasses import dataclass
from typing import Any, NamedTuple

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
        _calls(fz.capture(step, on_uncapturable="raise"), holder, raw)


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


@pytest.mark.parametrize("as_argument", [False, True])
@pytest.mark.parametrize("is_leaf_first", [False, True])
def test_a_leaf_and_a_computed_tensor_in_turn_have_the_gradients_of_eager(
    as_argument: bool, is_leaf_first: bool
) -> None:
    def run(capture):
        torch.manual_seed(0)
        raw, leaf, holder = nn.Parameter(torch.randn(3)), nn.Parameter(torch.ones(3)), Holder()

        def step(x, *given):
            loss = (x * (given[0] if given else holder.w)).sum()
            loss.backward()
            return loss.detach()

        step, found = capture(step), []
        for i in range(16):
            is_leaf = (i < 8) == is_leaf_first
            holder.w = leaf if is_leaf else raw * 2
            loss = step(torch.full((3,), float(i)), *([holder.w] if as_argument else []))
            found.append((loss.item(), _values(raw.grad), _values(leaf.grad)))
        return found

    assert run(lambda step: fz.capture(step, on_uncapturable="eager")) == run(lambda step: step)


class Holder:
    w: Tensor


def _values(gradient: Tensor | None) -> list[float] | None:
    return None if gradient is None else gradient.tolist()


def test_a_captured_forward_passes_gradients_on_to_what_was_computed_outside() -> None:
    def run(capture):
        raw, holder = nn.Parameter(torch.ones(3)), Holder()
        forward, found = capture(lambda x: (x * holder.w).sum()), []
        for i in range(8):
            raw.grad = None
            holder.w = raw * (i + 1)
            forward(torch.full((3,), 2.0)).backward()
            found.append(_values(raw.grad))
        return found

    def captured(forward):
        return fz.capture(forward, backward=True, on_uncapturable="eager")

    assert run(captured) == run(lambda forward: forward)


class _Weights(NamedTuple):
    first: Tensor


@dataclass
class _Given:
    x: Tensor


@pytest.mark.parametrize(
    ("place", "name"),
    [("argument", "given.x"), ("attribute", "kept.w"), ("element", "kept.both.first")],
)
def test_a_tensor_is_named_as_the_code_writes_it(place: str, name: str) -> None:
    weight, kept = torch.ones(3, requires_grad=True), types.SimpleNamespace(w=None, both=None)

    def step(given: Any) -> Any:
        other = {"argument": 1.0, "attribute": kept.w, "element": kept.both and kept.both.first}
        (given.x * other[place]).sum().backward()
        return weight.grad

    captured = fz.capture(step, on_uncapturable="raise")
    advice = f"goes through `{name}`, .*: compute `{name}` inside the step, or detach it"
    with pytest.raises(UncapturableError, match=re.escape(advice).replace(r"\.\*", ".*")):
        for _ in range(4):
            made = weight * 2
            if place == "attribute":
                kept.w = made
            if place == "element":
                kept.both = _Weights(made)
            captured(_Given(made if place == "argument" else torch.ones(3)))
