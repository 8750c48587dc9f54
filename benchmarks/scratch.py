"""What single ops allocate inside themselves: the allocator's truth beside the table of `planning.scratch`.

    python -m benchmarks.scratch                 the table: op, shape, dtype, truth, formula, difference
    python -m benchmarks.scratch --threads 2 --only convolution

Truth: the events of torch's CPU allocator by `torch.profiler` while the op runs once (after a run to warm up), its
peak less what is live at its end. What oneDNN, MKL and malloc hold beyond torch's allocator is not seen.
`share` is the scratch in the op's own peak (inputs, outputs, scratch), and `error` the difference as a part of it.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile

from benchmarks.machine import machine
from functionalize._compat import TorchDispatchMode, pytree
from functionalize.core.ops import OpRecord, TensorRef, geometry_of
from functionalize.planning.scratch import scratch_bytes

aten = torch.ops.aten
R = torch.randn
FLOATS = (torch.float32, torch.bfloat16)


class Case(NamedTuple):
    """One call of an op."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = {}  # noqa: RUF012
    label: str = ""

    @property
    def name(self) -> str:
        shapes = " ".join(
            str(tuple(t.shape)) for t in pytree.tree_leaves(self.args) if isinstance(t, Tensor)
        )
        return f"{self.target} {self.label} {shapes[:60]}"

    def dtype(self) -> torch.dtype:
        tensors = [t for t in pytree.tree_leaves(self.args) if isinstance(t, Tensor)]
        return next((t.dtype for t in tensors if t.is_floating_point()), torch.float32)


class Truth(NamedTuple):
    """Bytes: inside the op, left when it is over, and those of its inputs."""

    scratch: int
    outputs: int
    inputs: int

    @property
    def peak(self) -> int:
        return self.scratch + max(self.outputs, 0) + self.inputs


MARK = 54_321  # bytes of the tensor that is made between two cases


def truths(cases: Sequence[Case]) -> list[Truth]:
    """What the allocator sees of each case, after a run to warm up; all in one profile."""
    for case in cases:
        case.target(*case.args, **case.kwargs)
    gc.collect()
    with profile(  # torch 2.11 and 2.12 warn of what an unaccumulated profile would forget
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiler:
        for case in cases:
            mark = torch.empty(MARK, dtype=torch.uint8)
            kept = case.target(*case.args, **case.kwargs)
            del mark, kept
    runs: list[list[int]] = []
    for nbytes in _sizes(profiler):
        if abs(nbytes) == MARK:  # made before a case; freed before its results are
            runs.append([])
        else:
            runs[-1].append(nbytes)
    return [_truth(case, sizes) for case, sizes in zip(cases, runs[::2], strict=True)]


def _sizes(profiler: profile) -> list[int]:
    """Bytes of every allocation (+) and free (-) in a profile, in order."""
    results: Any = profiler.profiler
    events = [e for e in results.kineto_results.events() if e.name() == "[memory]"]
    return [e.nbytes() for e in sorted(events, key=lambda event: event.start_ns())]


def _truth(case: Case, sizes: list[int]) -> Truth:
    live = list(accumulate(sizes, initial=0))
    read = [t for t in pytree.tree_leaves((case.args, case.kwargs)) if isinstance(t, Tensor)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in read}
    return Truth(max(live) - live[-1], live[-1], sum(storages.values()))


def record(case: Case) -> OpRecord:
    """The op as a recorder tells it."""
    outputs = case.target(*case.args, **case.kwargs)
    return OpRecord(case.target, *_refs((case.args, case.kwargs, outputs)))


# -- cases -----------------------------------------------------------------------------------------


def convolutions(dtype: torch.dtype) -> Iterator[Case]:
    """Forward and backward: name, input, weight, stride, padding, dilation, groups, channels last, transposed."""
    layers: list[tuple[str, tuple[int, ...], tuple[int, ...], int, int, int, int, bool]] = [
        ("first", (2, 3, 32, 32), (16, 3, 3, 3), 1, 1, 1, 1, False),
        ("first, 8", (2, 3, 32, 32), (8, 3, 3, 3), 1, 1, 1, 1, False),
        ("first, 7x7", (2, 3, 64, 64), (64, 3, 7, 7), 2, 3, 1, 1, False),
        ("grey", (4, 1, 28, 28), (32, 1, 3, 3), 1, 1, 1, 1, False),
        ("plain", (2, 16, 32, 32), (32, 16, 3, 3), 1, 1, 1, 1, False),
        ("padded", (2, 20, 32, 32), (40, 20, 3, 3), 1, 1, 1, 1, False),
        ("strided", (2, 16, 32, 32), (32, 16, 3, 3), 2, 1, 1, 1, False),
        ("dilated", (2, 16, 32, 32), (32, 16, 3, 3), 1, 2, 2, 1, False),
        ("5x5", (2, 16, 32, 32), (32, 16, 5, 5), 1, 2, 1, 1, False),
        ("1x1", (2, 64, 32, 32), (32, 64, 1, 1), 1, 0, 1, 1, False),
        ("1x1 strided", (2, 64, 32, 32), (32, 64, 1, 1), 2, 0, 1, 1, False),
        ("1x1, batch 16", (16, 64, 16, 16), (64, 64, 1, 1), 1, 0, 1, 1, False),
        ("groups", (2, 32, 32, 32), (32, 16, 3, 3), 1, 1, 1, 2, False),
        ("depthwise", (2, 32, 32, 32), (32, 1, 3, 3), 1, 1, 1, 32, False),
        ("one image", (1, 16, 16, 16), (32, 16, 3, 3), 1, 1, 1, 1, False),
        ("ResNet", (8, 64, 56, 56), (64, 64, 3, 3), 1, 1, 1, 1, False),
        ("channels last", (2, 16, 32, 32), (32, 16, 3, 3), 1, 1, 1, 1, True),
        ("channels last, padded", (2, 20, 32, 32), (40, 20, 3, 3), 1, 1, 1, 1, True),
        ("channels last, depthwise", (2, 32, 32, 32), (32, 1, 3, 3), 1, 1, 1, 32, True),
        ("1d", (2, 16, 64), (32, 16, 3), 1, 1, 1, 1, False),
        ("1d, Whisper", (8, 80, 300), (384, 80, 3), 1, 1, 1, 1, False),
        ("3d", (2, 16, 8, 16, 16), (32, 16, 3, 3, 3), 1, 1, 1, 1, False),
    ]
    for label, x, w, stride, padding, dilation, groups, last in layers:
        yield from _convolution(dtype, label, x, w, stride, padding, dilation, groups, last)


def _convolution(
    dtype: torch.dtype,
    label: str,
    x_size: tuple[int, ...],
    w_size: tuple[int, ...],
    stride: int,
    padding: int,
    dilation: int,
    groups: int,
    last: bool,
) -> Iterator[Case]:
    dims = len(x_size) - 2
    x, w, b = (R(size).to(dtype) for size in (x_size, w_size, w_size[:1]))
    if last:
        x, w = (t.to(memory_format=torch.channels_last) for t in (x, w))
    shape = ([stride] * dims, [padding] * dims, [dilation] * dims, False, [0] * dims, groups)
    y = aten.convolution(x, w, b, *shape)
    yield Case(aten.convolution.default, (x, w, b, *shape), label=label)
    arguments = (torch.randn_like(y), x, w, [w_size[0]], *shape, [True, True, True])
    yield Case(aten.convolution_backward.default, arguments, label=label)
    arguments = (torch.randn_like(y), x, w, [w_size[0]], *shape, [False, True, False])
    yield Case(aten.convolution_backward.default, arguments, label=f"{label}, weights")


def transposed(dtype: torch.dtype) -> Iterator[Case]:
    """Transposed convolutions, forward and backward: input, weight, stride, padding, groups, channels last, bias."""
    layers: list[tuple[tuple[int, ...], tuple[int, ...], int, int, int, bool, bool]] = [
        ((4, 32, 20, 20), (32, 16, 2, 2), 2, 0, 1, False, True),
        ((4, 64, 20, 20), (64, 32, 4, 4), 2, 1, 1, False, True),
        ((4, 32, 20, 20), (32, 16, 3, 3), 2, 1, 1, False, True),
        ((4, 32, 20, 20), (32, 16, 3, 3), 1, 1, 1, False, True),
        ((4, 32, 20, 20), (32, 16, 3, 3), 1, 1, 1, False, False),
        ((2, 64, 20, 20), (64, 3, 4, 4), 2, 1, 1, False, True),
        ((2, 20, 20, 20), (20, 12, 4, 4), 2, 1, 1, False, True),
        ((1, 16, 20, 20), (16, 8, 2, 2), 2, 0, 1, False, True),
        ((4, 32, 20, 20), (32, 16, 4, 4), 2, 1, 2, False, True),
        ((4, 32, 20, 20), (32, 16, 2, 2), 2, 0, 1, True, True),
        ((4, 32, 20, 20), (32, 16, 3, 3), 1, 1, 1, True, True),
        ((4, 32, 100), (32, 16, 4), 2, 1, 1, False, True),
        ((4, 32, 8, 10, 10), (32, 16, 2, 2, 2), 2, 0, 1, False, True),
    ]
    for x_size, w_size, stride, padding, groups, last, biased in layers:
        dims, out = len(x_size) - 2, w_size[1] * groups
        x, w = R(x_size).to(dtype), R(w_size).to(dtype)
        b = R(out).to(dtype) if biased else None
        if last:
            x, w = (t.to(memory_format=torch.channels_last) for t in (x, w))
        shape = ([stride] * dims, [padding] * dims, [1] * dims, True, [0] * dims, groups)
        y = aten.convolution(x, w, b, *shape)
        yield Case(aten.convolution.default, (x, w, b, *shape))
        arguments = (torch.randn_like(y), x, w, [out], *shape, [True, True, biased])
        yield Case(aten.convolution_backward.default, arguments)


def recurrent(dtype: torch.dtype) -> Iterator[Case]:
    """LSTMs: time, batch, inputs, hidden."""
    for time, batch, inputs, hidden in (
        (5, 4, 8, 16),
        (20, 10, 50, 100),
        (16, 8, 32, 64),
        (32, 16, 128, 128),
        (35, 20, 200, 200),
        (32, 16, 256, 256),
    ):
        x = R(time, batch, inputs).to(dtype)
        w = [R(4 * hidden, *n).to(dtype) for n in ((inputs,), (hidden,), (), ())]
        h = torch.zeros(batch, hidden, dtype=dtype)
        last = (False, [], 2, hidden, 1, True, False, False, True)
        yield Case(aten.mkldnn_rnn_layer.default, (x, *w, h, h.clone(), *last))
        y, hy, cy, workspace = aten.mkldnn_rnn_layer(x, *w, h, h.clone(), *last)
        arguments = (x, *w, h, h.clone(), y, hy, cy, y.clone(), hy.clone(), cy.clone())
        last = (False, 2, hidden, 1, True, True, False, [], False, workspace)
        yield Case(aten.mkldnn_rnn_layer_backward.default, (*arguments, *last))


def attention(dtype: torch.dtype) -> Iterator[Case]:
    """Flash attention of CPUs: batch, heads, queries, keys, channels."""
    for batch, heads, queries, keys, channels in (
        (2, 4, 64, 64, 32),
        (1, 2, 512, 512, 64),
        (1, 2, 1000, 1000, 64),
        (1, 2, 200, 300, 80),
    ):
        q = R(batch, heads, queries, channels).to(dtype)
        k, v = (R(batch, heads, keys, channels).to(dtype) for _ in range(2))
        op = aten._scaled_dot_product_flash_attention_for_cpu
        yield Case(op.default, (q, k, v, 0.0, False))
        out, lse = op(q, k, v, 0.0, False)
        for gradient in (torch.randn_like(out), R(q.shape).to(dtype)):
            arguments = (gradient, q, k, v, out, lse, 0.0, False)
            yield Case(aten._scaled_dot_product_flash_attention_for_cpu_backward.default, arguments)


def products(dtype: torch.dtype) -> Iterator[Case]:
    """Matrix products: plain, transposed, batched, with gaps."""
    for m, k, n in ((64, 96, 80), (256, 256, 512), (512, 64, 256), (1000, 300, 700)):
        a, b, c = R(m, k).to(dtype), R(k, n).to(dtype), R(n).to(dtype)
        yield Case(aten.mm.default, (a, b))
        yield Case(aten.mm.default, (a, R(n, k).to(dtype).t()), label="right transposed")
        yield Case(aten.mm.default, (R(k, m).to(dtype).t(), b), label="left transposed")
        yield Case(aten.addmm.default, (c, a, b))
        yield Case(aten.bmm.default, (R(4, m, k).to(dtype), R(4, k, n).to(dtype)))
    yield Case(aten.mm.default, (R(64, 192).to(dtype)[:, ::2], R(96, 80).to(dtype)), label="gaps")
    yield Case(aten.mv.default, (R(64, 96).to(dtype), R(96).to(dtype)))


def norms(dtype: torch.dtype) -> Iterator[Case]:
    """Norms, their gradients, softmax, losses."""
    x, g, w = R(64, 1000).to(dtype), R(64, 1000).to(dtype), R(1000).to(dtype)
    _, mean, rstd = aten.native_layer_norm(x, [1000], w, w, 1e-5)
    yield Case(aten.native_layer_norm.default, (x, [1000], w, w, 1e-5))
    yield Case(
        aten.native_layer_norm_backward.default, (g, x, [1000], mean, rstd, w, w, [True] * 3)
    )
    y, gy, v = R(8, 32, 10, 10).to(dtype), R(8, 32, 10, 10).to(dtype), R(32).to(dtype)
    for label, a, b in (
        ("", y, gy),
        ("channels last", *(t.to(memory_format=torch.channels_last) for t in (y, gy))),
    ):
        _, mean, rstd = aten.native_group_norm(a, v, v, 8, 32, 100, 8, 1e-5)
        yield Case(aten.native_group_norm.default, (a, v, v, 8, 32, 100, 8, 1e-5), label=label)
        arguments: tuple[Any, ...] = (b, a, mean, rstd, v, 8, 32, 100, 8, [True] * 3)
        yield Case(aten.native_group_norm_backward.default, arguments, label=label)
        running = (torch.zeros(32, dtype=dtype), torch.ones(32, dtype=dtype))
        arguments = (a, v, v, *running, True, 0.1, 1e-5)
        yield Case(aten.native_batch_norm.default, arguments, label=label)
        _, mean, rstd = aten.native_batch_norm(*arguments)
        arguments = (b, a, v, *running, mean, rstd, True, 1e-5, [True] * 3)
        yield Case(aten.native_batch_norm_backward.default, arguments, label=label)
        yield Case(aten.max_pool2d_with_indices.default, (a, [2, 2], [2, 2]), label=label)
        pooled, at = aten.max_pool2d_with_indices(a, [2, 2], [2, 2])
        arguments = (pooled, a, [2, 2], [2, 2], [0, 0], [1, 1], False, at)
        yield Case(aten.max_pool2d_with_indices_backward.default, arguments, label=label)
        yield Case(aten._adaptive_avg_pool2d.default, (a, [5, 5]), label=label)
        yield Case(aten._adaptive_avg_pool2d_backward.default, (pooled, a), label=label)
        yield Case(aten.mean.dim, (a, [2, 3]), label=label)
    for op, back in (
        (aten._softmax, aten._softmax_backward_data),
        (aten._log_softmax, aten._log_softmax_backward_data),
    ):
        yield Case(op.default, (x, -1, False))
        yield Case(back.default, (g, op(x, -1, False), -1, dtype))
    labels = torch.randint(0, 1000, (64,))
    logs = aten._log_softmax(x, -1, False)
    loss, total = aten.nll_loss_forward(logs, labels, None, 1, -100)
    yield Case(aten.nll_loss_forward.default, (logs, labels, None, 1, -100))
    yield Case(aten.nll_loss_backward.default, (loss, logs, labels, None, 1, -100, total))
    yield Case(aten.mse_loss.default, (x, g))


def indexing(dtype: torch.dtype) -> Iterator[Case]:
    """Lookups, scatters, sorts, scans, reductions, random numbers."""
    table, rows = R(500, 64).to(dtype), torch.randint(0, 500, (3, 50))
    values, x = R(3, 50, 64).to(dtype), R(64, 1000).to(dtype)
    places, spread = torch.randint(0, 64, (500, 30)), R(500, 30).to(dtype)
    yield Case(aten.embedding.default, (table, rows))
    yield Case(aten.embedding_dense_backward.default, (values, rows, 500, -1, False))
    yield Case(aten.index.Tensor, (table, [rows]))
    yield Case(aten.index_put.default, (table, [rows], values, True))
    yield Case(aten.index_put_.default, (table.clone(), [rows], values, True))
    yield Case(aten.gather.default, (table, 1, places))
    yield Case(aten.scatter_add.default, (table, 1, places, spread))
    yield Case(aten.scatter.src, (table, 1, places, spread))
    for dim in (0, 1):
        yield Case(aten.sort.default, (x, dim))
        yield Case(aten.topk.default, (x, 5, dim))
        yield Case(aten.cumsum.default, (x, dim))
        yield Case(aten.kthvalue.default, (x, 5, dim))
        yield Case(aten.sum.dim_IntList, (x, [dim]))
        yield Case(aten.mean.dim, (x, [dim]))
        yield Case(aten.logsumexp.default, (x, [dim]))
        yield Case(aten.amax.default, (x, [dim]))
        yield Case(aten.linalg_vector_norm.default, (x, 2, [dim]))
    yield Case(aten.argsort.default, (x, 1))
    yield Case(aten.any.default, (x,))
    yield Case(aten.native_dropout.default, (x, 0.5, True))
    yield Case(aten.bernoulli_.float, (x.clone(), 0.5))
    yield Case(aten._cdist_forward.default, (R(200, 32), R(150, 32), 2.0, None))
    yield Case(aten._cdist_forward.default, (R(200, 32), R(150, 32), 1.0, None))
    yield Case(aten.cat.default, ([x, x], 1))
    yield Case(aten.cat.default, ([x, x.double()], 1), label="of two dtypes")
    yield Case(aten.im2col.default, (R(2, 8, 10, 10).to(dtype), [3, 3], [1, 1], [1, 1], [1, 1]))
    yield Case(aten._fft_r2c.default, (R(200, 32), [1], 0, True))


def rare(dtype: torch.dtype) -> Iterator[Case]:
    """Resizing, masks, losses of probabilities, bags, sequences."""
    small, large = R(4, 16, 20, 20).to(dtype), R(1, 8, 60, 60).to(dtype)
    for x in (small, large, small.to(memory_format=torch.channels_last)):
        size = [2 * x.shape[2], 2 * x.shape[3]]
        yield Case(aten.upsample_nearest2d.default, (x, size))
        yield Case(aten.upsample_bilinear2d.default, (x, size, False))
        yield Case(aten.upsample_bicubic2d.default, (x, size, False))
    yield Case(aten.upsample_linear1d.default, (R(4, 16, 100).to(dtype), [200], False))
    yield Case(aten.upsample_nearest3d.default, (R(2, 4, 6, 8, 8).to(dtype), [12, 16, 16]))
    x, mask = R(64, 1000).to(dtype), torch.rand(64, 1000) > 0.5
    yield Case(aten.masked_select.default, (x, mask))
    yield Case(aten.index.Tensor, (x, [mask]))
    yield Case(aten.index.Tensor, (x, [mask[:, 0]]))
    yield Case(aten.index_put.default, (x, [mask], x[mask]))
    yield Case(aten.index_add.default, (x, 0, torch.randint(64, (30,)), x[:30].clone()))
    yield Case(aten.cumsum.default, (mask, 1))
    yield Case(aten.sum.dim_IntList, (mask, [1]))
    yield Case(aten.roll.default, (x, [3, 2], [0, 1]))
    yield Case(aten.median.default, (x,))
    yield Case(aten.normal.Tensor_float, (x, 1.0))
    yield Case(aten._softmax.default, (x.t(), 1, False))
    yield Case(aten._safe_softmax.default, (x, -1))
    yield Case(aten.unfold_backward.default, (R(64, 199, 10).to(dtype), [64, 1000], 1, 10, 5))
    for reduction in (1, 2):
        probable = (x.sigmoid(), torch.rand_like(x), None, reduction)
        yield Case(aten.binary_cross_entropy.default, probable)
        yield Case(
            aten.binary_cross_entropy_with_logits.default, (x, x.sigmoid(), None, None, reduction)
        )
    wave = torch.fft.rfft2(R(20, 60, 64))
    yield Case(aten.abs.default, (wave,))
    yield Case(aten._fft_c2r.default, (wave, [1, 2], 2, 64))


def elementwise(dtype: torch.dtype) -> Iterator[Case]:
    """Elementwise ops, promotion, copies, lists of tensors, optimizers."""
    x, g = R(64, 1000).to(dtype), R(64, 1000).to(dtype)
    yield Case(aten.gelu.default, (x,))
    yield Case(aten.gelu_backward.default, (g, x))
    yield Case(aten.add.Tensor, (x, g))
    yield Case(aten.add.Tensor, (x, g.double()), label="of two dtypes")
    yield Case(aten.mul_.Tensor, (x.clone(), g.double()), label="of two dtypes")
    yield Case(aten.where.self, (x > 0, x, g))
    yield Case(aten.clone.default, (x.t(),), {"memory_format": torch.contiguous_format})
    yield Case(aten.copy_.default, (R(1000, 64).to(dtype), x.t()), label="transposed")
    yield Case(aten._to_copy.default, (x,), {"dtype": torch.float64})
    many = [[R(100, 10).to(dtype).abs() for _ in range(5)] for _ in range(4)]
    a, b, c, d = many
    yield Case(aten._foreach_add.List, (a, b))
    yield Case(aten._foreach_mul_.Scalar, (a, 2.0))
    yield Case(aten._foreach_lerp_.Scalar, (a, b, 0.1))
    yield Case(aten._foreach_addcdiv_.Scalar, (a, b, c, 0.1))
    yield Case(aten._foreach_sqrt.default, (c,))
    yield Case(aten._foreach_norm.Scalar, (a, 2))
    steps = [torch.tensor(1.0) for _ in a]
    options = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8}
    flags = {"amsgrad": False, "maximize": False}
    yield Case(aten._fused_adamw_.default, (a, b, c, d, [], steps), {**options, **flags})


FAMILIES: dict[str, Callable[[torch.dtype], Iterator[Case]]] = {
    "convolution": convolutions,
    "transposed": transposed,
    "recurrent": recurrent,
    "rare": rare,
    "attention": attention,
    "product": products,
    "norm": norms,
    "indexing": indexing,
    "elementwise": elementwise,
}


# -- whole steps -------------------------------------------------------------------------------------


class Counted(TorchDispatchMode):
    """Live bytes by the storages of what ops return, and each op's scratch: what a plan adds up.

    rows: per op its name and its own peak, in bytes beyond those live at the first. Every op is preceded by an
    allocation of MARK bytes, by which the allocator's events are cut.
    """

    def __init__(self, scratch: bool = True) -> None:
        super().__init__()
        self.scratch = scratch
        self.rows: list[tuple[str, int]] = []
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        torch.empty(MARK, dtype=torch.uint8)
        gone = [key for key, (ref, _) in self._live.items() if ref.expired()]
        for key in gone:
            del self._live[key]
        self._known.update(_storages((args, kwargs)).keys() - self._live.keys())
        before = sum(nbytes for _, nbytes in self._live.values())
        out = func(*args, **(kwargs or {}))
        for key, storage in _storages(out).items():
            if key not in self._live and key not in self._known:
                self._live[key] = (StorageWeakRef(storage), storage.nbytes())
        self._known -= self._live.keys()
        after = sum(nbytes for _, nbytes in self._live.values())
        called = OpRecord(func, *_refs((args, kwargs or {}, out)))
        inside = scratch_bytes(called) if self.scratch else 0
        self.rows.append((str(func), max(before, after + inside)))
        return out


def _storages(tree: Any) -> dict[int, torch.UntypedStorage]:
    found = [t.untyped_storage() for t in pytree.tree_leaves(tree) if isinstance(t, Tensor)]
    return {s._cdata: s for s in found}


def _refs(tree: Any) -> Any:
    def ref(value: Any) -> Any:
        return TensorRef(0, geometry_of(value)) if isinstance(value, Tensor) else value

    return pytree.tree_map(ref, tree)


def step_peaks(step: Callable[[], Any], scratch: bool = True) -> list[tuple[str, int, int]]:
    """Per op of a step: its name, its peak as counted, and as the allocator saw it; the third step is measured."""
    for _ in range(2):
        step()
    gc.collect()
    counted = Counted(scratch)
    with (
        profile(
            activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
        ) as profiler,
        counted,
    ):
        step()
    live, runs = 0, []
    for nbytes in _sizes(profiler):
        if nbytes == MARK:
            runs.append(live)
        elif nbytes != -MARK:
            live += nbytes
            runs[-1] = max(runs[-1], live)
    return [(*row, real) for row, real in zip(counted.rows, runs, strict=True)]


def steps() -> dict[str, Callable[[], Any]]:
    """Training steps: a convolutional network, an LSTM, a GRU."""

    def training(model: nn.Module, x: Tensor, classes: int) -> Callable[[], Any]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        labels = torch.randint(0, classes, x.shape[:1])

        def step() -> None:
            torch.nn.functional.cross_entropy(model(x), labels).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    network = nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()),
        *(nn.Conv2d(64, 128, 3, padding=1), nn.AdaptiveAvgPool2d(4), nn.Flatten()),
        nn.Linear(2048, 10),
    )
    return {
        "convolutional": training(network, R(16, 3, 32, 32), 10),
        "LSTM": training(Last(nn.LSTM(64, 128, 2, batch_first=True)), R(8, 20, 64), 128),
        "GRU": training(Last(nn.GRU(64, 128, 2, batch_first=True)), R(8, 20, 64), 128),
    }


class Last(nn.Module):
    """The last output of a recurrent layer, through a linear one."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.linear = layer, nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.layer(x)[0][:, -1])


def print_steps() -> None:
    print("| step | ops | allocator's peak | without scratch | with it | largest gap of an op |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, step in steps().items():
        without, rows = step_peaks(step, scratch=False), step_peaks(step)
        peak = max(real for *_, real in rows)
        bare, ours = max(row[1] for row in without) / peak - 1, max(r[1] for r in rows) / peak - 1
        gap = max(abs(row[1] - row[2]) for row in rows) / peak
        print(f"| {name} | {len(rows)} | {peak} | {bare:+.1%} | {ours:+.2%} | {gap:.2%} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", choices=[*FAMILIES, "steps"])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(machine())
    if options.only in (None, "steps"):
        print_steps()
    if options.only == "steps":
        return
    print("| op | dtype | truth | formula | difference | share | error |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for family in [options.only] if options.only else FAMILIES:
        for dtype in FLOATS:
            cases = list(FAMILIES[family](dtype))
            for case, real in zip(cases, truths(cases), strict=True):
                ours = scratch_bytes(record(case))
                off = ours - real.scratch
                shown = str(case.dtype()).removeprefix("torch.")
                print(
                    f"| {case.name} | {shown} | {real.scratch} | {ours} | {off} "
                    f"| {real.scratch / max(real.peak, 1):.1%} | {off / max(real.peak, 1):+.2%} |"
                )


if __name__ == "__main__":
    main()
