"""A convolution as scratch sees it: its geometry, which kernels take it, and how blocked layouts pad it.

    Convolution(x, w, y, ...)      tensors, hyperparameters, threads
    held(+a, +b, -a, ...)          the most that is live at once beyond what remains
    entry(nbytes, nested)          what a part of a scratchpad takes

Which kernel runs follows `ConvParams` in torch's ATen/native/Convolution.cpp, and oneDNN 3.12 on AVX-512 without AMX.
"""

from __future__ import annotations

import math
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


def entry(nbytes: int, nested: bool) -> int:
    """A scratchpad inside another one takes an entry of its own, if it is not empty."""
    return nbytes + 128 if nested and nbytes else nbytes


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
        if self.reduced or (len(self.x.size) > 4 and not self.transposed):
            return False
        kernel, batch = self.w.size[2:], self.x.size[0]
        plain = not self.strided and all(d == 1 for d in self.dilation)
        if plain and batch < 16 and self.window == 1 and self.threads == 1:
            return True
        large = self.groups > 1 or (len(kernel) > 1 and min(kernel) > 3) or batch > 1
        return not (large or self.x.numel > 20480)

    @property
    def reach(self) -> tuple[int, ...]:
        """The places that a window spans in each dimension."""
        return tuple((w - 1) * d + 1 for w, d in zip(self.w.size[2:], self.dilation, strict=True))

    @property
    def depthwise(self) -> bool:
        """Whether every channel is a group."""
        return self.groups > 1 and self.groups == self.inputs == self.outputs

    def uneven(self, channels: int, block: int = 8) -> bool:
        """Whether groups fill no block: inputs are unfolded and multiplied, in plain layouts."""
        if self.groups == 1 or self.depthwise:
            return False
        square = self.inputs == self.outputs and self.inputs // self.groups in (4, 8)
        return bool(channels // self.groups % block) and not (square and block == 8)

    @property
    def grouped_blocks(self) -> bool:
        """Whether a gradient of weights pads every group to a block: channels last, no kernel of its own."""
        if self.groups == 1 or not self.channels_last:
            return False
        return self.w.size[-1] > 3 if self.depthwise else bool(self.inputs // self.groups % BLOCK)

    @property
    def strided_product(self) -> bool:
        """Whether a strided gradient of the input is made of products: not with few channels in a group."""
        if not self.strided or self.dilated:
            return False
        into, out = self.inputs // self.groups, self.outputs // self.groups
        if self.groups == 1:
            return True
        return bool(out % BLOCK or into % BLOCK or out > BLOCK) if self.reduced else out > 8

    @property
    def pointwise(self) -> bool:
        """Whether oneDNN's 1x1 kernels run: the stride divides the input, and it has at most two dimensions."""
        if self.window > 1 or self.groups > 1 or any(self.padding):
            return False
        sizes = list(zip(self.x.size[2:], self.y.size[2:], self.stride, strict=True))
        return not self.strided or (len(sizes) < 3 and all(x == y * s for x, y, s in sizes))

    @property
    def dilated(self) -> bool:
        return self.window > 1 and any(d != 1 for d in self.dilation)

    @property
    def padded_inputs(self) -> int:
        """Input channels in whole blocks."""
        return (
            self.inputs if self.groups > 1 and not self.depthwise else rounded(self.inputs, BLOCK)
        )

    def blocked(self, tensor: Geometry, block: int = BLOCK) -> int:
        """Bytes of an activation with its channels padded to blocks."""
        plain = self.groups > 1 and not self.depthwise
        channels = tensor.size[1] if plain else rounded(tensor.size[1], block)
        return tensor.numel // max(tensor.size[1], 1) * channels * self.itemsize

    def weights(
        self, pad_in: bool = True, pad_out: bool = True, itemsize: int = 0, block: int = BLOCK
    ) -> int:
        """Bytes of the weights with their channels padded to blocks."""
        size = itemsize or self.itemsize
        if self.depthwise:
            return rounded(self.groups, block) * self.window * size
        if self.groups > 1:
            return self.w.numel * size
        out = rounded(self.outputs, block) if pad_out else self.outputs
        into = rounded(self.inputs, block) if pad_in else self.inputs
        return out * into * self.window * size

    def padded_bias(self, block: int = BLOCK) -> int:
        """A bias is copied to a padded one if channels are."""
        if not self.bias or not self.outputs % block or (self.groups > 1 and not self.depthwise):
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
