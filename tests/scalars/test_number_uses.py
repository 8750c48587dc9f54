"""What Python does with the numbers that a step reads: each use gives what it gives in eager, and none raises."""

from __future__ import annotations

import collections
import copy
import dataclasses
import datetime
import decimal
import functools
import io
import json
import marshal
import math
import pickle
import statistics
import struct
import time
from collections.abc import Callable
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import functionalize as fz

pytestmark = pytest.mark.usefixtures("ample_allowance")

D, Timedelta = decimal.Decimal, datetime.timedelta


@dataclasses.dataclass
class Metrics:
    loss: Any


class Slotted:
    __slots__ = ("loss",)

    def __init__(self, loss: Any) -> None:
        self.loss = loss


def contents(value: Any) -> Any:
    """The types and values of a result, down to the bits."""
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), value.detach().numpy().tobytes()
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tolist()
    if isinstance(value, (list, tuple, collections.deque)):
        return type(value), [contents(v) for v in value]
    if isinstance(value, dict):
        return type(value), [(contents(k), contents(v)) for k, v in value.items()]
    if isinstance(value, (set, frozenset)):
        return type(value), sorted(map(contents, value))
    if isinstance(value, (Metrics, SimpleNamespace, Slotted)):
        return type(value), contents(value.loss)
    return type(value), repr(value)


def outcome(fn: Callable[[Tensor], Any], x: Tensor) -> Any:
    try:
        return contents(fn(x))
    except Exception as error:
        return type(error), str(error)


def dumped(value: Any, **options: Any) -> str:
    file = io.StringIO()
    json.dump(value, file, **options)
    return file.getvalue()


def is_exactly(value: Any, kind: type) -> bool:
    return type(value) is kind


def by_local_import(value: Any) -> Any:
    from decimal import Decimal

    return Decimal(value)


FLOATS_AND_INTS: dict[str, Callable[[Any], Any]] = {
    "np.exp": lambda n: (np.exp(n), np.log(n), np.sqrt(n), np.log1p(n), np.power(n, 2)),
    "np.round": lambda n: (np.round(n), np.round(n, 1)),
    "np.isnan": lambda n: (np.isnan(n), np.isfinite(n)),
    "np.abs": lambda n: (np.abs(n), np.floor(n), np.maximum(n, 2), np.add(n, n)),
    "np.array": lambda n: (np.array(n), np.array([n]), np.array([[n, 1], [2, n]]), np.full(3, n)),
    "np.array of others": lambda n: (np.array([n, "a"]), np.array([n, 1j])),
    "np.mean": lambda n: (np.mean([n, 1.0]), np.sum([n, n]), np.cumsum([n, 2]), np.stack([n, n])),
    "an array and a number": lambda n: (np.ones(2) * n, n * np.ones(2), n - np.ones(2), n**np.ones(2)),
    "an array compared": lambda n: (n < np.ones(2), np.ones(2) == n),
    "an array divided": lambda n: (divmod(n, np.full(2, 2.0)), np.full(2, 7.0) % n),
    "numpy's scalars": lambda n: (np.float32(2.5) * n, n * np.float32(2.5), np.int64(2) * n, n < np.float64(2)),
    "np.linspace": lambda n: (np.linspace(0, n, 3), np.clip(n, 0, 1), np.where(n > 1, n, 0)),
    "np.testing": lambda n: np.testing.assert_allclose(n, n),
    "torch of numpy": lambda n: torch.tensor(np.array([n])),
    "Decimal": lambda n: (D(n), D.from_float(n), decimal.Context(prec=3).create_decimal(n)),
    "a local import": by_local_import,
    "Decimal compared": lambda n: (D(1) < n, n < D(1), n == D(3)),
    "Fraction": lambda n: (Fraction(n), n + Fraction(1, 2), Fraction(1, 2) * n, n < Fraction(1, 2)),
    "timedelta": lambda n: Timedelta(seconds=n),
    "timedelta multiplied": lambda n: (Timedelta(seconds=1) * n, n * Timedelta(seconds=1)),
    "timedelta divided": lambda n: Timedelta(seconds=1) / n,
    "statistics.mean": lambda n: (statistics.mean([n, 2]), statistics.variance([n, 1])),
    "statistics.fmean": lambda n: (statistics.fmean([n, 1]), statistics.harmonic_mean([n, 1])),
    "type is": lambda n: (type(n) is float, type(n) is int),
    "type in a helper": lambda n: (is_exactly(n, float), is_exactly(n, int)),
    "type as a key": lambda n: {float: "f", int: "i"}[type(n)],
    "type called": lambda n: type(n)(3),
    "class called": lambda n: (n.__class__(3), n.__class__.__name__),
    "json": lambda n: (json.dumps([n, n * 2], indent=1), json.dumps({n: n}), json.dumps({"a": (n,)})),
    "json.dump": lambda n: (dumped({"a": [n]}), dumped({n: {"b": n}}, indent=1, sort_keys=True)),
    "pickle": lambda n: [pickle.loads(pickle.dumps([n, {n: n}], p)) for p in range(6)],
    "marshal": lambda n: marshal.dumps(n, 2),  # 2: without marks of how many references there are
    "copies": lambda n: (copy.copy(n), copy.deepcopy([n, {"a": n}])),
    "struct": lambda n: struct.pack("d", n),
    "formats": lambda n: ("%d" % n, "%.3e %s" % (n, n), f"{n!r:>9}", f"{n:,}", format(n, "g")),  # noqa: UP031
    "keys": lambda n: ({n: 1}, collections.Counter([n, n]), collections.OrderedDict([(n, n)])),
    "hashes": lambda n: (hash(n), hash((n, 1)), {n}, n in {1: 0}),
    "math": lambda n: (math.isnan(n), math.exp(n), math.fsum([n, n]), math.modf(n), math.prod([n, 2])),
    "conversions": lambda n: (int(n), float(n), bool(n), complex(n), complex(1, n), round(n, None)),
    "floats' methods": lambda n: (n.is_integer() if type(n) is float else 0, n.as_integer_ratio()),
    "methods of the class": lambda n: float.hex(n) if isinstance(n, float) else int.bit_length(n),
    "getnewargs": lambda n: (n.__getnewargs__(), dir(n) == dir(1.5 if isinstance(n, float) else 1)),
    "time.sleep": lambda n: time.sleep(n * 0),
    "sym_max": lambda n: (torch.sym_max(n, 1), torch.sym_min(n, 1)),
    "interpolate": lambda n: F.interpolate(torch.ones(1, 1, 4), scale_factor=n),
    "a dataclass": lambda n: Metrics(n),
    "objects": lambda n: [SimpleNamespace(loss=[n]), {"a": Slotted(n)}, Metrics({"b": Metrics(n)})],
    "deque": lambda n: collections.deque([n]),
    "shape": lambda n: [torch.ones(2, 3).shape, {"a": torch.ones(1).shape}, Metrics(torch.Size([4]))],
}  # fmt: skip
INTS: dict[str, Callable[[Any], Any]] = {
    "ldexp": lambda n: math.ldexp(1.0, n),
    "three-argument pow": lambda n: (pow(n, 2, 3), pow(2, n, 5), pow(2, 3, n)),
    "sequences": lambda n: ([1, 2] * n, "ab" * n, list(range(n)), bytes(n), "abcdefgh"[n]),
    "sizes": lambda n: (torch.ones(8)[:n], np.zeros(n), np.arange(9)[n]),
}


@pytest.mark.parametrize(
    ("name", "value"),
    [*((n, 2.5) for n in FLOATS_AND_INTS), *((n, 3) for n in FLOATS_AND_INTS | INTS)],
)
def test_a_number_that_is_read_is_what_it_is_in_eager(name: str, value: float) -> None:
    use = (FLOATS_AND_INTS | INTS)[name]

    def fn(x: Tensor) -> Any:
        return use(x.item())

    step = fz.capture(fn)
    for each in (value, value, value, value, value + 1, value + 1, value):
        x = torch.tensor(each)
        assert outcome(step, x) == outcome(fn, x), each
    assert step.stats.replays and not step.stats.eager


def test_a_number_in_a_result_object_is_live() -> None:
    """No tensor is beside it: the object is opened for the number alone."""
    step = fz.capture(lambda x: Metrics(x.item()))
    found = [step(torch.tensor(v)).loss for v in (1.0, 2.0, 3.0, 4.0, 5.0)]
    assert found == [1.0, 2.0, 3.0, 4.0, 5.0] and set(map(type, found)) == {float}
    assert (step.stats.captures, step.stats.replays) == (1, 3)


HOLDERS: dict[str, Callable[[Any], Any]] = {
    "closure": lambda n: lambda: n,
    "partial": lambda n: functools.partial(float, n),
    "frozenset": lambda n: frozenset([n]).__iter__,
    "bound method": lambda n: [n].copy,
}


@pytest.mark.parametrize("name", HOLDERS)
def test_a_number_that_outlives_the_step_unseen_is_guarded(name: str) -> None:
    """A replay returns the object that was recorded."""
    step = fz.capture(lambda x: HOLDERS[name](x.item()))
    for value in (1.0, 1.0, 1.0, 2.0, 2.0, 1.0):
        found = step(torch.tensor(value))()
        found = next(iter(found), None) if hasattr(found, "__iter__") else found
        found = next(found) if hasattr(found, "__next__") else found
        assert found == value


def test_types_in_the_code_of_others_leave_numbers_live() -> None:
    """`type(self)` is not about a number."""

    class Trainer:
        def __init__(self) -> None:
            self.name = "loss"

        def step(self, x: Tensor) -> Any:
            return {f"{type(self).__name__}.{self.name}": x.item() * 2}

    step = fz.capture(Trainer().step)
    for value in (1.0, 2.0, 3.0, 4.0):
        assert step(torch.tensor(value)) == {"Trainer.loss": value * 2}
    assert (step.stats.captures, step.stats.replays) == (1, 2)


def test_the_date_in_the_code_of_others_leaves_numbers_live() -> None:
    def fn(x: Tensor) -> Any:
        started = datetime.datetime.min.year + time.timezone > -86400
        return x.item() if started else None

    step = fz.capture(fn)
    for value in (1.0, 2.0, 3.0, 4.0):
        assert step(torch.tensor(value)) == value
    assert (step.stats.captures, step.stats.replays) == (1, 2)


class Meter:
    def __init__(self) -> None:
        self.convert = lambda n: D(n) * 2

    def update(self, n: Any) -> Any:
        return datetime.datetime.fromtimestamp(n, datetime.UTC), type(n) is float

    def __call__(self, n: Any) -> Any:
        return Timedelta(days=n)


class Epoch:
    def __init__(self, n: Any) -> None:
        self.loss = time.gmtime(n)


def by_default(n: Any, convert: Callable[[Any], Any] = lambda n: D(str(n)) + D(n)) -> Any:
    return convert(n)


class Holding:
    """A step that leads to functions in many ways."""

    def __init__(self) -> None:
        self.meter, self.table = Meter(), {"days": lambda n: Timedelta(days=n)}

    def in_an_attribute(self, n: Any) -> Any:
        return self.meter.update(n)

    def in_an_attribute_of_an_attribute(self, n: Any) -> Any:
        return self.meter.convert(n)

    def in_a_table(self, n: Any) -> Any:
        return self.table["days"](n)

    def by_calling_an_object(self, n: Any) -> Any:
        return self.meter(n)

    def by_making_an_object(self, n: Any) -> Any:
        return Epoch(n).loss.tm_sec

    def in_a_variable(self, n: Any) -> Any:
        convert = functools.partial(Meter().update)
        return convert(n)

    def in_a_default(self, n: Any) -> Any:
        return by_default(n)


@pytest.mark.parametrize("name", [name for name in vars(Holding) if "_" in name.strip("_")])
@pytest.mark.parametrize("value", [2.5, 3])
def test_functions_that_the_step_leads_to(name: str, value: float) -> None:
    use = getattr(Holding(), name)

    def fn(x: Tensor, use: Callable[[Any], Any] = use) -> Any:
        return use(x.item())

    step = fz.capture(fn)
    for each in (value, value, value, value, value + 1):
        assert outcome(step, torch.tensor(each)) == outcome(fn, torch.tensor(each)), each


def test_what_c_code_refuses_is_noted_and_not_asked_again() -> None:
    """A use that no search of code finds: the call fails, with a note, and the next ones do not."""
    refuse = {"decimal": decimal.Decimal}

    def fn(x: Tensor) -> str:
        return str(refuse["decimal"](x.item()))

    step = fz.capture(fn)
    x = torch.tensor(2.5)
    assert step(x) == "2.5"
    with pytest.raises(TypeError, match="conversion from LiveFloat") as raised:
        step(x)
    assert "From the next call on" in raised.value.__notes__[0]
    for value in (2.5, 2.5, 3.5):
        assert step(torch.tensor(value)) == str(value)
    assert step.stats.replays


def test_a_sum_that_autograd_keeps_leaves_numbers_live() -> None:
    """Tensors of the result hold, in their history, the tensors that torch made of numbers."""
    weight = torch.nn.Parameter(torch.ones(2))

    def fn(x: Tensor) -> Tensor:
        return (weight * x.sum().item() / x.mean().item()).sum()

    step = fz.capture(fn)
    for value in ([1.0, 2.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]):
        assert torch.equal(step(torch.tensor(value)), fn(torch.tensor(value)))
    assert (step.stats.captures, step.stats.replays) == (1, 2)
