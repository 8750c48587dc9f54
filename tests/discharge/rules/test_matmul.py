"""Products into columns: the BLAS is called as eager calls it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.discharge.eager import one_thread, same_as_eager, text_of

LAYOUTS: dict[str, Callable[[int, int, torch.dtype], Tensor]] = {
    "rows": lambda m, n, dtype: torch.zeros(m, n, dtype=dtype),
    "columns": lambda m, n, dtype: torch.zeros(n, m, dtype=dtype).t(),
    "rows with gaps": lambda m, n, dtype: torch.zeros(m, 2 * n, dtype=dtype)[:, ::2],
    "columns with gaps": lambda m, n, dtype: torch.zeros(n, 2 * m, dtype=dtype)[:, ::2].t(),
}
PRODUCTS: dict[str, Callable[..., Any]] = {
    "mm": lambda a, b, o, s: torch.mm(a, b, out=o),
    "addmm": lambda a, b, o, s: torch.addmm(s, a, b, beta=0.5, alpha=2, out=o),
    "addmm_": lambda a, b, o, s: o.addmm_(a, b, alpha=0.3),
    "addbmm_": lambda a, b, o, s: o.addbmm_(a.expand(2, -1, -1), b.expand(2, -1, -1)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name: str, layout: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for m, k, n in ((5, 7, 9), (33, 65, 17), (1, 7, 5), (6, 7, 1)):
        for rows in (True, False):
            a, b = torch.randn(m, k).mul(5).to(dtype), torch.randn(k, n).mul(5).to(dtype)
            a = a if rows else a.t().contiguous().t()
            out = LAYOUTS[layout](m, n, dtype)
            out.copy_(torch.randn(m, n).mul(5))
            scaled = PRODUCTS[name]
            if dtype == torch.int64 and name in ("addmm", "addmm_"):
                continue  # fractional scales are for floats
            with one_thread():
                same_as_eager(scaled, a, b, out, torch.randn(n).to(dtype))


def test_graph(expect: Callable[[str, str], None]) -> None:
    def fn(a: Tensor, b: Tensor, o: Tensor) -> None:
        torch.mm(a, b, out=o.t())
        o.addmm_(a, b)

    expect("columns", text_of(same_as_eager(fn, *(torch.randn(2, 2) for _ in range(3)))))


SHAPES = ((3,), (5, 7), (2, 5, 7), (3, 2, 5, 7), (0, 5, 7), (4, 0))


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")  # of a vector
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_linear_into_out(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """`linear` adds the bias before it rounds; `linear.out` rounds the product first, but of matrices."""
    torch.manual_seed(0)
    linear: Callable[..., Any] = torch._C._nn.linear

    def into(x: Tensor, w: Tensor, b: Tensor | None, o: Tensor) -> None:
        linear(x, w, b, out=o)

    def whole(x: Tensor) -> Tensor:
        return x

    def columns(x: Tensor) -> Tensor:
        return x.transpose(0, -1).contiguous().transpose(0, -1)

    for bias in (torch.randn(16), torch.randn(1), None):
        b = None if bias is None else bias.to(dtype)
        for layout in (whole, columns):
            for gradients in (False, True):
                x, w = torch.randn(*shape).to(dtype), torch.randn(16, shape[-1]).to(dtype)
                w.requires_grad_(gradients)
                o = torch.zeros(*shape[:-1], 16, dtype=dtype)
                with one_thread(), torch.no_grad():
                    same_as_eager(into, layout(x), w, b, o)
                    if len(shape) == 2:
                        same_as_eager(into, layout(x), layout(w), b, columns(o))


def test_linear_graph(expect: Callable[[str, str], None]) -> None:
    def fn(x: Tensor, w: Tensor, b: Tensor, o: Tensor, matrix: Tensor) -> None:
        torch._C._nn.linear(x, w, b, out=o)
        torch._C._nn.linear(x[0], w, b, out=matrix)

    args = (torch.randn(2, 2, 3), torch.randn(4, 3), torch.randn(4), torch.zeros(2, 2, 4))
    expect("linear", text_of(same_as_eager(fn, *args, torch.zeros(2, 4))))
