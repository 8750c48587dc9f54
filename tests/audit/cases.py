"""Steps that read what Python holds in ways that guards may miss, and how each is changed between calls.

    CASES["a property"](model) -> (loss of a batch, change)

`change()` is called once, after the capture; where it is None the step itself moves what it reads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, TensorDataset

from tests.walk.cases import HELD, MOVED, READ, TENSORS

Loss = Callable[[Tensor], Tensor]
Made = tuple[Loss, Callable[[], object] | None]
CASES: dict[str, Callable[[nn.Module], Made]] = {}


def case(name: str) -> Callable[[Callable[[nn.Module], Made]], Callable[[nn.Module], Made]]:
    def add(make: Callable[[nn.Module], Made]) -> Callable[[nn.Module], Made]:
        CASES[name] = make
        return make

    return add


def scaled(model: nn.Module, number: Callable[[], Any]) -> Loss:
    return lambda x: (model(x) * number()).square().mean()


def holder(**values: Any) -> Any:
    return SimpleNamespace(**values)


# -- numbers that guards find, too -------------------------------------------------------------------


def hidden(name: str) -> Callable[[nn.Module], Made]:
    """A case of `tests.walk`: what code reads, what holds it, what moves when it is read."""
    make, number, change = {**READ, **HELD, **MOVED, **TENSORS}[name]

    def made(model: nn.Module) -> Made:
        held = holder(value=make())

        def changed() -> None:
            assert change is not None
            value = change(held.value)
            held.value = held.value if value is None else value

        return scaled(model, lambda: number(held.value)), None if change is None else changed

    return made


# By its place a replay finds an element of another tuple, and another attribute of a parameter.
_FOUND_BY_PLACE = {"a tuple", "a tensor of a parameter"}
CASES |= {
    name: hidden(name) for name in (*READ, *HELD, *MOVED, *TENSORS) if name not in _FOUND_BY_PLACE
}


# -- code of base classes, ops and geometries --------------------------------------------------------


class Base:
    scale = 0.5

    def number(self) -> float:
        return self.scale

    def loss(self, x: Tensor) -> Tensor:
        return (self.model(x) * self.number()).square().mean()  # type: ignore[attr-defined]


class Trainer(Base):
    def __init__(self, model: nn.Module) -> None:
        self.model, self.cfg = model, holder(temperature=0.5)

    def loss(self, x: Tensor) -> Tensor:
        return super().loss(x)

    @property
    def temperature(self) -> float:
        return self.cfg.temperature


@case("a method of a base class")
def base_class(model: nn.Module) -> Made:
    trainer = Trainer(model)
    return trainer.loss, lambda: setattr(trainer, "scale", 0.25)


@case("a property")
def a_property(model: nn.Module) -> Made:
    trainer = Trainer(model)
    return scaled(model, lambda: trainer.temperature), lambda: setattr(
        trainer.cfg, "temperature", 0.25
    )


@case("a tensor made from a number")
def a_literal(model: nn.Module) -> Made:
    numbers = np.full(2**15, 0.5)
    loss = lambda x: (model(x) * torch.tensor([float(numbers[7])])).square().mean()  # noqa: E731
    return loss, lambda: numbers.fill(0.25)


@case("a shape")
def a_shape(model: nn.Module) -> Made:
    config = holder(rows=3)
    return lambda x: model(x)[: config.rows].square().mean(), lambda: setattr(config, "rows", 2)


@case("the order of ops")
def an_order(model: nn.Module) -> Made:
    config = holder(first=True)

    def loss(x: Tensor) -> Tensor:
        y = model(x)
        y = (y.sin() + 1).cos() if config.first else (y.cos() + 1).sin()
        return y.square().mean()

    return loss, lambda: setattr(config, "first", False)


@case("which of two layers")
def which_layer(model: nn.Module) -> Made:
    config = holder(at=0)
    twins = nn.ModuleList([nn.Linear(6, 2), nn.Linear(6, 2)])
    model.twins = twins
    loss = lambda x: (twins[config.at](x) + model(x)).square().mean()  # noqa: E731
    return loss, lambda: setattr(config, "at", 1)


@case("which half of one storage")
def which_half(model: nn.Module) -> Made:
    config = holder(at=0)
    loss = lambda x: model(x).chunk(2, dim=1)[config.at].square().mean()  # noqa: E731
    return loss, lambda: setattr(config, "at", 1)


@case("a square or its transpose")
def which_square(model: nn.Module) -> Made:
    config = holder(at=0)

    def loss(x: Tensor) -> Tensor:
        square = model(x)[:2]
        return (square, square.t())[config.at].sin().cumsum(0).mean()

    return loss, lambda: setattr(config, "at", 1)


@case("which of two results")
def which_result(model: nn.Module) -> Made:
    config = holder(at=0)

    def loss(x: Tensor) -> Tensor:
        y = model(x)
        return (y.sin(), y.cos())[config.at].square().mean()

    return loss, lambda: setattr(config, "at", 1)


# -- hooks, loaders, replaced functions ---------------------------------------------------------------


@case("a hook on a parameter")
def parameter_hook(model: nn.Module) -> Made:
    scale = [1.0]
    parameter = next(model.parameters())
    parameter.register_hook(lambda grad: grad * scale[0])
    return lambda x: model(x).square().mean(), lambda: scale.__setitem__(0, 0.5)


@case("a hook after accumulation")
def accumulation_hook(model: nn.Module) -> Made:
    scale = [1.0]
    parameter = next(model.parameters())

    def halve(p: Tensor) -> None:
        assert p.grad is not None
        p.grad.mul_(scale[0])

    parameter.register_post_accumulate_grad_hook(halve)
    return lambda x: model(x).square().mean(), lambda: scale.__setitem__(0, 0.5)


@case("a hook on the accumulation")
def accumulator_hook(model: nn.Module) -> Made:
    scale = [1.0]
    parameter = next(model.parameters())
    node: Any = parameter.view_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    node.register_prehook(lambda grads: tuple(g * scale[0] for g in grads))
    model.kept = node  # type: ignore[assignment]
    return lambda x: model(x).square().mean(), lambda: scale.__setitem__(0, 0.5)


@case("a hook that assigns no gradient any more")
def dropping_hook(model: nn.Module) -> Made:
    keep = [True]
    parameter = next(model.parameters())

    def drop(p: Tensor) -> None:
        if not keep[0]:
            p.grad = None

    parameter.register_post_accumulate_grad_hook(drop)
    return lambda x: model(x).square().mean(), lambda: keep.__setitem__(0, False)


@case("a DataLoader in the step")
def a_loader(model: nn.Module) -> Made:
    torch.manual_seed(0)
    loader = iter(DataLoader(TensorDataset(torch.randn(200, 6)), batch_size=None))
    return lambda x: (model(x) + model(next(loader)[0])).square().mean(), None


# -- what the step moves and no op reads -------------------------------------------------------------


@case("a text in a function's attribute")
def a_text(model: nn.Module) -> Made:
    def loss(x: Tensor) -> Tensor:
        loss.calls += "."  # type: ignore[attr-defined]
        found: Tensor = model(x).square().mean()
        return found

    loss.calls = ""  # type: ignore[attr-defined]
    return loss, None


class Sink:
    """Behind a module, as a framework keeps metrics."""

    def __init__(self) -> None:
        self.metrics: dict[str, list[Tensor]] = {}

    def log(self, name: str, value: Tensor) -> None:
        self.metrics.setdefault(name, []).append(value)


@case("metrics that a module logs")
def metrics(model: nn.Module) -> Made:
    model.trainer = Sink()  # type: ignore[assignment]

    def loss(x: Tensor) -> Tensor:
        found: Tensor = model(x).square().mean()
        model.trainer.log("loss", found.detach())  # type: ignore[union-attr, operator]
        return found

    return loss, None


@case("a mode that a later call sets")
def a_mode(model: nn.Module) -> Made:
    config = holder(trains=True)

    def loss(x: Tensor) -> Tensor:
        found: Tensor = model(x).square().mean()
        model.train(config.trains)
        return found

    return loss, lambda: setattr(config, "trains", False)


# -- what a script sets around a call ----------------------------------------------------------------


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


class CosForSin(TorchFunctionMode):
    """A function mode of a script."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (torch.cos if func is torch.sin else func)(*args, **(kwargs or {}))


_call, _step = nn.Module.__call__, torch.optim.SGD.step


def doubled_step(self: torch.optim.SGD, closure: Any = None) -> Any:
    _step(self, closure)
    return _step(self, closure)


def square(model: nn.Module) -> Loss:
    return lambda x: model(x).square().mean()


def sine(model: nn.Module) -> Loss:
    return lambda x: torch.sin(model(x)).square().mean()


def relu(model: nn.Module) -> Loss:
    return lambda x: F.relu(model(x)).square().mean()


def twice(self: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, self.weight * 2, self.bias)


def doubled_call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return _call(self, *args, **kwargs) * 2


# What is around the later calls, and the loss.
AROUND: dict[str, tuple[Callable[[], AbstractContextManager[Any]], Callable[[nn.Module], Loss]]] = {
    "replaced F.relu": (lambda: replaced(F, "relu", F.gelu), relu),
    "replaced torch.sin": (lambda: replaced(torch, "sin", torch.cos), sine),
    "replaced nn.Linear.forward": (lambda: replaced(nn.Linear, "forward", twice), square),
    "replaced nn.Module.__call__": (lambda: replaced(nn.Module, "__call__", doubled_call), square),
    "replaced SGD.step": (lambda: replaced(torch.optim.SGD, "step", doubled_step), square),
    "function mode": (CosForSin, sine),
}
