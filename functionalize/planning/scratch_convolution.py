"""Scratch of CPU convolutions: what oneDNN's kernels and their re-orderings allocate, and the native one's columns.

    Call                                   allocations, in order (+ made, - freed)
    forward, channels first                +S +X +W +Y -W -X -S +y -Y       X, W, Y: blocked by 16 channels
    forward, channels last                 +y +S +W -W -S                   W: blocked
    backward, data then weights            +Y +W +X -W -Y +x -X, then +Y +X +W +S +b -S -X -Y +b +w -W -b

Channels are padded to 16; fewer input channels than 16 stay as they are, unless the kernel is 1x1. A formula gives
the sizes of that list, and `held` the most that is live beyond what remains. Sizes follow oneDNN 3.12 with AVX-512,
as torch 2.13 ships it.

One thread, float32: exact but for strided gradients of the input (within 10% of the op's own peak), dilated kernels
on few channels, channels last with few channels. One thread, bfloat16: exact for blocks of 16 channels and stride 1,
else within 25% for nine of ten shapes. More threads: the buffers that reduce gradients of weights are fitted in
float32 (two threads: within 4%), and within 25% in bfloat16 (see `weight_reduction`). What a strided transposed
convolution gathers is not known. What oneDNN's code and primitive caches hold is not torch's allocator's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from functionalize.core.ops import Geometry

BLOCK = 16  # channels in a block of a blocked layout (AVX-512: 16 floats)
PAGE = 4096


def rounded(n: int, to: int) -> int:
    """The next multiple."""
    return -(-n // to) * to


def held(*sizes: int) -> int:
    """The most bytes live at once beyond those that are live at the end, of allocations (+) and frees (-) in order."""
    live = most = 0
    for size in sizes:
        live += size
        most = max(most, live)
    return most - live


@dataclass(frozen=True)
class Convolution:
    """A convolution: its tensors, its hyperparameters, the threads that it runs on."""

    x: Geometry
    w: Geometry
    y: Geometry
    bias: bool
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    groups: int
    threads: int

    @property
    def itemsize(self) -> int:
        return self.x.dtype.itemsize

    @property
    def outputs(self) -> int:
        return self.y.size[1]

    @property
    def inputs(self) -> int:
        return self.x.size[1]

    @property
    def window(self) -> int:
        return math.prod(self.w.size[2:])

    @property
    def strided(self) -> bool:
        return any(s != 1 for s in self.stride)

    @property
    def flat(self) -> bool:
        """Whether the input keeps its layout: less than a block of channels, as in a first layer."""
        return self.inputs < BLOCK and self.groups == 1 and self.window > 1

    @property
    def reduced(self) -> bool:
        return self.x.dtype in (torch.bfloat16, torch.float16)

    @property
    def channels_last(self) -> bool:
        return _channels_last(self.x) or _channels_last(self.w)

    @property
    def native(self) -> bool:
        """Whether torch's own kernel runs (`ConvParams::use_mkldnn` in ATen/native/Convolution.cpp)."""
        if self.transposed or self.reduced or len(self.x.size) > 4:
            return False
        kernel, batch = self.w.size[2:], self.x.size[0]
        plain = not self.strided and all(d == 1 for d in self.dilation)
        if plain and batch < 16 and self.window == 1 and self.threads == 1:
            return True
        large = self.groups > 1 or (len(kernel) > 1 and min(kernel) > 3) or batch > 1
        return not (large or self.x.numel > 20480)

    @property
    def dilated(self) -> bool:
        return self.window > 1 and any(d != 1 for d in self.dilation)

    def blocked(self, tensor: Geometry, block: int = BLOCK) -> int:
        """Bytes of an activation with its channels padded to blocks."""
        channels = tensor.size[1] if self.groups > 1 else rounded(tensor.size[1], block)
        return tensor.numel // max(tensor.size[1], 1) * channels * self.itemsize

    def weights(
        self, pad_in: bool = True, pad_out: bool = True, itemsize: int = 0, block: int = BLOCK
    ) -> int:
        """Bytes of the weights with their channels padded to blocks."""
        size = itemsize or self.itemsize
        if self.groups > 1:
            return self.w.numel * size
        out = rounded(self.outputs, block) if pad_out else self.outputs
        into = rounded(self.inputs, block) if pad_in else self.inputs
        return out * into * self.window * size

    def padded_bias(self, block: int = BLOCK) -> int:
        """A bias is copied to a padded one if channels are."""
        if not self.bias or not self.outputs % block or self.groups > 1:
            return 0
        return rounded(self.outputs, block) * self.itemsize + 128


def _channels_last(tensor: Geometry) -> bool:
    """What `suggest_memory_format` says (c10/core/MemoryFormat.h): strides grow from channels over places to images."""
    if len(tensor.size) not in (4, 5) or not tensor.numel:
        return False
    least = 0
    for dim in (1, *range(len(tensor.size) - 1, 1, -1), 0):
        size, stride = tensor.size[dim], tensor.stride[dim]
        if stride < least or (dim == 0 and least == tensor.stride[1]):
            return False
        least = stride * max(size, 1)
    return True


def forward(conv: Convolution) -> int:
    """Scratch of `aten.convolution`."""
    if conv.native:
        return _columns(conv)
    if conv.transposed:
        return _transposed(conv)
    y = conv.y.nbytes
    if conv.channels_last:
        tiles, w = _tiles(conv), conv.weights(pad_in=False)
        return held(y, tiles, w, -w, -tiles)
    x = 0 if conv.flat else conv.blocked(conv.x)
    # A first layer's weights are not padded but to pairs, which bfloat16's instructions take.
    w = conv.weights(pad_in=not conv.flat)
    if conv.flat:
        pairs = rounded(conv.inputs, 2) if conv.reduced else conv.inputs
        w = w // conv.inputs * pairs
    out, scratch = conv.blocked(conv.y), _forward_scratch(conv)
    return held(scratch, x, w, out, -w, -x, -scratch, y, -out)


def _forward_scratch(conv: Convolution) -> int:
    """A padded bias, and what a 1x1 kernel gathers: the inputs that a stride leaves, sums in float32."""
    gathered = _gathered(conv)
    if conv.reduced and conv.window == 1 and conv.groups == 1:
        places = math.prod(conv.y.size[2:])
        gathered += conv.threads * rounded(conv.outputs, BLOCK) * places * 4
    return conv.padded_bias() + (gathered + 128 if gathered else 0)


def _gathered(conv: Convolution) -> int:
    """Per thread, an image's inputs that a strided 1x1 kernel reads."""
    if conv.window > 1 or conv.groups > 1 or not conv.strided:
        return 0
    places = math.prod(conv.y.size[2:])
    return conv.threads * rounded(conv.inputs, BLOCK) * places * conv.itemsize


def _strips(conv: Convolution) -> int:
    """Per thread, about an image's padded gradient of the output: a strided gradient of the input. Estimated."""
    sizes = zip(conv.y.size[2:], conv.w.size[2:], conv.stride, strict=True)
    taps = [(out, -(-window // stride)) for out, window, stride in sizes]
    places = math.prod(out + (tap if tap > 1 else 0) for out, tap in taps)
    image = rounded(conv.outputs * places * conv.itemsize, PAGE)
    return 3 * PAGE + conv.threads * (image + 2 * PAGE + 24)


def _tiles(conv: Convolution) -> int:
    """Small matrices of channels-last kernels: a page and some bytes for each thread."""
    depthwise = conv.groups > 1 and conv.groups == conv.inputs
    return 0 if depthwise else PAGE + conv.threads * (PAGE + 24)


def _columns(conv: Convolution) -> int:
    """The unfolded input of torch's own kernel: of the whole batch, of an image if dilated; none for a plain 1x1."""
    image = conv.inputs * conv.window * math.prod(conv.y.size[2:]) * conv.itemsize
    if any(d != 1 for d in conv.dilation):
        return image
    if conv.window == 1 and not conv.strided and not any(conv.padding):
        return 0
    return conv.x.size[0] * image


def _transposed(conv: Convolution) -> int:
    """A transposed convolution is the gradient of another by its input; a strided one ends in channels last."""
    x, w, y = conv.blocked(conv.x), conv.weights(), conv.y.nbytes
    if conv.strided:
        return held(x, w, y, -w, -x, y, y, -y, -y)
    out = conv.blocked(conv.y)
    return held(x, w, out, -w, -x, y, -out)


def backward(conv: Convolution, wanted: Sequence[bool]) -> int:
    """Scratch of `aten.convolution_backward`; wanted: its `output_mask`."""
    data, weights = bool(wanted[0]), bool(wanted[1])
    if conv.native:
        return _columns(conv)
    sizes: list[int] = []
    if data:
        sizes += _data(conv)
    if weights:
        sizes += _weights(conv, bool(wanted[2]))
    return held(*sizes)


def _data(conv: Convolution) -> list[int]:
    """The gradient of the input."""
    x, y = conv.x.nbytes, conv.blocked(conv.y)
    if conv.transposed:
        out = conv.blocked(conv.x)
        return [y, conv.weights(), out, -conv.weights(), -y, x, -out]
    if conv.channels_last:
        w = conv.weights(pad_out=False)
        tiles = _strips(conv) if conv.strided and conv.groups == 1 else _tiles(conv)
        return [x, w, tiles, -tiles, -w]
    w = conv.weights()
    if conv.strided and not conv.dilated:  # made in channels last, then copied twice
        strips = _strips(conv)
        return [y, w, x, strips, -strips, -w, -y, x, x, -x, -x]
    out = conv.blocked(conv.x)
    sums = 0
    if conv.reduced and conv.window == 1 and conv.groups == 1:
        sums = conv.threads * (out // conv.x.size[0] // conv.itemsize * 4) + 128
    return [y, w, out, sums, -sums, -w, -y, x, -out]


def _weights(conv: Convolution, bias: bool) -> list[int]:
    """The gradients of the weights and of the bias."""
    b = conv.outputs * conv.itemsize if bias else 0
    w = conv.w.nbytes
    if _unblocked(conv):
        scratch = _unfolded(conv)
        return [w, scratch, b, -scratch, b, w, -w, -b]
    scratch = weight_reduction(conv, bias)
    if conv.channels_last:
        blocked = conv.weights(pad_in=not conv.flat)
        return [blocked, scratch, b, -scratch, b, w, w, -w, -blocked, -b]
    if conv.flat and conv.inputs > 3 and not conv.reduced:  # AVX2's kernel, of 8 channels a block
        y, x = conv.blocked(conv.y, 8), conv.blocked(conv.x, 8)
        blocked, scratch = conv.weights(block=8), conv.padded_bias(8)
    else:
        y, x = conv.blocked(conv.y), 0 if conv.flat else conv.blocked(conv.x)
        blocked = conv.weights(pad_in=not conv.flat)
    return [y, x, blocked, scratch, b, -scratch, -x, -y, b, w, -blocked, -b]


def _unblocked(conv: Convolution) -> bool:
    """Whether the gradient of weights is a product of unfolded inputs: channels that fill no block, odd windows."""
    if conv.groups > 1:
        depthwise = conv.groups == conv.inputs == conv.outputs
        return not depthwise and bool((conv.inputs // conv.groups) % BLOCK)
    if conv.reduced:
        return conv.flat and bool(conv.outputs % BLOCK)
    if conv.flat and max(conv.w.size[2:]) > 14:
        return True
    return conv.dilated and (conv.flat or conv.strided) and not conv.channels_last


def _unfolded(conv: Convolution) -> int:
    """Per thread: the unfolded input of an image, and four times the weights in float32."""
    places = math.prod(conv.y.size[2:])
    columns = conv.inputs // conv.groups * conv.window * places * conv.itemsize
    fixed = 512 + 4 * conv.outputs if conv.reduced else 256
    return conv.threads * (columns + 4 * 4 * conv.w.numel) + fixed


def weight_reduction(conv: Convolution, bias: bool) -> int:
    """What threads add up a gradient of weights in; in bfloat16 also transposed inputs and sums in float32.

    One thread: exact in float32, within 4 kB in bfloat16. More: a copy of the gradient for each further share of
    the batch (`_shares`); in bfloat16 and 1x1 kernels as many shares as threads, which is a bound.
    """
    b = rounded(conv.outputs, BLOCK) * 4
    sums = conv.weights(pad_in=not conv.flat, itemsize=4)
    threads = min(conv.threads, max(conv.x.size[0], 1))
    given = b if bias else 0
    if conv.groups > 1 and conv.groups == conv.inputs:  # depthwise
        return (threads if conv.reduced else threads - 1) * (sums + given)
    if conv.window == 1 and not conv.channels_last:
        gathered = _gathered(conv)
        if conv.reduced:
            return threads * sums + gathered + given + 128
        reduced = threads * sums + b if threads > 1 else 0
        return gathered + (128 if gathered else 0) or conv.padded_bias() + reduced
    if not conv.reduced:
        shares = _shares(conv)
        spread = (shares - 1) * (sums + b) + 2 * PAGE + 128 if shares > 1 else 0
        return conv.padded_bias() + spread
    wide = conv.x.size[-1]
    padded = rounded(wide + 2 * conv.padding[-1], 2)
    into = 0 if conv.flat else conv.blocked(conv.x) // conv.x.size[0] // wide * padded
    out = conv.blocked(conv.y) // conv.y.size[0]
    return threads * (sums + into + out + given) + 2 * PAGE + 388


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
