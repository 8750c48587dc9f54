"""Memory that kernels of torch's CPU build allocate and free internally, from the geometries of a call.

    layer_norm_backward(call)      bytes; each function's docstring names the buffers

The formulas follow ATen's source. Memory that oneDNN, MKL and FBGEMM allocate inside an op is left out: see `scratch`.
Scratch that depends on data (how many elements a mask selects) is computed from the size of the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from functionalize.ir.ops import Geometry

SMALL = frozenset({torch.bfloat16, torch.float16})


@dataclass(frozen=True)
class KernelCall:
    """One call of an op. arguments: by the names of its schema; in these and in outputs, geometries for tensors."""

    name: str
    arguments: Mapping[str, Any]
    outputs: tuple[Geometry, ...]
    threads: int

    def __getitem__(self, argument: str) -> Any:
        return self.arguments[argument]

    def get(self, argument: str, default: Any = None) -> Any:
        """An argument; `default` if the op has none of that name."""
        return self.arguments.get(argument, default)

    @property
    def first(self) -> Geometry:
        """The first tensor."""
        return next(self.tensors())

    def tensors(self) -> Iterator[Geometry]:
        """Every tensor argument, items of lists included."""
        for value in self.arguments.values():
            yield from geometries(value)


def geometries(value: Any) -> Iterator[Geometry]:
    """Every geometry inside `value`."""
    if isinstance(value, Geometry):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from geometries(each)


# -- products --------------------------------------------------------------------------------------


def product(call: KernelCall) -> int:
    """mm, addmm, bmm…: contiguous copies of operands without a unit stride."""
    *_, left, right = (
        t for t in call.tensors() if len(t.size) >= 2 or call.name in ("mv", "addmv")
    )
    if not left.numel or not right.numel:
        return 0
    return sum(t.nbytes for t in (left, right) if len(t.size) > 1 and not _unit(t))


def _unit(tensor: Geometry) -> bool:
    """Whether BLAS reads a matrix without a copy: its rows or its columns have unit stride."""
    rows, columns = zip(tensor.size[-2:], tensor.stride[-2:], strict=True)
    return any(inner[1] == 1 or inner[0] == 1 for inner in (rows, columns)) and not (
        rows[1] == 0 or columns[1] == 0
    )


def distances(call: KernelCall) -> int:
    """cdist by a matrix product (`_euclidean_dist`): both operands, concatenated with their squared norms and ones."""
    left, right = (call.get("x1"), call.get("x2"))
    rows, columns, wide = left.size[-2], right.size[-2], left.size[-1]
    if call.name == "_cdist_forward":
        mode, large = call["compute_mode"], rows > 25 or columns > 25
        by_product = call["p"] == 2.0 and (mode == 1 or (mode in (None, 0) and large))
        if not by_product:
            return 0
    return math.prod(left.size[:-2]) * left.dtype.itemsize * (rows + columns) * (wide + 2)


# -- attention -------------------------------------------------------------------------------------


def _splits(queries: int, keys: int) -> tuple[int, int]:
    """Rows of queries and of keys per block of a thread (ATen/native/cpu/FlashAttentionKernel.cpp)."""
    rows = 256 if queries >= 768 else 64 if queries >= 192 else 32
    return min(rows, queries), min(512, keys)


def attention(call: KernelCall) -> int:
    """Per thread: scores, maxima, sums and result in float32; for bfloat16 inputs also the scores in bfloat16."""
    query, key, value = call["query"], call["key"], call["value"]
    rows, columns = _splits(query.size[2], key.size[2])
    buffers = 4 * rows * (columns + 2 + value.size[3])
    if query.dtype in SMALL:
        buffers += 2 * rows * columns
    return call.threads * buffers


def attention_backward(call: KernelCall) -> int:
    """Per thread: scores and their gradients. Also a copy of the output's gradient unless it is laid out as BSHD."""
    query, key, gradient = call["query"], call["key"], call["grad_out"]
    rows, columns = _splits(query.size[2], key.size[2])
    _, heads, length, depth = gradient.size
    expected = (length * heads * depth, depth, heads * depth, 1)
    has_layout = all(
        s == 1 or st == e for s, st, e in zip(gradient.size, gradient.stride, expected, strict=True)
    )
    buffers = 2 * 4 * rows * columns
    if query.dtype in SMALL:
        buffers += 2 * 2 * rows * columns
    return call.threads * buffers + 4 * rows + (0 if has_layout else gradient.nbytes)


# -- norms, losses, reductions -----------------------------------------------------------------------


def layer_norm_backward(call: KernelCall) -> int:
    """Per thread: partial sums of the gradients of weight and bias."""
    wide = math.prod(call["normalized_shape"])
    rows = call["input"].numel // max(wide, 1)
    if not any(call["output_mask"][1:]):
        return 0
    return 2 * min(call.threads, rows) * wide * call["input"].dtype.itemsize


def group_norm(call: KernelCall) -> int:
    """Channels last: two sums for each channel of each image."""
    return 0 if call["input"].is_contiguous else group_norm_backward(call)


def group_norm_backward(call: KernelCall) -> int:
    """Two sums for each channel of each image."""
    return 2 * call["N"] * call["C"] * 4


def batch_norm(call: KernelCall) -> int:
    """Scale and shift of every channel, in float32."""
    return 2 * call["input"].size[1] * 4  # channels last needs one or two more values per channel


def batch_norm_backward(call: KernelCall) -> int:
    """A second buffer of the size of the input's gradient."""
    x = call["input"]
    return x.nbytes if call["output_mask"][0] else 0


def mean(call: KernelCall) -> int:
    """mean of bfloat16: the input and the result in float32."""
    x, made = call.first, sum(out.numel for out in call.outputs)
    return 4 * (x.numel + made) if x.dtype in SMALL else 0


def summed(call: KernelCall) -> int:
    """sum, cumsum, norms…: the input cast to the dtype of the result, if they differ."""
    x, dtype = call.first, call.outputs[0].dtype
    return 0 if dtype == x.dtype else x.numel * dtype.itemsize


def tested(call: KernelCall) -> int:
    """any, all: the input as booleans."""
    x = call.first
    return 0 if x.dtype == torch.bool else x.numel


def log_sum_exp(call: KernelCall) -> int:
    """The exponentials, and the maxima."""
    return call.first.nbytes + sum(out.nbytes for out in call.outputs)


def loss(call: KernelCall) -> int:
    """mse_loss…: the loss of every element, and the scratch of their mean; 0 without a reduction."""
    x, reduction = call["self"], call.get("reduction", 1)
    return x.nbytes + _mean(x, reduction) if reduction else 0


def _mean(x: Geometry, reduction: int) -> int:
    """A mean in bfloat16: the elements in float32."""
    return 4 * x.numel if reduction == 1 and x.dtype in SMALL else 0


def cross_entropy(call: KernelCall) -> int:
    """binary_cross_entropy: the scratch of its mean; the losses of the elements stay in the result's storage."""
    return _mean(call["self"], call["reduction"])


def logits(call: KernelCall) -> int:
    """binary_cross_entropy_with_logits: two terms for each element."""
    x = call["self"]
    return (1 if call["reduction"] == 0 else 2) * x.nbytes + _mean(x, call["reduction"])


def softmax(call: KernelCall) -> int:
    """softmax, log_softmax: a contiguous copy of the input."""
    x = call["self"]
    if x.is_contiguous:
        return 0
    tile = 60 * 60 * x.dtype.itemsize
    transposed = len(x.size) == 2 and x.stride[0] == 1 and x.numel >= 60 * 60
    return x.nbytes + (tile if transposed else 0)


def safe_softmax(call: KernelCall) -> int:
    """_safe_softmax: masks of bool for scores and for rows."""
    x = call["self"]
    return x.numel + x.numel // max(x.size[call["dim"]], 1)


# -- indexing, sorting, random ---------------------------------------------------------------------


def scattered(call: KernelCall) -> int:
    """scatter of bfloat16: sums in float32, of one row if the index has one value per row."""
    x = call["self"]
    if x.dtype not in SMALL:
        return 0
    if _spread(call["index"], call["dim"]):
        return 4 * x.numel
    added = call.name == "scatter_add" or call.get("reduce") is not None
    return 4 * x.numel // max(x.size[0], 1) if added and len(x.size) > 1 else 0


def gathered(call: KernelCall) -> int:
    """gather of bfloat16: the result in float32."""
    x, index = call["self"], call["index"]
    return 4 * index.numel if x.dtype in SMALL and _spread(index, call["dim"]) else 0


def _spread(index: Geometry, dim: int) -> bool:
    """Whether an index is other than a vector along `dim` that is expanded over all other dimensions."""
    return not all(st == 0 for d, st in enumerate(index.stride) if d != dim % len(index.size))


def sort(call: KernelCall) -> int:
    """sort: 8 bytes for each element of one slice along `dim`; argsort also the sorted values."""
    x = call["self"]
    along = x.size[call["dim"]] if x.size else 1
    return along * 8 + (x.nbytes if call.name == "argsort" else 0)


def indexed(call: KernelCall) -> int:
    """index: the positions that a mask as first index selects."""
    return _selected(call, call.outputs[0])


def put(call: KernelCall) -> int:
    """index_put: the same, counted by the values; 0 for a single value, which does not show the count."""
    return _selected(call, call["values"])


def _selected(call: KernelCall, values: Geometry) -> int:
    mask = call["indices"][0] if call["indices"] else None
    if not isinstance(mask, Geometry) or mask.dtype not in (torch.bool, torch.uint8):
        return 0
    return 8 * len(mask.size) * values.size[0] if values.size else 0


def masked_select(call: KernelCall) -> int:
    """A counter for every element of the mask, freed before the result is allocated."""
    mask, x = call["mask"], call["self"]
    return 8 * max(mask.numel, x.numel) - call.outputs[0].nbytes


def index_added(call: KernelCall) -> int:
    """index_add of bfloat16: sums in float32, of one row if `dim` is 0."""
    x = call["self"]
    if x.dtype not in SMALL or len(x.size) < 2:
        return 0
    return 4 * x.numel // (max(x.size[0], 1) if call["dim"] % len(x.size) == 0 else 1)


def rolled(call: KernelCall) -> int:
    """roll along several dimensions: intermediate results, one dimension at a time."""
    return call["self"].nbytes * min(max(len(call["dims"]) - 1, 0), 2)


def one_copy(call: KernelCall) -> int:
    """A copy of the input."""
    return call.first.nbytes


def native_dropout(call: KernelCall) -> int:
    """In training, the mask in the dtype of the input."""
    return call["input"].nbytes if call["train"] is not False and call["p"] else 0


# -- resizing ----------------------------------------------------------------------------------------


def _tables(points: int) -> Callable[[KernelCall], int]:
    """Resizing by tables: per position of each dimension of the result, `points` source positions with weights."""

    def formula(call: KernelCall) -> int:
        out = call.outputs[0]
        return points * sum(out.size[2:]) * (8 + out.dtype.itemsize)

    return formula


def _resized(points: int) -> Callable[[KernelCall], int]:
    """Resizing of images: small ones through copies in channels last, large ones by tables.

    `_use_vectorized_kernel_cond_2d` in ATen/native/cpu/UpSampleKernel.cpp: small means that height plus width of
    the result are at most 128.
    """
    tables = _tables(points)

    def formula(call: KernelCall) -> int:
        x, out = call.first, call.outputs[0]
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


RESIZED: Mapping[str, Callable[[KernelCall], int]] = {
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


# -- copies and promotion ----------------------------------------------------------------------------


def copied(call: KernelCall) -> int:
    """copy_, clone, _to_copy: a tile of 60 x 60 elements if the copy transposes a matrix."""
    into = call.outputs[0] if call.outputs else None
    source = call.get("src", call["self"])
    if into is None or not isinstance(source, Geometry) or into.dtype != source.dtype:
        return 0
    if len(source.size) != 2 or into.size != source.size or source.numel < 60 * 60:
        return 0
    transposed = source.stride == (1, source.size[0]) and into.is_contiguous
    return 60 * 60 * into.dtype.itemsize if transposed else 0


def promoted(call: KernelCall) -> int:
    """An elementwise op on several dtypes: operands cast to the common dtype, and a result that is cast from it."""
    masked = call.name in ("where", "masked_fill")
    operands = [t for t in call.tensors() if not (masked and t.dtype == torch.bool)]
    if len({t.dtype for t in operands}) < 2:
        return 0
    common = _common(operands)
    cast = sum(t.numel for t in operands if t.dtype != common) * common.itemsize
    made = [o for o in call.outputs if o.dtype not in (common, torch.bool)]
    return cast + sum(o.numel for o in made[:1]) * common.itemsize


def _common(tensors: Sequence[Geometry]) -> torch.dtype:
    """The dtype that torch computes in: tensors with dimensions decide before those without."""
    ranked = [t for t in tensors if t.size] or list(tensors)
    common = ranked[0].dtype
    for t in ranked[1:]:
        common = torch.promote_types(common, t.dtype)
    for t in tensors:
        number = not t.size and t.dtype.is_floating_point
        if number and not (common.is_floating_point or common.is_complex):
            common = torch.promote_types(common, t.dtype)
    return common


def concatenated(call: KernelCall) -> int:
    """cat, stack: the largest tensor that is cast to the result's dtype; they are cast one at a time."""
    dtype = call.outputs[0].dtype
    return max((t.nbytes for t in call.tensors() if t.dtype != dtype), default=0)
