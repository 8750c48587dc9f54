"""Attributes of tensors that come as arguments or are returned, and what replays return in place of new tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functionalize as fz
from functionalize.errors import UncapturableWarning


class Own(torch.Tensor):
    """A subclass without tensors inside."""


def called(
    fn: Callable[[Any], Any], made: Callable[[int], Any], wrap: Any
) -> tuple[list[Any], Any]:
    step, found = wrap(fn), []
    for i in range(10):
        x = made(i)
        result = step(x)
        grad = (
            result.grad.tolist()
            if isinstance(result, Tensor) and result.is_leaf and result.grad is not None
            else None
        )
        own = [vars(x).copy(), vars(result).copy()] if type(x) is Tensor else []
        found.append(
            (
                type(result),
                result.tolist(),
                result.requires_grad,
                grad,
                own,
                x.grad is None or x.grad.tolist(),
            )
        )
    return found, step


def captured(fn: Callable[[Any], Any], made: Callable[[int], Any]) -> tuple[str, Any]:
    """What the user is told, and the step; each call does what eager does."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found, step = called(fn, made, lambda fn: fz.capture(fn, audit=False))
    assert found == called(fn, made, lambda fn: fn)[0]
    return "\n".join(
        str(each.message) for each in said if each.category is UncapturableWarning
    ), step


def batch(i: int) -> Tensor:
    return torch.ones(1, 2) * i


def with_weight(i: int) -> Tensor:
    x = batch(i)
    x.weight = 1.0 + i // 5  # type: ignore[attr-defined]
    return x


def test_an_attribute_of_an_argument_that_the_step_reads() -> None:
    _, step = captured(lambda x: x * x.weight, with_weight)
    assert step.stats.captures == 2 and step.stats.replays >= 6, step.explain()


def test_an_attribute_that_some_arguments_have() -> None:
    _, step = captured(
        lambda x: x * 2 if hasattr(x, "weight") else x,
        lambda i: (with_weight if i % 4 == 3 else batch)(i),
    )
    assert step.stats.replays >= 4, step.explain()


def mark(x: Any) -> Tensor:
    x.seen = True
    return x * 2


def test_an_attribute_that_the_step_assigns_to_an_argument() -> None:
    said, _ = captured(mark, batch)
    assert "assigns `seen` to the argument `x`, a tensor" in said
    assert "x.seen = True" in said


def tagged(x: Any) -> Any:
    y = x * 2
    y.tag = "t"
    return y


RETURNED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "an attribute": (tagged, "returns a tensor with the attribute `tag`"),
    "a leaf": (
        lambda x: x.clone().requires_grad_(),
        "returns a leaf that it has made and that requires a gradient",
    ),
    "a parameter": (lambda x: nn.Parameter(x * 2), "returns a Parameter that it has made"),
    "a subclass": (lambda x: (x * 2).as_subclass(Own), "returns an Own that it has made"),
}


@pytest.mark.parametrize("name", RETURNED)
def test_a_new_tensor_that_a_replay_would_return_as_a_plain_one(name: str) -> None:
    fn, expected = RETURNED[name]
    said, step = captured(fn, batch)
    assert expected in said and not step.stats.replays


MODEL = nn.Linear(2, 1)


def test_a_batch_that_requires_a_gradient_for_a_while() -> None:
    def attack(x: Tensor) -> Tensor:
        x.requires_grad_()
        MODEL.zero_grad()
        loss = MODEL(x).square().sum()
        loss.backward()
        x.requires_grad_(False)
        return loss.detach()

    captured(attack, batch)


def test_an_inference_tensor_raises_as_in_eager() -> None:
    def train(x: Tensor) -> Tensor:
        MODEL.zero_grad()
        loss = MODEL(x).square().sum()
        loss.backward()
        return loss.detach()

    step = fz.capture(train, audit=False)
    for i in range(5):
        step(batch(i))
    assert step.stats.replays
    with torch.inference_mode():
        x = batch(5)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
        step(x)
    step(batch(6))


def test_a_class_for_which_torch_calls_code_of_the_user() -> None:
    calls: list[Any] = []

    class Counted(torch.Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            calls.append(func.__name__)
            return super().__torch_function__(func, types, args, kwargs or {})

    def step(x: Tensor) -> Tensor:
        return (x * 2).sum()

    batches = [batch(i).as_subclass(Counted) for i in range(4)]
    eager = [(step(x), len(calls)) for x in batches]
    calls.clear()
    captured = fz.capture(step)
    with pytest.warns(
        UncapturableWarning, match=r"takes a Counted, a tensor for which torch calls"
    ):
        found = [(captured(x), len(calls)) for x in batches]
    assert [count for _, count in found] == [count for _, count in eager]
    assert {type(x) for x, _ in found} == {Counted}
    assert captured(batch(1)) == step(batch(1))  # the plain ones are captured
    assert captured.stats.warmups + captured.stats.captures == 1
    strict = fz.capture(step, on_uncapturable="raise")
    with pytest.raises(fz.errors.UncapturableError, match="as_subclass"):
        strict(batches[0])


class Counted(torch.Tensor):
    """A class for which torch calls code of the user's, which counts that."""

    calls = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        Counted.calls += 1
        return super().__torch_function__(func, types, args, kwargs or {})


class Reaches:
    """A model, and a tensor of that class that the step finds. where: in what."""

    def __init__(self, where: str) -> None:
        torch.manual_seed(0)
        Counted.calls = 0
        self.where, self.model, made = where, nn.Linear(4, 3), torch.ones(3).as_subclass(Counted)
        if where == "buffer":
            self.model.register_buffer("found", made)
        elif where == "parameter":
            self.model.bias = nn.Parameter(made)
        elif where == "table":
            self.table = {"found": [made]}
        elif where == "attribute":
            self.found = made
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        if where == "optimizer":
            self.optimizer.state["found"] = made

    def step(self, x: Tensor) -> Tensor:
        y = self.model(x)
        if self.where == "buffer":
            y = y * self.model.found
        elif self.where == "table":
            y = y * self.table["found"][0]
        elif self.where == "attribute":
            y = y * self.found
        elif self.where == "optimizer":
            y = y * self.optimizer.state["found"]
        y.sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return y.detach().as_subclass(Tensor)


@pytest.mark.parametrize("where", ["buffer", "parameter", "table", "attribute", "optimizer"])
def test_a_found_tensor_of_such_a_class_is_refused_before_anything_looks_at_it(where: str) -> None:
    def calls(wrap: Callable[[Any], Any]) -> list[Any]:
        reaches = Reaches(where)
        step = wrap(reaches.step)
        return [(step(torch.ones(2, 4)).tolist(), Counted.calls) for _ in range(6)]

    eager = calls(lambda fn: fn)
    with pytest.warns(UncapturableWarning, match=r"a Counted, a tensor for which torch calls"):
        assert calls(fz.capture) == eager
