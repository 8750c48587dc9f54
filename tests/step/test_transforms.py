"""Inside a transform of torch.func, or forward-mode AD, a captured callable is a part of it: it runs as in eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

import functionalize as fz

# Forward-mode AD imports what torch compiles by TorchScript.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.torch.jit.script. is deprecated:DeprecationWarning"
)

Run = Callable[[Callable[[Tensor], Tensor]], object]


def dual(fn: Callable[[Tensor], Tensor]) -> object:
    with forward_ad.dual_level():
        out = fn(forward_ad.make_dual(torch.ones(2, 3), torch.ones(2, 3)))
        return forward_ad.unpack_dual(out)


def jvp(fn: Callable[[Tensor], Tensor]) -> object:
    return torch.func.jvp(fn, (torch.ones(2, 3),), (torch.ones(2, 3),))


def vmap(fn: Callable[[Tensor], Tensor]) -> object:
    return torch.func.vmap(fn)(torch.ones(4, 2, 3))


def grad(fn: Callable[[Tensor], Tensor]) -> object:
    return torch.func.grad(lambda x: fn(x).sum())(torch.ones(2, 3))


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("run", [dual, jvp, vmap, grad])
def test_a_captured_callable_in_a_transform(run: Run, backward: bool) -> None:
    model = nn.Linear(3, 2)

    def forward(x: Tensor) -> Tensor:
        return model(x).tanh()

    captured = fz.capture(forward, backward=backward)
    for _ in range(4):
        out = captured(torch.ones(2, 3))
        if backward:
            out.sum().backward()
    replays = captured.stats.replays
    assert replays >= 2
    expected, found = tree_leaves(run(forward)), tree_leaves(run(captured))
    assert all(isinstance(each, Tensor) for each in expected)
    assert len(expected) == len(found) and all(map(torch.equal, expected, found))
    captured(torch.ones(2, 3))
    assert captured.stats.replays == replays + 1
