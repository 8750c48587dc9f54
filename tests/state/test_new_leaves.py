"""New leaves that require a gradient, which a step leaves in an attribute with or without their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import functionalize as fz

CALLS = 12


class Stage:
    """Hands a tensor on to another part of the step, as stages of a pipeline do on one rank."""

    def __init__(self) -> None:
        self.weight = torch.ones(3, requires_grad=True)
        self.buffer: Any = None
        self.gradient: Any = None

    def handed_on(self, x: Tensor) -> Tensor:
        self.weight.grad = None
        out = self.weight * x
        self.buffer = out.detach().requires_grad_()
        loss = self.buffer.square().sum()
        loss.backward()
        self.gradient = self.buffer.grad
        out.backward(self.gradient)
        return loss.detach()

    def without_gradient(self, x: Tensor) -> Tensor:
        self.buffer = (self.weight.detach() * x).requires_grad_()
        return x.sum()

    def of_the_last_call(self, x: Tensor) -> Tensor:
        before, self.buffer = self.buffer, (self.weight.detach() * x).requires_grad_()
        if before is not None:
            (before * x).sum().backward()
        return x.sum()


def found(stage: Stage) -> list[Any]:
    leaf, weight = stage.buffer, stage.weight
    grads = [each if each is None else each.tolist() for each in (leaf.grad, weight.grad)]
    shared = stage.gradient is not None and stage.gradient is leaf.grad
    return [leaf.tolist(), leaf.requires_grad, leaf.is_leaf, grads, shared]


def run(name: str, captured: bool, audit: Any = "auto") -> tuple[list[Any], int]:
    stage, kept, seen = Stage(), [], []
    step: Any = getattr(stage, name)
    if captured:
        step = fz.capture(step, audit=audit, on_uncapturable="raise")
    for call in range(CALLS):
        loss = step(torch.arange(3.0) + call % 5)
        kept.append(stage.buffer)
        old = [each.grad if each.grad is None else each.grad.tolist() for each in kept]
        seen.append((loss.item(), found(stage), old))
        if call == 8:  # what the loop does to it counts, too
            stage.buffer.grad = None
    return seen, step.stats.replays if captured else 0


@pytest.mark.parametrize("audit", ["auto", 1])
@pytest.mark.parametrize("name", ["handed_on", "without_gradient", "of_the_last_call"])
def test_as_in_eager(name: str, audit: Any) -> None:
    wanted, _ = run(name, False)
    seen, replays = run(name, True, audit)
    assert seen == wanted
    assert replays >= (CALLS - 6 if audit == "auto" else 0)
