"""What a callable can reach, and the source of every tensor found there."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from functionalize.ir.inputs import Call
from functionalize.state.sources import candidates, parameters, slots
from functionalize.walk.walker import reachable

MODEL = nn.Linear(2, 2)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.1)


def in_globals(x: Tensor) -> Tensor:
    return MODEL(x) + len(OPTIMIZER.param_groups)


def through_a_helper(x: Tensor) -> Tensor:
    return in_globals(x)


def in_a_nested_function(x: Tensor) -> Any:
    def inner() -> Tensor:
        return MODEL(x) + len(OPTIMIZER.param_groups)

    return inner()


def in_defaults(x: Tensor, model: nn.Module = MODEL, *, optimizer: Any = OPTIMIZER) -> Tensor:
    return model(x)


def takes_both(holder: dict[str, Any], x: Tensor) -> Tensor:
    return holder["model"](x)


class Trainer:
    def __init__(self) -> None:
        self.parts = {"model": MODEL, "more": [OPTIMIZER]}

    def step(self, x: Tensor) -> Tensor:
        return self.parts["model"](x)

    def __call__(self, x: Tensor) -> Tensor:
        return self.step(x)


def in_a_closure() -> Any:
    model, optimizer = MODEL, OPTIMIZER
    return lambda x: (model(x), optimizer.step())


@pytest.mark.parametrize(
    "fn",
    [
        in_globals,
        through_a_helper,
        in_a_nested_function,
        in_defaults,
        functools.partial(takes_both, {"model": MODEL, "optimizer": OPTIMIZER}),
        Trainer().step,
        Trainer(),
        in_a_closure(),
        functools.wraps(in_globals)(lambda *a: in_globals(*a)),
    ],
)
def test_modules_and_optimizers_are_found(fn: Any) -> None:
    roots = reachable(fn)
    assert list(roots.modules.values()) == [MODEL]
    assert list(roots.optimizers.values()) == [OPTIMIZER]


def test_arguments_are_searched_and_inner_modules_are_not_roots() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    roots = reachable(lambda m, inner: m, (model, model[0]))
    assert list(roots.modules.values()) == [model]


def test_every_tensor_has_a_source_that_finds_it_again() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), fused=True)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    leaves = [torch.randn(4, 3)]
    roots = reachable(lambda x: (model(x), optimizer.step()), leaves)
    held = list(slots(roots, list(parameters(roots, leaves))))
    found = list(candidates(roots, leaves, held))
    for name, source, tensor in found:
        again = source.resolve(Call(leaves, []))
        assert torch.equal(again, tensor), name
    names = {name for name, _, _ in found}
    assert names >= {
        "args_0",
        "model.0.weight",
        "model.0.weight.grad",
        "model.1.running_mean",
        "optimizer.lr_0",
        "optimizer.0.0.exp_avg",
    }


def test_a_replaced_parameter_is_seen() -> None:
    model = nn.Linear(2, 2)
    _, source, _ = next(candidates(reachable(model.forward), (), ()))
    model.weight = nn.Parameter(torch.ones(2, 2))
    assert source.resolve(Call((), [])) is model.weight
