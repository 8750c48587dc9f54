"""Ways in which Python asks for a size and decides by it, and what becomes of other sizes than the recorded ones."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.lengths.capturing import capture
from tests.steps import tripled_in_backward

LEARNED = (8, 12, 20, 33, 64)  # several times, so that the class is known
NAMES = {str(n): 0.5 for n in range(30)}


class Meter:
    elements = 0


SEEN = Meter()


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin() if x.size(0) <= 30 else x.cos()


BranchesInBackward = tripled_in_backward(lambda grad: len(grad) > 30)


def with_a_hook(x: Tensor) -> Tensor:
    y = x * 2
    y.register_hook(lambda grad: grad * 2 if grad.numel() <= 60 else grad * 3)
    return y


def by_rows(x: Tensor) -> Tensor:
    total = x.new_zeros(2)
    for row in x[::4]:
        total = total + row
    return total


def by_chunks(x: Tensor) -> Tensor:
    return torch.stack([chunk.sum() for chunk in x.chunk(4)])


def counted(x: Tensor) -> Tensor:
    SEEN.elements += x.numel()
    return x.sin()


def printed(x: Tensor) -> Tensor:
    print(f"{x.shape[0]} rows")
    return x.sin()


def tried(x: Tensor) -> Tensor:
    try:
        return x[30] * x.sum()
    except IndexError:
        return x.sum()


model = Branching()

# Each way with what becomes of other sizes: "predicted" at all of them, "found" where one decides otherwise than in the
# recordings, "recorded" where no function of the sizes gives what it makes of them.
WAYS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "a branch": (lambda x: x.sin() if x.shape[0] <= 512 else x.cos(), "found"),
    "a branch in a module": (model, "found"),
    "a branch in a backward": (BranchesInBackward.apply, "found"),
    "a branch in a hook": (with_a_hook, "found"),
    "a branch in a recomputation": (
        lambda x: checkpoint(model, x * 2, use_reentrant=False),
        "found",
    ),
    "a remainder": (lambda x: x.sin() if len(x) % 4 == 0 else x.cos(), "found"),
    "bits": (lambda x: x.sin() if x.shape[0].bit_count() <= 2 else x.cos(), "found"),
    "the shape as a key": (
        lambda x: x * {(8, 2): 2, (12, 2): 2}.get(tuple(x.shape), 2),
        "predicted",
    ),
    "a dictionary": (lambda x: x * {600: 2.0}.get(x.shape[0], 3.0), "found"),
    "a text": (lambda x: x * NAMES.get(f"{x.shape[0]}", 0.25), "found"),
    "a printed text": (printed, "recorded"),
    "a minimum": (lambda x: x[: min(x.shape[0], 512)] * 2, "found"),
    "a quotient": (lambda x: x[: x.shape[0] // 4 * 4] * 2, "found"),
    "a range": (lambda x: sum((x[i] for i in range(x.size(0) // 30 + 1)), x.sum()), "found"),
    "positions": (lambda x: x * torch.arange(x.size(0))[:, None], "predicted"),
    "a root": (lambda x: x / math.sqrt(x.shape[-2]), "recorded"),
    "a root that is one integer": (lambda x: x * math.isqrt(x.numel() // 64), "found"),
    "rows": (by_rows, "recorded"),
    "chunks": (by_chunks, "recorded"),
    "a list of lists": (lambda x: x.split([8, len(x) - 8])[0] * 2, "predicted"),
    "an exception": (tried, "found"),
    "a counter": (counted, "recorded"),
    "the strides": (lambda x: x.sin() if x.t().stride(1) < x.nbytes // 300 else x.cos(), "found"),
}


def stepped(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Any]:
    def step(x: Tensor) -> Any:
        out = fn(x)
        return out.detach(), torch.autograd.grad(out.square().sum(), x)[0]

    return step


def calls(seed: int) -> list[int]:
    """Several calls of some sizes, then one of each size between them, in any order."""
    others = [n for n in range(9, 66) if n not in LEARNED]
    random.Random(seed).shuffle(others)
    return [*(n for n in LEARNED for _ in range(3)), *others]


def compared(fn: Callable[[Tensor], Tensor], sizes: Sequence[int], **options: Any) -> Any:
    """A captured function that equals its eager twin bit for bit at every one of these sizes."""
    captured, eager = capture(stepped(fn), audit=False, **options), stepped(fn)
    for i, rows in enumerate(sizes):
        x = torch.randn(rows, 2, generator=torch.Generator().manual_seed(i))
        results = [step(x.clone().requires_grad_()) for step in (captured, eager)]
        assert all(map(torch.equal, *results)), (i, rows)
    return captured


def compare(fn: Callable[[Tensor], Tensor], sizes: Sequence[int], **options: Any) -> Any:
    """The counts of such a function."""
    return compared(fn, sizes, **options).stats
