"""Views: reads after the base was written, writes through the view, views of views, undefined contents."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.discharge.eager import same_as_eager, text_of

aten = torch.ops.aten
View = Callable[[Tensor], Any]


def matrix() -> Tensor:
    return torch.arange(24.0).view(4, 6) - 7


def cube() -> Tensor:
    return torch.arange(24.0).view(2, 3, 4) - 7


def square() -> Tensor:
    return torch.arange(16.0).view(4, 4) - 7


def complex_matrix() -> Tensor:
    return torch.complex(matrix(), matrix() * 3)


def small(*size: int) -> Tensor:
    return torch.arange(float(torch.Size(size).numel())).view(size) - 3


# Every view that writes may go through: name -> (what makes the base, the view).
VIEWS: dict[str, tuple[Callable[[], Tensor], View]] = {
    "view": (matrix, lambda x: x.view(3, 8)),
    "view of size 0 dims": (matrix, lambda x: x[0, 0].view(())),
    "reshape": (matrix, lambda x: x.reshape(2, -1)),
    "reshape_as": (matrix, lambda x: x.reshape_as(torch.empty(8, 3))),
    "view_as": (matrix, lambda x: x.view_as(torch.empty(8, 3))),
    "_reshape_alias": (matrix, lambda x: aten._reshape_alias(x, [8, 3], [3, 1])),
    "flatten": (cube, lambda x: x.flatten(1)),
    "unflatten": (matrix, lambda x: x.unflatten(1, (2, 3))),
    "ravel": (cube, lambda x: x.ravel()),
    "as_strided": (matrix, lambda x: x.as_strided((3, 2), (5, 2), 3)),
    "as_strided at its own offset": (matrix, lambda x: x[1:].as_strided((2, 2), (1, 4))),
    "slice": (matrix, lambda x: x[1:3]),
    "slice with a step": (matrix, lambda x: x[:, 1::2]),
    "slice of two dims": (matrix, lambda x: x[1:, -3:-1]),
    "slice past the end": (matrix, lambda x: x[2:100]),
    "slice of everything": (matrix, lambda x: x[:]),
    "slice of nothing": (matrix, lambda x: x[3:1]),
    "select": (matrix, lambda x: x[2]),
    "select of the last": (matrix, lambda x: x.select(-1, -2)),
    "select of a number": (matrix, lambda x: x[2, 3]),
    "split": (matrix, lambda x: x.split(4, 1)),
    "split with sizes": (matrix, lambda x: x.split([1, 2, 3], -1)),
    "unsafe_split": (matrix, lambda x: torch.unsafe_split(x, 2)),
    "unsafe_split_with_sizes": (matrix, lambda x: torch.unsafe_split_with_sizes(x, [1, 3])),
    "chunk": (matrix, lambda x: x.chunk(3)),
    "unbind": (matrix, lambda x: x.unbind(1)),
    "tensor_split": (matrix, lambda x: x.tensor_split(4, 1)),
    "tensor_split at indices": (matrix, lambda x: x.tensor_split((1, 4), 1)),
    "hsplit": (matrix, lambda x: x.hsplit(2)),
    "vsplit": (matrix, lambda x: x.vsplit(2)),
    "dsplit": (cube, lambda x: x.dsplit(2)),
    "narrow": (matrix, lambda x: x.narrow(1, 2, 3)),
    "transpose": (cube, lambda x: x.transpose(0, -1)),
    "permute": (cube, lambda x: x.permute(2, 0, 1)),
    "t": (matrix, lambda x: x.t()),
    "t of a vector": (matrix, lambda x: x[0].t()),
    "T": (cube, lambda x: x.permute(2, 1, 0)),
    "numpy_T": (matrix, lambda x: x.T),
    "mT": (cube, lambda x: x.mT),
    "mH": (cube, lambda x: x.mH),
    "mH of complex": (complex_matrix, lambda x: x.mH),
    "H": (complex_matrix, lambda x: x.H),
    "adjoint": (complex_matrix, lambda x: x.adjoint()),
    "movedim": (cube, lambda x: x.movedim(0, 2)),
    "swapaxes": (cube, lambda x: x.swapaxes(0, 1)),
    "squeeze": (lambda: small(1, 3, 1, 2), lambda x: x.squeeze()),
    "squeeze of a dim": (lambda: small(1, 3, 1, 2), lambda x: x.squeeze(2)),
    "squeeze of a dim of 3": (lambda: small(1, 3, 1, 2), lambda x: x.squeeze(1)),
    "squeeze of dims": (lambda: small(1, 3, 1, 2), lambda x: x.squeeze((0, 2))),
    "unsqueeze": (matrix, lambda x: x.unsqueeze(-1)),
    "expand of nothing": (matrix, lambda x: x.expand(1, -1, 6)),
    "diagonal": (matrix, lambda x: x.diagonal()),
    "diagonal with an offset": (cube, lambda x: x.diagonal(-1, 2, 1)),
    "linalg_diagonal": (cube, lambda x: torch.linalg.diagonal(x, offset=1)),
    "unfold": (matrix, lambda x: x.unfold(1, 2, 3)),
    "view_as_real": (complex_matrix, lambda x: torch.view_as_real(x)),
    "view_as_complex": (lambda: small(4, 3, 2), lambda x: torch.view_as_complex(x)),
    "real": (complex_matrix, lambda x: x.real),
    "imag": (complex_matrix, lambda x: x.imag),
    "conj": (complex_matrix, lambda x: x.conj()),
    "neg": (matrix, lambda x: torch._neg_view(x)),
    "imag of conj": (complex_matrix, lambda x: x.conj().imag),
    "view.dtype, same size": (matrix, lambda x: x.view(torch.int32)),
    "view.dtype, narrower": (matrix, lambda x: x.view(torch.int16)),
    "view.dtype, wider": (matrix, lambda x: x.view(torch.float64)),
    "view.dtype, bytes": (matrix, lambda x: x.view(torch.uint8)),
    "detach": (matrix, lambda x: x.detach()),
    "alias": (matrix, lambda x: aten.alias(x)),
    "lift_fresh": (matrix, lambda x: aten.lift_fresh(x)),
    "data": (matrix, lambda x: x.data),
}
# Views whose elements overlap: they can be read, and written only through their base.
READ_ONLY: dict[str, tuple[Callable[[], Tensor], View]] = {
    "expand": (lambda: small(4, 1), lambda x: x.expand(2, 4, 3)),
    "expand_as": (lambda: small(4, 1), lambda x: x.expand_as(torch.empty(4, 3))),
    "broadcast_to": (lambda: small(4, 1), lambda x: x.broadcast_to(4, 3)),
    "unfold, overlapping": (matrix, lambda x: x.unfold(0, 3, 1)),
    "as_strided, overlapping": (matrix, lambda x: x.as_strided((3, 3), (1, 1))),
}
# Views of the views above, where the size allows.
AGAIN: dict[str, View] = {
    "of itself": lambda v: v[...],
    "[1:]": lambda v: v[1:] if v.dim() and v.size(0) > 1 else v,
    "[..., ::2]": lambda v: v[..., ::2] if v.dim() else v,
    "transposed": lambda v: v.transpose(0, -1) if v.dim() else v,
    "[0]": lambda v: v[0] if v.dim() and v.size(0) else v,
}


def views_of(found: Any) -> list[Tensor]:
    return list(found) if isinstance(found, (list, tuple)) else [found]


def change(t: Tensor, by: int) -> None:
    """An in-place op that every dtype has, and that shows."""
    if t.dtype in (torch.uint8, torch.int16, torch.int32):
        t.bitwise_xor_(by)
    else:
        t.mul_(by + 1).add_(by)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", [*VIEWS, *READ_ONLY])
def test_read_after_the_base_was_written(name: str, inference: bool) -> None:
    base, view = {**VIEWS, **READ_ONLY}[name]

    def fn(x: Tensor) -> Any:
        with torch.inference_mode(inference):
            y = x * 1
            views = views_of(view(x)), views_of(view(y))
            x.add_(1)
            y.mul_(3)
            return [v.clone() for vs in views for v in vs]

    with quiet():
        same_as_eager(fn, base())


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", VIEWS)
def test_write_through_the_view(name: str, inference: bool) -> None:
    base, view = VIEWS[name]

    def fn(x: Tensor) -> Any:
        with torch.inference_mode(inference):
            y = x * 1
            for i, v in enumerate([*views_of(view(x)), *views_of(view(y))]):
                change(v, i + 1)
            return y, x * 2, y * 2

    with quiet():
        same_as_eager(fn, base())


@pytest.mark.parametrize("again", AGAIN)
@pytest.mark.parametrize("name", VIEWS)
def test_views_of_views(name: str, again: str) -> None:
    base, view = VIEWS[name]

    def fn(x: Tensor) -> Any:
        y = x * 1
        out = []
        for t in (x, y):
            first = views_of(view(t))[0]
            second = AGAIN[again](first)
            change(second, 2)
            out.append(first * 1)
            change(first, 3)
            out.append(second * 1)
            t.add_(1)
            out += [first * 1, second * 1]
        return out

    with quiet():
        same_as_eager(fn, base())


@pytest.mark.parametrize("name", [*VIEWS, *READ_ONLY])
def test_returned(name: str) -> None:
    base, view = {**VIEWS, **READ_ONLY}[name]

    def fn(x: Tensor) -> Any:
        y = x + 1
        return view(x), view(y), y

    with quiet():
        same_as_eager(fn, base())


@pytest.mark.parametrize("name", VIEWS)
def test_write_of_undefined_contents(name: str) -> None:
    """The storage is grown; one part is written through the view; that part alone is read.

    torch copies a view with a conjugate or negative bit before it writes to it, which is no read of the program's.
    """
    base, view = VIEWS[name]

    def fn(x: Tensor) -> Any:
        storage = x.untyped_storage()
        storage.resize_(x.numel() * x.itemsize)
        made = [v.zero_() for v in views_of(view(x))]
        out = [v.add(1) for v in made]
        storage.resize_(0)
        return out

    x = base()
    x.untyped_storage().resize_(0)
    with quiet():
        same_as_eager(fn, x)


def add_one(view: View) -> Callable[[Tensor], Tensor]:
    def fn(x: Tensor) -> Tensor:
        view(x).add_(1)
        return x.sin()

    return fn


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("slice", "slice"),
        ("slice_step", "slice with a step"),
        ("select", "select"),
        ("split", "split with sizes"),
        ("unbind", "unbind"),
        ("diagonal", "diagonal"),
        ("as_strided", "as_strided"),
        ("view", "view"),
        ("permute", "permute"),
        ("t", "t"),
        ("squeeze", "squeeze"),
        ("unsqueeze", "unsqueeze"),
        ("view_dtype", "view.dtype, same size"),
        ("view_as_real", "view_as_real"),
        ("view_as_complex", "view_as_complex"),
        ("real", "real"),
        ("conj", "conj"),
        ("unfold", "unfold"),
    ],
)
def test_inverse(case: str, name: str, expect: Callable[[str, str], None]) -> None:
    base, view = VIEWS[name]
    program = same_as_eager(add_one(lambda x: views_of(view(x))[0]), base())
    expect(case, text_of(program))


def test_partial_write_of_undefined_contents(expect: Callable[[str, str], None]) -> None:
    def fn(x: Tensor) -> Tensor:
        x.untyped_storage().resize_(24)
        x[1:3].fill_(2)
        out = x[2] * 3
        x.untyped_storage().resize_(0)
        return out

    x = torch.zeros(6)
    x.untyped_storage().resize_(0)
    expect("undefined", text_of(same_as_eager(fn, x)))


def test_a_view_is_made_once() -> None:
    def fn(x: Tensor) -> Tensor:
        return x[1:].sin() + x[1:].cos() + x[1:].tan()

    program = same_as_eager(fn, small(5))
    targets = [n.target for n in program.graph.nodes]
    assert targets.count(aten.slice.Tensor) == 1
