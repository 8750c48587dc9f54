"""Scratch of transposed CPU convolutions: each is the gradient of another convolution by its input.

    Call                                   allocations, in order (+ made, - freed)
    forward, stride 1                      +S +X +W +Y -W -X -S +y -Y        X, W, Y: blocked by 16 channels
    forward, strided                       +S +x +W +y -W -x -S +y +y -y -y  made in channels last, then copied twice
    forward, channels last                 +y +S +W -W -S
    forward, torch's own kernel            +y +C -C                          C: the columns of the batch
    backward                               the other convolution, forward, then its gradient of the weights

The other convolution (`dual`) has outputs where this one has inputs. Its scratchpad lies in an entry of this one's
(128 bytes). A kernel that cannot add a bias (all but products: stride 1 with channels first, few channels in a
group, rows that a stride does not fill) makes the result in float32 first, in the scratchpad.
Source: oneDNN, src/cpu/ref_deconvolution.hpp and src/cpu/x64/jit_brgemm_conv_bwd_utils.cpp, on AVX-512 without AMX.
Exact for one thread and the windows and strides of usual decoders; groups whose channels fill no block are not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from functionalize.planning.scratch_convolution import (
    data_sums,
    forward_sizes,
    strided_data,
    tiles,
    weights_sizes,
)
from functionalize.planning.scratch_layer import Convolution, entry, held


def dual(conv: Convolution) -> Convolution:
    """The convolution whose gradient by its input this one is; without a bias."""
    return replace(conv, x=conv.y, y=conv.x, bias=False, transposed=False)


def forward(conv: Convolution) -> int:
    """Scratch of `aten.convolution` with `transposed`."""
    if conv.native:
        return _columns(conv) + (conv.x.nbytes if len(conv.x.size) > 4 else 0)
    other, y = dual(conv), conv.y.nbytes
    rest = bool(conv.y.size[-1] % conv.stride[-1])
    summed = conv.bias and (rest or not other.strided_product)
    summed = summed and (conv.strided or not conv.channels_last)
    places = math.prod(conv.y.size[2:]) * conv.y.size[0]
    bias = places * (conv.outputs if other.strided_product else other.padded_inputs) * 4 + 128
    if other.strided_product or conv.channels_last:
        inside = strided_data(other, single=summed) if other.strided_product else tiles(other)
        scratch = entry(inside, True) + (bias if summed else 0)
        x, w = conv.x.nbytes, other.weights(pad_out=False)
        if conv.channels_last:
            return held(y, scratch, w, -w, -scratch)
        copies = [y, y, -y, -y] if conv.outputs > 1 else [y, -y]
        return held(scratch, x, w, y, -w, -x, -scratch, *copies)
    scratch = entry(data_sums(other), True) + (bias if summed else 0)
    x, w, out = other.blocked(conv.x), other.weights(), other.blocked(conv.y)
    return held(scratch, x, w, out, -w, -x, -scratch, y, -out)


def backward(conv: Convolution, wanted: Sequence[bool]) -> int:
    """Scratch of `aten.convolution_backward` with `transposed`; wanted: its `output_mask`."""
    if conv.native:
        plain = conv.window == 1 and not conv.strided and not any(conv.padding)
        return 0 if plain else _columns(conv)
    other, sizes = dual(conv), []
    if wanted[0]:
        sizes += forward_sizes(other, nested=True)
    if wanted[1]:
        bias = conv.outputs * conv.itemsize if wanted[2] else 0
        sizes += weights_sizes(other, bias, False, nested=True)
    return held(*sizes)


def _columns(conv: Convolution) -> int:
    """What torch's own kernel folds: every window's part of the result."""
    return conv.outputs * conv.window * conv.x.numel // max(conv.inputs, 1) * conv.itemsize
