"""The scratch memory of single ops: measured by the allocator, and by the table of `planning.scratch`.

    python -m benchmarks.scratch                 the table: op, shape, dtype, truth, formula, difference
    python -m benchmarks.scratch --threads 2 --only attention
    python -m benchmarks.scratch --without-onednn        the table's claim: both columns are equal

Truth: the events of torch's CPU allocator by `torch.profiler` while the op runs once (after a warm-up), its
peak minus the bytes live at its end. oneDNN's products and attention in bfloat16 allocate more than the table has.
`share` is the scratch in the op's own peak (inputs, outputs, scratch), and `error` the difference as a part of it.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.machine import machine
from functionalize._compat.graphs import pytree
from functionalize.ir.ops import OpRecord, TensorRef, geometry_of
from functionalize.planning.scratch.scratch import scratch_bytes

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
    """Bytes: scratch inside the op, live after it, and of its inputs."""

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
    for nbytes in sizes_of(profiler):
        if abs(nbytes) == MARK:  # made before a case; freed before its results are
            runs.append([])
        else:
            runs[-1].append(nbytes)
    return [_truth(case, sizes) for case, sizes in zip(cases, runs[::2], strict=True)]


def sizes_of(profiler: profile) -> list[int]:
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
    """The op in the form that a recorder passes it."""
    outputs = case.target(*case.args, **case.kwargs)
    return OpRecord(case.target, *refs((case.args, case.kwargs, outputs)))


def refs(tree: Any) -> Any:
    """`tree` with geometries for tensors, as a recorder has them."""

    def ref(value: Any) -> Any:
        return TensorRef(0, geometry_of(value)) if isinstance(value, Tensor) else value

    return pytree.tree_map(ref, tree)


# -- cases -----------------------------------------------------------------------------------------


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
    yield Case(aten._softmax.default, (x.t(), 1, False))
    yield Case(aten._safe_softmax.default, (x, -1))
    for reduction in (1, 2):
        probable = (x.sigmoid(), torch.rand_like(x), None, reduction)
        yield Case(aten.binary_cross_entropy.default, probable)
        yield Case(
            aten.binary_cross_entropy_with_logits.default, (x, x.sigmoid(), None, None, reduction)
        )


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
    "rare": rare,
    "attention": attention,
    "product": products,
    "norm": norms,
    "indexing": indexing,
    "elementwise": elementwise,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--without-onednn", action="store_true", help="ATen's own kernels alone")
    parser.add_argument("--only", choices=list(FAMILIES))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.backends.mkldnn.enabled = not options.without_onednn
    print(machine())
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
