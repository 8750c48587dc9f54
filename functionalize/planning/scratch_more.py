"""Scratch of ops that few models use, or that use little: resizing, indexing by masks, embedding bags, odd losses.

As `scratch_formulas`: each function takes a `Call` and gives bytes. What depends on data is taken from the size of the
result: how many elements a mask selects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from functionalize.core.ops import Geometry
from functionalize.planning import scratch_onednn
from functionalize.planning.scratch_formulas import SMALL, Call, promoted

# -- resizing ----------------------------------------------------------------------------------------


def _tables(points: int) -> Callable[[Call], int]:
    """Per place of each dimension of the result: places that are read, and their weights."""

    def formula(call: Call) -> int:
        out = call.outputs[0]
        return points * sum(out.size[2:]) * (8 + out.dtype.itemsize)

    return formula


def _resized(points: int) -> Callable[[Call], int]:
    """Images: small ones are resized in channels last, others with tables.

    `_use_vectorized_kernel_cond_2d` in ATen/native/cpu/UpSampleKernel.cpp: small is height and width of the
    result up to 128 together.
    """
    tables = _tables(points)

    def formula(call: Call) -> int:
        x, out = next(call.tensors()), call.outputs[0]
        last = _channels_last(x)
        if not (last and x.size[1] > 3) and sum(out.size[2:]) > 128:
            return tables(call)
        return 0 if last else x.nbytes + out.nbytes

    return formula


def _channels_last(x: Geometry) -> bool:
    images, channels, *places = x.size
    expected = channels
    if channels > 1 and x.stride[1] != 1:
        return False
    for size, stride in zip(reversed(places), reversed(x.stride[2:]), strict=True):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return images == 1 or x.stride[0] == expected


RESIZED: Mapping[str, Callable[[Call], int]] = {
    **{
        f"{name}{n}d": _tables(1)
        for name in ("upsample_nearest", "_upsample_nearest_exact")
        for n in (1, 3)
    },
    "upsample_nearest2d": _resized(1),
    "_upsample_nearest_exact2d": _resized(1),
    "upsample_bilinear2d": _resized(2),
    "upsample_linear1d": _tables(2),
    "upsample_trilinear3d": _tables(2),
    "upsample_bicubic2d": _tables(4),
}


# -- indexing ----------------------------------------------------------------------------------------


def indexed(call: Call) -> int:
    """index: the places that a leading mask selects."""
    return _selected(call, call.outputs[0])


def put(call: Call) -> int:
    """index_put: the same, counted by the values; of a single value it is not known how many."""
    return _selected(call, call["values"])


def _selected(call: Call, values: Geometry) -> int:
    mask = call["indices"][0] if call["indices"] else None
    if not isinstance(mask, Geometry) or mask.dtype not in (torch.bool, torch.uint8):
        return 0
    return 8 * len(mask.size) * values.size[0] if values.size else 0


def masked_select(call: Call) -> int:
    """A count for every element of the mask, free when the result is made."""
    mask, x = call["mask"], call["self"]
    return 8 * max(mask.numel, x.numel) - call.outputs[0].nbytes


def index_added(call: Call) -> int:
    """index_add, in bfloat16: sums in float32, of a row if rows are added."""
    x = call["self"]
    if x.dtype not in SMALL or len(x.size) < 2:
        return 0
    return 4 * x.numel // (max(x.size[0], 1) if call["dim"] % len(x.size) == 0 else 1)


def repeats(call: Call) -> int:
    """repeat_interleave by a tensor: the ends of the repeats."""
    return 8 * next(call.tensors()).numel


def unfolded(call: Call) -> int:
    """unfold_backward: the places of the dimension."""
    sizes: list[int] = call["input_sizes"]
    return 8 * sizes[call["dim"]] if sizes else 0


def rolled(call: Call) -> int:
    """roll along several dimensions, one by one."""
    return call["self"].nbytes * min(max(len(call["dims"]) - 1, 0), 2)


# -- elementwise, reductions, products ----------------------------------------------------------------


def cast_first(call: Call) -> int:
    """cumsum: the input in the dtype of the result."""
    x, out = call["self"], call.outputs[0]
    return 0 if x.dtype == out.dtype else x.numel * out.dtype.itemsize


def absolute(call: Call) -> int:
    """abs, of complex numbers: the result as complex numbers."""
    x = call["self"]
    return x.nbytes if x.dtype.is_complex else promoted(call)


def median(call: Call) -> int:
    """median of everything: a copy, to be ordered."""
    return 0 if "dim" in call.given else call["self"].nbytes


def normal(call: Call) -> int:
    """normal with means or deviations from a tensor: the numbers before they are scaled."""
    given = call.get("mean"), call.get("std")
    return call.outputs[0].nbytes if any(isinstance(each, Geometry) for each in given) else 0


def summed_products(call: Call) -> int:
    """addbmm, in bfloat16: a product's blocks."""
    left, right = call["batch1"], call["batch2"]
    if left.dtype not in SMALL:
        return 0
    return scratch_onednn.matmul(left.size[1], left.size[2], right.size[2], False, call.threads)


def to_real(call: Call) -> int:
    """_fft_c2r along several dimensions: two copies of the input."""
    return 2 * call["self"].nbytes if len(call["dim"]) > 1 else 0


def softmax(call: Call) -> int:
    """softmax, log_softmax: a contiguous copy of the input."""
    x = call["self"]
    if x.is_contiguous:
        return 0
    tile = 60 * 60 * x.dtype.itemsize
    transposed = len(x.size) == 2 and x.stride[0] == 1 and x.numel >= 60 * 60
    return x.nbytes + (tile if transposed else 0)


def safe_softmax(call: Call) -> int:
    """_safe_softmax: which scores are masked, and which rows are."""
    x = call["self"]
    return x.numel + x.numel // max(x.size[call["dim"]], 1)


# -- losses, embedding bags, sequences -----------------------------------------------------------------


def _mean(x: Geometry, reduction: int) -> int:
    """A mean in bfloat16: the elements in float32."""
    return 4 * x.numel if reduction == 1 and x.dtype in SMALL else 0


def cross_entropy(call: Call) -> int:
    """binary_cross_entropy: what its mean takes; every element's loss stays, as the result's storage."""
    return _mean(call["self"], call["reduction"])


def logits(call: Call) -> int:
    """binary_cross_entropy_with_logits: two terms for each element."""
    x = call["self"]
    return (1 if call["reduction"] == 0 else 2) * x.nbytes + _mean(x, call["reduction"])


def ctc_backward(call: Call) -> int:
    """_ctc_loss_backward: as much as the forward variables."""
    return call["log_alpha"].nbytes


def bag_backward(call: Call) -> int:
    """_embedding_bag_backward: sorted indices; of maxima, an index and a value for each."""
    if call["mode"] == 2:
        gradient = call["grad"]
        return gradient.numel * (8 + gradient.dtype.itemsize) + 8 * gradient.size[0]
    return 8 * (4 * call["indices"].numel + 1)


def bag_weights_backward(call: Call) -> int:
    """_embedding_bag_per_sample_weights_backward: the bag of every index, twice."""
    return 16 * (call["indices"].numel + 1)


def packed(call: Call) -> int:
    """_pack_padded_sequence: its parts, before they are joined."""
    return call.outputs[0].nbytes
