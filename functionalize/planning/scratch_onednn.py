"""Scratch of oneDNN's recurrent layer and of its matrix products in bfloat16, by their geometry.

    lstm_forward(...), lstm_backward(...)      packed weights, summed biases, the layer's scratchpad
    lstm_workspace(...)                        bytes of the workspace that forward saves: an output, empty on fakes
    matmul(...)                                a thread's copies of blocks, in bfloat16 and float16

Sizes follow oneDNN 3.12 as torch 2.13 ships it. Leading dimensions are padded to 64 bytes, and by 64 bytes more
where they are a multiple of 256 elements; every buffer of a scratchpad starts on a page. The recurrent
layer is exact in float32; in bfloat16 within 1% of the op's own peak, of tiny layers (16 hidden) within 7%.
"""

from __future__ import annotations

import torch

from functionalize.planning.scratch_layer import PAGE, rounded


def paged(nbytes: int) -> int:
    """Bytes in whole pages."""
    return rounded(nbytes, PAGE)


def leading(n: int, itemsize: int) -> int:
    """A leading dimension of `n` elements as oneDNN pads it."""
    line = 64 // itemsize
    n = rounded(n, line)
    return n + line if n % 256 == 0 else n


def _blocks(time: int, batch: int, hidden: int) -> tuple[int, int]:
    """Bytes of the gates of all moments, and of the states of one, in float32."""
    gates = paged(time * batch * leading(4 * hidden, 4) * 4)
    return gates, paged(batch * leading(hidden, 4) * 4)


def _scratchpad(time: int, batch: int, hidden: int, reduced: bool) -> int:
    gates, states = _blocks(time, batch, hidden)
    if reduced:  # the gates of one moment
        gates = paged(batch * 4 * rounded(hidden, 32) * 4) + PAGE
    return gates + 2 * states + PAGE + 568


def lstm_forward(time: int, batch: int, inputs: int, hidden: int, dtype: torch.dtype) -> int:
    """Scratch of `aten.mkldnn_rnn_layer`: summed biases, packed weights, the scratchpad."""
    reduced = dtype.itemsize == 2
    if reduced:
        packed = [k * 4 * rounded(hidden, 32) * 2 for k in (inputs, hidden)]
    else:
        packed = [k * leading(4 * hidden, 4) * 4 for k in (inputs, hidden)]
    return 4 * hidden * dtype.itemsize + sum(packed) + _scratchpad(time, batch, hidden, reduced)


def lstm_backward(time: int, batch: int, inputs: int, hidden: int, dtype: torch.dtype) -> int:
    """Scratch of `aten.mkldnn_rnn_layer_backward`; its outputs are float32 whatever the inputs are."""
    bias, single = 4 * hidden * dtype.itemsize, 4 * hidden * 4
    gradients = [k * leading(4 * hidden, 4) * 4 for k in (inputs, hidden)]
    pad = _scratchpad(time, batch, hidden, dtype.itemsize == 2)
    if dtype.itemsize == 2:
        states = [time * batch * hidden * 4, batch * hidden * 4, batch * hidden * 4]
        packed = [4 * hidden * rounded(k, 32) * 2 for k in (inputs, hidden)]
        sizes = [bias, *states, *packed, *gradients, single, pad]
    else:
        packed = [4 * hidden * leading(k, 4) * 4 for k in (inputs, hidden) if leading(k, 4) != k]
        sizes = [bias, *packed, *gradients, single, pad]
    return sum(sizes) - single  # the second gradient of a bias is made when the rest is free


def lstm_workspace(time: int, batch: int, inputs: int, hidden: int, dtype: torch.dtype) -> int:
    """Bytes of the workspace, the fourth output of `aten.mkldnn_rnn_layer` (0 elements on fake tensors)."""
    size = dtype.itemsize
    gates = paged(time * batch * leading(4 * hidden, size) * size)
    wide = max(inputs, hidden)
    states = paged(2 * (time + 1) * batch * leading(wide, size) * size)  # of layers, and of moments
    gradients = paged(2 * (time + 1) * batch * leading(wide, 4) * 4)
    cells = paged(2 * (time + 1) * batch * hidden * 4)  # and their gradients
    last = paged(time * batch * leading(hidden, size) * size)
    return gates + 2 * states + gradients + 2 * cells + last


def matmul(rows: int, inner: int, columns: int, transposed: bool, threads: int) -> int:
    """Scratch of a product in bfloat16: a block of the right operand, sums in float32, a transposed left block.

    transposed: whether the left operand's rows are not contiguous. Within 0.5 kB for `inner` up to 512 (up to
    2048 unless transposed); beyond, off by up to 1.6 MB per thread.
    """
    if rows * inner * columns <= 16**3:
        return 0
    high = -(-rows // -(-rows // 256))
    deep = inner if inner < 1024 else 512
    left, fixed = 0, 640 * threads + 384
    if transposed and rows > 1:
        high = min(high, -(-rows // threads))
        left = high * (deep + 32 if deep % 512 == 0 else rounded(deep, 32)) * 2
        fixed += 128
    sums = high * min(64, rounded(columns, 16)) * 4
    right = rounded(deep, 32) * 64 * 2
    if transposed and rows >= 1024 and inner >= 1024:
        left, sums, right = 1024 * 544 * 2, 1024 * 64 * 4, 4 * PAGE
    return threads * (left + sums + right) + fixed
