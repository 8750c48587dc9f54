"""`elide_copies`: what goes, what stays and why; replay gives the same bits either way."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

import functionalize as fz
from examples.programs import by_name
from examples.resize_program import R, values, z
from functionalize import passes
from functionalize.passes.elide_copies import ElideCopies
from tests.passes.helpers import graph_text, rewrite

aten = torch.ops.aten


def elided(fn, *args: Tensor, parts: bool = False) -> tuple[int, fz.Program]:
    """The rewrites in `fn` traced on copies of `args`, checked by `rewrite`."""

    def fresh() -> tuple[Tensor, ...]:
        return tuple(z(*t.shape) if not t.untyped_storage().nbytes() else t.clone() for t in args)

    return rewrite(fn, fresh, ElideCopies(parts))


# -- fires -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fsdp_linear", "cycle_feeds_cycle", "one_flat_storage"])
def test_fires_on_refilled_parameters(expect, name):
    program = by_name(name)
    n, after = rewrite(program.fn, program.make_args, ElideCopies())
    before = fz.functions.trace(program.fn, *program.make_args())
    expect(
        name, f"{before.print_readable(False)}-- {after.history[0]}\n{after.print_readable(False)}"
    )
    assert n


def test_fires_where_the_epilogue_reads_an_untouched_input(expect):
    def up(p, buf):
        R(p, 64)
        p.copy_(buf)
        return p.sum()

    n, after = elided(up, z(16), values(16))
    assert n == 1
    expect("epilogue_reads_input", after.print_readable(False))


def test_fires_on_casts_that_cast_nothing(expect):
    def cast(x):
        return x.to(torch.float32, copy=True).double().to(torch.float64, copy=True) + 1

    n, after = elided(cast, values(4))
    assert n == 2
    expect("casts", after.print_readable(False))


def test_fires_on_a_strided_copy_with_the_same_strides():
    def strided(p, buf):
        R(p, 64)
        p.t().copy_(buf.t())
        return p.t() @ p

    p = z(4, 4)
    n, after = elided(strided, p, values(4, 4))
    # `copy` and the `empty_strided` that gave it its layout
    assert n == 1 and "copy." not in str(after.graph) and "empty" not in str(after.graph)


def test_fires_on_a_returned_copy_of_a_value_that_only_it_uses(expect):
    n, after = elided(lambda x: (x * 2).clone(), values(4))
    assert n == 1
    expect("returned_once", after.print_readable(False))


def test_fires_on_aligned_parts_of_an_input():
    assert elided(lambda x: x[16:].clone().sin(), values(32))[0] == 1


def test_fires_on_a_part_that_dies_before_its_whole():
    def part(x):
        h = x * 2
        return h[16:].clone().sin() + h.sum()

    assert elided(part, values(32))[0] == 1


def test_fires_on_views_that_change_nothing():
    def views(x):
        return x.view(4).expand(4).detach() * 2

    gm = passes.on_graph_module("elide_copies")(make_fx(views)(values(4)))
    assert graph_text(gm).splitlines()[1] == "    mul = aten.mul.Tensor(x_1, 2)"


def test_fires_on_views_around_a_removed_copy_that_undo_each_other():
    n, after = elided(lambda x: x.view(24).clone().view(4, 6).sin(), values(4, 6))
    assert n == 2 and [str(n.target) for n in after.graph.nodes if n.op == "call_function"] == [
        "aten.sin.default"
    ]


def test_refuses_views_that_undo_each_other_but_are_returned():
    _, after = elided(lambda x: x.view(24).clone().view(4, 6), values(4, 6))
    assert "aten.clone.default" in str(after.graph)


def test_fires_on_a_split_into_aligned_rows(expect):
    def split(flat):
        a, b = torch.split_with_sizes_copy(flat, [16, 32])
        return a.view(4, 4).sin(), b.cos()

    n, after = elided(split, values(48))
    assert n == 1
    expect("split", after.print_readable(False))


def test_fires_on_a_split_into_one_part():
    def split(flat):
        return torch.split_with_sizes_copy(flat, [5])[0].sin()

    n, after = elided(split, values(5))
    assert n == 1 and after.nodes() == 1


def test_fires_on_the_argument_of_a_collective():
    gm = _collective()
    passes.on_graph_module("elide_copies")(gm, [values(4)])
    assert graph_text(gm).splitlines()[1:3] == [
        "    all_reduce_default = _c10d_functional.all_reduce.default(x, 'sum', '0')",
        "    wait_tensor_default = _c10d_functional.wait_tensor.default(all_reduce_default)",
    ]


def test_metadata_is_that_of_the_new_memory():
    n, after = elided(lambda x: x[16:].clone()[1:].sin(), values(32))
    view = next(n for n in after.graph.nodes if n.meta["val"].shape == (15,))
    assert n == 1 and view.meta["val"].storage_offset() == 17


# -- refuses ---------------------------------------------------------------------------------------


def _changed_strides(x):
    return x.t().clone(memory_format=torch.contiguous_format).sin()


def _cast(x):
    return x.to(torch.bfloat16).sin()


def _returned_input(x):
    return x.clone()


def _returned_twice(x):
    h = x * 2
    return h, h.clone()


def _returned_view_of_input(x):
    return x.clone().view(-1)


def _returned_part(x):
    return (x * 2)[16:].clone()


def _returned_constant(x):
    return torch.tensor([1.0, 2.0])


def _unaligned(x):
    return x[1:].clone().sin()


def _outlives(x):
    h = x * 2
    part = h[16:].clone()
    return part.sin() + h.sum(), (x + 1).sum() * part.cos()


def _interleaved_split(x):
    a, b = torch.split_with_sizes_copy(x.view(2, -1), [16, 0 + x.numel() // 2 - 16], 1)
    return a.sin(), b.cos()


def _unaligned_split(x):
    a, b = torch.split_with_sizes_copy(x, [1, x.numel() - 1])
    return a.sin(), b.cos()


def _returned_split(x):
    return torch.split_with_sizes_copy(x, [16, x.numel() - 16])[0]


REFUSED = [
    _cast,
    _returned_input,
    _returned_twice,
    _returned_view_of_input,
    _returned_part,
    _returned_constant,
    _unaligned,
    _outlives,
    _interleaved_split,
    _unaligned_split,
    _returned_split,
]


@pytest.mark.parametrize("fn", REFUSED, ids=lambda fn: fn.__name__.strip("_"))
def test_refuses(fn):
    assert elided(fn, values(64))[0] == 0


def test_refuses_to_change_strides():
    assert elided(_changed_strides, values(3, 4))[0] == 0


def test_parts_option_lets_a_whole_outlive_its_last_use():
    assert elided(_outlives, values(64), parts=True)[0] == 1


def _odd(dtype):
    def fn(x):
        a = x[:14].clone()
        a[1:].mul_(2)
        a.view(dtype)[1:].zero_()
        return a * 2

    return fn


def test_refuses_a_source_that_is_no_whole_number_of_scattered_elements():
    x = values(15, dtype=torch.int16)
    assert elided(_odd(torch.float32), x)[0] == 0
    assert elided(_odd(torch.float16), x)[0] == 1


def test_refuses_a_swap(expect):
    def swap(a, b):
        t = a.clone()
        a.copy_(b)
        b.copy_(t)

    n, after = elided(swap, values(4), values(4, seed=1))
    assert n == 1  # the second copy of `t`; each input is still read before the other is written
    expect("swap", after.print_readable(False))


def test_refuses_a_source_that_the_epilogue_frees():
    def free(a, b):
        b.copy_(a)
        R(a, 0)

    assert elided(free, values(4), values(4, seed=1))[0] == 0


def test_refuses_a_source_on_the_same_storage_as_what_is_written():
    def alias():
        base = values(8)
        return base, base.view(2, 4)

    def fn(a, b):
        b.copy_(a.view(2, 4))
        return b.sum()

    assert rewrite(fn, alias, ElideCopies())[0] == 0


def test_refuses_what_is_indexed_by_absolute_position():
    def window(x):
        return x[16:].clone().as_strided((2, 2), (1, 2), 3).sin()

    gm = make_fx(window)(values(64))
    before = graph_text(gm)
    assert graph_text(passes.on_graph_module("elide_copies")(gm)) == before


def test_fires_on_what_is_indexed_by_the_same_position():
    gm = make_fx(lambda x: (x * 2).clone().as_strided((2, 2), (1, 2), 3).sin())(values(64))
    assert "clone" not in graph_text(passes.on_graph_module("elide_copies")(gm))


def test_refuses_an_input_of_a_bare_graph_that_may_begin_anywhere():
    gm = make_fx(lambda x: x.clone().as_strided((2, 2), (1, 2), 3).sin())(values(64))
    assert "clone" in graph_text(passes.on_graph_module("elide_copies")(gm))


def test_random_ops_draw_the_same():
    def dropout(x):
        return torch.dropout(x.clone(), 0.5, True) + torch.rand_like(x)

    n, after = elided(dropout, values(64))
    drawn = [str(m.target) for m in after.graph.nodes if "bernoulli" in m.name or "rand" in m.name]
    assert n == 1 and len(drawn) == 2


def _collective() -> fx.GraphModule:
    graph = fx.Graph()
    functional = torch.ops._c10d_functional
    x = graph.placeholder("x")
    clone = graph.call_function(aten.clone.default, (x,))
    reduced = graph.call_function(functional.all_reduce.default, (clone, "sum", "0"))
    waited = graph.call_function(functional.wait_tensor.default, (reduced,))
    copy = graph.call_function(aten.clone.default, (waited,))
    graph.output((waited, copy))
    return fx.GraphModule(torch.nn.Module(), graph)


def test_refuses_a_copy_of_what_wait_tensor_gave_back():
    gm = passes.on_graph_module("elide_copies")(_collective(), [values(4)])
    assert graph_text(gm).splitlines()[-1] == "    return (wait_tensor_default, clone_default_1)"


def test_refuses_what_an_op_writes():
    def body(x):
        y = x.clone()
        x.add_(1)
        return y.sin()

    gm = make_fx(body)(values(4))
    before = graph_text(gm)
    assert graph_text(passes.on_graph_module("elide_copies")(gm)) == before


def test_refuses_symbolic_sizes():
    gm = make_fx(lambda x: x.clone().sin(), tracing_mode="symbolic")(values(4))
    before = graph_text(gm)
    assert graph_text(passes.on_graph_module("elide_copies")(gm)) == before


# -- graph modules ---------------------------------------------------------------------------------


def test_graph_module_is_rewritten_in_place():
    x = values(4)
    gm = make_fx(lambda x: (x.clone().sin(), x.clone()))(x)
    assert passes.on_graph_module("elide_copies")(gm) is gm
    assert graph_text(gm).splitlines()[1:] == [
        "    sin = aten.sin.default(x_1)",
        "    clone_1 = aten.clone.default(x_1)",
        "    return (sin, clone_1)",
    ]
    assert torch.equal(gm(x)[0], x.sin()) and gm(x)[1] is not x


def test_graph_module_of_trace():
    program = fz.functions.trace(lambda x: x.clone().sin(), values(4))
    gm = passes.on_graph_module("elide_copies")(program.copy().graph_module)
    assert [n.target for n in gm.graph.nodes if n.op == "call_function"] == [aten.sin.default]
