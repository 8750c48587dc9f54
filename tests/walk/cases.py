"""Numbers that a step reads somewhere in Python: how code reads them, which objects hold them, how they change."""

from __future__ import annotations

import abc
import argparse
import array
import builtins
import collections
import configparser
import contextvars
import copy
import ctypes
import datetime
import decimal
import enum
import functools
import gc
import importlib
import inspect
import io
import itertools
import logging
import multiprocessing
import operator
import os
import pathlib
import queue
import random
import re
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.attention import SDPBackend
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from tests.walk import imported

# -- code that reads it ----------------------------------------------------------------------------


@dataclass
class Settings:
    """Numbers, as scripts keep them."""

    scale: float = 1.0
    kl: float = 1.0
    l1: float = 1.0


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


@dataclass(frozen=True)
class Frozen:
    """Its methods are all generated."""

    distance: float = 1.0


class Distant:
    """Code names the attribute nowhere but in text."""

    def __init__(self) -> None:
        self.__dict__["distance"] = 1.0


DISTANCE, FIELD = operator.attrgetter("distance"), "{0.distance}"


def by_import(name: str) -> float:
    if name:
        from tests.walk.imported import SCALE

        return SCALE
    import tests.walk.imported

    return tests.walk.imported.SCALE


def by_name() -> float:
    return importlib.import_module("tests.walk." + "imported").SCALE  # type: ignore[no-any-return]


def set_imported(value: Any) -> None:
    imported.SCALE = 2.0


def with_getattr() -> types.ModuleType:
    module = types.ModuleType("with_getattr")
    exec("hidden = 1.0\ndef __getattr__(name): return hidden", vars(module))
    return module


def entered(value: Special) -> float:
    with value as number:
        return number


def matched(value: Any) -> float:
    match value:
        case Settings(scale=2.0):
            return 2.0
    return 1.0


READ_BY: dict[str, Callable[..., Any]] = {"read": getattr}


class Registered:
    """Its subclasses are its registry."""

    weight = 1.0


def with_subclasses() -> Any:
    return type("Root", (Registered,), {"__module__": __name__})


def with_cache() -> Any:
    """A function that keeps what it has read."""

    @functools.lru_cache
    def cached(key: str) -> list[float]:
        return [1.0]

    return cached


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
    "globals": (lambda: None, lambda v: imported.by_globals(), set_imported),
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
    "eval": (lambda: None, lambda v: imported.by_eval(), set_imported),
    "an import": (lambda: None, lambda v: by_import(""), set_imported),
    "a name from an import": (lambda: None, lambda v: by_import("SCALE"), set_imported),
    "import_module": (lambda: None, lambda v: by_name(), set_imported),
    "an attrgetter from outside": (Distant, lambda v: DISTANCE(v), set_("distance")),
    "getattr_static": (Distant, lambda v: inspect.getattr_static(v, "distance"), set_("distance")),
    "a hash": (
        Frozen,
        lambda v: float(hash(v) % 97),
        lambda v: object.__setattr__(v, "distance", 2.0),
    ),
    "format": (Distant, lambda v: float("{0.distance}".format(v)), set_("distance")),  # noqa: UP030, UP032
    "format of a global": (Distant, lambda v: float(FIELD.format(v)), set_("distance")),
    "a module's __getattr__": (with_getattr, lambda v: v.anything, hidden),
    "getattr by another name": (
        Distant,
        lambda v: READ_BY["read"](v, "-".join(["dis", "tance"]).replace("-", "")),
        set_("distance"),
    ),
    "a comparison of namespaces": (
        lambda: [argparse.Namespace(a=1.0), argparse.Namespace(a=1.0)],
        lambda v: 1.0 if v[0] == v[1] else 2.0,
        lambda v: setattr(v[0], "a", 2.0),
    ),
    "the text of a namespace": (
        lambda: types.SimpleNamespace(a=1.0),
        lambda v: float(len(str(v))),
        set_("a", 1.25),
    ),
    "a name in a namespace": (
        lambda: argparse.Namespace(a=1.0),
        lambda v: 2.0 if "mixup" in v else 1.0,
        set_("mixup"),
    ),
    "__subclasses__": (
        with_subclasses,
        lambda v: 1.0 + len(v.__subclasses__()),
        lambda v: KEPT_CLASSES.append(type("Leaf", (v,), {})),
    ),
    "a cached function": (with_cache, lambda v: v("a")[0], lambda v: put(v("a"), 0, 2.0)),
    "getenv": (
        lambda: None,
        lambda v: float(os.getenv("FZ_TEST_SCALE", "1")),
        lambda v: os.environ.__setitem__("FZ_TEST_SCALE", "2"),
    ),
    "a logger by its name": (
        lambda: None,
        lambda v: 2.0 if logging.getLogger("tests.hidden").isEnabledFor(logging.INFO) else 1.0,
        lambda v: logging.getLogger("tests.hidden").setLevel(logging.INFO),
    ),
    "the name of the thread": (
        lambda: setattr(threading.current_thread(), "name", "a"),
        lambda v: float(len(threading.current_thread().name)),
        lambda v: setattr(threading.current_thread(), "name", "abc"),
    ),
    "a replaced builtin": (
        lambda: None,
        lambda v: float(sum([1.0, 2.0])),
        lambda v: setattr(builtins, "sum", lambda values: 7.0),
    ),
    "a builtin that is wrapped": (
        lambda: 0.7,
        lambda v: sum([v, 0.1, 0.2, 0.3]),
        lambda v: [setattr(builtins, "sum", lambda values: SUM(values) * 2), 0.9][1],
    ),
    "a new builtin": (
        lambda: setattr(builtins, "FZ_SCALE", 1.0),
        lambda v: FZ_SCALE,  # type: ignore[name-defined]  # noqa: F821
        lambda v: setattr(builtins, "FZ_SCALE", 2.0),
    ),
    "options of the text of arrays": (
        lambda: np.array([1.23456]),
        lambda v: float(len(str(v))),
        lambda v: np.set_printoptions(precision=2),
    ),
    "a copy of an iterator": (
        lambda: iter([1.0, 2.0, 3.0]),
        lambda v: next(copy.copy(v)),
        lambda v: next(v) and None,
    ),
    "a generator that stays where it is": (
        lambda: types.SimpleNamespace(numbers=(c := [1.0]), running=same_again(c)),
        lambda v: next(v.running),
        lambda v: put(v.numbers, 0, 2.0),
    ),
    "an iterator of calls": (
        lambda: types.SimpleNamespace(numbers=(c := [1.0]), calls=iter(lambda: c[0], None)),
        lambda v: next(v.calls),
        lambda v: put(v.numbers, 0, 2.0),
    ),
}


def same_again(numbers: list[float]) -> Iterator[float]:
    while True:
        yield numbers[0]


# -- objects that hold it --------------------------------------------------------------------------


class Listed(list[float]):
    scale = 1.0


class Tabled(dict[str, float]):
    scale = 1.0


class Floated(float):
    scale: float


class Numbered(int):
    scale: float


class Gathered(set[int]):
    scale = 1.0


class EqualToAll:
    """Equals everything."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


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


class First:
    def number(self) -> float:
        return 1.0


class Second:
    def number(self) -> float:
        return 2.0


def with_partial() -> Any:
    method = functools.partialmethod(lambda self, numbers: numbers[0], [1.0])
    return type("WithPartial", (), {"method": method, "numbers": method.args[0]})()


def with_registry() -> Any:
    class Abstract(abc.ABC):  # noqa: B024
        """No class inherits it."""

    return Abstract, First()


def with_attribute(tensor: Tensor, value: Any = 1.0) -> Any:
    tensor.distance = value  # type: ignore[attr-defined]
    return tensor


class Config(collections.UserDict[str, float]):
    """Its attributes are named in code of a library alone."""


class Chain(collections.ChainMap[str, float]):
    """Also these."""


class Part(Subset[Any]):
    """Also these."""


class Held:
    scale = 1.0


class WithObject(enum.Enum):
    ONE = Held()


class Marked(torch.Tensor):
    """A class of tensors of the user."""


def marked() -> Any:
    return with_attribute(torch.ones(()).as_subclass(Marked), {"scale": 1.0})


def in_order(*numbers: int) -> set[int]:
    """Equal sets iterate in the order of insertion where hashes collide."""
    found: set[int] = set()
    for number in numbers:
        found.add(number)
    return found


KEPT_CLASSES: list[type] = []
SUM = sum
KEPT, PROXIED = [Hooked(), Hooked()], Hooked()
put = operator.setitem
HELD: dict[str, Case] = {
    "a subclass of UserDict": (
        lambda: Config(a=1.0),
        lambda v: v["a"],
        lambda v: put(v, "a", 2.0),
    ),
    "a subclass of ChainMap": (
        lambda: Chain({"a": 1.0}),
        lambda v: v["a"],
        lambda v: put(v, "a", 2.0),
    ),
    "a subclass of Subset": (
        lambda: Part(range(8), [1, 2]),  # type: ignore[arg-type]
        lambda v: float(v[0]),
        lambda v: put(v.indices, 0, 3),
    ),
    "a member of an enumeration": (
        lambda: WithObject.ONE,
        lambda v: v.value.scale,
        lambda v: setattr(v.value, "scale", 2.0),
    ),
    "a dict of a tensor of the user's class": (
        marked,
        lambda v: v.distance["scale"],
        lambda v: v.distance.update(scale=2.0),
    ),
    "the order of a set": (
        lambda: types.SimpleNamespace(numbers=in_order(0, 8)),
        lambda v: 1.0 + next(iter(v.numbers)),
        set_("numbers", in_order(8, 0)),
    ),
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
    "weakref.proxy": (
        lambda: weakref.proxy(PROXIED),
        lambda v: v.scale,
        lambda v: setattr(PROXIED, "scale", 2.0),
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
    "a subclass of int": (
        lambda: Numbered(1),
        lambda v: getattr(v, "scale", 1.0) * v,
        set_("scale"),
    ),
    "a subclass of set": (lambda: Gathered([1]), lambda v: v.scale, set_("scale")),
    "an object that equals all": (
        lambda: EqualToAll(1.0),
        lambda v: v.scale,
        lambda v: EqualToAll(2.0),
    ),
    "a key that equals another": (
        lambda: {1: 1.0},
        lambda v: 2.0 if type(next(iter(v))) is bool else 1.0,
        lambda v: {True: 1.0},
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
    "an attribute of a tensor": (
        lambda: with_attribute(torch.ones(())),
        lambda v: v * v.distance,
        set_("distance"),
    ),
    "an attribute of a parameter that is new": (
        lambda: nn.Parameter(torch.ones(())),
        lambda v: v.detach() * getattr(v, "distance", 1.0),
        set_("distance"),
    ),
    "a default factory": (
        lambda: collections.defaultdict(lambda: SETTINGS.kl),
        lambda v: v.default_factory(),
        set_settings(kl=2.0),
    ),
    "text in memory": (
        lambda: io.StringIO("1"),
        lambda v: float(v.getvalue()),
        lambda v: v.__init__("2"),
    ),
    "the length of a queue": (
        queue.SimpleQueue,
        lambda v: 1.0 + v.qsize(),
        lambda v: v.put(1),
    ),
    "whether a queue is empty": (
        queue.Queue,
        lambda v: 1.0 if v.empty() else 2.0,
        lambda v: v.put(1),
    ),
    "a queue that had nothing": (
        queue.Queue,
        lambda v: polled(v),
        lambda v: v.put(2.0),
    ),
    "a lock": (threading.Lock, lambda v: 1.0 + v.locked(), lambda v: v.acquire() and None),
    "the decimal context": (
        lambda: setattr(decimal.getcontext(), "prec", 28),
        lambda v: float(decimal.Decimal(1) / decimal.Decimal(3)),
        lambda v: setattr(decimal.getcontext(), "prec", 3),
    ),
    "the garbage collector": (
        gc.enable,
        lambda v: 1.0 if gc.isenabled() else 2.0,
        lambda v: gc.disable(),
    ),
    "the current folder": (
        os.getcwd,
        lambda v: 1.0 if os.getcwd() == v else 2.0,
        lambda v: os.chdir(os.sep),
    ),
    "the precision of products": (
        torch.get_float32_matmul_precision,
        lambda v: 1.0 if torch.get_float32_matmul_precision() == v else 2.0,
        lambda v: torch.set_float32_matmul_precision("high"),
    ),
    "flags of cudnn": (
        lambda: torch._C._set_cudnn_benchmark(False),
        lambda v: 1.0 + torch.backends.cudnn.benchmark,
        lambda v: torch._C._set_cudnn_benchmark(True),
    ),
    "the fast path of attention": (
        lambda: torch.backends.mha.set_fastpath_enabled(True),
        lambda v: 1.0 + torch.backends.mha.get_fastpath_enabled(),
        lambda v: torch.backends.mha.set_fastpath_enabled(False),
    ),
    "bases": (
        lambda: type("Based", (type("Base", (First,), {}),), {})(),
        lambda v: v.number(),
        lambda v: setattr(type(v), "__bases__", (Second,)),
    ),
    "a partial method": (
        with_partial,
        lambda v: v.method(),
        lambda v: put(type(v).numbers, 0, 2.0),
    ),
    "a registered subclass": (
        with_registry,
        lambda v: 2.0 if isinstance(v[1], v[0]) else 1.0,
        lambda v: v[0].register(First) and None,
    ),
    "limits of a type": (
        lambda: types.SimpleNamespace(info=torch.finfo(torch.float32)),
        lambda v: v.info.eps * 1e6,
        set_("info", torch.finfo(torch.bfloat16)),
    ),
    "a policy": (
        lambda: types.SimpleNamespace(policy=MixedPrecisionPolicy()),
        lambda v: 1.0 if v.policy.param_dtype is None else 2.0,
        set_("policy", MixedPrecisionPolicy(torch.bfloat16)),
    ),
    "a reduction": (
        lambda: types.SimpleNamespace(op=dist.ReduceOp(dist.ReduceOp.SUM)),
        lambda v: 1.0 if v.op == dist.ReduceOp.SUM else 2.0,
        set_("op", dist.ReduceOp(dist.ReduceOp.MAX)),
    ),
    "a kernel of attention": (
        lambda: types.SimpleNamespace(kernel=SDPBackend.MATH),
        lambda v: 1.0 if v.kernel == SDPBackend.MATH else 2.0,
        set_("kernel", SDPBackend.FLASH_ATTENTION),
    ),
    "a date": (
        lambda: types.SimpleNamespace(day=datetime.date(2020, 1, 1)),
        lambda v: float(v.day.year),
        set_("day", datetime.date(2021, 1, 1)),
    ),
    "a type": (
        lambda: types.SimpleNamespace(kinds=int | str),
        lambda v: 1.0 if isinstance(3, v.kinds) else 2.0,
        set_("kinds", float | str),
    ),
    "the order of a dict": (
        lambda: collections.OrderedDict(a=1.0, b=2.0),
        lambda v: next(iter(v.values())),
        lambda v: v.move_to_end("a"),
    ),
    "the values of a dict": (
        lambda: types.SimpleNamespace(numbers=(table := {"a": 1.0}).values(), unread=table),
        lambda v: sum(v.numbers),
        lambda v: v.unread.update(a=2.0),
    ),
    "the state of a generator": (
        lambda: random.Random(0),
        lambda v: 1.0 + v.getstate()[1][-1] % 7,
        lambda v: v.random() and None,
    ),
    "a copy of a generator": (
        lambda: random.Random(0),
        lambda v: copy.deepcopy(v).random(),
        lambda v: v.random() and None,
    ),
    "the length of an iterator": (
        lambda: iter([1, 2, 3]),
        lambda v: float(operator.length_hint(v)),
        lambda v: next(v) and None,
    ),
    "the seed of a generator": (
        torch.Generator,
        lambda v: 1.0 + v.initial_seed() % 7,
        lambda v: v.manual_seed(5) and None,
    ),
    "what a logger adds": (
        lambda: logging.LoggerAdapter(logging.getLogger("tests.hidden"), {"scale": 1.0}),
        lambda v: v.extra["scale"],
        lambda v: v.extra.update(scale=2.0),
    ),
    "a namespace": (
        lambda: types.SimpleNamespace(scale=1.0),
        lambda v: v.scale,
        set_("scale"),
    ),
}


# -- tensors in other objects: inputs of the program -------------------------------------------------


def held_in(kind: Callable[[Tensor], Any], read: Callable[[Any], Tensor], above: bool) -> Case:
    """A tensor in a holder, of which another one takes the place, or an object above it is replaced."""

    def changed(v: Any) -> Any:
        if above:
            return types.SimpleNamespace(holder=kind(torch.tensor(2.0)))
        v.holder = kind(torch.tensor(2.0))
        return None

    make = lambda: types.SimpleNamespace(holder=kind(torch.tensor(1.0)))  # noqa: E731
    return make, lambda v: read(v.holder), changed


HOLDERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "a dict": (lambda t: {"x": t}, lambda h: h["x"]),
    "a list": (lambda t: [t], lambda h: h[0]),
    "a tuple": (lambda t: (t,), lambda h: h[0]),
    "an object": (lambda t: types.SimpleNamespace(x=t), lambda h: h.x),
    "an object of a class": (Settings, lambda h: h.scale),
    "an object in a list": (lambda t: [Settings(t)], lambda h: h[0].scale),
    "a UserDict": (lambda t: collections.UserDict(x=t), lambda h: h["x"]),
    "an OrderedDict": (lambda t: collections.OrderedDict(x=t), lambda h: h["x"]),
    "a deque": (lambda t: collections.deque([t]), lambda h: h[0]),
    "a closure": (lambda t: lambda: t, lambda h: h()),
    "a default": (lambda t: lambda t=t: t, lambda h: h()),
    "a partial": (lambda t: functools.partial(torch.mul, t), lambda h: h(1.0)),
    "a class": (lambda t: type("Holding", (), {"x": t}), lambda h: h.x),
}
TENSORS: dict[str, Case] = {
    **{name: held_in(kind, read, False) for name, (kind, read) in HOLDERS.items()},
    **{f"above {name}": held_in(kind, read, True) for name, (kind, read) in HOLDERS.items()},
    "a tensor of a parameter": (
        lambda: with_attribute(nn.Parameter(torch.ones(())), torch.ones(())),
        lambda v: v.detach() * v.distance,
        lambda v: setattr(v, "distance", torch.tensor(2.0)),
    ),
    "a distribution": (
        lambda: types.SimpleNamespace(prior=torch.distributions.Normal(0.0, 1.0)),
        lambda v: v.prior.log_prob(torch.tensor(1.0)),
        set_("prior", torch.distributions.Normal(0.0, 2.0)),
    ),
}


def under(context: Any) -> Tensor:
    with context:
        return (torch.full((2, 2), 1.1) @ torch.full((2, 2), 1.1)).float().sum()


def polled(waiting: queue.Queue[float]) -> float:
    try:
        return waiting.get_nowait()
    except queue.Empty:
        return 1.0


# -- state that is read by changing it -------------------------------------------------------------


def running() -> Iterator[float]:
    number = 1.0
    while True:
        number += 1
        yield number


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(64.0)), batch_size=2)


MOVED: dict[str, Case] = {
    "random.Random": (lambda: random.Random(0), lambda v: v.sample(range(1, 99), 1)[0], None),
    "default_rng": (lambda: np.random.default_rng(0), lambda v: float(v.random(1)[0]), None),
    "RandomState": (lambda: np.random.RandomState(0), lambda v: float(v.rand(1)[0]), None),
    "count": (lambda: itertools.count(1), lambda v: next(v), None),
    "cycle": (lambda: itertools.cycle([1.0, 2.0, 3.0]), lambda v: next(v), None),
    "zip": (lambda: zip(range(20), range(1, 21), strict=True), lambda v: next(v)[1], None),
    "a list's iterator": (lambda: iter([float(i) for i in range(20)]), lambda v: next(v), None),
    "a generator": (running, lambda v: next(v), None),
    "map": (lambda: map(float, range(20)), lambda v: next(v), None),
    "a data loader's iterator": (lambda: iter(loader()), lambda v: next(v)[0].sum(), None),
}


# -- the process -----------------------------------------------------------------------------------


@contextmanager
def same_process() -> Iterator[None]:
    """State of the process that cases change is as before after the `with`."""
    threads, logger = torch.get_num_threads(), logging.getLogger("tests.hidden")
    folder, precision = os.getcwd(), torch.get_float32_matmul_precision()
    level, argv = logger.level, sys.argv
    os.environ.pop("FZ_TEST_SCALE", None)
    KEPT[1].scale = 2.0
    thread, options = threading.current_thread().name, np.get_printoptions()
    try:
        yield
    finally:
        SETTINGS.scale = SETTINGS.kl = SETTINGS.l1 = Meta.scale = PROXIED.scale = 1.0
        imported.SCALE = Held.scale = 1.0
        vars(WithObject.ONE.value).clear()
        builtins.sum = SUM
        vars(builtins).pop("FZ_SCALE", None)
        threading.current_thread().name = thread
        np.set_printoptions(**options)
        gc.enable()
        os.chdir(folder)
        decimal.getcontext().prec = 28
        torch.set_float32_matmul_precision(precision)
        torch._C._set_cudnn_benchmark(
            False
        )  # its attribute is frozen by torch's own test utilities
        torch.backends.mha.set_fastpath_enabled(True)
        VARIABLE.set(1.0)
        sys.argv = argv
        os.environ.pop("FZ_TEST_SCALE", None)
        torch.set_num_threads(threads)
        logger.setLevel(level)
