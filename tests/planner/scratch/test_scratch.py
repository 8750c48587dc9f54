"""The table of op scratch: kernels of CUDA, by geometry alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from functionalize._compat.fakes import FakeTensorMode
from functionalize.ir.ops import OpRecord, TensorRef, contiguous_geometry
from functionalize.planner.scratch.scratch import (
    MODELLED,
    base_name,
    is_shaped,
    scratch_bytes,
    scratch_of,
)

aten = torch.ops.aten
FLASH = aten._scaled_dot_product_flash_attention_backward.default
EFFICIENT = aten._scaled_dot_product_efficient_attention_backward.default


def attention_backward(queries: int, target: Any) -> OpRecord:
    """A record of attention's backward by geometry alone: 2 sequences, 4 heads, 64 channels."""
    q = TensorRef(0, contiguous_geometry((2, 4, queries, 64), torch.bfloat16))
    lse = TensorRef(1, contiguous_geometry((2, 4, queries), torch.float32))
    return OpRecord(target, (q, q, q, q, q, lse), {}, (q, q, q))


def test_every_name_of_the_table_is_an_op() -> None:
    for name in MODELLED:
        assert hasattr(aten, name), name
        assert is_shaped(getattr(aten, name).default)


def test_names_leave_out_the_overload_and_the_underscore() -> None:
    assert base_name(aten.add_.Tensor) == "add"
    assert base_name(aten._fused_adamw_.default) == "_fused_adamw"
    assert base_name(aten.__and__.Tensor) == "__and__"
    assert base_name(print) is None


def test_a_node_that_is_no_op_has_none() -> None:
    graph = fx.Graph()
    assert scratch_of(graph.placeholder("x"), "cuda") == 0
    assert scratch_of(graph.call_function(print, ()), "cuda") == 0


def test_a_node_with_fake_values_has_the_scratch_of_the_record() -> None:
    called, graph, mode = attention_backward(1000, FLASH), fx.Graph(), FakeTensorMode()
    args = []
    for ref in called.args:
        args.append(graph.placeholder("x"))
        with mode:
            args[-1].meta["val"] = torch.empty(ref.geometry.size, dtype=ref.geometry.dtype)
    node = graph.call_function(FLASH, tuple(args))
    assert scratch_of(node, "cuda") == scratch_bytes(called, "cuda") > 0
    assert scratch_of(node, "cpu") == 0


def test_flash_attention_on_cuda_keeps_a_float32_gradient_of_the_queries() -> None:
    called = attention_backward(1000, FLASH)
    rows = 2 * 4 * 1024
    assert scratch_bytes(called, "cuda") == 4 * rows * 64 + 4 * rows
    assert scratch_bytes(called, "cpu") == 0  # a kernel of another device


def test_grouped_heads_on_cuda_have_gradients_per_query_head() -> None:
    plain = attention_backward(256, FLASH)
    gradient, query, *_ = plain.args
    key = TensorRef(2, contiguous_geometry((2, 1, 256, 64), torch.bfloat16))
    grouped = OpRecord(FLASH, (gradient, query, key, key, *plain.args[4:]), {}, plain.outputs)
    more = 2 * 2 * 4 * 256 * 64 * 2
    assert scratch_bytes(grouped, "cuda") == scratch_bytes(plain, "cuda") + more


def test_memory_efficient_attention_on_cuda_sums_the_gradient_of_the_queries() -> None:
    called = attention_backward(256, EFFICIENT)
    assert scratch_bytes(called, "cuda") == 4 * (2 * 4 * 256) * (64 + 1)


def test_a_kernel_without_an_entry_has_none() -> None:
    q = TensorRef(0, contiguous_geometry((2, 4, 64, 64), torch.bfloat16))
    target = aten._scaled_dot_product_flash_attention_for_cpu.default
    assert scratch_bytes(OpRecord(target, (q, q, q), {}, (q, q)), "cuda") == 0
