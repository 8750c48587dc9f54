"""`fold_views`: one op for a chain of views, with the geometry of the last; replay gives the same bits."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

import functionalize as fz
from examples.resize_program import values
from functionalize import passes
from functionalize.ir.ops import geometry_of
from functionalize.passes.fold_views import FoldViews, step_between
from tests.passes.helpers import built, graph_text, rewrite

aten = torch.ops.aten


def folded(fn, *args: Tensor) -> tuple[int, fz.Program]:
    """The rewrites in `fn` traced on copies of `args`, checked by `rewrite`."""
    return rewrite(fn, lambda: tuple(t.clone() for t in args), FoldViews())


# -- fires -----------------------------------------------------------------------------------------

FOLDED = {
    "views": [(aten.view.default, [24]), (aten.view.default, [2, 12]), (aten.view.default, [3, 8])],
    "slices": [(aten.slice.Tensor, 0, 1, 4), (aten.slice.Tensor, 0, 1, 3)],
    "steps": [(aten.slice.Tensor, 1, 1, 6, 2), (aten.slice.Tensor, 1, 1, 3)],
    "expands": [
        (aten.unsqueeze.default, 0),
        (aten.expand.default, [2, 4, 6]),
        (aten.expand.default, [2, 4, 6]),
    ],
    "selects": [(aten.slice.Tensor, 0, 1, 3), (aten.select.int, 0, 1)],
    "permutes": [
        (aten.view.default, [2, 2, 6]),
        (aten.permute.default, [2, 0, 1]),
        (aten.permute.default, [1, 0, 2]),
    ],
    "transposes": [
        (aten.view.default, [2, 2, 6]),
        (aten.permute.default, [1, 2, 0]),
        (aten.permute.default, [1, 0, 2]),
    ],
    "strided_view": [(aten.as_strided.default, [2, 12], [12, 1], 0)],
    "strided_part": [(aten.as_strided.default, [2, 6], [6, 1], 6)],
    "strided_row": [(aten.as_strided.default, [6], [1], 12)],
    "strided_t": [(aten.as_strided.default, [6, 4], [1, 6], 0)],
    "strided_twice": [
        (aten.view.default, [24]),
        (aten.as_strided.default, [3, 4, 6], [0, 6, 1], 0),
    ],
    "dtypes": [
        (aten.view.dtype, torch.int32),
        (aten.view.default, [24]),
        (aten.view.dtype, torch.float32),
    ],
}


def test_fires(expect):
    text = []
    for name, steps in FOLDED.items():
        gm, x = built(*steps), values(4, 6)
        expected = gm(x)[0]
        passes.verify(gm, [x])
        want = list(gm.graph.nodes)[-3].meta["val"]
        before = graph_text(gm)
        passes.on_graph_module("fold_views")(gm, [x])
        got = list(gm.graph.nodes)[-3].meta["val"]
        assert geometry_of(got) == geometry_of(want)
        assert got.untyped_storage()._cdata == want.untyped_storage()._cdata
        assert torch.equal(gm(x)[0], expected)
        once = graph_text(gm)
        assert graph_text(passes.on_graph_module("fold_views")(gm, [x])) == once
        text.append(f"-- {name}\n{before}\n->\n{once}")
    expect("fires", "\n".join(text) + "\n")


def test_fires_on_a_program(expect):
    def heads(x, w):
        q, k = F.linear(x, w).view(2, 4, 2, 3, 2).unbind(2)
        return (q.transpose(1, 2) @ k.permute(0, 2, 3, 1)).flatten(2)

    n, after = folded(heads, values(2, 4, 6), values(12, 6))
    assert n
    expect("program", after.print_readable(False))


def test_a_chain_longer_than_it_looks_up_is_folded_whole():
    steps = [(aten.view.default, [24 // n, n]) for n in (1, 2, 3, 4, 6, 8) * 8]
    gm = passes.on_graph_module("fold_views")(built(*steps), [values(4, 6)])
    assert len(gm.graph.nodes) == 5


# -- refuses ---------------------------------------------------------------------------------------

REFUSED = {
    "one_view": [(aten.view.default, [24])],
    "two_ops": [(aten.slice.Tensor, 0, 1, 3), (aten.view.default, [12])],
    "two_dimensions": [(aten.slice.Tensor, 0, 1, 3), (aten.slice.Tensor, 1, 1, 3)],
    "other_bits": [(aten.view.default, [24]), (aten.view.dtype, torch.int32)],
    "stride_of_one": [(aten.t.default,), (aten.unsqueeze.default, 1), (aten.transpose.int, 0, 2)],
    "undone": [(aten.t.default,), (aten.t.default,)],
    "overlapping": [(aten.as_strided.default, [3, 4], [2, 1], 0)],
    "nothing": [(aten.slice.Tensor, 0, 2, 2), (aten.view.default, [6, 0])],
    "parts": [
        (aten.view.default, [24]),
        (aten.split_with_sizes.default, [12, 12]),
        (operator.getitem, 0),
    ],
}


@pytest.mark.parametrize("steps", REFUSED.values(), ids=REFUSED)
def test_refuses(steps):
    gm, x = built(*steps), values(4, 6)
    before = graph_text(gm)
    assert graph_text(passes.on_graph_module("fold_views")(gm, [x])) == before


def test_refuses_as_strided_of_an_input_that_may_begin_anywhere():
    gm = make_fx(lambda x: x.as_strided((24,), (1,), 0).sin())(values(4, 6))
    assert "as_strided" in graph_text(passes.on_graph_module("fold_views")(gm))
    gm = built((aten.as_strided.default, [24], [1], 0))
    assert "as_strided" not in graph_text(passes.on_graph_module("fold_views")(gm, [values(4, 6)]))


def test_refuses_symbolic_sizes():
    gm = make_fx(lambda x: x.view(-1).view(x.shape).view(-1).sin(), tracing_mode="symbolic")(
        values(4)
    )
    before = graph_text(gm)
    assert graph_text(passes.on_graph_module("fold_views")(gm)) == before


# -- any geometry ----------------------------------------------------------------------------------


@st.composite
def views(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """A tensor and a view of it, by a few random view ops."""
    size = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    base = torch.arange(torch.Size(size).numel() + 3)[3:].view(size)
    if draw(st.booleans()):
        base = base.permute(draw(st.permutations(range(len(size)))))
    view = base
    for _ in range(draw(st.integers(1, 3))):
        dim = draw(st.integers(0, view.dim() - 1)) if view.dim() else 0
        kind = draw(
            st.sampled_from(["permute", "unsqueeze", "select", "slice", "flatten", "expand"])
        )
        if kind == "permute":
            view = view.permute(draw(st.permutations(range(view.dim()))))
        elif kind == "unsqueeze":
            view = view.unsqueeze(dim)
        elif kind == "expand":
            view = view.unsqueeze(0).expand(2, *view.shape)
        elif kind == "flatten" and view.is_contiguous():
            view = view.view(-1)
        elif view.dim() and kind == "select":
            view = view.select(dim, draw(st.integers(0, view.shape[dim] - 1)))
        elif view.dim() and kind == "slice":
            view = view.narrow(dim, draw(st.integers(0, view.shape[dim] - 1)), 1)
    return base, view


@settings(max_examples=150, deadline=None)
@given(views())
def test_a_step_leads_where_it_says(pair):
    base, view = pair
    step = step_between(geometry_of(base), geometry_of(view))
    if step is not None:
        target, args = step
        assert geometry_of(target(base, *args)) == geometry_of(view)


def test_graph_module_is_rewritten_in_place():
    gm = make_fx(lambda x: x.view(24).view(2, 12).sin())(values(4, 6))
    assert passes.on_graph_module("fold_views")(gm) is gm and isinstance(gm, fx.GraphModule)
    assert graph_text(gm).splitlines()[1] == "    view_2 = aten.view.default(x_1, [2, 12])"


def test_a_value_whose_elements_are_split_keeps_its_views():
    """`add` has the stride 2 of `x` in the dimension of size 1, its fake has 1."""

    def fn(x, y):
        x.add_(2)
        return y + 2

    def make():
        whole = torch.arange(4, dtype=torch.float32)
        return whole.view(torch.float64).as_strided((2, 1), (1, 2)), whole[2:]

    program = passes.run(fz.functions.trace(fn, *make()), "fold_views")
    assert torch.equal(program(*make()), fn(*make()))
