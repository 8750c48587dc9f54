"""The same graphs with hooks inside a captured step, and around and through captured forwards: equal to eager's."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functionalize as fz
from functionalize.errors import UncapturableError
from tests.step_backward.cases import CASES
from tests.step_backward.runs import EAGER, model, same

# These add a hook to a parameter at each call, so each call is another step.
ADD_HOOKS = {"only_some_inputs"}

# What no captured step can repeat, and what its second call says.
NOT_INSIDE = {"threads": r"backward runs in another thread .*call backward\(\) in that thread"}

# What no captured forward can equal, or repeat.
NOT_THROUGH = {
    "current_node_in_hook": "the node of an output is another one",
    "create_graph": "create_graph=True is refused",
    "checkpointed_dropout": "a forward in a module",
    "checkpointed_norm": "a forward in a module",
}
NOT_REPLAYED = {
    *ADD_HOOKS,
    "module_bw_hooks",  # adds hooks to modules
    "leaf_as_root",  # does not call the model
    "ckpt_early",  # gives its generators other states at each call
}


class CapturedModel:
    """A model whose forward, and those of its layers, are captured with their backwards."""

    def __init__(self, m: nn.Sequential) -> None:
        self._model, self._forward = m, fz.capture(m, backward=True)
        self._layers = [CapturedLayer(layer) for layer in m]

    def __call__(self, x: Tensor) -> Any:
        return self._forward(x)

    def __getitem__(self, i: int) -> Any:
        return self._layers[i]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    @property
    def replays(self) -> int:
        forwards = [self._forward, *(layer.forward for layer in self._layers)]
        return sum(forward.stats.backwards for forward in forwards)


class CapturedLayer:
    def __init__(self, layer: nn.Module) -> None:
        self.layer, self.forward = layer, fz.capture(layer, backward=True)

    def __call__(self, x: Tensor) -> Any:
        return self.forward(x)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)


def results(m: nn.Sequential, step: Callable[[Tensor], Any]) -> list[Any]:
    """What a step returns, all gradients and parameters and the generator, after each of five calls."""
    found = []
    torch.manual_seed(1)
    for _ in range(5):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of anomaly mode
            found.append(step(torch.randn(5, 3)))
        found.append([None if p.grad is None else p.grad.clone() for p in m.parameters()])
        found.append([p.detach().clone() for p in m.parameters()])
        found.append(torch.get_rng_state())
        for p in m.parameters():
            p.grad = None
    return found


def eager(case: Any) -> list[Any]:
    m = model()
    return results(m, lambda x: case(m, x, EAGER))


@pytest.mark.filterwarnings("ignore:<lambda> cannot be captured")
@pytest.mark.parametrize("name", [name for name in CASES if name not in ADD_HOOKS])
def test_inside_a_captured_step(name: str) -> None:
    m, case = model(), CASES[name]
    step = fz.capture(lambda x: case(m, x, EAGER), on_uncapturable="raise")
    if name in NOT_INSIDE:
        step(torch.ones(5, 3))
        with pytest.raises(UncapturableError, match=NOT_INSIDE[name]):
            step(torch.ones(5, 3))
        return
    assert same(results(m, step), eager(case))
    assert step.stats.replays >= 3


@pytest.mark.parametrize("name", [name for name in CASES if name not in NOT_THROUGH])
def test_through_captured_forwards(name: str) -> None:
    case, captured = CASES[name], CapturedModel(model())
    assert same(results(captured._model, lambda x: case(captured, x, EAGER)), eager(case))
    assert (captured.replays >= 3) == (name not in NOT_REPLAYED)
