"""Attributes that code sets by a text, not as `obj.name`: immutable records do, in their constructors."""

from __future__ import annotations

import queue
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import functionalize as fz
from functionalize.walk.code_names import names_in


class Frozen:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        object.__setattr__(self, "value", value)

    def __setattr__(self, *args: Any) -> None:
        raise AttributeError("frozen")


class OfBase:
    def __init__(self, value: Any) -> None:
        super().__setattr__("value", value)


class BehindAProperty:
    def __init__(self, value: Any) -> None:
        for name in ("_value",):
            object.__setattr__(self, name, value)

    value = property(lambda self: self._value)


class OfNew:
    def __new__(cls, value: Any) -> OfNew:
        made = object.__new__(cls)
        object.__setattr__(made, "value", value)
        return made


def kept(own: Any, made: Any) -> None:
    own.kept = made


def in_place(own: Any, number: Any) -> None:
    object.__setattr__(own.kept, "value", number)


def by_its_method(own: Any, number: Any) -> None:
    own.kept.__setattr__("value", number)


def trained(wrap: Callable[[Any], Any], leave: Callable[[Any, Any], Any]) -> list[Any]:
    own, found = types.SimpleNamespace(n=0, kept=OfBase(0)), []

    def step(x: torch.Tensor) -> torch.Tensor:
        own.n += 1
        leave(own, own.n)
        return x.sin()

    wrapped = wrap(step)
    for _ in range(10):
        wrapped(torch.ones(2))
        found.append(own.kept.value)
    return found


@pytest.mark.parametrize(
    "leave",
    [
        lambda own, n: kept(own, Frozen(n)),
        lambda own, n: kept(own, OfBase(n)),
        lambda own, n: kept(own, BehindAProperty(n)),
        lambda own, n: kept(own, OfNew(n)),
        in_place,
        by_its_method,
    ],
    ids=["slots", "base", "property", "new", "in_place", "by_its_method"],
)
def test_attributes_that_are_set_by_their_text(leave: Callable[[Any, Any], Any]) -> None:
    assert trained(partial(fz.capture, audit=False), leave) == trained(lambda fn: fn, leave)


def _by_data(self: Any, values: Any, mode: str = "train") -> None:
    for name, value in values.items():
        object.__setattr__(self, name, value)


def _by_text(self: Any, value: Any) -> None:
    object.__setattr__(self, "scale", value + 1)
    self.__setattr__("shift", [value])
    getattr(self, "read", 0)


def _passing_on() -> Any:
    class Checked:
        def __setattr__(self, name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

    return Checked.__setattr__


def test_the_argument_that_names_an_attribute() -> None:
    """Another text beside a name that is data, such as a default, does not make it known."""
    assert names_in(_by_data.__code__).is_dynamic
    found = names_in(_by_text.__code__)
    assert {"scale", "shift", "read"} <= found.names and not found.is_dynamic
    assert not names_in(_passing_on().__code__).is_dynamic


def test_a_queue_whose_elements_cannot_be_seen() -> None:
    own, found = types.SimpleNamespace(n=0, kept=None), []

    @fz.capture(audit=False)
    def step(x: torch.Tensor) -> torch.Tensor:
        own.n += 1
        made: Any = queue.SimpleQueue()
        made.put(own.n)
        own.kept = made
        return x.sin()

    with pytest.warns(fz.errors.UncapturableWarning, match="own.kept"):
        for _ in range(8):
            step(torch.ones(2))
            found.append(own.kept.get())
            own.kept.put(found[-1])
    assert found == [*range(1, 9)]


@pytest.mark.parametrize("number", [False, True])
def test_a_result_that_contains_itself(number: bool) -> None:
    """Eager returns it; no replay makes such an object, so that the step runs eagerly."""

    @fz.capture
    def step(x: torch.Tensor) -> list[Any]:
        found: list[Any] = [x.sum().item() if number else x.sin()]
        found.append({"parent": found})
        return found

    with pytest.warns(
        fz.errors.UncapturableWarning, match="returns an object that contains itself"
    ):
        for _ in range(8):
            found = step(torch.ones(2))
            assert found[1]["parent"] is found and type(found[0]) in (float, torch.Tensor)
