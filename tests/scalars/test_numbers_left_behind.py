"""What a step leaves its numbers in: after every call each object holds the plain number that eager leaves there."""

from __future__ import annotations

import collections
import json
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import functionalize as fz


class WithSlots:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Pair(NamedTuple):
    value: Any
    twice: Any


class PairWithMethods(collections.namedtuple("PairWithMethods", "value twice")):
    __slots__ = ()

    def text(self) -> str:
        return f"{self.value:.3f}"


class OwnTuple(tuple):
    """Its instances have attributes."""


@dataclass(slots=True)
class Record:
    value: Any


@dataclass(frozen=True)
class Frozen:
    value: Any


def _own_tuple(value: Any) -> OwnTuple:
    made = OwnTuple([value])
    made.value = value
    return made


# What makes an object around a number, and what it holds.
HOLDERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "slots": (WithSlots, lambda made: made.value),
    "named tuple": (lambda v: Pair(v, v), lambda made: made[1]),
    "named tuple with methods": (lambda v: PairWithMethods(v, v), lambda made: made.twice),
    "tuple with attributes": (_own_tuple, lambda made: (made.value, *made)),
    "record with slots": (Record, lambda made: made.value),
    "frozen record": (Frozen, lambda made: made.value),
    "namespace": (lambda v: types.SimpleNamespace(value=v), lambda made: made.value),
    "default argument": (lambda v: lambda value=v: value, lambda made: made()),
    "keyword": (lambda v: lambda *, value=v: value, lambda made: made()),
    "closure": (lambda v: lambda: v, lambda made: made()),
    "partial": (lambda v: partial(float, v), lambda made: made.args),
    "exception": (lambda v: ValueError(v), lambda made: made.args),
    "slice": (lambda v: slice(v, None), lambda made: made.start),
    "key": (lambda v: {v: 1}, lambda made: list(made)),
    "key of an ordered dict": (lambda v: collections.OrderedDict([(v, 1)]), lambda made: list(made)),
    "set": (lambda v: {v}, lambda made: list(made)),
    "frozenset": (lambda v: frozenset([v]), lambda made: list(made)),
    "nested": (lambda v: [{"a": (frozenset([(v,)]), [Pair(v, (v,))])}], lambda made: made[0]["a"][1][0]),
}  # fmt: skip


def trained(
    wrap: Callable[[Any], Any], holder: str, what: str, where: str
) -> tuple[list[Any], Any]:
    """What is kept and returned after each call, as text, and the step. where: kept, returned, both or history."""
    make, content = HOLDERS[holder]
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    own, found = types.SimpleNamespace(n=0, kept=None, history=[]), []

    def step(x: Tensor) -> Any:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        own.n += 1
        made = make(loss.item() if what == "read" else own.n)
        if where in ("kept", "both"):
            own.kept = made
        if where == "history":
            own.history.append(made)
        return (loss.detach(), made) if where in ("returned", "both") else loss.detach()

    wrapped = wrap(step)
    for i in range(8):
        result = wrapped(torch.randn(3, 8, generator=torch.Generator().manual_seed(i)))
        now = [own.kept, *own.history] + ([result[1]] if type(result) is tuple else [])
        held = [content(each) for each in now if each is not None]
        found.append(repr(held) + json.dumps(held))  # `json` takes plain numbers alone
        if where == "both" and i < 3:  # while calls are recorded
            assert result[1] is own.kept
    return found, wrapped


@pytest.mark.parametrize("where", ["kept", "returned", "both", "history"])
@pytest.mark.parametrize("what", ["read", "counted"])
@pytest.mark.parametrize("holder", HOLDERS)
def test_objects_hold_plain_numbers(holder: str, what: str, where: str) -> None:
    eager, _ = trained(lambda fn: fn, holder, what, where)
    captured, _ = trained(partial(fz.capture, audit=False), holder, what, where)
    assert captured == eager


@pytest.mark.parametrize("make", [Pair, PairWithMethods])
def test_records_of_numbers_are_made_anew_by_replays(make: Callable[[Any, Any], Any]) -> None:
    def trained(wrap: Callable[[Any], Any]) -> tuple[list[Any], Any]:
        torch.manual_seed(0)
        model, own = nn.Linear(8, 4), types.SimpleNamespace(n=0, kept=None, history=[])

        def step(x: Tensor) -> Any:
            own.n += 1
            loss = model(x).square().mean().item()
            own.kept = make(own.n, loss)
            own.history.append(make(loss, own.n))
            return loss

        wrapped = wrap(step)
        found = [repr((wrapped(torch.ones(3, 8) * i), own.kept, own.history)) for i in range(12)]
        return found, wrapped

    eager, _ = trained(lambda fn: fn)
    captured, step = trained(fz.capture)
    assert captured == eager and step.stats.replays >= 4


@pytest.mark.parametrize("make", [torch.tensor, torch.as_tensor, lambda n: torch.tensor([1.0, n])])
def test_a_number_too_large_for_a_float32_is_infinite(make: Callable[[Any], Tensor]) -> None:
    step = fz.capture(lambda x: make(x.sum().item() * 1e300))
    for i in range(6):
        assert torch.equal(step(torch.ones(2)), make(2e300)), i
