"""Element-wise ops into tensors of any strides: bit for bit as eager's kernel on the machine of the test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from functionalize.discharge.loops import Loop, copied_argument, loop
from functionalize.errors import UnsupportedOpError
from functionalize.ir.ops import TensorRef, contiguous_geometry
from tests.discharge.eager import clones, one_thread, same_as_eager, text_of

pytestmark = pytest.mark.long

aten = torch.ops.aten

ELEMENT_WISE: dict[str, tuple[int, Callable[..., Any]]] = {  # arguments, `fn(out, *arguments)`
    "sigmoid": (1, lambda o, x: torch.sigmoid(x, out=o)),
    "sinh": (1, lambda o, x: torch.sinh(x, out=o)),
    "softplus": (1, lambda o, x: torch._C._nn.softplus(x, out=o)),
    "atan2": (2, lambda o, x, y: torch.atan2(x, y, out=o)),
    "pow": (2, lambda o, x, y: torch.pow(x, y, out=o)),
    "sigmoid_backward": (2, lambda o, x, y: aten.sigmoid_backward.grad_input(x, y, grad_input=o)),
    "where": (3, lambda o, x, y, z: torch.where(x > y, y, z, out=o)),
    "addcdiv": (3, lambda o, x, y, z: torch.addcdiv(x, y, z, value=0.3, out=o)),
    "add": (2, lambda o, x, y: torch.add(x, y, alpha=0.3, out=o)),
    "div": (2, lambda o, x, y: torch.div(x, y, out=o)),
    "in place": (1, lambda o, x: o.atan2_(x)),
}
SIZES = st.lists(st.sampled_from([1, 2, 3, 17, 40]), min_size=1, max_size=3)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool)


@st.composite
def tensors(draw: st.DrawFn, size: list[int], dtypes: Any, may_expand: bool = True) -> Tensor:
    """A tensor of `size`, or one that broadcasts to it: with gaps, and its dimensions in any order in memory."""
    dims = range(len(size))
    if may_expand:
        size = [1 if draw(st.integers(0, 9)) == 9 else s for s in size]
    order = draw(st.permutations(dims))
    steps = [draw(st.sampled_from([1, 1, 2])) for _ in dims]
    wide = torch.zeros([size[d] * steps[d] + draw(st.sampled_from([0, 0, 3])) for d in order])
    t = wide.to(draw(dtypes))
    for at, d in enumerate(order):
        index = slice(0, (size[d] - 1) * steps[d] + 1, steps[d])
        t = t[(slice(None),) * at + (index,)]
    t = t.permute([order.index(d) for d in dims])
    values = torch.rand(size) if t.dtype.is_floating_point else torch.randint(1, 4, size)
    return t.copy_(values)


@pytest.mark.parametrize("name", ELEMENT_WISE)
@given(data=st.data())
def test_as_eager(name: str, data: st.DataObject) -> None:
    torch.manual_seed(0)
    count, fn = ELEMENT_WISE[name]
    size, main = data.draw(SIZES), data.draw(st.sampled_from(DTYPES[:3]))
    types = st.sampled_from([main] * 6 + list(DTYPES))
    out = data.draw(tensors(size, st.sampled_from([main] * 4 + [torch.float64]), may_expand=False))
    args = [data.draw(tensors(size, types)) for _ in range(count)]
    assume(torch.broadcast_shapes(*(t.shape for t in args)) == out.shape or name == "in place")
    try:
        fn(clones(out), *clones(args))
    except (RuntimeError, NotImplementedError):
        assume(False)
    with one_thread():
        same_as_eager(fn, out, *args)


@pytest.mark.parametrize("rows", [64, 1024])
def test_in_threads(rows: int) -> None:
    """Large tensors are shared among threads: each begins its vectors anew."""
    x, y = torch.rand(rows, 101), torch.rand(101, rows).t()
    for out in (
        torch.zeros(rows, 202)[:, ::2],
        torch.zeros(rows, 103)[:, 1:-1],
        torch.zeros_like(y),
    ):
        same_as_eager(lambda x, o: torch.sigmoid(x, out=o), x, out)
        same_as_eager(lambda x, y, o: torch.atan2(x, y, out=o), x, y, out)


def test_graph(expect: Callable[[str, str], None]) -> None:
    """An argument is copied where the strides of `out` matter, and nowhere else."""

    def fn(x: Tensor, whole: Tensor, gaps: Tensor, rows: Tensor, columns: Tensor) -> None:
        for out in (whole, gaps, rows, columns):
            torch.sigmoid(x, out=out)
        torch.mul(x, x, out=gaps)  # exact
        x.t().sigmoid_()

    outs = torch.zeros(3, 4), torch.zeros(3, 8)[:, ::2], torch.zeros(3, 6)[:, :4]
    expect("out", text_of(same_as_eager(fn, torch.randn(3, 4), *outs, torch.zeros(4, 3).t())))


LOOPS: dict[str, tuple[list[tuple[int, ...]], Loop | None]] = {
    "rows": ([(4, 1), (4, 1)], Loop(12, (1, 0))),
    "columns": ([(1, 3), (1, 3)], Loop(12, (0, 1))),
    "rows into columns": ([(1, 3), (4, 1)], None),
    "wide rows": ([(9, 1), (4, 1)], Loop(4, (1, 0))),
    "gaps": ([(8, 2), (4, 1)], None),
    "one row": ([(4, 1), (0, 1), (4, 1)], Loop(4, (1, 0))),
    "one column": ([(4, 1), (1, 0), (4, 1)], Loop(4, (1, 0))),
    "one number": ([(4, 1), (4, 1), (0, 0)], Loop(12, (1, 0))),
    "two numbers": ([(4, 1), (0, 0), (0, 0)], None),
}


@pytest.mark.parametrize("name", LOOPS)
def test_loop(name: str) -> None:
    strides, want = LOOPS[name]
    assert loop((3, 4), strides) == want


def test_no_loop_of_eager() -> None:
    ref = TensorRef(0, contiguous_geometry((3, 4), torch.float32))
    gaps = ref.geometry._replace(stride=(8, 2))
    assert copied_argument(aten.sigmoid.default, (ref,), {}, gaps, ref.geometry) is not None
    with pytest.raises(UnsupportedOpError) as error:  # no positional argument that could be copied
        copied_argument(aten.sigmoid.default, (), {"self": ref}, gaps, ref.geometry)
    assert str(error.value) == (
        "computes into float32[3, 4] stride [8, 2] by a loop over the elements that no functional op runs, "
        "and may round differently: compute without out=, then copy_()"
    )
