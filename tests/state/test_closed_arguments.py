"""Arguments that cannot be opened, or whose classes have special methods that nobody but the step may call."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functionalize as fz
from functionalize.errors import UncapturableWarning


def step_of() -> Callable[..., Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)

    def step(x: Tensor, given: Any) -> Tensor:
        model.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        return loss.detach()

    return step


def cycle() -> Any:
    node: dict[str, Any] = {"value": 1.0}
    node["parent"] = node
    return node


def deep() -> Any:
    found: list[Any] = []
    for _ in range(2000):
        found = [found]
    return found


@pytest.mark.parametrize("make", [cycle, deep])
def test_what_cannot_be_opened_is_refused_by_name(make):
    step, captured = step_of(), fz.capture(step_of())
    x = torch.ones(2, 4)
    with pytest.warns(
        UncapturableWarning, match=r"takes `args\[1\]`, which contains itself, or has"
    ):
        assert [captured(x, make()) for _ in range(6)] == [step(x, make()) for _ in range(6)]
    assert captured(x, None) == step(x, None)
    strict = fz.capture(step_of(), on_uncapturable="raise")
    with pytest.raises(fz.errors.UncapturableError, match="keep it in an attribute"):
        strict(x, make())


def raising(*args: Any) -> Any:
    raise TypeError("not for others")


class Meta(type):
    __eq__ = raising  # and no `__hash__`


class Unhashable(metaclass=Meta):
    pass


class Text(str):
    __eq__ = raising
    __hash__ = str.__hash__


class Number(int):
    __eq__ = raising
    __hash__ = int.__hash__


class Listed(list):
    __iter__ = raising


class Compared:
    __eq__ = raising
    __hash__ = None


class Hashed:
    __eq__ = __hash__ = raising


CLASSES: dict[str, Callable[[], Any]] = {
    "metaclass": Unhashable,
    "text": lambda: Text("a"),
    "number": lambda: Number(3),
    "list": lambda: Listed([1.0]),
    "compared": Compared,
    "hashed": Hashed,
}


@pytest.mark.parametrize("make", CLASSES.values(), ids=CLASSES.keys())
@pytest.mark.parametrize("is_anew", [False, True])
@pytest.mark.filterwarnings("ignore::functionalize.errors.UncapturableWarning")
def test_special_methods_of_arguments_are_not_called(make, is_anew):
    step, captured = step_of(), fz.capture(step_of())
    x, given = torch.ones(2, 4), make()
    for _ in range(8):
        assert torch.equal(captured(x, make() if is_anew else given), step(x, None))


class Scaled:
    """Two of these are equal by their names, whatever their scales."""

    def __init__(self, name: str, scale: float) -> None:
        self.name, self.scale = name, scale

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scaled) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)


def test_objects_that_are_equal_by_code_of_the_user_are_others():
    captured = fz.capture(lambda x, given: x * given.scale, audit=False, allowance=None)
    for i in range(8):
        given = Scaled("a", 2.0 if i < 5 else 3.0)
        assert captured(torch.ones(2), given)[0] == given.scale


class Config(metaclass=Meta):
    scale = 2.0


def test_state_whose_class_compares_classes_is_refused_by_name():
    config = Config()
    captured = fz.capture(lambda x: x * config.scale)
    with pytest.warns(
        UncapturableWarning, match=r"reaches `config`, a Config, whose metaclass Meta"
    ):
        for _ in range(4):
            assert captured(torch.ones(2))[0] == 2


def test_calls_that_are_all_others_beside_one_that_cannot_be_opened():
    captured = fz.capture(step_of(), audit=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(45):
            captured(torch.ones(2, 4), f"text {i}")
            captured(torch.ones(2, 4), cycle())
    closed, each = (str(warning.message) for warning in caught)
    assert "which contains itself" in closed and "nearly every call is another one" in each
