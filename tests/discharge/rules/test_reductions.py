"""Reductions that compute in the type of `out`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import functionalize as fz
from functionalize.errors import UnsupportedOpError
from tests.discharge.eager import same_as_eager, text_of

REDUCTIONS: dict[str, Callable[..., Any]] = {
    "std": lambda x, o: torch.std(x, 1, out=o),
    "std, corrected": lambda x, o: torch.std(x, (0, 2), correction=0, out=o),
    "var": lambda x, o: torch.var(x, 0, out=o),
    "var, dim kept": lambda x, o: torch.var(x, -1, keepdim=True, out=o),
    "logsumexp": lambda x, o: torch.logsumexp(x, 1, out=o),
    "logsumexp, dim kept": lambda x, o: torch.logsumexp(x, (0, 2), True, out=o),
    "sum": lambda x, o: torch.sum(x, 1, out=o),
    "mean": lambda x, o: torch.mean(x, 1, out=o),
    "prod": lambda x, o: torch.prod(x, 1, out=o),
    "cumsum": lambda x, o: torch.cumsum(x, 1, out=o),
    "norm": lambda x, o: torch.linalg.vector_norm(x, dim=1, dtype=o.dtype, out=o),
}


@pytest.mark.parametrize("into", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_out_of_another_type(name: str, dtype: torch.dtype, into: torch.dtype) -> None:
    torch.manual_seed(0)
    fn, x = REDUCTIONS[name], torch.randn(3, 4, 5).to(dtype)
    same = torch.zeros(0, dtype=dtype)
    size = x[:, 0].shape if name == "norm" else fn(x, same).shape
    out = torch.zeros(size, dtype=into)
    try:
        fn(x, out.clone())
    except RuntimeError:
        with pytest.raises(fz.errors.FunctionalizeError):
            fz.functions.trace(fn, x, out)
        return
    same_as_eager(fn, x, out)


def test_infinities() -> None:
    x = torch.tensor([[1.0, float("inf")], [-float("inf"), -float("inf")], [0.0, float("nan")]])
    same_as_eager(lambda x, o: torch.logsumexp(x, 1, out=o), x, torch.zeros(3, dtype=torch.float64))


def test_of_all_elements() -> None:
    def fn(x: Tensor, o: Tensor) -> Tensor:
        return torch.std(x, out=o) if x.dim() < 2 else torch.std(x, dim=None, out=o)

    same_as_eager(lambda x, o: torch.std(x, dim=None, out=o), torch.randn(3, 4), torch.zeros(()))
    with pytest.raises(UnsupportedOpError, match="which eager computes in float64: reduce without"):
        fz.functions.trace(
            lambda x, o: torch.std(x, dim=None, out=o),
            torch.randn(3, 4),
            torch.zeros((), dtype=torch.float64),
        )


def test_graph(expect: Callable[[str, str], None]) -> None:
    def fn(x: Tensor, a: Tensor, b: Tensor) -> None:
        torch.var(x, 0, out=a)
        torch.logsumexp(x, 0, out=b)

    out = torch.zeros(3, dtype=torch.float64)
    expect("wider", text_of(same_as_eager(fn, torch.randn(2, 3), out, out.clone())))


@pytest.mark.parametrize("name", ["sum", "nansum", "mean", "logsumexp"])
def test_sums_into_columns(name: str) -> None:
    """The strides of `out` decide in which order eager adds."""
    torch.manual_seed(0)

    def fn(x: Tensor, o: Tensor) -> None:
        getattr(torch, name)(x, 1, out=o)

    x = torch.randn(67, 45, 33)
    same_as_eager(fn, x, torch.zeros(67, 66)[:, ::2])
    same_as_eager(fn, x[:, :, :1], torch.zeros(1, 67).t())
    with pytest.raises(UnsupportedOpError, match=r"stride \[1, 67\]\), and rounds otherwise than"):
        fz.functions.trace(fn, x, torch.zeros(33, 67).t())
    if name == "sum":
        same_as_eager(fn, x.long(), torch.zeros(33, 67).t().long())  # exact
