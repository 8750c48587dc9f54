"""`narrow_masks`: gradients that nobody reads are not computed; the others keep every bit."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import functionalize as fz
from functionalize import passes
from functionalize.passes.narrow_masks import _PARTS, NarrowMasks
from tests.passes.helpers import graph_text, rewrite
from tests.steps import make_step

aten = torch.ops.aten
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "convolution_backward": lambda: nn.Conv2d(8, 8, 3),
    "native_batch_norm_backward": lambda: nn.BatchNorm2d(8),
    "native_group_norm_backward": lambda: nn.GroupNorm(2, 8),
    "native_layer_norm_backward": lambda: nn.LayerNorm(5),
}


def masks(program: fz.Program) -> list[list[bool]]:
    found = (n for n in program.graph.nodes if n.target in _PARTS)
    return [list(n.args[-1]) for n in found]


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_of_weights_that_are_dropped(name: str) -> None:
    def make() -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        layer = LAYERS[name]()
        return torch.randn(2, 8, 5, 5), *(p.detach() for p in layer.parameters())

    def fn(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        x, weight, bias = (t.detach().requires_grad_() for t in (x, weight, bias))
        layer = LAYERS[name]()
        y = torch.func.functional_call(layer, {"weight": weight, "bias": bias}, (x,))
        return torch.autograd.grad(y.square().sum(), (x, weight, bias))[0]

    done, after = rewrite(fn, make, NarrowMasks())
    assert done == 1 and masks(after) == [[True, False, False]]


def test_a_gradient_of_an_input_that_is_dropped() -> None:
    def make() -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        return torch.randn(2, 8, 5, 5), torch.randn(8, 8, 3, 3)

    def fn(x: Tensor, weight: Tensor) -> Tensor:
        x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
        y = torch.nn.functional.conv2d(x, weight)
        return torch.autograd.grad(y.square().sum(), (x, weight))[1]

    done, after = rewrite(fn, make, NarrowMasks())
    assert done == 1 and masks(after) == [[False, True, False]]


def test_a_gradient_that_the_step_drops() -> None:
    """The optimizer never sees the gradients of the first layer."""

    def train(x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        loss.backward()
        for parameter in model[0].parameters():
            parameter.grad = None
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.LayerNorm(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = fz.capture(train)
    for _ in range(3):
        step(torch.randn(3, 4, requires_grad=True))
    assert step.program is not None
    before = masks(step.program)
    after = masks(passes.run(step.program, "narrow_masks"))
    assert before[-1] == [True, True, True] and after[-1] == [True, False, False]
    assert after[0] == before[0]  # all of the last layer's are read


@pytest.mark.parametrize("frozen", ["weight", "both"])
def test_gradients_of_frozen_parameters_are_not_computed(frozen: str) -> None:
    """Autograd asks for none of both; weight and bias go together."""
    model = nn.Sequential(nn.Linear(5, 5), nn.LayerNorm(5))
    model[1].weight.requires_grad_(False)
    model[1].bias.requires_grad_(frozen != "both")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = fz.capture(make_step(model, optimizer))
    for _ in range(3):
        step(torch.randn(3, 5))
    assert step.program is not None
    (mask,) = masks(passes.run(step.program, "default,narrow_masks"))
    assert mask == [True, False, frozen != "both"]


def graph_of(target: Any, args: tuple[Any, ...], read: tuple[int, ...]) -> fx.GraphModule:
    """A graph that calls an op and returns some of its results."""
    graph = fx.Graph()
    named = ((f"x_{i}", a) for i, a in enumerate(args))
    taken = [graph.placeholder(name) if isinstance(a, Tensor) else a for name, a in named]
    whole = graph.call_function(target, tuple(taken))
    parts = [graph.call_function(operator.getitem, (whole, i)) for i in read]
    graph.output(tuple(parts))
    return fx.GraphModule(nn.Module(), graph)


LAYER_NORM = (torch.randn(3, 4), torch.randn(3, 4), [4], torch.randn(3, 1), torch.randn(3, 1))


@pytest.mark.parametrize(
    ("read", "mask"),
    [
        ((0, 1, 2), [True, True, True]),
        ((0, 1), [True, True, True]),  # weight and bias go together
        ((2,), [False, True, True]),
        ((0,), [True, False, False]),
    ],
)
def test_what_is_read_stays(read: tuple[int, ...], mask: list[bool]) -> None:
    weights = torch.randn(4), torch.randn(4)
    args = (*LAYER_NORM, *weights, [True, True, True])
    gm = graph_of(aten.native_layer_norm_backward.default, args, read)
    tensors = [a for a in args if isinstance(a, Tensor)]
    before = gm(*tensors)
    passes.on_graph_module("narrow_masks")(gm, tensors)
    assert str(mask) in graph_text(gm)
    assert all(torch.equal(a, b) for a, b in zip(before, gm(*tensors), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("size", [5, 17])
def test_the_parts_of_the_table_do_not_depend_on_each_other(
    dtype: torch.dtype, channels_last: bool, size: int
) -> None:
    torch.manual_seed(0)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    x = torch.randn(2, 8, size, size, dtype=dtype).to(memory_format=layout)
    g, w = torch.randn_like(x), torch.randn(8, dtype=dtype)
    kernel = torch.randn(8, 8, 3, 3, dtype=dtype)
    once, grid = [1, 1], torch.rand(2, size, size, 2, dtype=dtype)
    _, mean, inverse = aten.native_batch_norm(x, w, w, None, None, True, 0.1, 1e-5)
    _, of_groups, spread = aten.native_group_norm(x, w, w, 2, 8, size * size, 4, 1e-5)
    _, of_rows, width = aten.native_layer_norm(x, [size], None, None, 1e-5)
    row = torch.randn(size, dtype=dtype)
    arguments: dict[Any, tuple[Any, ...]] = {
        aten.convolution_backward.default: (
            *(g, x, kernel, [8], once, once, once),
            *(False, [0, 0], 1),
        ),
        aten.grid_sampler_2d_backward.default: (g, x, grid, 0, 0, False),
        aten.native_batch_norm_backward.default: (g, x, w, None, None, mean, inverse, True, 1e-5),
        aten.native_group_norm_backward.default: (
            *(g, x, of_groups, spread),
            *(w, 2, 8, size * size, 4),
        ),
        aten.native_layer_norm_backward.default: (g, x, [size], of_rows, width, row, row),
    }
    assert arguments.keys() == _PARTS.keys()
    for op, args in arguments.items():
        if op is aten.grid_sampler_2d_backward.default and dtype is torch.bfloat16:
            continue  # torch has no such kernel
        results = 2 if op is aten.grid_sampler_2d_backward.default else 3
        whole = op(*args, [True] * results)
        for part in _PARTS[op]:
            mask = [i not in part for i in range(results)]
            for i, value in enumerate(op(*args, mask)):
                if mask[i]:
                    assert torch.equal(value, whole[i]), (op, part, i)
