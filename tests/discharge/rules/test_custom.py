"""Custom ops that only mutate: torch's wrapper makes them functional."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import functionalize as fz
from functionalize.errors import UnsupportedOpError
from tests.discharge.eager import same_as_eager, text_of


@pytest.fixture(scope="module")
def ops() -> Iterator[Any]:
    library = torch.library.Library("fz_test", "FRAGMENT")
    library.define("scale_(Tensor(a!) x, float by=2.0) -> ()")
    library.define("both(Tensor(a!) x, Tensor(b!)[] ys, Tensor z, *, Tensor(c!)? w=None) -> Tensor")
    library.define("has_form_(Tensor(a!) x, Tensor y) -> Tensor(a!)")
    library.define("has_form(Tensor x, Tensor y) -> Tensor")
    library.define("returns_itself(Tensor(a!) x) -> (Tensor(a!), Tensor)")

    def scale_(x: Tensor, by: float = 2.0) -> None:
        x.mul_(by)

    def both(x: Tensor, ys: list[Tensor], z: Tensor, *, w: Tensor | None = None) -> Tensor:
        out = z + 1
        x.add_(z)
        for y in ys:
            y.mul_(z)
        if w is not None:
            w.sub_(z)
        return out

    key = "CompositeExplicitAutograd"
    library.impl("scale_", scale_, key)
    library.impl("both", both, key)
    library.impl("has_form_", lambda x, y: x.add_(y), key)
    library.impl("has_form", lambda x, y: x + y, key)
    library.impl("returns_itself", lambda x: (x.add_(1), x * 2), key)
    yield torch.ops.fz_test
    library._destroy()


def test_a_part(ops: Any, expect: Callable[[str, str], None]) -> None:
    def fn(x: Tensor) -> Tensor:
        ops.scale_(x[:, 1], 3.0)
        ops.scale_(x.t())
        return x * 2

    program = same_as_eager(fn, torch.randn(3, 4), times=2)
    expect("a_part", text_of(program))
    assert program.graph_module(torch.ones(3, 4)) is not None


@pytest.mark.parametrize("third", [False, True])
def test_lists_outputs_and_options(ops: Any, third: bool) -> None:
    def fn(x: Tensor, y: Tensor, ys: list[Tensor], w: Tensor) -> Any:
        extra = {"w": w.view(-1)} if third else {}
        return ops.both(x, [y[1:3], *ys], x.sum() if third else y[0], **extra), x + 1

    args = torch.randn(3), torch.randn(5), [torch.randn(2, 2), torch.randn(())], torch.randn(2, 2)
    same_as_eager(fn, *args, times=2)


def test_undefined_contents(ops: Any) -> None:
    def fn(x: Tensor) -> None:
        x.untyped_storage().resize_(16)
        ops.scale_(x, 0.0)

    x = torch.randn(4)
    x.untyped_storage().resize_(0)
    program = fz.functions.trace(fn, x)
    assert "auto_functionalized" in text_of(program)


def test_a_functional_overload_is_preferred(ops: Any) -> None:
    program = same_as_eager(lambda x, y: ops.has_form_(x, y) * 2, torch.randn(3), torch.randn(3))
    assert ops.has_form.default in [n.target for n in program.graph.nodes]


def test_overlapping_arguments(ops: Any) -> None:
    def fn(x: Tensor) -> None:
        ops.both(x[0], [x[0].view(2)], x[1])

    with pytest.raises(UnsupportedOpError) as error:
        fz.functions.trace(fn, torch.randn(2, 2))
    assert str(error.value).splitlines()[0] == (
        "fz_test.both.default writes an argument (float32[2]) that overlaps another one (float32[2]), "
        "and has no functional form that could see the write: clone() one of them"
    )


def test_what_the_wrapper_refuses(ops: Any) -> None:
    with pytest.raises(UnsupportedOpError) as error:
        fz.functions.trace(lambda x: ops.returns_itself(x), torch.randn(2))
    assert str(error.value).splitlines()[0] == (
        "fz_test.returns_itself.default writes `x` and has no functional form: use an op that returns its "
        "result, or give it one with torch.library"
    )
