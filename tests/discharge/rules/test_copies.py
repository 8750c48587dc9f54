"""`copy_`, `fill_`, `zero_`: what the tensor held is never read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.discharge.eager import same_as_eager, text_of

Fn = Callable[..., Any]
COPIES: dict[str, Fn] = {
    "of the same": lambda x, y: x.copy_(y),
    "broadcast": lambda x, y: x.copy_(y[0]),
    "of a number": lambda x, y: x.copy_(y[0, 0]),
    "cast": lambda x, y: x.copy_(y.double()),
    "cast from int": lambda x, y: x.copy_((y * 5).long()),
    "cast from bool": lambda x, y: x.copy_(y > 0),
    "cast and broadcast": lambda x, y: x.copy_(y[:, :1].double()),
    "cast to narrower": lambda x, y: y.copy_(x.bfloat16()),
    "of columns": lambda x, y: x.t().copy_(y.t()),
    "of columns to rows": lambda x, y: x.view(4, 3).copy_(y.t()),
    "between rows of one": lambda x, y: x[0].copy_(x[1]),
    "to a slice with a step": lambda x, y: x[:, ::2].copy_(y[:, 1:3].double()),
    "real to complex": lambda x, y: torch.view_as_complex(x.view(3, 2, 2)).copy_(y[0, :2]),
    "of itself": lambda x, y: x.copy_(x),
    "of what is written later": lambda x, y: (x.copy_(y), y.add_(1)),
    "fill": lambda x, y: x.fill_(3),
    "fill with a tensor": lambda x, y: x.fill_(y.sum()),
    "fill with an int tensor": lambda x, y: x.fill_(y.argmax()),
    "fill a part with a tensor": lambda x, y: x[:, ::2].fill_(y[0, 0]),
    "fill with its own": lambda x, y: x.fill_(x[0, 0]),
    "fill a column": lambda x, y: x[:, 1].fill_(3),
    "fill columns": lambda x, y: x.t().fill_(3),
    "zero a corner": lambda x, y: x[1:, 1:].zero_(),
    "zero": lambda x, y: x.zero_(),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies(name: str) -> None:
    torch.manual_seed(0)
    same_as_eager(COPIES[name], torch.randn(3, 4), torch.randn(3, 4), times=2)


@pytest.mark.parametrize("size", [(3, 3), (9, 3), (3, 9), (4, 3), (3, 3, 3)])
@pytest.mark.parametrize("wrap", [False, True])
def test_fill_diagonal(size: tuple[int, ...], wrap: bool) -> None:
    def fn(x: Tensor) -> Tensor:
        return x.fill_diagonal_(5.0, wrap)

    same_as_eager(fn, torch.randn(size))
    if not wrap:  # eager wraps around rows only
        same_as_eager(fn, torch.randn(size).permute(*reversed(range(len(size)))))
    same_as_eager(fn, torch.randn(*size[:-1], size[-1] * 2)[..., ::2])


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("step", [1, 2])
def test_fill_of_a_root_with_gaps(dtype: torch.dtype, step: int) -> None:
    """`aten.fill` would leave no gaps, and the next view counts on them."""

    def fn(x: Tensor) -> Any:
        x.fill_(1)
        x.as_strided((2,), (2 * step,)).zero_()
        return x[1:] * 2

    same_as_eager(fn, torch.zeros(8, dtype=dtype)[::step])


@pytest.mark.parametrize("name", ["of the same", "cast", "fill", "fill with a tensor", "zero"])
def test_into_an_empty_storage(name: str) -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        x.untyped_storage().resize_(48)
        COPIES[name](x, y)
        out = x + 1
        x.untyped_storage().resize_(0)
        return out

    x = torch.randn(3, 4)
    x.untyped_storage().resize_(0)
    same_as_eager(fn, x, torch.randn(3, 4))


def test_graphs(expect: Callable[[str, str], None]) -> None:
    def fn(x: Tensor, y: Tensor) -> None:
        x.copy_(y)
        y.t().copy_(x[0, :3].double())
        x[:, ::2].fill_(1)
        y.zero_()

    expect("copies", text_of(same_as_eager(fn, torch.randn(3, 4), torch.randn(3, 4))))
