"""Twins for tests of faults: a model with hooks of every kind, trained eagerly, and its captured twin."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Variable

import functionalize as fz
from tests.faults import (
    Trap,
    fault_of,
    surroundings,
)
from tests.fsdp.twins import differences, flat, state_of, unequal


class Trapped(torch.autograd.Function):
    """The identity, with a place for a fault in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, trap: Trap) -> Tensor:
        ctx.trap = trap
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.trap("backward")
        return gradient.clone(), None


class Centred(nn.Module):
    """A buffer that every step changes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(0).to(self.mean.dtype), 0.1)
        return x - self.mean


class Net(nn.Module):
    """Dropout and a buffer: random numbers, state; hooks of every kind, each with a place for a fault."""

    def __init__(self, trap: Trap) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, 5), Centred(5), nn.Linear(5, 2)
        self.drop, self.trap = nn.Dropout(0.3), trap
        self.norm.register_forward_pre_hook(lambda module, args: trap("module pre-hook"))
        self.norm.register_forward_hook(lambda module, args, out: trap("module hook"))
        self.b.register_full_backward_hook(lambda module, *grads: trap("module backward hook"))
        self.a.weight.register_hook(lambda grad: trap("parameter hook"))
        self.a.weight.register_post_accumulate_grad_hook(lambda p: trap("accumulated hook"))

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(F.relu(self.norm(self.a(x))))
        self.trap("forward")
        if x.requires_grad:
            x.register_hook(lambda grad: self.trap("tensor hook"))
        return self.b(Trapped.apply(x, self.trap))


class World:
    """A model and its optimizer, from one seed; `step` has a place for every fault."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.trap = Trap()
        self.model = Net(self.trap)
        given = {"lr": 0.05, "foreach": False, **options}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **given)
        self.optimizer.register_step_pre_hook(lambda *given: self.trap("optimizer pre-hook"))
        self.optimizer.register_step_post_hook(lambda *given: self.trap("optimizer hook"))
        self.drawn = torch.get_rng_state()

    def step(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        if loss.requires_grad:
            loss.register_hook(lambda grad: self._queue())
        loss.backward()
        self.trap("between")
        self.optimizer.step()
        self.trap("end")
        return loss.detach()

    def _queue(self) -> None:
        Variable._execution_engine.queue_callback(lambda: self.trap("callback"))


PLACES = (
    "forward",
    "module pre-hook",
    "module hook",
    "module backward hook",
    "backward",
    "tensor hook",
    "parameter hook",
    "accumulated hook",
    "callback",
    "between",
    "optimizer pre-hook",
    "optimizer hook",
    "end",
)
WARM_UP, LIVE, REPLAY, AGAIN = 0, 1, 4, 6
STRIDE = 9
OTHER = 6  # the batch of the call that is recorded again has other rows


def batch(i: int) -> Tensor:
    rows = 7 if i >= OTHER else 4
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(i))


class Twins:
    """One world trained eagerly, one captured; both call by call, each with its own random numbers."""

    def __init__(self, make: Callable[[], Any] = World, **options: Any) -> None:
        self.eager, self.ours = make(), make()
        self.step = fz.capture(self.ours.step, **options)
        self.optimizers = (self.eager.optimizer, self.ours.optimizer)

    def call(
        self,
        i: int,
        given: Callable[[], Sequence[Any]] | None = None,
        around: Callable[[Any], Any] | None = None,
    ) -> str | None:
        """Both calls of step `i`; asserts that they end alike. Returns what was raised.

        given: makes the arguments, of each call its own. around: a context for each call.
        """
        raised, results = [], []
        for world, step in ((self.eager, self.eager.step), (self.ours, self.step)):
            torch.set_rng_state(world.drawn)
            args = given() if given else (batch(i),)
            with surroundings(*self.optimizers), around(world) if around else _nothing():
                raised.append(fault_of(lambda: results.append(step(*args))))  # noqa: B023
            world.drawn = torch.get_rng_state()
        assert raised[0] == raised[1]
        if raised[0] is None:
            assert differences(i, flat(results[1]), flat(results[0])) == []
        self.compare(i)
        return raised[0]

    def compare(self, i: int) -> None:
        """Everything that is the model's, the optimizer's and the generators' is the same."""
        a, b = self.eager, self.ours
        rng = differences(i, {"rng": b.drawn}, {"rng": a.drawn})
        state = differences(i, state_of(b.model, b.optimizer), state_of(a.model, a.optimizer))
        modes = unequal(i, _modes(b.model), _modes(a.model))
        assert rng + state + modes == []


def _nothing() -> Any:
    return contextlib.nullcontext()


def _modes(model: nn.Module) -> dict[str, Any]:
    return {name: module.training for name, module in model.named_modules()}


def train(twins: Twins, at: int, last: int = 10) -> None:
    """From step `at` on: no fault, and replays at the end."""
    before = twins.step.stats.replays
    assert [twins.call(i) for i in range(at, last)] == [None] * (last - at)
    assert twins.step.stats.replays > before
