"""Products into columns: the BLAS is called as eager calls it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.core.eager import one_thread, same_as_eager, text_of

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
