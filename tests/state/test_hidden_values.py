"""A number that the step reads somewhere in Python changes between two calls: the calls are those of eager."""

from __future__ import annotations

import array
import collections
import configparser
import contextvars
import ctypes
import datetime
import enum
import functools
import itertools
import logging
import multiprocessing
import operator
import os
import pathlib
import random
import re
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import functionalize as fz

CALLS, CHANGED_AT = 8, 4


class Trainer:
    """A model that is trained by a number: what `number(value)` returns."""

    def __init__(self, value: Any, number: Callable[[Any], Any]) -> None:
        torch.manual_seed(0)
        self.model, self.value, self.number = nn.Linear(3, 1), value, number
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self, x: Tensor) -> Tensor:
        loss = self.model(x).mean() * self.number(self.value)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def faithful(
    make: Callable[[], Any],
    number: Callable[[Any], Any],
    change: Callable[[Any], Any] | None = None,
    trainer: Callable[..., Any] = Trainer,
) -> Any:
    """Train by eager and by a captured step, which must agree at every call; returns the captured step."""
    ours, eager = trainer(make(), number), trainer(make(), number)
    captured = fz.capture(ours.step, on_uncapturable="eager")
    generators: dict[int, Any] = {}
    seen = []
    for i in range(CALLS):
        if i == CHANGED_AT and change is not None:
            for each in (ours, eager):
                changed = change(each.value)
                each.value = each.value if changed is None else changed
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(i))
        results = []
        for each, run in ((ours, captured), (eager, eager.step)):
            random.setstate(generators.get(id(each), random.getstate()))
            results.append(run(x.clone()))
            generators[id(each)] = random.getstate()
        assert torch.equal(*results), (i, results, captured.explain())
        assert torch.equal(ours.model.weight, eager.model.weight), i
        seen.append(results[0])
    return captured


# -- code that reads it ----------------------------------------------------------------------------


@dataclass
class Settings:
    """Numbers, as scripts keep them."""

    scale: float = 1.0
    kl: float = 1.0
    l1: float = 1.0


class Base(Trainer):
    def compute(self) -> float:
        return float(self.value.scale)

    def step(self, x: Tensor) -> Tensor:
        self.number = lambda value: self.compute()
        return super().step(x)


class Derived(Base):
    """All code that reads the number is a base class's."""


class Head(nn.Module):
    """`forward` calls a helper and reads a property."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.layer, self.settings = nn.Linear(3, 1), settings
        self.weight = self.layer.weight

    @property
    def temperature(self) -> float:
        return self.settings.kl

    def head(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.settings.scale

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) * self.temperature


class WithHead(Trainer):
    def __init__(self, value: Any, number: Any) -> None:
        super().__init__(value, number)
        self.model = Head(value)  # type: ignore[assignment]
        torch.manual_seed(0)
        nn.init.normal_(self.model.weight)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)


SETTINGS = Settings()


class Made:
    """Reads a number when it is made."""

    def __init__(self) -> None:
        self.number = SETTINGS.l1


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * SETTINGS.kl

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * SETTINGS.kl


class ByDescriptor:
    def __get__(self, owner: Any, kind: Any) -> float:
        return float(owner.hidden)


class Special:
    """Every special method reads the number."""

    described = ByDescriptor()

    def __init__(self) -> None:
        self.hidden = 1.0

    def __getitem__(self, key: Any) -> float:
        return self.hidden

    def __bool__(self) -> bool:
        return self.hidden > 1

    def __len__(self) -> int:
        return int(self.hidden)

    def __iter__(self) -> Iterator[float]:
        return iter([self.hidden])

    def __float__(self) -> float:
        return self.hidden

    def __mul__(self, other: Any) -> Any:
        return self.hidden * other

    def __enter__(self) -> float:
        return self.hidden

    def __exit__(self, *error: Any) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return self.hidden > 1

    def __getattr__(self, name: str) -> float:
        return self.__dict__["hidden"]

    def __call__(self) -> float:
        return self.hidden


def entered(value: Special) -> float:
    with value as number:
        return number


def matched(value: Any) -> float:
    match value:
        case Settings(scale=2.0):
            return 2.0
    return 1.0


def set_(name: str, to: Any = 2.0) -> Callable[[Any], None]:
    return lambda value: setattr(value, name, to)


def set_settings(**numbers: float) -> Callable[[Any], None]:
    def change(value: Any) -> None:
        for key, number in numbers.items():
            setattr(SETTINGS, key, number)

    return change


Case = tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any] | None]
hidden = set_("hidden")
READ: dict[str, Case] = {
    "vars": (Settings, lambda v: dict(**vars(v))["scale"], set_("scale")),
    "asdict": (Settings, lambda v: dict(**asdict(v))["scale"], set_("scale")),
    "the values of vars": (Settings, lambda v: sum(vars(v).values()), set_("scale")),
    "getattr of names": (Settings, lambda v: sum(getattr(v, n) for n in ("kl", "l1")), set_("l1")),
    "getattr of text": (Settings, lambda v: getattr(v, f"{'kl'}"), set_("kl")),
    "match": (Settings, matched, set_("scale")),
    "attrgetter": (Settings, lambda v: operator.attrgetter("scale")(v), set_("scale")),
    "globals": (lambda: None, lambda v: globals()["SETTINGS"].kl, set_settings(kl=2.0)),
    "a class made in the step": (lambda: None, lambda v: Made().number, set_settings(l1=3.0)),
    "an autograd function": (
        lambda: None,
        lambda v: Scaled.apply(torch.ones(())),
        set_settings(kl=4.0),
    ),
    "a descriptor": (Special, lambda v: v.described, hidden),
    "__getitem__": (Special, lambda v: v[0], hidden),
    "__bool__": (Special, lambda v: 2.0 if v else 1.0, hidden),
    "__len__": (Special, len, hidden),
    "__iter__": (Special, lambda v: next(iter(v)), hidden),
    "__float__": (Special, float, hidden),
    "__mul__": (Special, lambda v: v * 2, hidden),
    "__enter__": (Special, entered, hidden),
    "__eq__": (Special, lambda v: 2.0 if v == 1 else 1.0, hidden),
    "__getattr__": (Special, lambda v: v.anything, hidden),
    "__call__": (Special, lambda v: v(), hidden),
}


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    yield
    SETTINGS.scale = SETTINGS.kl = SETTINGS.l1 = 1.0


@pytest.mark.parametrize("name", READ)
def test_code_that_reads_a_number(name: str) -> None:
    make, number, change = READ[name]
    captured = faithful(make, number, change)
    assert captured.stats.replays >= 2, captured.explain()


@pytest.mark.parametrize("trainer", [Derived, WithHead])
@pytest.mark.parametrize("name", ["scale", "kl"])
def test_code_of_a_base_class_and_of_helpers(trainer: Any, name: str) -> None:
    captured = faithful(Settings, lambda value: 1.0, set_(name), trainer)
    assert captured.stats.replays >= 2, captured.explain()


# -- objects that hold it --------------------------------------------------------------------------


class Listed(list[float]):
    scale = 1.0


class Tabled(dict[str, float]):
    scale = 1.0


class Floated(float):
    scale: float


class Meta(type):
    scale = 1.0


class WithMeta(metaclass=Meta):
    pass


class Kind(enum.Enum):
    SMALL = 1


@dataclass(frozen=True)
class Key:
    name: str = "a"


@dataclass
class Tables:
    by_pair: dict[Any, float] = field(default_factory=lambda: {("a", 1): 1.0})
    by_enum: dict[Any, float] = field(default_factory=lambda: {Kind.SMALL: 1.0})
    by_key: dict[Any, float] = field(default_factory=lambda: {Key(): 1.0})


def counted(value: Any) -> float:
    return 1.0


VARIABLE: contextvars.ContextVar[float] = contextvars.ContextVar("VARIABLE", default=1.0)


def parser(number: float = 1.0) -> configparser.ConfigParser:
    config = configparser.ConfigParser()
    config["loss"] = {"scale": str(number)}
    return config


def sampler() -> DistributedSampler[Any]:
    return DistributedSampler(range(8), num_replicas=2, rank=0)  # type: ignore[arg-type]


class Hooked:
    """A weak reference leads to it."""

    scale = 1.0


KEPT = [Hooked(), Hooked()]
put = operator.setitem
HELD: dict[str, Case] = {
    "os.environ": (
        lambda: None,
        lambda v: float(os.environ.get("FZ_TEST_SCALE", "1")),
        lambda v: os.environ.__setitem__("FZ_TEST_SCALE", "2"),
    ),
    "UserDict": (
        lambda: collections.UserDict(a=1.0),
        lambda v: v["a"],
        lambda v: put(v, "a", 2.0),
    ),
    "ChainMap": (
        lambda: collections.ChainMap({"a": 1.0}),
        lambda v: v["a"],
        lambda v: put(v, "a", 2.0),
    ),
    "configparser": (
        parser,
        lambda v: v.getfloat("loss", "scale"),
        lambda v: v.set("loss", "scale", "2"),
    ),
    "ContextVar": (
        lambda: None,
        lambda v: VARIABLE.get(),
        lambda v: VARIABLE.set(2.0) and None,
    ),
    "multiprocessing.Value": (
        lambda: multiprocessing.Value("d", 1.0),
        lambda v: v.value,
        lambda v: setattr(v, "value", 2.0),
    ),
    "ctypes": (
        lambda: ctypes.c_double(1.0),
        lambda v: v.value,
        lambda v: setattr(v, "value", 2.0),
    ),
    "array": (lambda: array.array("d", [1.0]), lambda v: v[0], lambda v: put(v, 0, 2.0)),
    "bytearray": (lambda: bytearray(b"\1"), lambda v: v[0], lambda v: put(v, 0, 2)),
    "weakref": (
        lambda: weakref.ref(KEPT[0]),
        lambda v: v().scale,
        lambda v: weakref.ref(KEPT[1]),
    ),
    "Path": (
        lambda: pathlib.Path("a"),
        lambda v: len(v.name),
        lambda v: pathlib.Path("abc"),
    ),
    "timedelta": (
        lambda: datetime.timedelta(seconds=1),
        lambda v: v.total_seconds(),
        lambda v: datetime.timedelta(seconds=2),
    ),
    "a pattern": (
        lambda: re.compile("a"),
        lambda v: len(v.findall("aab")),
        lambda v: re.compile("b"),
    ),
    "itemgetter": (
        lambda: operator.itemgetter(0),
        lambda v: v([1.0, 2.0]),
        lambda v: operator.itemgetter(1),
    ),
    "a ufunc": (lambda: np.exp, lambda v: float(v(1.0)), lambda v: np.log1p),
    "a method of Tensor": (
        lambda: Tensor.sin,
        lambda v: v(torch.ones(())),
        lambda v: Tensor.cos,
    ),
    "an op": (
        lambda: torch.ops.aten.sin.default,
        lambda v: v(torch.ones(())),
        lambda v: torch.ops.aten.cos.default,
    ),
    "an op packet": (
        lambda: torch.ops.aten.sin,
        lambda v: v(torch.ones(())),
        lambda v: torch.ops.aten.cos,
    ),
    "DistributedSampler": (sampler, lambda v: 1.0 + v.epoch, lambda v: v.set_epoch(3)),
    "Subset": (
        lambda: Subset(range(8), [1, 2]),  # type: ignore[arg-type]
        lambda v: float(v[0]),
        lambda v: put(v.indices, 0, 3),
    ),
    "a subclass of list": (lambda: Listed([1.0]), lambda v: v.scale, set_("scale")),
    "a subclass of dict": (Tabled, lambda v: v.scale, set_("scale")),
    "a subclass of float": (
        lambda: Floated(1.0),
        lambda v: getattr(v, "scale", 1.0) * v,
        set_("scale"),
    ),
    "a function": (
        lambda: functools.wraps(counted)(lambda x: 1.0),
        lambda v: getattr(v, "scale", 1.0),
        set_("scale"),
    ),
    "a metaclass": (lambda: WithMeta, lambda v: v.scale, lambda v: setattr(Meta, "scale", 2.0)),
    "a dict by tuples": (
        Tables,
        lambda v: v.by_pair[("a", 1)],
        lambda v: put(v.by_pair, ("a", 1), 2.0),
    ),
    "a dict by enums": (
        Tables,
        lambda v: v.by_enum[Kind.SMALL],
        lambda v: put(v.by_enum, Kind.SMALL, 2.0),
    ),
    "a dict by objects": (
        Tables,
        lambda v: v.by_key[Key()],
        lambda v: put(v.by_key, Key(), 2.0),
    ),
    "other keys": (
        lambda: {"a": 1.0},
        lambda v: 1.0 if "a" in v else 2.0,
        lambda v: v.update(b=v.pop("a")),
    ),
    "a large array": (
        lambda: np.ones(100_000),
        lambda v: float(v[70_000]),
        lambda v: put(v, 70_000, 2.0),
    ),
    "an array of objects": (
        lambda: np.array([1.0, "a"], dtype=object),
        lambda v: v[0],
        lambda v: put(v, 0, 2.0),
    ),
    "the number of threads": (
        torch.get_num_threads,
        lambda v: 1.0 if torch.get_num_threads() == v else 2.0,
        lambda v: torch.set_num_threads(v + 1),
    ),
    "a log level": (
        lambda: logging.getLogger("tests.hidden"),
        lambda v: 2.0 if v.isEnabledFor(logging.INFO) else 1.0,
        lambda v: v.setLevel(logging.INFO),
    ),
    "sys.argv": (
        lambda: None,
        lambda v: float(len(sys.argv)),
        lambda v: setattr(sys, "argv", ["a", "b", "c", "d"]),
    ),
    "autocast": (
        lambda: torch.autocast("cpu", enabled=False),
        lambda v: under(v),
        lambda v: torch.autocast("cpu", torch.bfloat16),
    ),
    "a namespace": (
        lambda: types.SimpleNamespace(scale=1.0),
        lambda v: v.scale,
        set_("scale"),
    ),
}


def under(context: Any) -> Tensor:
    with context:
        return (torch.full((2, 2), 1.1) @ torch.full((2, 2), 1.1)).float().sum()


@pytest.fixture
def _process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(Meta, "scale", 1.0)
    monkeypatch.delenv("FZ_TEST_SCALE", raising=False)
    threads, level = torch.get_num_threads(), logging.getLogger("tests.hidden").level
    KEPT[1].scale = 2.0
    yield
    os.environ.pop("FZ_TEST_SCALE", None)
    torch.set_num_threads(threads)
    logging.getLogger("tests.hidden").setLevel(level)
    VARIABLE.set(1.0)


@pytest.mark.usefixtures("_process")
@pytest.mark.parametrize("name", HELD)
def test_an_object_that_holds_a_number(name: str) -> None:
    make, number, change = HELD[name]
    captured = faithful(make, number, change)
    assert captured.stats.replays >= 2, captured.explain()


# -- state that is read by changing it -------------------------------------------------------------


def running() -> Iterator[float]:
    number = 1.0
    while True:
        number += 1
        yield number


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2)


MOVED: dict[str, Case] = {
    "random.Random": (lambda: random.Random(0), lambda v: v.random(), None),
    "default_rng": (lambda: np.random.default_rng(0), lambda v: float(v.random()), None),
    "RandomState": (lambda: np.random.RandomState(0), lambda v: float(v.rand()), None),
    "count": (lambda: itertools.count(1), lambda v: next(v), None),
    "cycle": (lambda: itertools.cycle([1.0, 2.0, 3.0]), lambda v: next(v), None),
    "zip": (lambda: zip(range(20), range(1, 21), strict=True), lambda v: next(v)[1], None),
    "a list's iterator": (lambda: iter([float(i) for i in range(20)]), lambda v: next(v), None),
    "a generator": (running, lambda v: next(v), None),
    "map": (lambda: map(float, range(20)), lambda v: next(v), None),
    "a data loader's iterator": (lambda: iter(loader()), lambda v: next(v)[0].sum(), None),
}


@pytest.mark.parametrize("name", MOVED)
def test_state_that_is_read_by_changing_it(name: str) -> None:
    make, number, change = MOVED[name]
    CALLS_OF_A_LOADER = 4

    class Short(Trainer):
        pass

    captured = faithful(make, number, change, Short) if "loader" not in name else None
    if captured is None:
        step = fz.capture(Trainer(make(), number).step, on_uncapturable="eager")
        eager = Trainer(make(), number)
        for i in range(CALLS_OF_A_LOADER):
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(i))
            assert torch.equal(step(x), eager.step(x))
        captured = step
    assert captured.stats.replays == 0, captured.explain()


# -- hooks, patches, modules -----------------------------------------------------------------------


def hooked(register: Callable[[nn.Linear, list[float]], Any]) -> Callable[..., Trainer]:
    def trainer(value: Any, number: Any) -> Trainer:
        made = Trainer(value, number)
        made.handle = register(made.model, value)  # type: ignore[attr-defined]
        return made

    return trainer


def by_gradient(model: nn.Linear, scale: list[float]) -> Any:
    return model.weight.register_hook(lambda g: g * scale[0])


def after_accumulation(model: nn.Linear, scale: list[float]) -> Any:
    def scaled(p: Tensor) -> None:
        assert p.grad is not None
        p.grad.mul_(scale[0])

    return model.weight.register_post_accumulate_grad_hook(scaled)


def on_the_accumulator(model: nn.Linear, scale: list[float]) -> Any:
    node = model.weight.view_as(model.weight).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    node.register_prehook(lambda grads: tuple(g * scale[0] for g in grads))
    return node


@pytest.mark.parametrize("register", [by_gradient, after_accumulation, on_the_accumulator])
def test_hooks_that_read_a_number(register: Any) -> None:
    faithful(lambda: [1.0], lambda v: 1.0, lambda v: put(v, 0, 2.0), hooked(register))


PATCHES = {
    "F.relu": (F, "relu", lambda v: F.relu(torch.ones(())), lambda x: x * 2),
    "torch.sin": (torch, "sin", lambda v: torch.sin(torch.ones(())), lambda x: x * 2),
    "nn.Linear.forward": (nn.Linear, "forward", lambda v: 1.0, lambda self, x: x @ self.weight.T),
}


@pytest.mark.parametrize("name", PATCHES)
def test_replaced_functions_of_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, number, other = PATCHES[name]
    faithful(lambda: None, number, lambda v: monkeypatch.setattr(owner, attribute, other))


class Remembers(nn.Linear):
    """Keeps its last activation."""

    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.last = out.detach()
        return out


def test_an_activation_that_a_module_keeps() -> None:
    ours, eager = Trainer(None, lambda v: 1.0), Trainer(None, lambda v: 1.0)
    for each in (ours, eager):
        torch.manual_seed(0)
        each.model = Remembers(3, 1)
        each.optimizer = torch.optim.SGD(each.model.parameters(), lr=0.1)
    captured = fz.capture(ours.step, on_uncapturable="eager")
    for i in range(CALLS):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(i))
        assert torch.equal(captured(x), eager.step(x))
        assert torch.equal(ours.model.last, eager.model.last), i  # type: ignore[arg-type]


def test_a_count_in_a_functions_attribute() -> None:
    def make() -> Any:
        def step(x: Tensor) -> Tensor:
            step.calls += 1  # type: ignore[attr-defined]
            return x * 2

        step.calls = 0  # type: ignore[attr-defined]
        return step

    ours, eager = make(), make()
    captured = fz.capture(ours, on_uncapturable="eager")
    for _ in range(CALLS):
        assert torch.equal(captured(torch.ones(2)), eager(torch.ones(2)))
        assert ours.calls == eager.calls


def test_a_batch_from_a_loader_that_the_step_iterates() -> None:
    """The rows of a dataset are views of one storage, which is the same one at every step."""
    data = TensorDataset(torch.arange(32.0).reshape(16, 2))

    def make() -> Any:
        batches = iter(DataLoader(data, batch_size=2))
        return lambda x: x + next(batches)[0].sum()

    ours, eager = make(), make()
    captured = fz.capture(ours, on_uncapturable="eager")
    for _ in range(CALLS):
        assert torch.equal(captured(torch.ones(2)), eager(torch.ones(2)))


def test_a_loader_that_is_made_new_in_the_step() -> None:
    data = TensorDataset(torch.arange(32.0).reshape(16, 2))
    loaders = [
        DataLoader(data, 2, shuffle=True, generator=torch.Generator().manual_seed(3)) for _ in "ab"
    ]
    captured = fz.capture(lambda x: x + next(iter(loaders[0]))[0].sum(), on_uncapturable="eager")
    for _ in range(CALLS):
        assert torch.equal(captured(torch.ones(2)), torch.ones(2) + next(iter(loaders[1]))[0].sum())


def test_argument_keys_that_are_equal_and_not_the_same() -> None:
    captured = fz.capture(lambda table: table["x"] * (2 if type([*table][1]) is bool else 3))
    for key in (1, 1, 1, 1, True, True, 1, True):
        wanted = 2 if type(key) is bool else 3
        assert captured({"x": torch.ones(2), key: torch.ones(2)}).tolist() == [wanted, wanted]


class Liar:
    """Equals everything."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


def test_arguments_that_claim_to_be_equal() -> None:
    captured = fz.capture(lambda x, liar: x * liar.scale)
    for i in range(CALLS):
        assert captured(torch.ones(1), Liar(i // 4)).item() == i // 4
