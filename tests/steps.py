"""The training step that tests of everything share: forward, loss, backward, optimizer, gradients gone.

    step = make_step(model, optimizer)       step(x) is the detached loss, the mean of the squared outputs
    step = make_loss_step(loss, optimizer)   for a loss of the batch, or a model that returns it
    train(model, optimizer, x)               the same, called once

Steps on ranks, with inputs and targets, are in `tests/fsdp/steps.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.optim import Optimizer

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


def make_loss_step(loss_of: Callable[[Tensor], Tensor], optimizer: Optimizer) -> Step:
    def step(x: Tensor) -> Tensor:
        loss = loss_of(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
