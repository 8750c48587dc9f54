"""Python reads the shape, the dtype or a hook of a tensor that the step finds, and another call finds another one."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functionalize as fz
from tests.walk.cases import put
from tests.walk.trainer import faithful

ROWS = torch.ones(3, 4)


def with_buffer(tensor: Tensor) -> nn.Module:
    module = nn.Module()
    module.register_buffer("kept", tensor)
    return module


def with_list(tensor: Tensor) -> nn.Module:
    module = nn.Module()
    module.kept = [tensor]
    return module


def with_state() -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.state[optimizer.param_groups[0]["params"][0]]["kept"] = torch.ones(3)
    return optimizer


def of_state(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return optimizer.state[optimizer.param_groups[0]["params"][0]]


HOLDERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor], Callable[..., None]]] = {
    "an attribute": (
        lambda t: SimpleNamespace(kept=t),
        lambda v: v.kept,
        lambda v, t: setattr(v, "kept", t),
    ),
    "a list": (lambda t: [t], lambda v: v[0], lambda v, t: put(v, 0, t)),
    "a dict": (lambda t: {"kept": t}, lambda v: v["kept"], lambda v, t: put(v, "kept", t)),
    "a buffer": (with_buffer, lambda v: v.kept, lambda v, t: setattr(v, "kept", t)),
    "a list of a module": (with_list, lambda v: v.kept[0], lambda v, t: put(v.kept, 0, t)),
}
READS: dict[str, tuple[Callable[[Tensor], float], Tensor]] = {
    "shape": (lambda t: t.shape[0], torch.ones(5, 4)),
    "len": (len, torch.ones(5, 4)),
    "dtype": (lambda t: t.dtype.itemsize, ROWS.double()),
    "stride": (lambda t: t.stride(0), torch.ones(4, 3).t()),
    "storage_offset": (lambda t: t.storage_offset(), torch.ones(4, 4)[1:]),
    "device": (lambda t: len(t.device.type), torch.ones(3, 4, device="meta")),
    "requires_grad": (lambda t: 2.0 if t.requires_grad else 1.0, ROWS.clone().requires_grad_()),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_every_place_of_a_tensor_without_an_op(holder: str) -> None:
    make, read, change = HOLDERS[holder]
    captured = faithful(
        lambda: make(ROWS.clone()), lambda v: read(v).shape[0], lambda v: change(v, torch.ones(5))
    )
    assert captured.stats.replays >= 2 and "`" in captured.explain()


@pytest.mark.parametrize("name", READS)
def test_all_that_python_reads_of_it(name: str) -> None:
    read, other = READS[name]
    captured = faithful(
        lambda: SimpleNamespace(kept=ROWS.clone()),
        lambda v: read(v.kept),
        lambda v: setattr(v, "kept", other),
    )
    assert captured.stats.replays >= 2 and captured.stats.captures == 2


def grow(kept: list[Tensor]) -> None:
    kept[0].resize_(5)


def test_a_tensor_that_is_resized_in_place() -> None:
    captured = faithful(lambda: [torch.ones(3)], lambda v: v[0].numel(), grow)
    assert captured.stats.captures == 2


def test_optimizer_state_without_an_op() -> None:
    faithful(
        with_state,
        lambda v: of_state(v)["kept"].numel(),
        lambda v: put(of_state(v), "kept", torch.ones(7)),
    )


def test_a_dtype_to_cast_to() -> None:
    model = nn.Linear(3, 3)
    captured = fz.capture(lambda x: x.to(model.weight.dtype))
    x = torch.ones(3)
    assert [captured(x).dtype for _ in range(3)] == [torch.float32] * 3
    model.double()
    assert [captured(x).dtype for _ in range(3)] == [torch.float64] * 3


def test_a_tensor_of_an_op_that_begins_to_require_a_gradient() -> None:
    buffers = with_buffer(torch.ones(3))
    captured = fz.capture(lambda x: (x * buffers.kept).requires_grad)
    x = torch.ones(3)
    assert [captured(x) for _ in range(3)] == [False] * 3
    buffers.kept.requires_grad_()
    assert [captured(x) for _ in range(3)] == [True] * 3


def test_a_new_length_of_an_unread_tensor_is_another_program_of_its_class() -> None:
    """The integers of the guard are functions of the lengths, as those of inputs are."""
    kept = SimpleNamespace(mask=torch.ones(0))

    def step(x: Tensor) -> Tensor:
        return x * kept.mask.shape[0]

    captured = fz.capture(step, dynamic=True)
    for length in [4, 6, 9, 5, 7, 8, 11, 10, 12, 3]:
        kept.mask = torch.ones(2 * length)
        x = torch.arange(float(length))
        assert torch.equal(captured(x), x * 2 * length), length


# -- hooks of leaf tensors that no module holds ----------------------------------------------------


def hooked(scale: list[float], after: bool) -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(3))

    def multiply(p: Tensor) -> None:
        assert p.grad is not None
        p.grad.mul_(scale[0])

    if after:
        parameter.register_post_accumulate_grad_hook(multiply)
    else:
        parameter.register_hook(lambda g: g * scale[0])
    return parameter


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("way", ["closure", "argument", "optimizer"])
def test_a_hook_of_a_parameter_reads_a_number(way: str, after: bool) -> None:
    """Of a parameter that no module holds, found by a closure, by an argument or by an optimizer alone."""
    scale = [1.0]
    p = hooked(scale, after)
    optimizer = torch.optim.SGD([p], lr=0.0)

    def of_closure(x: Tensor) -> Tensor:
        (x * p).sum().backward()
        return taken(p)

    def of_argument(x: Tensor, p: nn.Parameter) -> Tensor:
        (x * p).sum().backward()
        return taken(p)

    def of_optimizer(x: Tensor) -> Tensor:
        (only,) = optimizer.param_groups[0]["params"]
        (x * only).sum().backward()
        return taken(only)

    step = {"closure": of_closure, "argument": of_argument, "optimizer": of_optimizer}[way]
    captured = fz.capture(step)
    for i in range(7):
        scale[0] = 1.0 if i < 4 else 3.0
        arguments = (torch.ones(3), p) if way == "argument" else (torch.ones(3),)
        assert captured(*arguments).tolist() == [scale[0]] * 3, i
    assert captured.stats.replays >= 2, captured.explain()


def taken(p: nn.Parameter) -> Tensor:
    gradient = p.grad
    p.grad = None
    assert gradient is not None
    return gradient
