"""Which layers are equal, and what a layer that is left out returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from functionalize.equal_layers.layers import FIRST, LAST, EqualLayers, are_equal
from functionalize.equal_layers.short_run import ShortRun
from tests.equal_layers.models import WIDTH, Layer, Stack


def named(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(f"model.{name}" if name else "model", m) for name, m in model.named_modules()]


def scaled(by: float) -> Callable[..., Tensor]:
    return lambda module, args, out: out * by


@dataclasses.dataclass(frozen=True)
class Fixed:
    value: int


def test_a_run_leaves_out_what_is_between_its_first_and_last_layers() -> None:
    found = EqualLayers.of(named(Stack(layers=10)))
    (run,) = found.runs
    assert run.names == tuple(f"model.layers.{i}" for i in range(10))
    assert list(run.left_out) == list(range(FIRST, 10 - LAST))
    assert found.differing == {Layer: {"number"}}
    assert found.of_module("model.layers.7.inner") == (0, 7)
    assert found.stand_in((0, 7)) == (0, FIRST - 1)
    assert found.stand_in((0, 9)) == (0, 9)
    name = "model.layers.7.inner.weight"
    assert found.name_in_stand_in(name, found.of_tensor(name)) == "model.layers.2.inner.weight"


def test_short_runs_of_layers_and_layers_apart_are_none() -> None:
    assert EqualLayers.of(named(Stack(layers=FIRST + LAST + 2))).runs == ()
    wide: Any = lambda i: Layer(i) if i != 6 else nn.Sequential(Layer(i))  # noqa: E731
    assert EqualLayers.of(named(Stack(wide, layers=12))).runs == ()


@pytest.mark.parametrize(
    ("change", "equal"),
    [
        (lambda layer: layer.eval(), False),
        (lambda layer: layer.inner.requires_grad_(False), False),
        (lambda layer: layer.double(), False),
        (lambda layer: setattr(layer, "other", 3), False),
        (lambda layer: setattr(layer, "number", [1, 2]), False),
        (lambda layer: setattr(layer, "number", 7), True),
        (lambda layer: layer.register_forward_hook(scaled(2)), False),
        (lambda layer: setattr(layer, "forward", partial(Layer.forward, layer)), False),
        (lambda layer: setattr(layer, "inner", nn.Linear(WIDTH, WIDTH, bias=False)), False),
    ],
)
def test_what_makes_layers_differ(change: Callable[[Any], Any], equal: bool) -> None:
    one, other = Layer(0), Layer(1)
    assert are_equal(one, other, {})
    change(other)
    assert are_equal(one, other, {}) is equal


@pytest.mark.parametrize(
    ("values", "equal"),
    [
        ((torch.Size([3]), torch.Size([3])), True),
        ((Fixed(3), Fixed(3)), True),
        ((Fixed(3), Fixed(4)), False),
        ((object(), object()), False),
        (([1, {"a": 2}], [1, {"a": 2}]), True),
        (({3: "x"}, {3: "x"}), True),
        (({3: "x"}, {4: "x"}), False),
        ((scaled(2), scaled(2)), True),
        ((scaled(2), scaled(3)), False),
        ((torch.ones(3), torch.zeros(3)), True),
        ((torch.ones(3), torch.ones(4)), False),
        ((partial(torch.add, alpha=2), partial(torch.add, alpha=3)), False),
    ],
)
def test_values_of_attributes(values: tuple[Any, Any], equal: bool) -> None:
    layers = Layer(0), Layer(1)
    for layer, value in zip(layers, values, strict=True):
        layer.kept = value
    assert are_equal(*layers, {}) is equal


class Paired(nn.Module):
    """Returns two tensors and a constant; the next layer gets the tensors."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, pair: tuple[Tensor, Tensor], *, scale: float) -> Any:
        x, y = pair
        return (self.inner(x) * scale, y + 1), None


def test_layers_return_what_they_get() -> None:
    model = Stack(Paired, layers=10)
    short, called = ShortRun(EqualLayers.of(named(model))), []
    for n, layer in enumerate(model.layers):
        layer.inner.register_forward_hook(lambda *_, n=n: called.append(n))
    pair = torch.ones(2, WIDTH), torch.ones(2)
    with short:
        for layer in model.layers:
            pair, nothing = layer(pair, scale=2.0)
            assert nothing is None
    assert called == [0, 1, 2, 8, 9]
    assert short.ran_whole is None
    assert pair[1].eq(6).all()


@pytest.mark.parametrize(
    ("scales", "why"),
    [
        ([2.0] * 5 + [3.0] * 5, "`model.layers.5` is called with other arguments"),
        ([2.0] * 10, "`model.layers.3` would return a tensor that the layer after it does not get"),
    ],
)
def test_a_layer_with_other_arguments_runs(scales: list[float], why: str) -> None:
    model = Stack(Paired, layers=10)
    short = ShortRun(EqualLayers.of(named(model)))
    pair = torch.ones(2, WIDTH), torch.ones(2)
    with short:
        for layer, scale in zip(model.layers, scales, strict=True):
            pair, _ = layer(pair, scale=scale)
            if scales[-1] == 2.0:
                pair = pair[0], pair[1].clone()
    assert short.ran_whole == why


def test_what_differs_is_noted_when_it_is_read() -> None:
    model = Stack(layers=10)
    short = ShortRun(EqualLayers.of(named(model)))
    with short:
        model(torch.ones(2, WIDTH))
        assert short.read == set()
        assert model.layers[4].number == 4
        model.layers[4].number = 5
    assert short.read == {"Layer.number"}
    assert "number" not in vars(Layer)
    assert model.layers[4].number == 5
    assert all("_compiled_call_impl" not in vars(m) for m in model.modules())
