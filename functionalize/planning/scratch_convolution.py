"""Scratch of CPU convolutions: what oneDNN's kernels and their re-orderings allocate, and the native one's columns.

    Call                                   allocations, in order (+ made, - freed)
    forward, channels first                +S +X +W +Y -W -X -S +y -Y       X, W, Y: blocked by 16 channels
    forward, channels last                 +y +S +W -W -S                   W: blocked
    backward, data then weights            +Y +W +X -W -Y +x -X, then +Y +X +W +S +b -S -X -Y +b +w -W -b

Channels are padded to 16; fewer input channels than 16 stay as they are, unless the kernel is 1x1. A formula gives
the sizes of that list, and `held` the most that is live beyond what remains. Sizes follow oneDNN 3.12 with AVX-512
and without AMX, as torch 2.13 ships it; the kernel is guessed by the rules in `scratch_layer`.

One thread: exact in float32 and bfloat16 for the layers of usual networks (windows of 1 to 7, strides, whole groups,
depthwise, channels last). Not exact: windows wider than what their padding takes, dilated and strided at once,
groups whose channels fill no block, grouped channels last, grouped and 1x1 in three dimensions. More threads: the
buffers that reduce gradients of weights are fitted in float32 (two threads: within 4%), and follow oneDNN's split of
the work in bfloat16 (`scratch_pairs`). What oneDNN's code and primitive caches hold is not torch's allocator's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from functionalize.core.ops import Geometry
from functionalize.planning import scratch_pairs
from functionalize.planning.scratch_layer import BLOCK, PAGE, Convolution, entry, held, rounded


def forward(conv: Convolution) -> int:
    """Scratch of `aten.convolution`."""
    if conv.native:
        return _columns(conv)
    return held(*forward_sizes(conv))


def forward_sizes(conv: Convolution, nested: bool = False) -> list[int]:
    """The same, in order. nested: whether it is the gradient of a transposed convolution, which adds an entry."""
    y = conv.y.nbytes
    if conv.uneven(conv.outputs):
        scratch = entry(_columns_of_image(conv, conv.y, conv.itemsize, conv.bias), nested)
        return [scratch, y, -scratch, y, -y] if not conv.channels_last else [y, scratch, -scratch]
    # A first layer's weights are not padded but to pairs, which bfloat16's instructions take.
    if conv.channels_last:
        scratch, w = entry(tiles(conv), nested), conv.weights(pad_in=False)
        if conv.reduced and conv.groups == 1:
            w = w // conv.inputs * rounded(conv.inputs, 2)
        return [y, scratch, w, -w, -scratch]
    x = 0 if conv.flat else conv.blocked(conv.x)
    w = conv.weights(pad_in=not conv.flat)
    if conv.flat:
        pairs = rounded(conv.inputs, 2) if conv.reduced else conv.inputs
        w = w // conv.inputs * pairs
    out, scratch = conv.blocked(conv.y), entry(_forward_scratch(conv), nested)
    return [scratch, x, w, out, -w, -x, -scratch, y, -out]


def _forward_scratch(conv: Convolution) -> int:
    """A padded bias, and what a 1x1 kernel gathers: the inputs that a stride leaves, sums in float32."""
    if conv.reduced and conv.depthwise:  # the bias in float32
        return rounded(conv.outputs, BLOCK) * 4 + 128 if conv.bias else 0
    gathered = gather(conv)
    sums = scratch_pairs.sums(conv, conv.outputs, conv.y) if conv.reduced and conv.pointwise else 0
    return conv.padded_bias() + gathered + sums


def _columns_of_image(conv: Convolution, result: Geometry, itemsize: int, bias: bool) -> int:
    """Per thread the unfolded input of an image (of one slice in three dimensions); in bfloat16 sums and a bias."""
    places = _slice(conv.y)
    total = 0
    if conv.window > 1 or conv.strided or any(conv.padding):
        columns = conv.inputs // conv.groups * conv.window * places
        total = conv.threads * columns * itemsize + 128
    if conv.reduced:
        sums = rounded(result.size[1] // conv.groups * _slice(result), 16)
        total += conv.threads * sums * 4 + 128 + (conv.outputs * 4 + 128 if bias else 0)
    return total


def _slice(tensor: Geometry) -> int:
    """Places of an image, of one slice of it where it has three dimensions."""
    return math.prod(tensor.size[2:][-2:])


def gather(conv: Convolution) -> int:
    """Per thread, an image's inputs that a strided 1x1 kernel reads."""
    if not conv.pointwise or not conv.strided:
        return 0
    places = math.prod(conv.y.size[2:])
    return conv.threads * rounded(conv.inputs, BLOCK) * places * conv.itemsize + 128


def strided_data(conv: Convolution, single: bool = False) -> int:
    """What a strided gradient of the input takes: calls, padded gradients of an image and what marks them, per thread.

    single: whether the result is in float32 whatever the dtype is; else sums in float32 are kept beside it.
    """
    sizes = zip(
        conv.x.size[2:], conv.y.size[2:], conv.reach, conv.stride, conv.padding, strict=True
    )
    places = 1
    for wide, out, reach, stride, pad in sizes:
        after = max((out - 1) * stride + reach - wide - pad, 0)
        places *= out + max(reach - 1 - pad, 0) // stride + max(reach - 1 - after, 0) // stride
    wide, step = conv.x.size[-1], conv.stride[-1]
    size = 4 if single else conv.itemsize
    image = PAGE + conv.threads * rounded(conv.outputs * places, PAGE) * conv.itemsize
    rows = PAGE + conv.threads * rounded(rounded(wide, step) * step * conv.inputs, PAGE) * size
    channels = min(rounded(conv.inputs, BLOCK), 4 * BLOCK)
    sums = PAGE + conv.threads * channels * -(-wide // step) * 4
    total = _calls(conv) + image + PAGE * (1 + conv.threads)
    return total + (rows if wide % step else 0) + (sums if conv.reduced and not single else 0)


def _calls(conv: Convolution) -> int:
    """A page of the products that a thread lists (40 bytes each), on a page of its own."""
    return PAGE + conv.threads * rounded(PAGE, 40)


def tiles(conv: Convolution) -> int:
    """Small matrices of channels-last kernels: a page and some bytes for each thread."""
    return 0 if conv.depthwise else _calls(conv)


def _columns(conv: Convolution) -> int:
    """The unfolded input of torch's own kernel: of the whole batch, of an image if dilated; none for a plain 1x1."""
    image = conv.inputs * conv.window * math.prod(conv.y.size[2:]) * conv.itemsize
    if any(d != 1 for d in conv.dilation):
        return image
    if conv.window == 1 and not conv.strided and not any(conv.padding):
        return 0
    return conv.x.size[0] * image


def backward(conv: Convolution, wanted: Sequence[bool]) -> int:
    """Scratch of `aten.convolution_backward`; wanted: its `output_mask`."""
    data, weights = bool(wanted[0]), bool(wanted[1])
    if conv.native:
        return _columns(conv)
    sizes: list[int] = []
    if data:
        sizes += _data(conv)
    if weights:
        bias = conv.outputs * conv.itemsize if wanted[2] else 0
        sizes += weights_sizes(conv, bias, bool(wanted[2]))
    return held(*sizes)


def _data(conv: Convolution) -> list[int]:
    """The gradient of the input."""
    x, y, w = conv.x.nbytes, conv.blocked(conv.y), conv.weights(pad_out=False)
    uneven = conv.uneven(conv.inputs) and not conv.strided_product
    if uneven or (conv.strided and conv.dilated):
        scratch = _columns_of_image(conv, conv.x, 4, False)
        return [x, scratch, -scratch, x, -x] if not conv.channels_last else [x, scratch, -scratch]
    if conv.channels_last:
        product = conv.strided_product and conv.groups == 1
        scratch = strided_data(conv) if product else tiles(conv)
        return [x, w, scratch, -scratch, -w]
    if conv.strided_product:  # made in channels last, then copied twice
        strips, y = strided_data(conv), conv.y.nbytes
        return [y, w, x, strips, -strips, -w, -y, x, x, -x, -x]
    w = conv.weights()
    out, sums = conv.blocked(conv.x), data_sums(conv)
    return [y, w, out, sums, -sums, -w, -y, x, -out]


def data_sums(conv: Convolution) -> int:
    """bfloat16, 1x1 kernels: the gradient of the input in float32."""
    return scratch_pairs.sums(conv, conv.inputs, conv.x) if conv.reduced and conv.pointwise else 0


def weights_sizes(conv: Convolution, b: int, bias: bool, nested: bool = False) -> list[int]:
    """The gradients of the weights and of the bias (`b` bytes). bias: whether the kernel makes both."""
    w = conv.w.nbytes
    if _unblocked(conv):
        scratch = entry(_unfolded(conv, bias), nested)
        return [w, scratch, b, -scratch, b, w, -w, -b]
    scratch = entry(weight_reduction(conv, bias), nested)
    if conv.channels_last:
        blocked = conv.weights(pad_in=not conv.flat)
        if conv.grouped_blocks:  # every group padded to a block
            into, out = (rounded(n // conv.groups, BLOCK) for n in (conv.inputs, conv.outputs))
            blocked = conv.groups * into * out * conv.window * conv.itemsize
        return [blocked, scratch, b, -scratch, b, w, w, -w, -blocked, -b]
    if conv.flat and conv.inputs > 3 and not conv.reduced:  # AVX2's kernel, of 8 channels a block
        y, x = conv.blocked(conv.y, 8), conv.blocked(conv.x, 8)
        blocked, scratch = conv.weights(block=8), conv.padded_bias(8) if bias else 0
    else:
        y, x = conv.blocked(conv.y), 0 if conv.flat else conv.blocked(conv.x)
        blocked = conv.weights(pad_in=not conv.flat)
    return [y, x, blocked, scratch, b, -scratch, -x, -y, b, w, -blocked, -b]


def _unblocked(conv: Convolution) -> bool:
    """Whether the gradient of weights is a product of unfolded inputs: channels that fill no block, odd windows."""
    if conv.groups > 1:
        if conv.depthwise:
            return conv.w.size[-1] > 3 and not conv.channels_last
        channels = conv.inputs // conv.groups, conv.outputs // conv.groups
        return any(n % (BLOCK if conv.reduced else 8) for n in channels)
    if conv.reduced:
        return conv.flat and bool(conv.outputs % BLOCK)
    if conv.flat and max(conv.w.size[2:]) > 14:
        return True
    return conv.dilated and (conv.flat or conv.strided) and not conv.channels_last


def _unfolded(conv: Convolution, bias: bool) -> int:
    """Per thread: the unfolded input of an image, and four times the weights in float32."""
    places = _slice(conv.y)
    columns = conv.inputs // conv.groups * conv.window * places * conv.itemsize
    fixed = (384 + (128 + 4 * conv.outputs if bias else 0)) if conv.reduced else 256
    return conv.threads * (columns + 4 * 4 * conv.w.numel) + fixed


def weight_reduction(conv: Convolution, bias: bool) -> int:
    """What threads add up a gradient of weights in; in bfloat16 also transposed inputs and sums in float32.

    One thread: exact. More: a copy of the gradient for each further share of the batch (`_shares`); of 1x1 kernels as
    many shares as threads, which is a bound.
    """
    b = rounded(conv.outputs, BLOCK) * 4
    sums = conv.weights(pad_in=not conv.flat, itemsize=4)
    threads = min(conv.threads, max(conv.x.size[0], 1))
    given = b if bias else 0
    if conv.depthwise and not conv.grouped_blocks:
        if conv.reduced:
            if bias and conv.channels_last:  # one more bias, and none is padded
                return threads * (sums + 4 * conv.outputs) + 4 * conv.outputs + 384
            return threads * (sums + given) + (256 if bias else 128)
        return (threads - 1) * (sums + given)
    if conv.pointwise and not conv.channels_last:
        if conv.reduced:
            return gather(conv) + scratch_pairs.pointwise_reduction(conv, bias)
        return gather(conv) or conv.padded_bias() + (threads * sums + b if threads > 1 else 0)
    if conv.grouped_blocks and not conv.reduced:
        return rounded(conv.outputs // conv.groups, BLOCK) * conv.groups * 4 + 128 if bias else 0
    if not conv.reduced:
        shares = _shares(conv)
        spread = (shares - 1) * (sums + b) + 2 * PAGE + 128 if shares > 1 else 0
        return conv.padded_bias() + spread
    return scratch_pairs.reduction(conv, bias)


def _shares(conv: Convolution) -> int:
    """Into how many shares oneDNN splits the batch: as many as make threads move the least (bytes of x, y, 4 w).

    Fitted: the split that is the cheapest by these weights is the one seen for 16 of 17 layers on two threads.
    """
    if conv.groups > 1:
        return 1
    batch, threads = max(conv.x.size[0], 1), conv.threads
    block = conv.inputs if conv.flat else BLOCK
    ins, outs = -(-conv.inputs // block), -(-conv.outputs // BLOCK)
    x = block * math.prod(conv.x.size[2:]) // math.prod(conv.stride)
    y, w = BLOCK * math.prod(conv.y.size[2:]), 4 * conv.window * block * BLOCK
    best = (math.inf, 1)
    for shares in range(1, min(threads, batch) + 1):
        images, rest = -(-batch // shares), threads // shares
        for by_out in range(1, min(rest, outs) + 1):
            out, into = -(-outs // by_out), -(-ins // min(rest // by_out, ins))
            best = min(best, (images * (into * x + out * y) + out * into * w, shares))
    return best[1]
