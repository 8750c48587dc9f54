"""What kernels of torch's CPU build allocate and free inside themselves, by the geometry of a call.

    layer_norm_backward(call)      bytes; each function's docstring says what they hold

A kernel's buffers follow ATen's source. What oneDNN, MKL and FBGEMM allocate inside an op is left out: see `scratch`.
What depends on data is taken from the size of the result: how many elements a mask selects.
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
class Call:
    """One call of an op: its arguments by the names of its schema, with geometries for tensors, and its outputs."""

    name: str
    given: Mapping[str, Any]
    outputs: tuple[Geometry, ...]
    threads: int

    def __getitem__(self, argument: str) -> Any:
        return self.given[argument]

    def get(self, argument: str, default: Any = None) -> Any:
        """An argument; `default` where the op has none of that name."""
        return self.given.get(argument, default)

    @property
    def first(self) -> Geometry:
        """The first tensor."""
        return next(self.tensors())

    def tensors(self) -> Iterator[Geometry]:
        """Every tensor given, through lists."""
        for value in self.given.values():
            yield from geometries(value)


def geometries(value: Any) -> Iterator[Geometry]:
    """Every geometry inside `value`."""
    if isinstance(value, Geometry):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from geometries(each)


# -- products --------------------------------------------------------------------------------------


def product(call: Call) -> int:
    """mm, addmm, bmm…: copies of operands with no unit stride."""
    *_, left, right = (
        t for t in call.tensors() if len(t.size) >= 2 or call.name in ("mv", "addmv")
    )
    if not left.numel or not right.numel:
        return 0
    return sum(t.nbytes for t in (left, right) if len(t.size) > 1 and not _unit(t))


def _unit(tensor: Geometry) -> bool:
    """Whether BLAS takes a matrix as it is: rows or columns without gaps."""
    rows, columns = zip(tensor.size[-2:], tensor.stride[-2:], strict=True)
    return any(inner[1] == 1 or inner[0] == 1 for inner in (rows, columns)) and not (
        rows[1] == 0 or columns[1] == 0
    )


def distances(call: Call) -> int:
    """cdist by a product (`_euclidean_dist`): both operands with their squared norms and ones beside them."""
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
    """Rows of queries and of keys that a thread takes (ATen/native/cpu/FlashAttentionKernel.cpp)."""
    rows = 256 if queries >= 768 else 64 if queries >= 192 else 32
    return min(rows, queries), min(512, keys)


def attention(call: Call) -> int:
    """Each thread's scores, maxima, sums and result in float32; in bfloat16 its scores again."""
    query, key, value = call["query"], call["key"], call["value"]
    rows, columns = _splits(query.size[2], key.size[2])
    buffers = 4 * rows * (columns + 2 + value.size[3])
    if query.dtype in SMALL:
        buffers += 2 * rows * columns
    return call.threads * buffers


def attention_backward(call: Call) -> int:
    """Each thread's scores and their gradients; the gradient, if it lies unlike (batch, sequence, heads, channels)."""
    query, key, gradient = call["query"], call["key"], call["grad_out"]
    rows, columns = _splits(query.size[2], key.size[2])
    _, heads, length, depth = gradient.size
    as_made = (length * heads * depth, depth, heads * depth, 1)
    laid = all(
        s == 1 or st == e for s, st, e in zip(gradient.size, gradient.stride, as_made, strict=True)
    )
    buffers = 2 * 4 * rows * columns
    if query.dtype in SMALL:
        buffers += 2 * 2 * rows * columns
    return call.threads * buffers + 4 * rows + (0 if laid else gradient.nbytes)


# -- norms, losses, reductions -----------------------------------------------------------------------


def layer_norm_backward(call: Call) -> int:
    """Per thread the sums of both gradients of parameters."""
    wide = math.prod(call["normalized_shape"])
    rows = call["input"].numel // max(wide, 1)
    if not any(call["output_mask"][1:]):
        return 0
    return 2 * min(call.threads, rows) * wide * call["input"].dtype.itemsize


def group_norm(call: Call) -> int:
    """Channels last: two sums for each channel of each image."""
    return 0 if call["input"].is_contiguous else group_norm_backward(call)


def group_norm_backward(call: Call) -> int:
    """Two sums for each channel of each image."""
    return 2 * call["N"] * call["C"] * 4


def batch_norm(call: Call) -> int:
    """Scale and shift of every channel, in float32."""
    return 2 * call["input"].size[1] * 4  # and one or two more values a channel in channels last


def batch_norm_backward(call: Call) -> int:
    """A gradient of the input beside the one that is given back."""
    x = call["input"]
    return x.nbytes if call["output_mask"][0] else 0


def mean(call: Call) -> int:
    """In bfloat16, the input and the result in float32."""
    x, made = call.first, sum(out.numel for out in call.outputs)
    return 4 * (x.numel + made) if x.dtype in SMALL else 0


def summed(call: Call) -> int:
    """sum, cumsum, norms…: the input in the dtype of the result, if it is another one."""
    x, dtype = call.first, call.outputs[0].dtype
    return 0 if dtype == x.dtype else x.numel * dtype.itemsize


def tested(call: Call) -> int:
    """any, all: the input as booleans."""
    x = call.first
    return 0 if x.dtype == torch.bool else x.numel


def log_sum_exp(call: Call) -> int:
    """The exponentials, and the maxima."""
    return call.first.nbytes + sum(out.nbytes for out in call.outputs)


def loss(call: Call) -> int:
    """mse_loss…: every element's loss, and what their mean takes; none without a reduction."""
    x, reduction = call["self"], call.get("reduction", 1)
    return x.nbytes + _mean(x, reduction) if reduction else 0


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


# -- indexing, sorting, random ---------------------------------------------------------------------


def scattered(call: Call) -> int:
    """scatter, in bfloat16: the sums in float32, of a row if the index is one per row."""
    x = call["self"]
    if x.dtype not in SMALL:
        return 0
    if _spread(call["index"], call["dim"]):
        return 4 * x.numel
    added = call.name == "scatter_add" or call.get("reduce") is not None
    return 4 * x.numel // max(x.size[0], 1) if added and len(x.size) > 1 else 0


def gathered(call: Call) -> int:
    """gather, in bfloat16: the result in float32."""
    x, index = call["self"], call["index"]
    return 4 * index.numel if x.dtype in SMALL and _spread(index, call["dim"]) else 0


def _spread(index: Geometry, dim: int) -> bool:
    """Whether an index is not the expansion of a vector along all dimensions but one."""
    return not all(st == 0 for d, st in enumerate(index.stride) if d != dim % len(index.size))


def sort(call: Call) -> int:
    """A slice's keys beside its indices; argsort also the sorted values."""
    x = call["self"]
    along = x.size[call["dim"]] if x.size else 1
    return along * 8 + (x.nbytes if call.name == "argsort" else 0)


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


def rolled(call: Call) -> int:
    """roll along several dimensions, one by one."""
    return call["self"].nbytes * min(max(len(call["dims"]) - 1, 0), 2)


def one_copy(call: Call) -> int:
    """A copy of the input."""
    return call.first.nbytes


def native_dropout(call: Call) -> int:
    """The mask as numbers, in training."""
    return call["input"].nbytes if call["train"] is not False and call["p"] else 0


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


# -- copies and promotion ----------------------------------------------------------------------------


def copied(call: Call) -> int:
    """copy_, clone, _to_copy: a tile of 60 x 60 elements where a matrix is transposed."""
    into = call.outputs[0] if call.outputs else None
    source = call.get("src", call["self"])
    if into is None or not isinstance(source, Geometry) or into.dtype != source.dtype:
        return 0
    if len(source.size) != 2 or into.size != source.size or source.numel < 60 * 60:
        return 0
    transposed = source.stride == (1, source.size[0]) and into.is_contiguous
    return 60 * 60 * into.dtype.itemsize if transposed else 0


def promoted(call: Call) -> int:
    """An elementwise op on tensors of several dtypes: those that are cast first, and a result that is cast last."""
    masked = call.name in ("where", "masked_fill")
    given = [t for t in call.tensors() if not (masked and t.dtype == torch.bool)]
    if len({t.dtype for t in given}) < 2:
        return 0
    common = _common(given)
    cast = sum(t.numel for t in given if t.dtype != common) * common.itemsize
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


def concatenated(call: Call) -> int:
    """cat, stack: each tensor that is not of the result's dtype, one at a time."""
    dtype = call.outputs[0].dtype
    return max((t.nbytes for t in call.tensors() if t.dtype != dtype), default=0)
