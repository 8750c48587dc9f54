"""Random ops draw the numbers that eager draws, into the same elements, from the same generator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import functionalize as fz
from functionalize.errors import UnsupportedOpError
from tests.discharge.eager import same_as_eager, text_of

IN_PLACE: dict[str, Callable[[Tensor], Any]] = {
    "uniform_": lambda x: x.uniform_(-1, 2),
    "normal_": lambda x: x.normal_(1, 2),
    "random_": lambda x: x.random_(),
    "random_ to": lambda x: x.random_(7),
    "random_ from": lambda x: x.random_(2, 7),
    "bernoulli_": lambda x: x.bernoulli_(),
    "bernoulli_ of p": lambda x: x.bernoulli_(0.3),
    "bernoulli_ of a number": lambda x: x.bernoulli_(torch.full((), 0.3)),
    "bernoulli_ of a row": lambda x: x.bernoulli_(torch.linspace(0, 1, x.shape[-1])),
    "cauchy_": lambda x: x.cauchy_(),
    "exponential_": lambda x: x.exponential_(2),
    "geometric_": lambda x: x.geometric_(0.4),
    "log_normal_": lambda x: x.log_normal_(),
    "dropout": lambda x: F.dropout(x, 0.5, True, inplace=True),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, True, inplace=True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.3, True, inplace=True),
    "rrelu_": lambda x: F.rrelu_(x, training=True),
    "kaiming_uniform_": lambda x: torch.nn.init.kaiming_uniform_(x),
}
OUT_OF_PLACE: dict[str, Callable[[Tensor], Any]] = {
    "rand": lambda x: torch.rand(3, 4) + x[0, 0],
    "nobody reads it": lambda x: (torch.rand(3), torch.randn(3))[1],
    "randint": lambda x: torch.randint(3, (4,)),
    "randperm": lambda x: torch.randperm(8),
    "multinomial": lambda x: torch.multinomial(x.abs(), 2),
    "dropout": lambda x: F.dropout(x, 0.4),
    "native_dropout": lambda x: torch.native_dropout(x, 0.3, True),
    "poisson": lambda x: torch.poisson(x.abs()),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "gamma": lambda x: torch._standard_gamma(x.abs() + 1),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.3),
    "into temporaries": lambda x: torch.empty(3, 4).uniform_() + torch.empty(4, 3).t().normal_(),
    "rand_like": lambda x: torch.rand_like(x),
    "randn_like": lambda x: torch.randn_like(x, dtype=torch.float64),
    "randint_like": lambda x: torch.randint_like(x, 3, 9),
}
LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "rows": lambda: torch.randn(8, 6),
    "columns": lambda: torch.randn(6, 8).t(),
    "rows with gaps": lambda: torch.randn(8, 12)[:, ::2],
    "columns with gaps": lambda: torch.randn(6, 16)[:, ::2].t(),
    "a slice": lambda: torch.randn(10, 6)[1:9],
    "three dims": lambda: torch.randn(4, 3, 5).permute(2, 0, 1)[0],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place(name: str, layout: str) -> None:
    if name == "normal_" and layout == "rows with gaps":
        with pytest.raises(
            UnsupportedOpError, match="a tensor with gaps, as no functional op does"
        ):
            fz.functions.trace(IN_PLACE[name], LAYOUTS[layout]())
        return
    same_as_eager(IN_PLACE[name], LAYOUTS[layout](), times=2)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OUT_OF_PLACE)
def test_out_of_place(name: str, layout: str) -> None:
    same_as_eager(OUT_OF_PLACE[name], LAYOUTS[layout](), times=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("columns", [False, True])
def test_normal_into_out(dtype: torch.dtype, columns: bool) -> None:
    def fn(mean: Tensor, std: Tensor, out: Tensor) -> Any:
        out = out.t() if columns else out
        torch.normal(mean, std, out=out)
        first = out * 2
        torch.normal(mean, 2.0, out=out)
        second = out * 2
        torch.normal(1.0, std, out=out)
        return first, second, out * 2

    same_as_eager(fn, torch.randn(5, 5), torch.rand(5, 5), torch.zeros(5, 5, dtype=dtype))


def test_a_generator_is_refused() -> None:
    g = torch.Generator()
    for fn in (
        lambda x: x.uniform_(generator=g),
        lambda x: torch.rand(3, generator=g),
        lambda x: torch.normal(0.0, 1.0, (3,), generator=g, out=x),
        lambda x: torch.randperm(3, generator=g),
    ):
        with pytest.raises(UnsupportedOpError, match=r"draws from a torch.Generator argument"):
            fz.functions.trace(fn, torch.randn(3))


def test_graph(expect: Callable[[str, str], None]) -> None:
    def fn(x: Tensor) -> None:
        x.uniform_()
        x.t().bernoulli_(0.3)
        x[0].normal_(1, 2)

    expect("in_place", text_of(same_as_eager(fn, torch.randn(3, 4))))
