"""FSDP2's own ops, in every mix of dtypes, bit for bit like eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import functionalize as fz
from functionalize._compat import fsdp as compat
from tests.discharge.eager import same_as_eager


def ops_of(program: fz.Program) -> list[str]:
    return [
        n.target.overloadpacket.__name__ for n in program.graph.nodes if n.op == "call_function"
    ]


compat.load_fsdp_ops()
FSDP = torch.ops.fsdp
needs_2_15 = pytest.mark.skipif(
    not hasattr(FSDP, "chunk_cat_mixed_dtype"), reason="FSDP2 has the op since torch 2.15"
)
BF16, F32, F16 = torch.bfloat16, torch.float32, torch.float16


def gradients(*dtypes: torch.dtype) -> list[Tensor]:
    """Two gradients whose rows do not divide by two chunks."""
    torch.manual_seed(0)
    sizes = ((3, 4), (5,), (2, 2))
    return [torch.randn(size).to(dtype) for size, dtype in zip(sizes, dtypes, strict=False)]


def copied_in(op: Any, grads: list[Tensor], out: Tensor) -> None:
    op(grads, dim=0, num_chunks=2, out=out)


@pytest.mark.parametrize("out", [F32, BF16])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_chunk_cat(dtype: torch.dtype, out: torch.dtype) -> None:
    same_as_eager(copied_in, FSDP.chunk_cat, gradients(dtype, dtype), torch.ones(2, 11, dtype=out))


@needs_2_15
@pytest.mark.parametrize("out", [F32, BF16])
@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, BF16), (BF16, F32), (F32, BF16), (F16, F32)])
def test_chunk_cat_of_several_dtypes(dtypes: tuple[Any, ...], out: torch.dtype) -> None:
    op = FSDP.chunk_cat_mixed_dtype
    program = same_as_eager(copied_in, op, gradients(*dtypes), torch.ones(2, 11, dtype=out))
    casts = ops_of(program).count("_to_copy")
    if len(set(dtypes)) == 1:
        assert casts == int(dtypes[0] != out)  # one cast of all
    else:
        assert casts == sum(dtype != out for dtype in dtypes)


def test_copy() -> None:
    def fn(target: Tensor, data: Tensor) -> None:
        FSDP.copy_(target, data)

    for dtype in (F32, BF16):
        same_as_eager(fn, torch.zeros(3, 2), torch.randn(3, 2).to(dtype))
    same_as_eager(fn, torch.zeros(2, 3).t(), torch.randn(3, 2))


@needs_2_15
def test_recording_a_stream_is_nothing() -> None:
    def fn(x: Tensor) -> Tensor:
        y = x + 1
        FSDP.record_grad_output_stream(y, 0, 0, 0)
        return y * 2

    program = same_as_eager(fn, torch.ones(3))
    assert ops_of(program) == ["add", "mul"]
