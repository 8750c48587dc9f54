"""Whose a function and a class are: decided by the namespace in which the code was run, not by a name it was given.

Code that is run in a dict without `__name__` makes classes of "builtins" and functions of no module; `functools.wraps`
gives a function of a script the module of a library. All that they read counts as that of any other code of a script.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import functionalize as fz
from functionalize.util.packages import is_users_class, is_users_function

pytestmark = pytest.mark.usefixtures("ample_allowance")

SCRIPT = """
class Scaled:
    factor = 1.0
    def __init__(self): self.own = 1.0
    def __rmul__(self, other): return other * self.factor * self.own
    def __float__(self): return self.factor
    def __len__(self): return int(self.factor)
    def __call__(self, loss): return loss * self.factor
    @property
    def doubled(self): return self.factor * 2
    def __getattr__(self, name):
        if name == "made": return self.factor * 3
        raise AttributeError(name)
    @classmethod
    def of_class(cls): return cls.factor
    @staticmethod
    def of_none(): return Scaled.factor

class Derived(Scaled): pass

class Meta(type):
    factor = 1.0
    def __len__(cls): return int(cls.factor)
    @property
    def doubled(cls): return cls.factor * 2

class WithMeta(metaclass=Meta): pass

class Layer(base):
    factor = 1.0
    def forward(self, loss): return loss * self.factor

def scaled(loss): return loss * FACTOR

FACTOR = 1.0
value, derived, layer = Scaled(), Derived(), Layer()
"""
SPACES: dict[str, dict[str, Any]] = {
    "no name": {},
    "a name": {"__name__": "script"},
    "builtins": {"__name__": "builtins"},
    "a library": {"__name__": "collections"},
    "torch": {"__name__": "torch.other"},
}


def _of_class(space: Any) -> None:
    space.Scaled.factor = 3.0


def _of_meta(space: Any) -> None:
    space.Meta.factor = 3.0


def _of_space(space: Any) -> None:
    space.__dict__["FACTOR"] = 3.0


def _method(space: Any) -> None:
    space.Scaled.__call__ = lambda self, loss: loss * 5


READS: dict[str, tuple[Callable[[Any, Tensor], Any], Callable[[Any], None]]] = {
    "an operator": (lambda s, loss: loss.item() * s.value * loss, _of_class),
    "float": (lambda s, loss: loss * float(s.value), _of_class),
    "len": (lambda s, loss: loss * len(s.value), _of_class),
    "call": (lambda s, loss: s.value(loss), _of_class),
    "another method": (lambda s, loss: s.value(loss), _method),
    "property": (lambda s, loss: loss * s.value.doubled, _of_class),
    "getattr": (lambda s, loss: loss * s.value.made, _of_class),
    "class method": (lambda s, loss: loss * s.derived.of_class(), _of_class),
    "static method": (lambda s, loss: loss * s.Scaled.of_none(), _of_class),
    "an object": (
        lambda s, loss: s.derived(loss) * s.value.own,
        lambda s: vars(s.value).update(own=2),
    ),
    "len of a class": (lambda s, loss: loss * len(s.WithMeta), _of_meta),
    "property of a class": (lambda s, loss: loss * s.WithMeta.doubled, _of_meta),
    "a module": (lambda s, loss: s.layer(loss), lambda s: setattr(s.Layer, "factor", 3.0)),
    "a global": (lambda s, loss: s.scaled(loss), _of_space),
}


def _losses(
    read: Callable[[Any, Tensor], Any],
    change: Callable[[Any], None],
    space: Any,
    capture: Callable[[Any], Any],
) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)

    def step(x: Tensor) -> Tensor:
        loss = read(space, model(x).square().mean())
        loss.backward()
        return loss.detach()

    captured, found = capture(step), []
    for i in range(14):
        model.zero_grad()
        found += [captured(torch.full((2, 3), 0.5)).item(), *model.weight.grad.flatten().tolist()]  # type: ignore[union-attr]
        if i == 8:
            change(space)
    return found, captured


def _twins(read: Any, change: Any, make: Callable[[], Any]) -> None:
    capture = functools.partial(
        fz.capture, audit=False
    )  # which would find the difference, but not always
    (expected, _), (found, step) = (
        _losses(read, change, make(), c) for c in (lambda s: s, capture)
    )
    assert found == expected
    assert step.stats.replays > 6, step.explain()


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("name", SPACES)
def test_code_without_a_file(name: str, read: str) -> None:
    def make() -> Any:
        space = types.SimpleNamespace(**SPACES[name])
        vars(space)["base"] = nn.Module
        exec(SCRIPT, vars(space))
        return space

    _twins(*READS[read], make)


def _wrapped(function: Any, space: Any) -> Any:
    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) * space.scale

    return inner


@pytest.mark.parametrize("function", [F.relu, math.fabs, torch.relu], ids=["F", "math", "torch"])
def test_wrapper_of_a_function_of_a_library(function: Any) -> None:
    def make() -> Any:
        space = types.SimpleNamespace(scale=1.0)
        space.call = _wrapped(function, space)
        return space

    is_of_tensors = function is not math.fabs
    read = lambda s, loss: loss * s.call(loss if is_of_tensors else 2.0)  # noqa: E731
    _twins(read, lambda s: setattr(s, "scale", 3.0), make)


def test_class_that_gives_itself_another_module() -> None:
    def make() -> Any:
        class Public:
            factor = 1.0

            def scaled(self, loss: Any) -> Any:
                return loss * self.factor

        Public.__module__ = "torch.nn"
        return Public()

    _twins(lambda v, loss: v.scaled(loss), lambda v: setattr(type(v), "factor", 3.0), make)


@pytest.mark.parametrize("kind", ["function", "method"])
def test_first_attribute_of_a_function(kind: str) -> None:
    def make() -> Any:
        class Holder:
            def scaled(self, loss: Any) -> Any:
                return loss

        return Holder

    def read(holder: Any, loss: Any) -> Any:
        function = holder.scaled if kind == "function" else holder().scaled.__func__
        return loss * getattr(function, "factor", 1.0)

    _twins(read, lambda holder: setattr(holder.scaled, "factor", 3.0), make)


def test_counts_of_a_cache() -> None:
    """They change at every call: the step is refused, where it was replayed with the counts of its recording."""

    @functools.lru_cache(None)
    def doubled(n: int) -> float:
        return n * 2.0

    def step(x: Tensor) -> Tensor:
        return x.sum() * doubled(3) * (1 + doubled.cache_info().hits)

    captured, found = fz.capture(step, audit=False), []
    for _ in range(8):
        found.append(captured(torch.ones(2)).item())
    assert found == [12.0 * (1 + i) for i in range(8)]
    (error,) = captured.core.refused.values()
    assert "changes Python state" in str(error)


def test_whose() -> None:
    space: dict[str, Any] = {"base": nn.Module}
    exec(SCRIPT, space)
    assert is_users_class(space["Scaled"]) and is_users_function(space["scaled"])
    assert is_users_class(dataclasses.make_dataclass("Made", ["a"]))
    assert is_users_class(namedtuple("Pair", "a b"))
    assert is_users_function(_wrapped(F.relu, None))
    libraries = [
        nn.Linear,
        torch.optim.AdamW,
        dict,
        types.SimpleNamespace,
        functools.partial,
        Tensor,
    ]
    assert not any(map(is_users_class, libraries))
    assert not any(map(is_users_function, [F.relu, nn.Linear.forward, dataclasses.asdict]))
    assert not is_users_function(torch.optim.SGD.step)
