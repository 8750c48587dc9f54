"""`set_` in its forms, `aten.resize_`, in-place views, `x.data = y`, constants made by Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from functionalize._compat.dispatch import all_op_names
from functionalize.discharge.rules.mutations import is_mutating
from functionalize.discharge.rules.registry import RULES
from functionalize.discharge.rules.resizes import inplace_view, is_inplace_view
from tests.discharge.eager import same_as_eager, text_of

Fn = Callable[..., Any]


def set_data(x: Tensor, y: Tensor) -> Tensor:
    x.data = y
    return x.mul_(3)


MOVES: dict[str, Fn] = {
    "set_ of a tensor": lambda x, y: x.set_(y),
    "set_ of a storage": lambda x, y: x.set_(y.untyped_storage()),
    "set_ of a part": lambda x, y: x.set_(y.untyped_storage(), 2, (2, 2), (3, 1)),
    "set_ of a part of a tensor": lambda x, y: x.set_(y, 1, (2, 3), (3, 1)),
    "set_ of nothing": lambda x, y: (x.set_(), y * 2)[1],
    "set_ of nothing, resized": lambda x, y: x.set_().resize_(3).fill_(2) * 1,
    "set_ and write": lambda x, y: x.set_(y).add_(1) * 2,
    "set_ of a temporary": lambda x, y: x.set_(y * 2).add_(1) * 2,
    "set_ of its own storage": lambda x, y: (
        (x.mul_(2).set_(x.untyped_storage(), 4, (4,), (1,))) * 2
    ),
    "t_": lambda x, y: x.t_().add_(1),
    "transpose_": lambda x, y: x.transpose_(0, 1).add_(1),
    "swapaxes_": lambda x, y: x.swapaxes_(0, 1),
    "unsqueeze_": lambda x, y: x.unsqueeze_(0).mul_(2),
    "squeeze_": lambda x, y: x.unsqueeze_(0).squeeze_(),
    "as_strided_": lambda x, y: x.as_strided_((2, 2), (1, 4), 1).mul_(2),
    "detach_": lambda x, y: x.detach_().mul_(2),
    "resize_ to the same": lambda x, y: x.resize_(4, 3).add_(1),
    "resize_ to less": lambda x, y: x.resize_(2, 2) * 2,
    "resize_ to nothing": lambda x, y: x.resize_(0),
    "resize_ to more": lambda x, y: x.resize_(5, 4).zero_(),
    "resize_ to more, a part": lambda x, y: (x.resize_(5, 4)[3:].zero_(), x + 1)[1],
    "resize_as_": lambda x, y: x.resize_as_(y[0]) * 1,
    "resize_as_ more": lambda x, y: x.resize_as_(y.expand(2, 3, 4)).zero_() * 1,
    "resize_ of a temporary": lambda x, y: (y * 2).resize_(2, 3) + 1,
    "resize_ of a temporary to more": lambda x, y: (y * 2).resize_(20).fill_(1) + 1,
    "data =": set_data,
    "data = a temporary": lambda x, y: set_data(x, y * 2),
    "data = a view": lambda x, y: set_data(x, y[0]),
    "data = of another dtype": lambda x, y: set_data(x, y.double()),
}


@pytest.mark.parametrize("name", MOVES)
def test_moves(name: str) -> None:
    torch.manual_seed(0)
    whole = not name.startswith("resize_")  # what a resize adds is undefined
    same_as_eager(MOVES[name], torch.randn(3, 4), torch.randn(3, 4), whole=whole)


@pytest.mark.parametrize("nbytes", [0, 4, 16, 24, 32, 64])
@pytest.mark.parametrize("through", ["storage", "op"])
def test_storage_resizes(nbytes: int, through: str) -> None:
    def fn(x: Tensor) -> Tensor:
        x.mul_(2)
        if through == "op":
            torch.ops.inductor.resize_storage_bytes_(x, nbytes)
        else:
            x.untyped_storage().resize_(nbytes)
        y = x.as_strided((min(nbytes // 4, 8),), (1,))
        if nbytes > 32:
            x.zero_()
        return y + 1 if nbytes else y.new_zeros(1)

    same_as_eager(fn, torch.arange(8.0), whole=nbytes <= 32)


CONSTANTS: dict[str, Fn] = {
    "read": lambda x: torch.tensor([1.0, 2.0]) + x,
    "written": lambda x: torch.tensor([1.0, 2.0]).mul_(2) + x,
    "returned": lambda x: torch.tensor([1.0, 2.0]),
    "written and returned": lambda x: torch.tensor([1.0, 2.0]).add_(1),
    "returned as a view": lambda x: torch.tensor([1.0, 2.0])[1:],
    "put in an input": lambda x: x.set_(torch.tensor([1.0, 2.0])),
    "as an index": lambda x: x[torch.tensor([1, 0])],
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants(name: str) -> None:
    """The caller changes what it gets; the program's constant stays."""
    x = torch.randn(2)
    program = same_as_eager(CONSTANTS[name], x.clone())
    given = x.clone()
    first = program(given)
    want = first.clone()
    first.zero_()
    given.zero_()
    if name == "put in an input":
        given = torch.zeros(2)
    assert torch.equal(program(x.clone() if name != "put in an input" else given), want)


def test_a_constant_and_its_views() -> None:
    def fn(x: Tensor) -> Any:
        t = torch.tensor([1.0, 2.0])
        return t, t[:1], t.add_(x[0])

    same_as_eager(fn, torch.randn(2), times=3)


def test_graphs(expect: Callable[[str, str], None]) -> None:
    def moved(x: Tensor, y: Tensor) -> Tensor:
        x.set_(y)
        return x.add_(1).t_()

    expect("set_", text_of(same_as_eager(moved, torch.randn(2, 3), torch.randn(3, 2))))

    def grown(x: Tensor) -> Tensor:
        return x.resize_(6).fill_(1)

    expect("resize_", text_of(same_as_eager(grown, torch.randn(2, 2))))


def test_ops_in_place_are_found_by_their_names() -> None:
    """The rule is registered for all ops of `aten` that change a geometry in place: no other name has such a tag."""
    names = (n.removeprefix("aten::") for n in all_op_names() if n.startswith("aten::"))
    pairs = (
        (packet, overload or "default") for packet, _, overload in (n.partition(".") for n in names)
    )
    ops = (
        getattr(getattr(torch.ops.aten, packet, None), overload, None) for packet, overload in pairs
    )
    views = {op for op in ops if is_inplace_view(op) and is_mutating(op)}
    assert len(views) > 10
    assert views == {op for op, found in RULES.items() if found is inplace_view}
