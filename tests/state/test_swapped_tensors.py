"""torch swaps tensors to which no weak reference exists: between calls, a captured step has none to a parameter.

`torch.utils.swap_tensors` gives a parameter another tensor, and leaves it the same object: guards must notice.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import functionalize as fz
from tests.ranks import run_on_ranks

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "audits": {"audit": 1},
    "no audits": {"audit": False},
    "at once": {"allowance": None},
    "passes": {"passes": "default", "allowance": None},
    "backward": {"backward": True},
    "audited backward": {"backward": True, "audit": 1},
}


@pytest.fixture
def swapping() -> Iterator[None]:
    """`load_state_dict`, `.to()` and the like swap parameters."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def weak_references(model: nn.Module) -> list[int]:
    """Of each parameter."""
    return [len(weakref.getweakrefs(p)) for p in model.parameters()]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_parameters_have_no_weak_reference(options: dict[str, Any]) -> None:
    """After warm-ups, recordings, replays and audits alike, without the help of the garbage collector."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)

    def forward(x: Tensor) -> Tensor:
        return model(x).square().sum()

    def step(x: Tensor) -> Tensor:
        loss = forward(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    captured = fz.capture(forward if "backward" in options else step, **options)
    gc.disable()
    try:
        for i in range(8):
            loss = captured(torch.full((4 + i % 2, 3), float(i)))
            if "backward" in options:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            assert not any(weak_references(model)), i
    finally:
        gc.enable()
    assert captured.stats.replays + captured.stats.audits >= 2


def load(model: nn.Module, other: nn.Module) -> None:
    """Other values."""
    model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()})


def swap(model: nn.Module, other: nn.Module) -> None:
    """Each parameter with that of another module."""
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        one.grad = None
        torch.utils.swap_tensors(one, two)


def swap_for_a_view(model: nn.Module, other: nn.Module) -> None:
    """A parameter with a window on a larger storage, at other strides."""
    weight = next(model.parameters())
    weight.grad = None
    base = torch.full((weight.shape[1] + 1, weight.shape[0]), 0.1)
    torch.utils.swap_tensors(weight, nn.Parameter(base[1:].t()))


def to_double(model: nn.Module, other: nn.Module) -> None:
    """Another dtype, and back."""
    model.double()
    model.float()


def freeze(model: nn.Module, other: nn.Module) -> None:
    """A parameter that needs no gradient any more."""
    weight = next(model.parameters())
    weight.grad = None
    torch.utils.swap_tensors(weight, nn.Parameter(weight.detach().clone(), requires_grad=False))


CHANGES = [load, swap, swap_for_a_view, to_double, freeze]


@pytest.mark.parametrize("options", [{}, {"audit": False}, {"backward": True}])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_after_a_swap(
    change: Callable[[nn.Module, nn.Module], None], options: dict[str, Any], swapping: None
) -> None:
    """Twelve more calls, with two more swaps, are those of eager."""

    def run(is_captured: bool) -> list[Any]:
        torch.manual_seed(0)
        model, other = (nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3)) for _ in range(2))
        optimizer = torch.optim.SGD(model.parameters(), 0.001)

        def forward(x: Tensor) -> Tensor:
            return model(x).square().mean()

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = forward(x)
            loss.backward()
            optimizer.step()
            return loss.detach()

        called: Any = step
        if is_captured and "backward" in options:
            forward = fz.capture(forward, **options)
        elif is_captured:
            called = fz.capture(step, **options)
        found: list[Any] = []
        for i in range(20):
            if i in (8, 12, 14):
                change(model, other)
            found.append(called(torch.full((2, 6), float(i % 3))).item())
        found += [p.tolist() for each in (model, other) for p in each.parameters()]
        return [*found, *(p.grad is None for p in model.parameters())]

    assert run(True) == run(False)


def _sharded_losses(captures: bool, how: str) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    fully_shard(model[0])
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    called = fz.capture(step, audit=False) if captures else step
    found = [called(torch.ones(2, 4)).item() for _ in range(6)]
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        if how == "load":
            load(model, model)
        else:
            weight = model[0].weight
            torch.utils.swap_tensors(weight, nn.Parameter(weight.detach() * 2))
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    return [*found, *(called(torch.ones(2, 4)).item() for _ in range(6))]


@pytest.mark.parametrize("how", ["load", "swap"])
def test_parameters_of_fsdp_can_be_swapped(how: str) -> None:
    eager = run_on_ranks(_sharded_losses, False, how, world=2)
    assert run_on_ranks(_sharded_losses, True, how, world=2) == eager
