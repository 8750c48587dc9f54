"""The training step that tests of everything share: forward, loss, backward, optimizer, gradients gone.

    step = make_step(model, optimizer)       step(x) is the detached loss, the mean of the squared outputs
    step = make_loss_step(loss, optimizer)   for a loss of the batch, or a model that returns it
    train(model, optimizer, x)               the same, called once
    program_of(model, optimizer, x)          the program of `make_step`, captured

Steps on ranks, with inputs and targets, are in `tests/fsdp/steps.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import functionalize as fz

Step = Callable[[Tensor], Tensor]


def train(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def make_step(model: nn.Module, optimizer: Optimizer) -> Step:
    def step(x: Tensor) -> Tensor:
        return train(model, optimizer, x)

    return step


def program_of(model: nn.Module, optimizer: Optimizer, x: Tensor) -> fz.Program:
    captured = fz.capture(make_step(model, optimizer))
    for _ in range(4):
        captured(x)
    assert captured.program is not None
    return captured.program


def make_loss_step(loss_of: Callable[[Tensor], Tensor], optimizer: Optimizer) -> Step:
    def step(x: Tensor) -> Tensor:
        loss = loss_of(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def tripled_in_backward(is_long: Callable[[Tensor], bool]) -> type[torch.autograd.Function]:
    """A function that doubles; its backward decides by the gradient's size whether it doubles or triples."""

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0] * 3 if is_long(grads[0]) else grads[0] * 2

    return Doubled
