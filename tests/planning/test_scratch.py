"""The table of op scratch against torch's own allocator: single ops, and whole steps op by op.

One thread unless said otherwise, where the table is the closest: what kernels give each thread is tested by its
geometry. The bounds are those that the docstrings promise.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from torch import fx

from benchmarks.scratch import FAMILIES, FLOATS, Case, record, step_peaks, steps, truths
from functionalize._compat import FakeTensorMode, pytree
from functionalize.core.ops import OpRecord, TensorRef, contiguous_geometry
from functionalize.frontend.release import minor_of
from functionalize.planning.scratch import (
    TABLE,
    ZERO,
    base_name,
    is_tabulated,
    scratch_bytes,
    scratch_of,
    unseen_outputs,
)

aten, R = torch.ops.aten, torch.randn
TINY = 64  # bytes of scalars that kernels wrap, which the table leaves out
# The largest error of a family's ops, as a part of the op's own peak (inputs, outputs, scratch).
BOUNDS = {
    ("recurrent", torch.float32): 0.0,
    ("recurrent", torch.bfloat16): 0.07,
    ("norm", torch.float32): 0.001,
    ("norm", torch.bfloat16): 0.001,
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def needs_avx512() -> None:
    if "AVX512" not in torch.backends.cpu.get_cpu_capability():
        pytest.skip("the table's sizes of blocks are those of AVX-512")


def needs_the_measured_onednn() -> None:
    """oneDNN chooses its bfloat16 kernels by its release, which torch's brings along, and by the CPU."""
    if minor_of(torch.__version__) != (2, 13):
        pytest.skip("the table's bfloat16 kernels are those of the oneDNN in torch 2.13")
    if torch.cpu._is_amx_tile_supported():
        pytest.skip("the table's bfloat16 kernels are those of CPUs without AMX")


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_is_what_the_allocator_sees(family, dtype):
    needs_avx512()
    if dtype == torch.bfloat16 and family in ("convolution", "transposed", "attention", "product"):
        needs_the_measured_onednn()
    cases = list(FAMILIES[family](dtype))
    bound = BOUNDS.get((family, dtype), 0.0)
    wrong = []
    for case, real in zip(cases, truths(cases), strict=True):
        off = abs(scratch_bytes(record(case)) - real.scratch)
        if off > max(TINY, bound * real.peak):
            wrong.append((case.name, real.scratch, scratch_bytes(record(case))))
    assert not wrong


def some_convolutions(dtype: torch.dtype, transposed: bool) -> list[Case]:
    """Forward and backward of thirty layers that were drawn once."""
    draw = random.Random(4)
    cases: list[Case] = []
    for _ in range(30):
        batch, size = draw.choice((2, 4, 16)), draw.choice((14, 28, 32))
        into, out = draw.choice((1, 3, 5, 8, 16, 20, 64)), draw.choice((8, 16, 20, 32, 96))
        window, stride = draw.choice((1, 3, 3, 5, 7)), draw.choice((1, 1, 2))
        channels = (into, out) if transposed else (out, into)
        x, w, b = (
            R(n).to(dtype) for n in ((batch, into, size, size), (*channels, window, window), (out,))
        )
        shape = ([stride] * 2, [window // 2] * 2, [1, 1], transposed, [0, 0], 1)
        y = aten.convolution(x, w, b, *shape)
        cases.append(Case(aten.convolution.default, (x, w, b, *shape)))
        arguments = (torch.randn_like(y), x, w, [out], *shape, [True, True, True])
        cases.append(Case(aten.convolution_backward.default, arguments))
    return cases


@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
@pytest.mark.parametrize(
    ("dtype", "exact"), [(torch.float32, 0.95), (torch.bfloat16, 0.95)], ids=str
)
def test_of_convolutions_of_any_shape_most_are_exact(dtype, exact, transposed):
    needs_avx512()
    if dtype == torch.bfloat16:
        needs_the_measured_onednn()
    elif transposed and minor_of(torch.__version__) >= (2, 15):
        pytest.skip("oneDNN in torch 2.15 has other kernels for some of them: 56 of 60 are exact")
    cases = some_convolutions(dtype, transposed)
    errors = [
        abs(scratch_bytes(record(case)) - real.scratch) / real.peak
        for case, real in zip(cases, truths(cases), strict=True)
    ]
    assert sum(error < 1e-3 for error in errors) >= exact * len(errors)
    assert sorted(errors)[int(0.9 * len(errors))] < 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_a_node_with_fake_values_has_the_scratch_of_the_record(family):
    for case in FAMILIES[family](torch.float32):
        assert scratch_of(node_of(case)) == scratch_bytes(record(case)), case.name


def node_of(case: Case) -> fx.Node:
    """The op as a node of a graph on fake values, its outputs with the layouts that the real ones have."""
    graph, mode = fx.Graph(), FakeTensorMode()

    def fake(value):
        return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value

    def placeholder(value):
        if not isinstance(value, torch.Tensor):
            return value
        node = graph.placeholder("x")
        node.meta["val"] = fake(value)
        return node

    args, kwargs = pytree.tree_map(placeholder, (case.args, case.kwargs))
    node = graph.call_function(case.target, tuple(args), kwargs)
    node.meta["val"] = pytree.tree_map(fake, case.target(*case.args, **case.kwargs))
    return node


@pytest.mark.parametrize(
    ("name", "threads"), [("convolutional", 1), ("convolutional", 2), ("LSTM", 1), ("GRU", 1)]
)
def test_live_bytes_and_scratch_are_the_allocators_at_every_op_of_a_step(name, threads):
    needs_avx512()
    torch.set_num_threads(threads)
    rows = step_peaks(steps()[name])
    peak = max(real for *_, real in rows)
    assert abs(max(ours for _, ours, _ in rows) - peak) <= 0.01 * peak
    assert max(abs(ours - real) for _, ours, real in rows) <= 0.01 * peak


@pytest.mark.parametrize("name", ["convolutional", "LSTM"])
def test_without_scratch_a_step_is_short_of_a_tenth(name):
    needs_avx512()
    rows = step_peaks(steps()[name], scratch=False)
    assert max(ours for _, ours, _ in rows) < 0.9 * max(real for *_, real in rows)


# -- what each kind of target gets -------------------------------------------------------------------


def test_what_is_tabulated_and_what_is_not():
    for target in (
        aten.mm.default,
        aten.relu_.default,  # elementwise
        aten._foreach_add_.List,
        aten.view.default,
        aten.transpose.int,
        aten._fused_adamw_.default,
        torch.ops._c10d_functional.all_reduce.default,
        aten.convolution.default,
    ):
        assert is_tabulated(target), target
    for target in (aten.linalg_svd.default, aten.multinomial.default, aten.renorm.default):
        assert not is_tabulated(target), target
        assert scratch_bytes(OpRecord(target, (), {})) == 0


def test_every_name_of_the_table_is_an_op():
    for name in (*TABLE, *ZERO):
        assert hasattr(aten, name) or hasattr(aten, f"{name}_"), name


def test_an_op_is_tabulated_as_formula_or_as_zero_and_not_as_both():
    assert not ZERO & TABLE.keys()


def test_names_leave_out_the_overload_and_the_underscore():
    assert base_name(aten.add_.Tensor) == "add"
    assert base_name(aten._fused_adamw_.default) == "_fused_adamw"
    assert base_name(aten.__and__.Tensor) == "__and__"
    assert base_name(print) is None


def test_a_node_that_is_no_op_has_none():
    graph = fx.Graph()
    assert scratch_of(graph.placeholder("x")) == 0
    assert scratch_of(graph.call_function(print, ())) == 0
    assert is_tabulated(print)


# -- threads, workspaces, devices --------------------------------------------------------------------


def attention(queries: int, *, backward: bool = False, target=None, dtype=torch.bfloat16):
    """A record of attention by geometry alone: 2 sequences, 4 heads, 64 channels."""
    q = TensorRef(0, contiguous_geometry((2, 4, queries, 64), dtype))
    lse = TensorRef(1, contiguous_geometry((2, 4, queries), torch.float32))
    if not backward:
        target = aten._scaled_dot_product_flash_attention_for_cpu.default
        return OpRecord(target, (q, q, q, 0.0, False), {}, (q, lse))
    return OpRecord(target, (q, q, q, q, q, lse), {}, (q, q, q))


def test_each_thread_of_attention_has_its_scores():
    one = scratch_bytes(attention(1024), threads=1)
    assert one == 4 * 256 * (512 + 2 + 64) + 2 * 256 * 512
    assert scratch_bytes(attention(1024), threads=8) == 8 * one


def test_threads_are_torchs_by_default():
    assert scratch_bytes(attention(1024)) == scratch_bytes(attention(1024), threads=1)


def test_the_workspace_of_an_lstm_is_missing_on_fakes():
    needs_avx512()
    for case in FAMILIES["recurrent"](torch.float32):
        if case.target is not aten.mkldnn_rnn_layer.default:
            continue
        real = case.target(*case.args)
        seen = record(case)
        assert unseen_outputs(seen) == 0
        *others, workspace = seen.outputs
        empty = workspace._replace(geometry=contiguous_geometry((0,), torch.uint8))
        fake = OpRecord(case.target, seen.args, {}, (*others, empty))
        assert unseen_outputs(fake) == real[3].nbytes
        mode = FakeTensorMode()
        node = node_of(case)
        node.meta["val"] = case.target(*(mode_tensor(mode, a) for a in case.args))
        assert unseen_outputs(node) == real[3].nbytes
    assert unseen_outputs(attention(64)) == 0


def mode_tensor(mode: FakeTensorMode, value):
    return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value


def test_flash_attention_on_cuda_keeps_a_float32_gradient_of_the_queries():
    target = aten._scaled_dot_product_flash_attention_backward.default
    called = attention(1000, backward=True, target=target)
    rows = 2 * 4 * 1024
    assert scratch_bytes(called, device="cuda") == 4 * rows * 64 + 4 * rows
    assert scratch_bytes(called) == 0  # a kernel of another device
    assert is_tabulated(target, "cuda") and not is_tabulated(target)


def test_grouped_heads_on_cuda_have_gradients_per_query_head():
    target = aten._scaled_dot_product_flash_attention_backward.default
    plain = attention(256, backward=True, target=target)
    gradient, query, *_ = plain.args
    key = TensorRef(2, contiguous_geometry((2, 1, 256, 64), torch.bfloat16))
    grouped = OpRecord(target, (gradient, query, key, key, *plain.args[4:]), {}, plain.outputs)
    more = 2 * 2 * 4 * 256 * 64 * 2
    assert scratch_bytes(grouped, device="cuda") == scratch_bytes(plain, device="cuda") + more


def test_memory_efficient_attention_on_cuda_sums_the_gradient_of_the_queries():
    target = aten._scaled_dot_product_efficient_attention_backward.default
    called = attention(256, backward=True, target=target)
    assert scratch_bytes(called, device="cuda") == 4 * (2 * 4 * 256) * (64 + 1)


def test_a_kernel_of_cpus_has_none_on_cuda():
    assert scratch_bytes(attention(1024), device="cuda") == 0
