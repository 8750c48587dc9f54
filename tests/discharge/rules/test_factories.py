"""Ops that take a tensor for its shape alone never read it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from functionalize.ir.ops import OpRecord
from tests.discharge.eager import same_as_eager, text_of
from tests.discharge.engines import engine_with

aten = torch.ops.aten
FACTORIES: dict[str, Callable[[Tensor], Any]] = {
    "empty_like": lambda x: torch.empty_like(x).fill_(2),
    "zeros_like": lambda x: torch.zeros_like(x),
    "ones_like": lambda x: torch.ones_like(x, dtype=torch.bool),
    "full_like": lambda x: torch.full_like(x, 2.5, dtype=torch.float64),
    "zeros_like of rows": lambda x: torch.zeros_like(x, memory_format=torch.contiguous_format),
    "rand_like": lambda x: torch.rand_like(x),
    "randn_like": lambda x: torch.randn_like(x, dtype=torch.float64),
    "randint_like": lambda x: torch.randint_like(x, 7),
    "randint_like from": lambda x: torch.randint_like(x, 3, 9),
    "new_empty": lambda x: x.new_empty(3).zero_(),
    "new_empty_strided": lambda x: x.new_empty_strided((2, 3), (1, 2)).zero_(),
    "new_zeros": lambda x: x.new_zeros(2, 0, 3),
    "new_ones": lambda x: x.new_ones((2, 3), dtype=torch.int64),
    "new_full": lambda x: x.new_full((2,), 7),
}
LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "rows": lambda: torch.randn(4, 6),
    "columns": lambda: torch.randn(6, 4).t(),
    "with gaps": lambda: torch.randn(4, 12)[:, ::2],
    "expanded": lambda: torch.randn(4, 1).expand(4, 6),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "complex conjugate": lambda: torch.randn(2, 3, dtype=torch.complex64).conj(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FACTORIES)
def test_like(name: str, layout: str) -> None:
    if layout == "complex conjugate" and name.startswith(("randint", "randn")):
        pytest.skip("eager has none")
    same_as_eager(FACTORIES[name], LAYOUTS[layout]())


@pytest.mark.parametrize("contents", ["empty", "undefined"])
@pytest.mark.parametrize("name", FACTORIES)
def test_of_what_cannot_be_read(name: str, contents: str) -> None:
    def fn(x: Tensor) -> Any:
        if contents == "undefined":
            x.untyped_storage().resize_(96)
        out = FACTORIES[name](x)
        x.untyped_storage().resize_(0)
        return out

    x = torch.randn(4, 6)
    x.untyped_storage().resize_(0)
    same_as_eager(fn, x)


def test_a_record_without_outputs() -> None:
    """Live, the op was not run: its meta kernel tells what it would make."""
    engine, (ref,) = engine_with((4, 6))
    node = engine.step(OpRecord(aten.zeros_like.default, (ref,), {"dtype": torch.int64}))
    assert node.args == ([4, 6], 0)
    assert node.kwargs == {"dtype": torch.int64, "device": torch.device("cuda")}
    node = engine.step(OpRecord(aten.empty_like.default, (ref,), {"device": torch.device("cpu")}))
    assert node.kwargs["device"] == torch.device("cpu")


def test_graph(expect: Callable[[str, str], None]) -> None:
    def fn(x: Tensor) -> Any:
        x.mul_(2)
        return torch.zeros_like(x), torch.ones_like(x.t()), torch.rand_like(x)

    expect("like", text_of(same_as_eager(fn, torch.randn(2, 3))))
