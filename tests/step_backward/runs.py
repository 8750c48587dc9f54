"""The two ways in which a case goes backward, and what the trace of a backward must leave as it was.

case(model(), x, EAGER)      torch's backward
case(model(), x, TRACED)     `trace_backward`: every tensor of the process and the generator are as before it
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import functionalize as fz


@dataclass(frozen=True)
class Run:
    """How a case goes backward."""

    backward: Callable[..., None]
    grad: Callable[..., Sequence[Tensor]]


def everything() -> list[tuple[Tensor, Tensor, int, Tensor | None]]:
    """Every tensor of the process with its contents, its version and its gradient, as long as this is held."""
    found = [t for t in gc.get_objects() if type(t) in (Tensor, nn.Parameter)]
    with torch.no_grad():
        return [(t, bits(t), t._version, t.grad if has_grad(t) else None) for t in found]


def bits(t: Tensor) -> Tensor:
    return t.detach().resolve_conj().clone().reshape(-1).view(torch.uint8)


def has_grad(t: Tensor) -> bool:
    return t.is_leaf or t.retains_grad


def traced(*args: Any, **kwargs: Any) -> Any:
    """`fz.functions.trace_backward`, compared with having done nothing."""
    before, state = everything(), torch.get_rng_state()
    program = fz.functions.trace_backward(*args, **kwargs)
    assert torch.equal(torch.get_rng_state(), state)
    for t, was, version, grad in before:
        assert torch.equal(bits(t), was)
        assert t._version == version
        assert (t.grad if has_grad(t) else None) is grad
    return program


def _backward(
    loss: Any, gradient: Any = None, retain_graph: bool = False, inputs: Any = None
) -> None:
    assert traced(loss, inputs, gradient, accumulate=True, retain_graph=retain_graph)() is None


def _grad(
    loss: Any,
    inputs: Any,
    gradient: Any = None,
    retain_graph: bool = False,
    allow_unused: bool = False,
) -> Any:
    options = {"allow_unused": allow_unused, "retain_graph": retain_graph}
    return traced(loss, inputs, gradient, **options)()


EAGER = Run(torch.autograd.backward, torch.autograd.grad)
TRACED = Run(_backward, _grad)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))


def same(a: Any, b: Any) -> bool:
    """Whether two results have the same bits and strides."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.stride() == b.stride() and torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a is None and b is None
