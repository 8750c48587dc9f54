"""`merge_duplicates`: equal values are computed once, where no memory lives longer for it."""

from __future__ import annotations

import operator
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import functionalize as fz
from examples.resize_program import values
from functionalize import passes
from functionalize.cost.liveness import Liveness
from functionalize.passes.drop_dead_code import DropDeadCode
from functionalize.passes.merge_duplicates import MergeDuplicates, Numbers
from tests.passes.helpers import count, graph_text, rewrite

aten, functional = torch.ops.aten, torch.ops._c10d_functional


def merged(fn, *args: Tensor, held: int | None = 0) -> tuple[int, fz.Program]:
    """The rewrites in `fn` traced on copies of `args`, checked by `rewrite`; memory must not grow."""

    def fresh() -> tuple[Tensor, ...]:
        return tuple(t.detach().clone().requires_grad_(t.requires_grad) for t in args)

    before = fz.functions.trace(fn, *args)
    n, after = rewrite(fn, fresh, MergeDuplicates(held))
    if held == 0:
        assert Liveness(after.graph).peak <= Liveness(passes.run(before, []).graph).peak
    assert count(passes.run(after, [DropDeadCode()])) == 0
    return n, after


# -- fires -----------------------------------------------------------------------------------------


def _mixed(x, w):
    h, g = x.sin(), x.sin()
    a, b = h @ w.t(), g @ w.t()
    return (a * b + h.sum()) * a, torch.split(a, 2)[0] + torch.split(a, 2)[1]


def test_fires(expect):
    args = values(4, 6), values(4, 6)
    before = fz.functions.trace(_mixed, *args)
    n, after = merged(_mixed, *args)
    assert n
    expect(
        "fires",
        f"{before.print_readable(False)}-- {after.history[0]}\n{after.print_readable(False)}",
    )


FIRED = {
    "twice": lambda x: x.sin() + x.sin(),
    "deep": lambda x: (x.sin() * 2).cos() + (x.sin() * 2).cos(),
    "one_is_returned": lambda x: (h := x.sin(), x.sin() + h),
    "several_results": lambda x: torch.var_mean(x)[1] + torch.var_mean(x)[1],
    "numbers": lambda x: torch.full((4,), 0.5) * torch.full((4,), 0.5) + x.sum(),
    "copied_twice": lambda x: x.clone() * x.clone(),
}


@pytest.mark.parametrize("fn", FIRED.values(), ids=FIRED)
def test_fires_on(fn):
    assert merged(fn, values(4, 4))[0]


def test_fires_on_what_the_epilogue_copies():
    def fn(a, b, x):
        a.copy_(x.sin())
        b.copy_(x.sin())

    n, after = merged(fn, values(4), values(4), values(4))
    assert n == 1 and after.print_readable(False).count("aten.sin") == 1


def test_views_are_equal_if_they_look_the_same():
    def body(x):
        h = x * 2
        return h.view(24)[6:12] + h[1] + torch.ops.aten.as_strided(h, (6,), (1,), 6)

    gm, x = make_fx(body)(values(4, 6)), values(4, 6)
    expected = gm(x)
    passes.on_graph_module("merge_duplicates")(gm)
    assert torch.equal(gm(x), expected)
    assert graph_text(gm).splitlines()[3:-1] == [
        "    slice_1 = aten.slice.Tensor(view, 0, 6, 12)",
        "    add = aten.add.Tensor(slice_1, slice_1)",
        "    add_1 = aten.add.Tensor(add, slice_1)",
    ]


def test_metadata_is_that_of_the_memory_that_is_left():
    def fn(x):
        h, g = x.sin(), x.sin()
        return torch.ops.aten._unsafe_view(g, (24,)) * g.view(24) * h.view(24)

    gm = make_fx(fn)(values(4, 6))
    passes.on_graph_module("merge_duplicates")(gm)
    keys = {
        n.meta["val"].untyped_storage()._cdata
        for n in gm.graph.nodes
        if "view" in n.name or n.name == "sin"
    }
    assert len(keys) == 1


# -- lives -----------------------------------------------------------------------------------------


def _far_apart(x):
    a = x.sin().sum()
    for _ in range(3):
        a = (x * a).sum()
    return a + x.sin().sum()


def test_refuses_to_keep_a_value_for_longer():
    n, after = merged(_far_apart, values(64))
    assert n == 0
    n, after = merged(_far_apart, values(64), held=4)  # the sum, and what it is of
    assert n == 1 and after.print_readable(False).count("aten.sin") == 1
    assert merged(_far_apart, values(64), held=None)[0] == 2


def test_a_recomputation_stays_one():
    def joint(x, w):
        out = checkpoint(lambda x: (x @ w).relu() @ w, x, use_reentrant=False).sum()
        return out, *torch.autograd.grad(out, (x, w))

    x, w = values(8, 8).requires_grad_(), values(8, 8).requires_grad_()
    before = fz.functions.trace(joint, x, w)
    assert before.print_readable(False).count("aten.relu") == 2
    after = passes.run(before, [MergeDuplicates()])
    assert after.print_readable(False).count("aten.relu") == 2
    assert Liveness(after.graph).peak <= Liveness(before.graph).peak


def test_a_value_that_lives_anyway_is_not_recomputed():
    def joint(x, w):
        out = checkpoint(lambda x: (x @ w).sin(), x, use_reentrant=False)
        h = x @ w
        return h, *torch.autograd.grad((out * h).sum(), (x, w))

    n, after = merged(joint, values(8, 8).requires_grad_(), values(8, 8).requires_grad_())
    assert n == 1 and after.print_readable(False).count("aten.mm") == 6  # seven before


# -- refuses ---------------------------------------------------------------------------------------

REFUSED = {
    "both_returned": lambda x: (x.sin(), x.sin()),
    "views_returned": lambda x: (x.sin(), x.sin().view(2, 12)),
    "random": lambda x: torch.rand_like(x) + torch.rand_like(x),
    "dropout": lambda x: F.dropout(x) + F.dropout(x),
    "empty": lambda x: (torch.empty_like(x).fill_(1) + x, torch.empty(3).zero_())[0],
    "other_dtype": lambda x: (
        torch.full((4,), 1).sum() + torch.full((4,), 1.0).sum() + torch.full((4,), True).sum()
    ),
    "minus_zero": lambda x: x / torch.full((), 0.0) + x / torch.full((), -0.0),
    "number_types": lambda x: torch.add(x, 1) + torch.add(x, 1.0) + torch.add(x, True),
    "other_places": lambda x: x[0].sum() + x[1].sum(),
}


@pytest.mark.parametrize("fn", REFUSED.values(), ids=REFUSED)
def test_refuses(fn):
    assert merged(fn, values(4, 6), held=None)[0] == 0


def test_refuses_both_parts_of_two_that_are_returned():
    def both(x):
        return torch.var_mean(x)[0], torch.var_mean(x)[0]

    def one(x):
        return torch.var_mean(x)[0], torch.var_mean(x)[0] + 1

    assert merged(both, values(4), held=None)[0] == 0
    n, after = merged(one, values(4))
    assert n == 2 and after.print_readable(False).count("aten.var_mean") == 1


def _graph(*targets: object, size: int = 4) -> fx.GraphModule:
    """A graph that calls each op with `x` and adds up."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    total = x
    for target, *args in targets:
        total = graph.call_function(
            aten.add.Tensor, (total, graph.call_function(target, (x, *args)))
        )
    graph.output((total,))
    return fx.GraphModule(torch.nn.Module(), graph)


def test_refuses_collectives_and_waits():
    gm = _graph(
        *[(functional.all_reduce.default, "sum", "0")] * 2, *[(functional.wait_tensor.default,)] * 2
    )
    before = graph_text(gm)
    assert graph_text(passes.on_graph_module("merge_duplicates")(gm, [values(4)])) == before


def test_refuses_ops_of_other_libraries_and_what_writes():
    with torch.library._scoped_library("merged_test", "FRAGMENT") as library:
        library.define("noise(Tensor x) -> Tensor")
        library.impl("noise", lambda x: x + 1, "CompositeExplicitAutograd")
        op = torch.ops.merged_test.noise.default
        before = graph_text(gm := _graph((op,), (op,)))
        assert graph_text(passes.on_graph_module("merge_duplicates")(gm, [values(4)])) == before
    written = make_fx(lambda x: x.sin() + x.add_(1) + x.sin())(values(4))
    before = graph_text(written)
    assert graph_text(passes.on_graph_module("merge_duplicates")(written)) == before


def test_refuses_arguments_that_it_does_not_know():
    gm = _graph((aten.sin.default,), (aten.sin.default,))
    for node in gm.graph.find_nodes(op="call_function", target=aten.sin.default):
        node.target, node.args = (
            operator.mul,
            (node.args[0], fx.node.Argument),
        )  # nothing that has a key
    program = SimpleNamespace(guards=[None], geometries={})
    graph, numbers = gm.graph, Numbers(program)
    found = [numbers.number(n) for n in graph.nodes]
    assert len(set(found)) == len(found)
