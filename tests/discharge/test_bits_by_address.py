"""A BLAS rounds by where its operands lie: what eager reads in the middle of a storage, replays read there, too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import functionalize as fz

MADE = torch.Generator().manual_seed(1)
WEIGHT, VECTOR = torch.randn(8, 6, generator=MADE), torch.randn(6, generator=MADE)


def shifted(x: Tensor) -> Tensor:
    h = torch.zeros(41, 6)
    h[1:] = x
    return F.linear(h[1:], WEIGHT)


def scaled(x: Tensor) -> Tensor:
    h = x.clone()
    h[1:5].mul_(2)
    return h[1:5] @ VECTOR


def of_an_argument(x: Tensor) -> Tensor:
    c = x[1:5]
    c.mul_(2)
    return F.linear(c, WEIGHT)


def attended(x: Tensor) -> Tensor:
    h = torch.zeros(2, 9, 8)
    h[:, 1:] = x.view(-1)[:128].view(2, 8, 8)
    return F.scaled_dot_product_attention(h[:, 1:], h[:, 1:], h[:, 1:])


def twice(x: Tensor) -> Tensor:
    """A part of a part, of which both are written."""
    h = x.clone()
    part = h[1:9]
    part.add_(1)
    part[1:4].mul_(3)
    return part[1:4] @ VECTOR + (h[1:9] @ VECTOR).sum()


@pytest.mark.parametrize("passes", [None, "", "default"])
@pytest.mark.parametrize("fn", [shifted, scaled, of_an_argument, attended, twice])
def test_a_product_of_a_part_that_was_written(
    fn: Callable[[Tensor], Tensor], passes: str | None
) -> None:
    step = fz.capture(fn, audit=False, passes=passes)
    made = torch.Generator().manual_seed(2)
    for _ in range(16):
        x = torch.randn(40, 6, generator=made)
        assert torch.equal(step(x.clone()), fn(x.clone()))
    assert step.stats.replays > 8


def test_a_part_that_nobody_wrote_has_one_view() -> None:
    program = fz.functions.trace(
        lambda x: (x[1:5] @ VECTOR) + (x[1:5].sin() @ VECTOR), torch.randn(40, 6)
    )
    assert str(program.graph).count("torch.ops.aten.slice") == 1
