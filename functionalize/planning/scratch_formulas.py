"""Scratch by family of ops: what kernels of torch's CPU build allocate, by the geometry of a call.

Each function takes a `Call` and gives bytes; its docstring says what they hold. Convolutions, oneDNN's recurrent
layer and its products have modules of their own. Truth and conventions: `scratch`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from functionalize.core.ops import Geometry
from functionalize.planning import scratch_convolution as convolutions
from functionalize.planning import scratch_onednn, scratch_transposed
from functionalize.planning.scratch_layer import Convolution

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
    """mm, addmm, bmm…: copies of operands with no unit stride; in bfloat16 and float16, oneDNN's blocks."""
    *_, left, right = (
        t for t in call.tensors() if len(t.size) >= 2 or call.name in ("mv", "addmv")
    )
    if not left.numel or not right.numel:
        return 0
    copied = sum(t.nbytes for t in (left, right) if len(t.size) > 1 and not _unit(t))
    if left.dtype not in SMALL:
        return copied
    rows, inner = left.size[-2:]
    columns = right.size[-1] if len(right.size) > 1 else 1
    if columns == 1 and call.name in ("mv", "addmv"):  # as the product of a row and a matrix
        return copied + scratch_onednn.matmul(1, inner, rows, False, call.threads)
    transposed = left.stride[-1] != 1 and left.stride[-2] == 1
    return copied + scratch_onednn.matmul(rows, inner, columns, transposed, call.threads)


def _unit(tensor: Geometry) -> bool:
    """Whether BLAS takes a matrix as it is: rows or columns without gaps."""
    rows, columns = zip(tensor.size[-2:], tensor.stride[-2:], strict=True)
    return any(inner[1] == 1 or inner[0] == 1 for inner in (rows, columns)) and not (
        rows[1] == 0 or columns[1] == 0
    )


# -- convolutions and recurrent layers --------------------------------------------------------------


def convolution(call: Call) -> int:
    """Blocked copies of input, weights and output: `scratch_convolution`."""
    conv = _convolution(call, call["input"], call.outputs[0], call["bias"] is not None)
    return scratch_transposed.forward(conv) if conv.transposed else convolutions.forward(conv)


def convolution_backward(call: Call) -> int:
    """Blocked copies of the gradients as well: `scratch_convolution`."""
    wanted = call["output_mask"]
    conv = _convolution(call, call["input"], call["grad_output"], bool(wanted[2]))
    if conv.transposed:
        return scratch_transposed.backward(conv, wanted)
    return convolutions.backward(conv, wanted)


def _convolution(call: Call, x: Geometry, y: Geometry, bias: bool) -> Convolution:
    def each(name: str) -> tuple[int, ...]:
        given = tuple(call[name])
        return given if len(given) > 1 else given * (len(x.size) - 2)

    return Convolution(
        x, call["weight"], y, bias, each("stride"), each("padding"), each("dilation"),
        call["transposed"], call["groups"], call.threads,
    )  # fmt: skip


def recurrent_sizes(call: Call) -> tuple[int, int, int, int, torch.dtype]:
    """Time, batch, inputs, hidden, dtype."""
    x = call["input"]
    return x.size[0], x.size[1], x.size[2], call["hidden_size"], x.dtype


def recurrent(call: Call) -> int:
    """`mkldnn_rnn_layer`: packed weights and the layer's scratchpad: `scratch_onednn`."""
    return scratch_onednn.lstm_forward(*recurrent_sizes(call))


def recurrent_backward(call: Call) -> int:
    """`mkldnn_rnn_layer_backward`: `scratch_onednn`; gradients that are not given, or lie with gaps, are made."""
    made = 0
    for output, gradient in (("output", "grad_output"), ("hy_", "grad_hy"), ("cy_", "grad_cy")):
        given = call[gradient]
        if given is None or not given.is_contiguous:
            made += call[output].nbytes
    return made + scratch_onednn.lstm_backward(*recurrent_sizes(call))


# -- attention -------------------------------------------------------------------------------------


def _splits(queries: int, keys: int) -> tuple[int, int]:
    """Rows of queries and of keys that a thread takes (ATen/native/cpu/FlashAttentionKernel.cpp)."""
    rows = 256 if queries >= 768 else 64 if queries >= 192 else 32
    return min(rows, queries), min(512, keys)


def attention(call: Call) -> int:
    """Each thread's scores, maxima, sums and result in float32; in bfloat16 its scores again, and products."""
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
        depths = (query.size[3],)
        products = [scratch_onednn.matmul(columns, rows, d, True, 1) for d in depths]
        products += [scratch_onednn.matmul(rows, d, columns, False, 1) for d in depths]
        buffers += 2 * 2 * rows * columns + max(products)
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
    plain = call["input"].is_contiguous
    return 0 if plain else 2 * call["N"] * call["C"] * 4


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
    x = next(call.tensors())
    if x.dtype not in SMALL:
        return 0
    return 4 * (x.numel + sum(out.numel for out in call.outputs))


def summed(call: Call) -> int:
    """The input in the dtype of the sum, if it is another one."""
    x = next(call.tensors())
    wanted = call.get("dtype")
    dtype = call.outputs[0].dtype if wanted is None and call.outputs else wanted or x.dtype
    return 0 if dtype == x.dtype else x.numel * dtype.itemsize


def tested(call: Call) -> int:
    """any, all: the input as booleans."""
    x = next(call.tensors())
    return 0 if x.dtype == torch.bool else x.numel


def log_sum_exp(call: Call) -> int:
    """The exponentials, and the maxima."""
    return next(call.tensors()).nbytes + sum(out.nbytes for out in call.outputs)


def loss(call: Call) -> int:
    """mse_loss…: every element's loss, and in bfloat16 their mean's scratch; none without a reduction."""
    x = call["self"]
    if call.get("reduction", 1) == 0:
        return 0
    averaged = 4 * x.numel if x.dtype in SMALL and call.get("reduction", 1) == 1 else 0
    return x.nbytes + averaged


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
    values = x.nbytes if call.name == "argsort" else 0
    return along * 8 + values


def kth(call: Call) -> int:
    """kthvalue: the input again, and an index for each element."""
    x = call["self"]
    return x.nbytes + 8 * x.numel


def one_copy(call: Call) -> int:
    """A copy of the input."""
    return next(call.tensors()).nbytes


def native_dropout(call: Call) -> int:
    """The mask as numbers, in training."""
    return call["input"].nbytes if call["train"] is not False and call["p"] else 0


# -- distances ---------------------------------------------------------------------------------------


def distances(call: Call) -> int:
    """cdist by a product (`_euclidean_dist`): both operands with their squared norms and ones beside them."""
    left, right = (call.get("x1"), call.get("x2"))
    rows, columns, wide = left.size[-2], right.size[-2], left.size[-1]
    if call.name == "_cdist_forward":
        mode, large = call["compute_mode"], rows > 25 or columns > 25
        by_product = call["p"] == 2.0 and (mode == 1 or (mode in (None, 0) and large))
        if not by_product:
            return 0
    size = left.dtype.itemsize
    batch = math.prod(left.size[:-2])
    return batch * size * (rows + columns) * (wide + 2)


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
    given = [t for t in call.tensors() if not (call.name in _MASKED and t.dtype == torch.bool)]
    dtypes = {t.dtype for t in given}
    if len(dtypes) < 2:
        return 0
    common = _common(given)
    cast = sum(t.numel for t in given if t.dtype != common) * common.itemsize
    made = [o for o in call.outputs if o.dtype not in (common, torch.bool)]
    return cast + sum(o.numel for o in made[:1]) * common.itemsize


_MASKED = frozenset({"where", "masked_fill"})


def _common(tensors: Sequence[Geometry]) -> torch.dtype:
    """The dtype that torch computes in: tensors with dimensions decide before those without."""
    ranked = [t for t in tensors if t.size] or list(tensors)
    common = ranked[0].dtype
    for t in ranked[1:]:
        common = torch.promote_types(common, t.dtype)
    for t in tensors:
        if (
            not t.size
            and t.dtype.is_floating_point
            and not common.is_floating_point
            and not common.is_complex
        ):
            common = torch.promote_types(common, t.dtype)
    return common


def masked(call: Call) -> int:
    """where, masked_fill: a mask of the output's size, and what is cast."""
    return promoted(call)


def concatenated(call: Call) -> int:
    """cat, stack: each tensor that is not of the result's dtype, one at a time."""
    dtype = call.outputs[0].dtype
    return max((t.nbytes for t in call.tensors() if t.dtype != dtype), default=0)
