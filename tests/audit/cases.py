"""Steps that read what Python holds in ways that guards may miss, and how each is changed between calls.

    CASES["a property"](model) -> (loss of a batch, change)

`change()` is called once, after the capture; where it is None the step itself moves what it reads.
"""

from __future__ import annotations

import array
import collections
import contextlib
import contextvars
import dataclasses
import itertools
import os
import random
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

Loss = Callable[[Tensor], Tensor]
Made = tuple[Loss, Callable[[], object] | None]
CASES: dict[str, Callable[[nn.Module], Made]] = {}

SCALE = 0.5
_TEMPERATURE: contextvars.ContextVar[float] = contextvars.ContextVar("temperature", default=0.5)


def case(name: str) -> Callable[[Callable[[nn.Module], Made]], Callable[[nn.Module], Made]]:
    def add(make: Callable[[nn.Module], Made]) -> Callable[[nn.Module], Made]:
        CASES[name] = make
        return make

    return add


def scaled(model: nn.Module, number: Callable[[], Any]) -> Loss:
    return lambda x: (model(x) * number()).square().mean()


def holder(**values: Any) -> Any:
    return SimpleNamespace(**values)


# -- attributes that names in code do not lead to ----------------------------------------------------


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


class Field:
    def __init__(self) -> None:
        self.values = {"scale": 0.5}

    def __get__(self, instance: Any, owner: Any) -> float:
        return self.values["scale"]


class Described:
    scale = Field()


@case("a descriptor")
def a_descriptor(model: nn.Module) -> Made:
    described = Described()
    values = vars(Described)["scale"].values
    return scaled(model, lambda: described.scale), lambda: values.update(scale=0.25)


class Dunders:
    """Every way to a number without its name."""

    def __init__(self) -> None:
        self.n = 1

    def __getitem__(self, key: Any) -> int:
        return self.n

    def __bool__(self) -> bool:
        return self.n > 1

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        return iter([self.n])

    def __float__(self) -> float:
        return float(self.n)

    def __mul__(self, other: Tensor) -> Tensor:
        return other * self.n

    def __eq__(self, other: object) -> bool:
        return self.n == 1

    __hash__ = None  # type: ignore[assignment]

    def __enter__(self) -> int:
        return self.n

    def __exit__(self, *exc: Any) -> None:
        pass

    def __getattr__(self, name: str) -> int:
        if name.startswith("_"):
            raise AttributeError(name)
        return self.n


def _entered(d: Any) -> int:
    with d as number:
        return int(number)


for _name, _read in {
    "__getitem__": lambda d: d["any"],
    "__bool__": lambda d: 2.0 if d else 1.0,
    "__len__": len,
    "__iter__": sum,
    "__float__": float,
    "__eq__": lambda d: 1.0 if d == 0 else 2.0,
    "__enter__": _entered,
    "__getattr__": lambda d: d.anything,
}.items():

    def _dunder(model: nn.Module, read: Any = _read) -> Made:
        dunders = Dunders()
        return scaled(model, lambda: read(dunders)), lambda: setattr(dunders, "n", 2)

    CASES[_name] = _dunder


@case("__mul__")
def dunder_mul(model: nn.Module) -> Made:
    dunders = Dunders()
    return lambda x: (dunders * model(x)).square().mean(), lambda: setattr(dunders, "n", 2)


@dataclasses.dataclass
class Config:
    kl: float = 0.5
    l1: float = 0.1


for _name, _numbers in {
    "vars().values()": lambda c: sum(vars(c).values()),
    "**asdict()": lambda c: (lambda kl, l1: kl + l1)(**dataclasses.asdict(c)),
    "getattr by a name that is data": lambda c: sum(getattr(c, n) for n in ("kl", "l1")),
    "getattr by an f-string": lambda c: getattr(c, f"k{'l'}"),
}.items():

    def _named(model: nn.Module, read: Any = _numbers) -> Made:
        config = Config()
        return scaled(model, lambda: read(config)), lambda: setattr(config, "kl", 0.25)

    CASES[_name] = _named


@case("a match statement")
def a_match(model: nn.Module) -> Made:
    config = Config()

    def number() -> float:
        match config:
            case Config(kl=value):
                return value
        return 0.0

    return scaled(model, number), lambda: setattr(config, "kl", 0.25)


@case("globals() by name")
def by_global_name(model: nn.Module) -> Made:
    return scaled(model, lambda: globals()["SCA" + "LE"]), lambda: globals().update(SCALE=0.25)


@case("a class that the step makes")
def made_in_the_step(model: nn.Module) -> Made:
    config = Config()

    class Term:
        def __init__(self) -> None:
            self.weight = config.kl

    return scaled(model, lambda: Term().weight), lambda: setattr(config, "kl", 0.25)


@case("an autograd.Function")
def a_function(model: nn.Module) -> Made:
    config = Config()

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * config.kl

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0] * config.l1

    return lambda x: Scaled.apply(model(x)).square().mean(), lambda: setattr(config, "l1", 0.25)


@case("attributes of a list, a function, a metaclass")
def odd_attributes(model: nn.Module) -> Made:
    class Numbers(list):  # type: ignore[type-arg]
        scale = 1.0

    class Meta(type):
        scale = 1.0

    class Made_(metaclass=Meta):
        pass

    def helper() -> float:
        return 1.0

    helper.scale = 0.5  # type: ignore[attr-defined]
    numbers = Numbers()
    number = lambda: numbers.scale * helper.scale * Made_.scale  # type: ignore[attr-defined]  # noqa: E731
    return scaled(model, number), lambda: setattr(helper, "scale", 0.25)


# -- objects that count by type ---------------------------------------------------------------------


def _counts() -> Iterator[float]:
    n = 0.0
    while True:
        n += 1.0
        yield n


_MOVING: dict[str, Callable[[], Callable[[], Any]]] = {
    "random.Random": lambda: random.Random(0).random,
    "numpy's default_rng": lambda: np.random.default_rng(0).random,
    "numpy's RandomState": lambda: np.random.RandomState(0).rand,
    "itertools.count": lambda: itertools.count().__next__,
    "itertools.cycle": lambda: itertools.cycle([0.5, 0.25, 0.75]).__next__,
    "a generator": lambda: _counts().__next__,
}
for _name, _source in _MOVING.items():

    def _moving(model: nn.Module, source: Any = _source) -> Made:
        draw = source()
        return scaled(model, lambda: float(draw())), None

    CASES[_name] = _moving


@case("os.environ")
def environment(model: nn.Module) -> Made:
    os.environ["AUDITED_SCALE"] = "0.5"
    number = lambda: float(os.environ["AUDITED_SCALE"])  # noqa: E731
    return scaled(model, number), lambda: os.environ.update(AUDITED_SCALE="0.25")


@case("a ContextVar")
def a_context_variable(model: nn.Module) -> Made:
    _TEMPERATURE.set(0.5)
    return scaled(model, _TEMPERATURE.get), lambda: _TEMPERATURE.set(0.25)


@case("a UserDict and a ChainMap")
def mappings(model: nn.Module) -> Made:
    user = collections.UserDict({"scale": 0.5})
    chain: Any = collections.ChainMap({}, user)
    return scaled(model, lambda: chain["scale"]), lambda: user.update(scale=0.25)


@case("an array and a bytearray")
def arrays(model: nn.Module) -> Made:
    numbers, octets = array.array("d", [0.5]), bytearray([1])
    return scaled(model, lambda: numbers[0] * octets[0]), lambda: octets.__setitem__(0, 2)


@case("a large numpy array that is refilled")
def large_array(model: nn.Module) -> Made:
    numbers = np.full(2**15, 0.5)
    return scaled(model, lambda: float(numbers[7])), lambda: numbers.fill(0.25)


@case("a tensor made from a number")
def a_literal(model: nn.Module) -> Made:
    numbers = np.full(2**15, 0.5)
    loss = lambda x: (model(x) * torch.tensor([float(numbers[7])])).square().mean()  # noqa: E731
    return loss, lambda: numbers.fill(0.25)


@case("sys.argv")
def arguments(model: nn.Module) -> Made:
    sys.argv.append("0.5")
    return scaled(model, lambda: float(sys.argv[-1])), lambda: sys.argv.__setitem__(-1, "0.25")


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


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


REPLACEMENTS: dict[str, tuple[Any, str, Callable[..., Any], Callable[[nn.Module], Loss]]] = {
    "F.relu": (F, "relu", F.gelu, lambda model: lambda x: F.relu(model(x)).square().mean()),
    "torch.sin": (
        torch,
        "sin",
        torch.cos,
        lambda model: lambda x: torch.sin(model(x)).square().mean(),
    ),
    "nn.Linear.forward": (
        nn.Linear,
        "forward",
        lambda self, x: F.linear(x, self.weight * 2, self.bias),
        lambda model: lambda x: model(x).square().mean(),
    ),
}
