"""Scratch of CUDA kernels, from public sources: modelled, not measured.

    Op                                             bytes
    flash attention, forward                       0: its log-sum-exp and random state are outputs
    flash attention, backward                      float32 gradient of the queries, row sums of the gradient, and
                                                   keys' gradients per query head where heads are grouped
    memory-efficient attention, backward           float32 gradient of the queries, row sums of the gradient

An op without an entry may still have scratch: partial sums of norms, sorts and embeddings are missing.
The workspaces of cuBLAS and cuDNN are constants of a process: see `planning/machines/constants.py`.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any


def _rounded(n: int, to: int) -> int:
    return -(-n // to) * to


def flash_attention_backward(call: Any) -> int:
    """`dq_accum` and `softmax_d` in float32; with grouped heads also `dk` and `dv` of every query head.

    Rows are rounded up to 128, channels to 32 (past 192 to 256).
    Source: Dao-AILab/flash-attention, csrc/flash_attn/flash_api.cpp, `mha_bwd`, which torch builds in
    aten/src/ATen/native/transformers/cuda/flash_attn/. Deterministic mode, which keeps one `dq_accum` for
    every block of keys, is not modelled.
    """
    query, key = call["query"], call["key"]
    batch, heads, length, depth = query.size
    rows = _rounded(length, 128)
    wide = _rounded(depth, 32) if depth <= 192 else 256
    grouped = 0
    if key.size[1] != heads:
        grouped = 2 * batch * heads * key.size[2] * depth * key.dtype.itemsize
    return 4 * batch * heads * rows * (wide + 1) + grouped


def efficient_attention_backward(call: Any) -> int:
    """Row sums and, since keys are split over blocks, the queries' gradients, both in float32.

    Source: aten/src/ATen/native/transformers/cuda/mem_eff_attention/kernel_backward.h (`kNeedsAccumGradQ`, from
    compute capability 7.0). The accumulators of keys and values, of channels past a block, are not modelled.
    """
    query = call["query"]
    batch, heads, length, depth = query.size
    rows = _rounded(length, 128)
    return 4 * batch * heads * rows * (_rounded(depth, 32) + 1)


MODELLED: Mapping[str, Callable[[Any], int]] = types.MappingProxyType(
    {
        "_scaled_dot_product_flash_attention_backward": flash_attention_backward,
        "_flash_attention_backward": flash_attention_backward,
        "_scaled_dot_product_efficient_attention_backward": efficient_attention_backward,
    }
)
