"""`remove_noops`: what changes nothing goes; what copies becomes a clone; replay gives the same bits."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import functionalize as fz
from examples.resize_program import values
from functionalize import passes
from functionalize.passes.remove_noops import RemoveNoops
from tests.passes.helpers import built, graph_text, rewrite

aten = torch.ops.aten


def removed(fn, *args: Tensor) -> tuple[int, fz.Program]:
    """The rewrites in `fn` traced on copies of `args`, checked by `rewrite`."""
    return rewrite(fn, lambda: tuple(t.clone() for t in args), RemoveNoops())


def ops(program: fz.Program) -> list[str]:
    return [n.target._schema.name for n in program.graph.nodes if n.op == "call_function"]


# -- fires -----------------------------------------------------------------------------------------


def test_fires(expect):
    def fn(x, w):
        h = x.detach().view(4, 6).expand(4, 6)[:, 0:6]  # nothing
        g = torch.ops.aten.t(torch.ops.aten.t(w.permute(1, 0))).permute(1, 0)  # w again
        (part,) = torch.split(h @ g, 4)
        return part.sum() + part.view(2, 2, 4).view(4, 4).pow(1).exp()

    args = values(4, 6), values(6, 4)
    gm = make_fx(fn)(*args)
    before, expected = graph_text(gm), gm(*args)
    after = graph_text(passes.on_graph_module("remove_noops")(gm))
    assert (
        torch.equal(gm(*args), expected)
        and graph_text(passes.on_graph_module("remove_noops")(gm)) == after
    )
    expect("fires", f"{before}\n->\n{after}\n")


UNDONE = {
    "transposes": [(aten.transpose.int, 0, 1), (aten.transpose.int, 1, 0)],
    "permutes": [(aten.permute.default, [1, 0]), (aten.t.default,)],
    "unsqueezed": [(aten.unsqueeze.default, 1), (aten.squeeze.dim, 1)],
    "viewed_back": [(aten.view.default, [24]), (aten.view.default, [4, 6])],
    "unsafe": [(aten._unsafe_view.default, [24]), (aten._unsafe_view.default, [4, 6])],
    "far": [
        (aten.t.default,),
        (aten.unsqueeze.default, 0),
        (aten.select.int, 0, 0),
        (aten.t.default,),
    ],
    "one_part": [(aten.split_with_sizes.default, [4])],
    "placed": [(aten.as_strided.default, [4, 6], [6, 1], 0)],
}


@pytest.mark.parametrize("steps", UNDONE.values(), ids=UNDONE)
def test_fires_on_views_that_undo_each_other(steps):
    if steps[-1][0] is aten.split_with_sizes.default:
        steps = [*steps, (operator.getitem, 0)]
    gm = built(*steps)
    x = values(4, 6)
    expected = gm(x)[0]
    passes.on_graph_module("remove_noops")(gm, [x])
    assert [n.target for n in gm.graph.nodes][1:-1] == [aten.mul.Tensor, aten.sin.default]
    assert torch.equal(gm(x)[0], expected)


COPIES = {
    "power": lambda x: (x * 2).pow(1.0).sin(),
    "cat": lambda x: torch.cat([x * 2], 1).sin(),
    "repeat": lambda x: (x * 2).repeat(1, 1).sin(),
    "rounded": lambda x: torch.ops.aten.floor((x * 2).int()) + 1,
}


@pytest.mark.parametrize("fn", COPIES.values(), ids=COPIES)
def test_fires_on_copies(fn):
    n, after = removed(fn, values(4, 6))
    assert n == 1 and "aten::clone" in ops(after)
    assert "aten::clone" not in ops(passes.run(after, "elide_copies"))


def test_fires_on_padding():
    padded = built((aten.constant_pad_nd.default, [0, 0]))
    assert "clone" in graph_text(passes.on_graph_module("remove_noops")(padded, [values(4, 6)]))


def test_fires_on_a_slice_that_is_written_whole():
    n, after = removed(lambda x: torch.slice_scatter(x * 2, x.cos(), 0, 0, 4).sin(), values(4, 6))
    assert n == 1 and "clone = aten.clone.default(cos)" in after.print_readable(False)
    assert removed(lambda x: torch.slice_scatter(x, x[1:].cos(), 0, 1), values(4, 6))[0] == 0


def test_metadata_stays():
    n, after = removed(lambda x: (x * 2).pow(1).sin(), values(4, 6))
    clone = next(n for n in after.graph.nodes if n.target is aten.clone.default)
    assert n == 1 and clone.meta["original_aten"] is aten.pow.Tensor_Scalar and "val" in clone.meta


# -- refuses ---------------------------------------------------------------------------------------

REFUSED = {
    "other_size": lambda x: x.view(24).sin(),
    "other_strides": lambda x: x.t().sin(),
    "a_part": lambda x: x[1:].sin(),
    "power_of_integers": lambda x: x.int().pow(1.0).sin(),
    "laid_out_otherwise": lambda x: torch.cat([x[::2].t()], 0).sin(),
    "by_one": lambda x: (x * 1).sin() + 0,
    "rounded": lambda x: x.floor(),
    "of_two": lambda x: torch.cat([x, x]),
}


@pytest.mark.parametrize("fn", REFUSED.values(), ids=REFUSED)
def test_refuses(fn):
    assert removed(fn, values(4, 6))[0] == 0


def test_refuses_a_view_that_is_handed_out():
    gm = make_fx(lambda x: (x.view(4, 6), x.sin(), (x * 2).view(4, 6)))(values(4, 6))
    text = graph_text(passes.on_graph_module("remove_noops")(gm))
    assert text.splitlines()[-1] == "    return (view, sin, mul)"
    twice = make_fx(lambda x: (h := x * 2, h.view(4, 6)))(values(4, 6))
    assert (
        graph_text(passes.on_graph_module("remove_noops")(twice)).splitlines()[-1]
        == "    return (mul, view)"
    )


def test_refuses_as_strided_of_an_input_that_may_begin_anywhere():
    gm = make_fx(lambda x: x.as_strided((4, 6), (6, 1), 0).sin())(values(4, 6))
    assert "as_strided" in graph_text(passes.on_graph_module("remove_noops")(gm))


def test_refuses_symbolic_sizes():
    gm = make_fx(lambda x: x.detach().sin(), tracing_mode="symbolic")(values(4))
    before = graph_text(gm)
    assert graph_text(passes.on_graph_module("remove_noops")(gm)) == before
