"""`recompute_views`: on joint graphs by hand, and as the partition of stock `aot_function`.

A parameter is freed at the end of the forward and refilled before backward, as FSDP2 does it. Outputs,
gradients and storage sizes are those of eager.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch
from functorch.compile import (
    aot_function,
    default_partition,
    make_boxed_func,
    min_cut_rematerialization_partition,
    nop,
)
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import functionalize as fz
from examples.resize_program import R, leaf, refill_parameter, values, z
from functionalize import passes
from functionalize.errors import PassError
from functionalize.passes import partitioner
from functionalize.passes.recompute_views import RecomputeViews, partition
from tests.passes.helpers import count, graph_text

BASES = ("min_cut", "default")
SPLIT = torch.ops.aten.split_with_sizes.default


# -- a joint graph by hand -------------------------------------------------------------------------


def linear(primals: list[Tensor], tangents: list[Tensor]) -> list[Tensor]:
    """Forward `x @ buf.t()`, with `w`, as empty as FSDP2 leaves it, saved through a view."""
    x, w, buf = primals
    wt = w.t()
    return [x @ buf.t(), tangents[0] @ wt.t()]


def joint(fn=linear) -> torch.fx.GraphModule:
    """The joint graph of `fn`: `primals_1` is x, `primals_2` is w, `primals_3` is buf."""
    inputs = [values(3, 4), values(5, 4, seed=1), values(5, 4, seed=2)]

    def flat(primals_1, primals_2, primals_3, tangents_1):
        return fn([primals_1, primals_2, primals_3], [tangents_1])

    gm = make_fx(flat)(*inputs, values(3, 5, seed=3))
    for node, name in zip(
        gm.graph.find_nodes(op="placeholder"),
        ("primals_1", "primals_2", "primals_3", "tangents_1"),
        strict=True,
    ):
        node.name = node.target = name
    gm.recompile()
    return gm


def run(gm: torch.fx.GraphModule) -> list[Tensor]:
    x, w, buf, t = (values(*s, seed=i) for i, s in enumerate([(3, 4), (5, 4), (5, 4), (3, 5)]))
    return list(gm(x, w, buf, t))


def test_fires(expect):
    gm = joint()
    before, results = graph_text(gm), run(gm)
    assert passes.on_graph_module("recompute_views{outputs=1}")(gm) is gm
    expect("joint", f"{before}\n--\n{graph_text(gm)}")
    assert all(map(torch.equal, run(gm), results))


def test_second_run_changes_nothing():
    gm = passes.on_graph_module("recompute_views{outputs=1}")(joint())
    text = graph_text(gm)
    assert graph_text(passes.on_graph_module("recompute_views{outputs=1}")(gm)) == text
    assert RecomputeViews(outputs=1).apply(passes.graph_modules.program_of(gm)) == 0


def test_a_view_that_forward_reads_stays_there_too(expect):
    def shared(primals, tangents):
        wt = primals[1].t()
        return [primals[0] @ wt, tangents[0] @ wt.t()]

    gm = joint(shared)
    results = run(gm)
    assert RecomputeViews(outputs=1).apply(passes.graph_modules.program_of(gm)) == 2
    expect("read_in_forward", graph_text(gm))
    gm.recompile()
    assert all(map(torch.equal, run(gm), results))


def test_refuses_inputs_that_are_not_named():
    gm = joint()
    text = graph_text(gm)
    for emptied, is_same in (("primals_1", True), ("primals_2", False)):
        each = passes.on_graph_module(RecomputeViews(outputs=1, emptied=(emptied,)))
        assert (graph_text(each(gm)) == text) is is_same


def test_refuses_what_is_no_view():
    def cast(primals, tangents):
        low = primals[1].bfloat16()
        return [primals[0] @ primals[2].t(), tangents[0] @ low.float()]

    gm = joint(cast)
    text = graph_text(gm)
    assert graph_text(passes.on_graph_module("recompute_views{outputs=1}")(gm)) == text


def test_refuses_a_graph_without_backward():
    def fn(x, w):
        return x @ w.t()

    program = fz.functions.trace(fn, values(3, 4), values(5, 4))
    assert count(passes.run(program, [RecomputeViews()])) == 0
    assert count(passes.run(program, [RecomputeViews(outputs=1)])) == 0


def test_joint_program_through_run():
    def step(x, w, buf, t):
        wt = w.t()
        return x @ (buf.t() + wt), t @ wt.relu().t()

    args = values(3, 4), values(5, 4), values(5, 4), values(3, 5)
    program = fz.functions.trace(step, *args)
    after = passes.run(program, "recompute_views{outputs=1}")
    assert after.history == ("recompute_views{outputs=1}: 1",)
    assert count(passes.run(after, "recompute_views{outputs=1}")) == 0
    assert all(map(torch.equal, after(*args), step(*args)))


def test_each_half_has_its_own_split():
    def step(x, w, t):
        a, b = w.split([2, 3])
        return x @ a.t(), t[:, :2] @ a, t[:, 2:] @ b

    args = values(3, 4), values(5, 4), values(3, 5)
    program = fz.functions.trace(step, *args)
    after = passes.run(program, "recompute_views{outputs=1}")
    splits = [p.graph.find_nodes(op="call_function", target=SPLIT) for p in (program, after)]
    assert [len(nodes) for nodes in splits] == [1, 2]
    assert [len(node.users) for node in splits[1]] == [1, 2]
    assert all(map(torch.equal, after(*args), step(*args)))


def test_unknown_placeholder():
    message = r"no placeholder 'w'; there are primals_1, primals_2, primals_3, tangents_1"
    with pytest.raises(PassError, match=message):
        passes.on_graph_module("recompute_views{emptied=w}")(joint())
    with pytest.raises(PassError, match="no placeholder 9;"):
        partition(joint(), [], num_fwd_outputs=1, emptied=[9])


def test_unknown_partitioner():
    with pytest.raises(PassError) as error:
        partitioner("max_cut")
    assert str(error.value) == "no partitioner 'max_cut'; there are min_cut, default"


# -- as a partition of aot_function ----------------------------------------------------------------


class Split:
    """`aot_function` that keeps the text of forward and backward."""

    def __init__(self, fn, partition_fn) -> None:
        self.texts: list[str] = []
        self.call = aot_function(
            fn,
            self._compile,
            self._compile,
            partition_fn=partition_fn,
            keep_inference_input_mutations=True,
        )

    def _compile(self, gm, inputs):
        self.texts.append(graph_text(gm))
        return make_boxed_func(gm.forward)

    @property
    def backward(self) -> str:
        return self.texts[1]


def freed(x, w):
    """A linear layer that frees its weight when it is done."""
    out = (x @ w.t()).relu()
    R(w, 0)
    return out


def freed_in_parts(x, w):
    """The same by two matrices, parts of the weight."""
    out = torch.cat([x @ part.t() for part in w.split([2, 3])], 1).relu()
    R(w, 0)
    return out


def freed_and_counted(x, w, seen):
    """The same, and a buffer that is written."""
    seen.add_(1)
    out = (x @ w.t()).relu() * seen
    R(w, 0)
    return out


class EmptyLinear(torch.autograd.Function):
    """A linear layer whose weight is empty in forward, where `buf` stands in for it."""

    @staticmethod
    def forward(ctx, x, w, buf):
        ctx.save_for_backward(x, w.t())
        return x @ buf.t()

    @staticmethod
    def backward(ctx, grad):
        x, wt = ctx.saved_tensors
        return grad @ wt.t(), grad.t() @ x, None


def steps(call, weight: Tensor, *extra: Tensor) -> list[Tensor]:
    """Two steps with a refill before each backward; what a training loop would see."""
    seen: list[Tensor] = []
    full = values(5, 4, seed=2)
    for _ in range(2):
        x = leaf(3, 4)
        if weight.untyped_storage().nbytes() == 0 and not isinstance(call, _Empty):
            refill_parameter(weight, full)
        out = call(x, weight, *extra)
        assert weight.untyped_storage().nbytes() == 0
        refill_parameter(weight, full)
        out.sum().backward()
        assert weight.untyped_storage().nbytes() == 80
        seen += [out.detach(), x.grad, weight.grad.clone(), *(e.clone() for e in extra)]
        if isinstance(call, _Empty):
            R(weight, 0)
    return seen


class _Empty:
    """A callable that wants its weight empty."""

    def __init__(self, call) -> None:
        self.call = call

    def __call__(self, *args):
        return self.call(*args)


@pytest.mark.parametrize("base", BASES)
def test_parameter_is_saved_not_its_parts(base):
    split = Split(freed_in_parts, partitioner(base))
    got = steps(split.call, leaf(5, 4, seed=2))
    want = steps(freed_in_parts, leaf(5, 4, seed=2))
    assert all(map(torch.equal, got, want))
    assert all(
        map(
            torch.equal,
            steps(fz.functions.aot_function(freed_in_parts, nop), leaf(5, 4, seed=2)),
            want,
        )
    )
    forward, backward = split.texts
    assert forward.count("split_with_sizes.default") <= 1
    assert backward.count("split_with_sizes.default") == 1


@pytest.mark.parametrize("base", BASES)
def test_parameter_is_saved_not_its_view(base, expect):
    split = Split(freed, partitioner(base))
    got = steps(split.call, leaf(5, 4, seed=2))
    assert all(map(torch.equal, got, steps(freed, leaf(5, 4, seed=2))))
    expect(f"freed.{base}", "\n".join(split.texts))


@pytest.mark.parametrize("base", BASES)
def test_side_effects_stay_in_forward(base, expect):
    split = Split(freed_and_counted, partitioner(base))
    got = steps(split.call, leaf(5, 4, seed=2), torch.ones(()))
    expected = steps(freed_and_counted, leaf(5, 4, seed=2), torch.ones(()))
    assert all(map(torch.equal, got, expected))
    assert "resize" not in split.backward and "copy_" not in split.backward
    expect(f"side_effects.{base}", "\n".join(split.texts))


@pytest.mark.parametrize("base", BASES)
def test_view_of_an_empty_parameter_is_not_taken_in_forward(base, expect):
    """Without the pass, forward fails: it would take the view of a storage of 0 bytes."""
    full = values(5, 4, seed=2)
    split = Split(EmptyLinear.apply, partitioner(base))
    got = steps(_Empty(split.call), z(5, 4, grad=True), full)

    def stock(x, w, buf):
        with torch.no_grad():
            refill_parameter(w, buf)
        return freed_linear(x, w)

    def freed_linear(x, w):
        out = x @ w.t()
        R(w, 0)
        return out

    expected = steps(_Empty(stock), z(5, 4, grad=True), full)
    assert all(map(torch.equal, got, expected))
    expect(f"empty.{base}", "\n".join(split.texts))


@pytest.mark.parametrize("base", BASES)
def test_stock_partitions_fail_where_these_do_not(base):
    """The two traps this pass is for, so that it is noticed when torch no longer has them."""
    with pytest.raises(RuntimeError, match="out of bounds for storage of size 0"):
        if base == "min_cut":
            steps(Split(freed, min_cut_rematerialization_partition).call, leaf(5, 4, seed=2))
        else:
            split = Split(EmptyLinear.apply, default_partition)
            split.call(leaf(3, 4), z(5, 4, grad=True), values(5, 4))


def test_refuses_a_forward_that_reads_what_it_wrote():
    def late(primals, tangents):
        primals[0].mul_(2)
        return [primals[0].sin(), tangents[0] @ primals[1]]

    gm = joint(late)
    with pytest.raises(PassError) as error:
        partition(gm, [], num_fwd_outputs=1)
    assert str(error.value) == (
        "`sin` reads `mul_` after the forward wrote `primals_1`: functionalize the function "
        "first, so that its writes come last"
    )


def test_returned_result_of_a_side_effect():
    """An in-place op that is returned: the output is the input that it wrote."""

    def fn(primals, tangents):
        written = primals[0].mul_(2)
        return [primals[2] + 1, written, tangents[0] @ primals[1]]

    forward, backward = partition(joint(fn), [], num_fwd_outputs=2)
    assert graph_text(forward).splitlines()[-2:] == [
        "    mul_ = aten.mul_.Tensor(primals_1, 2)",
        "    return (add, primals_1, primals_2)",
    ]
    assert "mul_" not in graph_text(backward)


@pytest.mark.parametrize("base", BASES)
def test_returned_view_of_what_was_written_comes_after_the_write(base):
    """An input that was empty has no view before it has grown."""

    def fn(primals, tangents):
        value = primals[0] + 1
        R(primals[0], 64)
        primals[0].copy_(value)
        flat = primals[0].view(-1)
        return [primals[2] + 1, flat[2:4], flat.split(6)[1], tangents[0] @ primals[1]]

    forward, backward = partitioner(base)(joint(fn), [], num_fwd_outputs=3)
    lines = graph_text(forward).splitlines()
    write = next(i for i, line in enumerate(lines) if "copy_ =" in line)
    assert any("resize_storage" in line for line in lines[:write])
    views = [
        i for i, line in enumerate(lines) if "view" in line or "slice" in line or "split" in line
    ]
    assert views and min(views) > write
    assert "view" not in graph_text(backward)


def test_passes_import_torchs_partitioners_when_one_is_used() -> None:
    code = """
        import sys
        from functionalize import passes
        assert "torch._functorch.partitioners" not in sys.modules
        passes.partitioner()
        assert "torch._functorch.partitioners" in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)
