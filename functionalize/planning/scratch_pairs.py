"""Scratch of convolutions in bfloat16: rows as pairs, which its instructions take, and sums in float32.

    sums(conv, channels, result)           a 1x1 kernel's result, per thread
    pointwise_reduction(conv, bias)        the gradient of a 1x1 kernel's weights
    reduction(conv, bias)                  the gradient of any other's

Follows oneDNN 3.12 on a CPU with AVX-512 and bfloat16 instructions, without AMX (`init_conf` and `init_scratchpad` in
src/cpu/x64/jit_avx512_core_bf16_conv_kernel.cpp and ..._1x1_conv_kernel.cpp). One thread: exact. More: the split of
work among threads is oneDNN's own (`_split`), and of 1x1 kernels as many shares as threads, which is a bound.
"""

from __future__ import annotations

import math

from functionalize.core.ops import Geometry
from functionalize.planning.scratch_layer import BLOCK, PAGE, Convolution, rounded


def sums(conv: Convolution, channels: int, result: Geometry) -> int:
    """Per thread an image's result in float32, its places in whole registers' worth."""
    places = math.prod(result.size[2:])
    whole = rounded(places, _registers(conv, channels, math.prod(result.size[2:-1]), places))
    return conv.threads * whole * rounded(channels, BLOCK) * 4 + 128


def _registers(conv: Convolution, channels: int, rows: int, places: int) -> int:
    """How many places a 1x1 kernel takes at once: a divisor, or that which leaves the most for the last time."""
    most, least = (9, 6) if 8 * conv.x.size[0] >= conv.threads else (30, 9)
    if most == 9 and 128 < channels < 256 and 10 < rows < 28:
        most, least = 6, 5
    divided = rows if rows >= 14 else places
    for size in range(most, least - 1, -1):
        if divided % size == 0:
            return size
    found, rest = min(most, places), places % most
    for size in range(most, least - 1, -1):
        if places % size == 0:
            return size
        if places % size > rest:
            found, rest = size, places % size
    return found


def pointwise_reduction(conv: Convolution, bias: bool) -> int:
    """Sums of the weights and of the bias; below 15 rows or columns, transposed copies of both operands as well."""
    threads = min(conv.threads, max(conv.x.size[0], 1))
    into, out = rounded(conv.inputs, BLOCK), rounded(conv.outputs, BLOCK)
    total = threads * (into + (1 if bias else 0)) * out * 4 + 128
    total += 2 * PAGE if threads > 1 else 0
    dims = conv.y.size[2:]
    rows = dims[-2] if len(dims) > 1 else 1
    if rows > 14 and dims[-1] > 14 and (len(dims) < 3 or out <= 64):
        return total
    outs, ins = _divisor(out // BLOCK, 16), _divisor(into // BLOCK, 5)
    return total + 256 + conv.threads * rounded(math.prod(dims), 2) * BLOCK * (outs + ins) * 2


def _divisor(blocks: int, least: int) -> int:
    """The number from `least` on, at most `blocks`, whose multiples waste the least; of several the lowest."""
    tried = range(min(least, blocks), blocks + 1)
    return min(tried, key=lambda n: ((rounded(blocks, n) - blocks) / rounded(blocks, n), n))


def reduction(conv: Convolution, bias: bool) -> int:
    """bfloat16: inputs and gradients as pairs along rows, sums in float32, barriers.

    Source: oneDNN, src/cpu/x64/jit_avx512_core_bf16_conv_kernel.cpp (`init_conf`, `init_scratchpad` of the weights).
    """
    height, wide = math.prod(conv.x.size[2:-1]), conv.x.size[-1]
    rows, columns = math.prod(conv.y.size[2:-1]), conv.y.size[-1]
    step, pad = conv.stride[-1], conv.padding[-1]
    after = max((columns - 1) * step + conv.reach[-1] - wide - pad, 0)
    pads = rounded(max(pad, after + 1), 2)
    width = rounded(-(-wide // step) + pads, 2) * step
    by_batch, by_out, by_in = _split(conv, width)
    into = conv.inputs if conv.flat else rounded(conv.inputs // conv.groups, BLOCK) * conv.groups
    out = rounded(conv.outputs // conv.groups, BLOCK) * conv.groups
    total = by_batch * out * rounded(columns, 2) * rows * 2 + 128
    paired = not conv.flat or (conv.channels_last and conv.inputs > 1)
    total += ((by_batch * into * width * height if paired else 0) + pads) * 2 + 128
    total += sum(
        PAGE * (1 + by_batch * other) for by, other in ((by_out, by_in), (by_in, by_out)) if by > 1
    )
    sums = into // conv.groups * out * conv.window + (out if bias else 0)
    return total + by_batch * sums * 4 + 128 + 2 * PAGE


def _split(conv: Convolution, width: int) -> tuple[int, int, int]:
    """Into how many shares bfloat16's gradient of weights splits batch, outputs and inputs: the least memory moved.

    width: of a row of inputs, padded. Source: `balance` in the same file.
    """
    if conv.threads < conv.groups:
        return 1, 1, 1
    block = conv.inputs if conv.flat else BLOCK
    ins, outs = -(-conv.inputs // conv.groups // block), -(-conv.outputs // conv.groups // BLOCK)
    batch, dims = max(conv.x.size[0], 1), len(conv.x.size)
    work = batch * (conv.y.size[2] if dims > 3 else 1)
    x = block * math.prod(conv.x.size[2:-1]) * width
    y = BLOCK * math.prod(conv.y.size[2:-1]) * rounded(conv.y.size[-1], 2)
    w, ratio = block * BLOCK * conv.window, outs / ins
    scale = 0.5 * batch * (outs * y + ins * x) * 2 / (outs * ins * w * 4)
    x_cost, w_cost = max(1 / ratio, 1) * (4 if scale < 1 else 1), max(scale, 1)

    def cost(by_batch: int, by_out: int, by_in: int) -> float:
        images = -(-work // by_batch) * batch / work
        out, into = -(-outs // by_out), -(-ins // by_in)
        moved = x_cost * images * into * x / math.prod(conv.stride)
        return moved + w_cost * out * into * w + max(ratio, 1) * images * out * y

    threads = conv.threads // conv.groups
    best, found = cost(1, 1, 1), (1, 1, 1)
    for by_batch in range(1, min(threads, work) + 1):
        for by_out in range(1, min(threads // by_batch, outs) + 1):
            split = by_batch, by_out, min(threads // by_batch // by_out, ins)
            if cost(*split) <= best:
                best, found = cost(*split), split
    if threads / 2 < found[0] < threads:
        found = min(work, threads), *found[1:]
    return found
