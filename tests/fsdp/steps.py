"""Training steps as users write them: each takes `(model, optimizer)` and returns the function to capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.optim import Optimizer

Step = Callable[..., Any]
STEPS = 8


def pairs(n: int = STEPS, rows: int = 4, classes: int = 3) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets, other ones on every rank."""
    g = torch.Generator().manual_seed(dist.get_rank())
    return [
        (torch.randn(rows, 8, generator=g), torch.randn(rows, classes, generator=g))
        for _ in range(n)
    ]


def in_bfloat16() -> list[tuple[Tensor, Tensor]]:
    return [(x.bfloat16(), y) for x, y in pairs()]


def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
    out = model(x)
    return F.mse_loss(out[:, : y.shape[1]].to(y.dtype), y)


def finish(optimizer: Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def plain(model: Any, optimizer: Optimizer) -> Step:
    """Forward, loss, backward, optimizer."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x, y)
        loss.backward()
        finish(optimizer)
        return loss.detach()

    return step


def scaled_by_the_last(model: Any, optimizer: Optimizer) -> Step:
    """A number that a step leaves on a sharded parameter, for the next one."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        weight = next(model.parameters())
        loss = loss_of(model, x, y) * getattr(weight, "scale", 1.0)
        loss.backward()
        finish(optimizer)
        next(model.parameters()).scale = 1 / (1 + x.abs().max())
        return loss.detach()

    return step


def keeping_gradients(model: Any, optimizer: Optimizer) -> Step:
    """Gradients are cleared at the start: those of the step stay for the user to see."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def clipped(model: Any, optimizer: Optimizer) -> Step:
    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        loss = loss_of(model, x, y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        finish(optimizer)
        return loss.detach(), norm.full_tensor()

    return step


def reading_parameters(model: Any, optimizer: Optimizer) -> Step:
    """Sharded parameters and gradients as DTensors: gathered, sharded in another way, computed with."""

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        loss = loss_of(model, x, y)
        loss.backward()
        weight = model.blocks[0].a.weight
        columns = weight.grad.redistribute(placements=[Shard(1)])
        cosine = (weight.grad * weight).sum().full_tensor()
        finish(optimizer)
        return loss.detach(), columns.to_local(), cosine.detach(), weight.detach().full_tensor()

    return step


# -- accumulation ----------------------------------------------------------------------------------


def accumulating(*setters: str, parts: int = 2) -> Callable[[Any, Optimizer], Step]:
    """Microbatches; every setter is given whether the microbatch is the last one."""

    def make(model: Any, optimizer: Optimizer) -> Step:
        def step(x: Tensor, y: Tensor) -> Tensor:
            total = x.new_zeros(())
            for i, (a, b) in enumerate(zip(x.chunk(parts), y.chunk(parts), strict=True)):
                for setter in setters:
                    getattr(model, setter)(i == parts - 1)
                loss = loss_of(model, a, b) / parts
                loss.backward()
                total += loss.detach()
            finish(optimizer)
            return total

        return step

    return make


# -- autograd --------------------------------------------------------------------------------------


def two_forwards(model: Any, optimizer: Optimizer) -> Step:
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x, y) + loss_of(model, 2 * x, y)
        loss.backward()
        finish(optimizer)
        return loss.detach()

    return step


def two_backwards(model: Any, optimizer: Optimizer) -> Step:
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x, y)
        loss.backward(retain_graph=True)
        (2 * loss).backward()
        finish(optimizer)
        return loss.detach()

    return step


def gradient_of_the_input(model: Any, optimizer: Optimizer) -> Step:
    """`autograd.grad` with respect to the data: no gradient of a parameter is reduced."""

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x = x.clone().requires_grad_()
        loss = loss_of(model, x, y)
        (gradient,) = torch.autograd.grad(loss, [x])
        return loss.detach(), gradient

    return step


def adversarial(model: Any, optimizer: Optimizer) -> Step:
    """The gradient of the input, and a training step after it."""

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        leaf = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss_of(model, leaf, y), [leaf])
        loss = loss_of(model, x + 0.1 * gradient.sign(), y)
        loss.backward()
        finish(optimizer)
        return loss.detach(), gradient

    return step


def only_a_block(model: Any, optimizer: Optimizer) -> Step:
    """After the model's own forward, one of its wrapped modules is called alone."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x, y)
        loss.backward()
        extra = model.blocks[0](x).square().mean()
        extra.backward()
        finish(optimizer)
        return loss.detach() + extra.detach()

    return step


def through_features(model: Any, optimizer: Optimizer) -> Step:
    """Another method than `forward`, made known by `register_fsdp_forward_method`."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = model.features(x).square().mean() + loss_of(model, x, y)
        loss.backward()
        finish(optimizer)
        return loss.detach()

    return step


# -- unsharding by hand ----------------------------------------------------------------------------


def unsharding(async_op: bool) -> Callable[[Any, Optimizer], Step]:
    def make(model: Any, optimizer: Optimizer) -> Step:
        def step(x: Tensor, y: Tensor) -> Tensor:
            handles = [block.unshard(async_op=async_op) for block in model.blocks]
            if async_op:
                handles[1].wait()
            loss = loss_of(model, x, y)
            loss.backward()
            finish(optimizer)
            return loss.detach()

        return step

    return make


def resharding(model: Any, optimizer: Optimizer) -> Step:
    """The whole model is resharded by hand between forward and backward."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x, y)
        for module in (*model.blocks, model):
            module.reshard()
        loss.backward()
        finish(optimizer)
        return loss.detach()

    return step


# -- evaluation ------------------------------------------------------------------------------------


def evaluating(mode: Callable[[], Any]) -> Callable[[Any, Optimizer], Step]:
    def make(model: Any, optimizer: Optimizer) -> Step:
        def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            with mode():
                out = model(x)
                return out.clone(), F.mse_loss(out, y)

        return step

    return make


# -- arguments and results -------------------------------------------------------------------------


def named() -> list[dict[str, Any]]:
    """Batches given by keyword."""
    return [{"batch": {"x": x, "y": y}, "scale": 0.5, "name": "n"} for x, y in pairs()]


def structured(model: Any, optimizer: Optimizer) -> Step:
    def step(batch: dict[str, Any], *, scale: float, name: str) -> dict[str, Any]:
        out = model(batch["x"], targets=batch["y"], scale=scale, name=name)
        loss = out["loss"] if isinstance(out, dict) else out.loss
        logits = out["aux"][0] if isinstance(out, dict) else out.logits
        loss.backward()
        finish(optimizer)
        return {"loss": loss.detach(), "logits": [logits.detach()], "name": name, "none": None}

    return step
