"""What a calibration runs: for each kind of kernel, calls of several sizes with their FLOPs and bytes.

    for probe in probes(device, dtype, largest=1 << 26): probe.kind, probe.size, probe.calls, probe.work

    matmul       x @ w.t(), g @ w, g.t() @ x of m rows and width 4 m, as a linear layer has them in a training step
    attention    causal, of 4 heads, 512 rows in all, by length; forward and backward
    others       the bytes that the op reads and writes, as `costs.moved` counts them

The calls of a probe take turns at tensors of `largest` bytes together (of at most 512 sets), so that no cache has what
a call reads, as for most values of a training step. Lookups share a table.
Every call runs an ATen op alone: no autograd, no module. The calls of a probe are of one kind and about one size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from functionalize.cost.machines.efficiency import (
    ATTENTION,
    ATTENTION_BACKWARD,
    COPY,
    COSTLY,
    LOOKUP,
    MATMUL,
    NORM,
    OPTIMIZER,
    POINTWISE,
    RANDOM,
    REDUCTION,
)

aten = torch.ops.aten
Call = Callable[[], Any]
_ROWS, _WIDTH = 512, 32  # of the attention probes: rows in all, channels of a head
_ROW = 256  # elements of a row in norms, reductions and lookups
_MOST_SETS = 512  # of tensors of a probe: a run of small calls would take too long


@dataclass(frozen=True)
class Probe:
    """Calls of one kind and size. work: FLOPs, or bytes, of all calls; size: by which the curve is looked up."""

    kind: str
    size: float
    work: float
    calls: Sequence[Call]
    dtype: torch.dtype


def probes(device: str, dtype: torch.dtype, largest: int) -> Iterator[Probe]:
    """Every probe whose tensors have at most `largest` bytes together, small ones first within a kind."""
    yield from matmuls(device, dtype, largest)
    yield from _attention(device, dtype, largest)
    for kind, make in _BY_BYTES.items():
        count = 1 << 10
        while 8 * count * dtype.itemsize <= largest:
            sets = 1 if kind == LOOKUP else sets_of(largest, count * dtype.itemsize)
            made = [make(count, device, dtype) for _ in range(sets)]
            calls, nbytes = [call for each, _ in made for call in each], sum(n for _, n in made)
            yield Probe(kind, nbytes / len(calls), nbytes, calls, dtype)
            count *= 4


def sets_of(largest: int, nbytes: int, most: int = _MOST_SETS) -> int:
    """How many sets of tensors a probe takes turns at. nbytes: of one of them."""
    return min(max(largest // nbytes, 1), most)


def matmuls(device: str, dtype: torch.dtype, largest: int, most: int = 99) -> Iterator[Probe]:
    """The products of a linear layer, by FLOPs. most: how many sizes, of the largest."""
    sizes, rows = [], 8
    while 48 * rows * rows * dtype.itemsize <= largest and rows <= (
        384 if device == "cpu" else 4096
    ):
        sizes.append(rows)
        rows = rows * 2 if rows < 256 else rows * 3 // 2
    for rows in sizes[-most:]:
        wide = 4 * rows
        calls: list[Call] = []
        for _ in range(sets_of(largest, 24 * rows * rows * dtype.itemsize)):
            x, g = _random(device, dtype, rows, wide), _random(device, dtype, rows, wide)
            w = _random(device, dtype, wide, wide)
            calls += (
                partial(aten.mm, x, w.t()),
                partial(aten.mm, g, w),
                partial(aten.mm, g.t(), x),
            )
        flops = 2.0 * rows * wide**2
        yield Probe(MATMUL, flops, len(calls) * flops, calls, dtype)


def _attention(device: str, dtype: torch.dtype, largest: int) -> Iterator[Probe]:
    cpu = device == "cpu"
    heads, width = (4, _WIDTH) if cpu else (16, 128)
    rows = _ROWS if cpu else 16_384
    name = "_scaled_dot_product_flash_attention" + ("_for_cpu" if cpu else "")
    forward, backward = getattr(aten, name), getattr(aten, name + "_backward")
    length = 16 if cpu else 512
    while length <= rows and rows * heads * width * dtype.itemsize * 8 <= max(largest, 1 << 21):
        shape = (rows // length, heads, length, width)
        forwards: list[Call] = []
        backwards: list[Call] = []
        for _ in range(sets_of(largest, 8 * rows * heads * width * dtype.itemsize)):
            q, k, v, g = (_random(device, dtype, *shape) for _ in range(4))
            out = forward(q, k, v, 0.0, True)
            arguments = (g, q, k, v, out[0], out[1])
            if not cpu:  # cum_seq_q, cum_seq_k, max_q, max_k
                arguments = (*arguments, *out[2:6])
            last = (0.0, True) if cpu else (0.0, True, out[6], out[7])
            forwards.append(partial(forward, q, k, v, 0.0, True))
            backwards.append(partial(backward, *arguments, *last))
        flops = 4.0 * rows * length * heads * width / 2  # a causal mask hides half
        yield Probe(ATTENTION, length, len(forwards) * flops, forwards, dtype)
        flops *= 2.5
        yield Probe(ATTENTION_BACKWARD, length, len(backwards) * flops, backwards, dtype)
        length *= 2 if cpu else 4


def _pointwise(count: int, device: str, dtype: torch.dtype) -> tuple[list[Call], float]:
    x, y = _random(device, dtype, count), _random(device, dtype, count)
    return [lambda: aten.add(x, y), lambda: aten.mul(x, y)], 6.0 * _bytes(x)


def _costly(count: int, device: str, dtype: torch.dtype) -> tuple[list[Call], float]:
    x, y = _random(device, dtype, count), _random(device, dtype, count)
    return [lambda: aten.gelu(x), lambda: aten.gelu_backward(y, x)], 5.0 * _bytes(x)


def _random_numbers(count: int, device: str, dtype: torch.dtype) -> tuple[list[Call], float]:
    x = _random(device, dtype, count)
    return [lambda: aten.bernoulli_(x, 0.9)], 2.0 * _bytes(x)


def _reduction(count: int, device: str, dtype: torch.dtype) -> tuple[list[Call], float]:
    x = _random(device, dtype, count // _ROW, _ROW)
    calls: list[Call] = [lambda: aten._log_softmax(x, 1, False), lambda: aten.sum(x, [0])]
    return calls, 3.0 * _bytes(x)


def _norm(count: int, device: str, dtype: torch.dtype) -> tuple[list[Call], float]:
    x, g = (_random(device, dtype, count // _ROW, _ROW) for _ in range(2))
    w, b = (_random(device, dtype, _ROW) for _ in range(2))
    _, mean, rstd = aten.native_layer_norm(x, [_ROW], w, b, 1e-5)
    calls: list[Call] = [
        lambda: aten.native_layer_norm(x, [_ROW], w, b, 1e-5),
        lambda: aten.native_layer_norm_backward(g, x, [_ROW], mean, rstd, w, b, [True] * 3),
    ]
    return calls, 5.0 * _bytes(x) + 6.0 * _bytes(w)


def _copy(count: int, device: str, dtype: torch.dtype) -> tuple[list[Call], float]:
    x = _random(device, dtype, count)
    halves = list(x.chunk(2))
    return [lambda: aten.clone(x), lambda: aten.cat(halves)], 4.0 * _bytes(x)


def _lookup(count: int, device: str, dtype: torch.dtype) -> tuple[list[Call], float]:
    rows = max(count // _ROW, 1)
    table, g = _random(device, dtype, 1024, _ROW), _random(device, dtype, rows, _ROW)
    index = torch.randint(0, 1024, (rows,), device=device)
    calls: list[Call] = [lambda: aten.embedding(table, index)]
    return calls, 2.0 * _bytes(g) + _bytes(index)


def _optimizer(count: int, device: str, dtype: torch.dtype) -> tuple[list[Call], float]:
    lists = [[_random(device, dtype, count // 4).abs_() for _ in range(4)] for _ in range(4)]
    steps = [torch.ones((), device=device) for _ in range(4)]
    numbers = {"lr": 1e-9, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8}
    p, g, m, v = lists

    def update() -> None:
        aten._fused_adamw_(p, g, m, v, [], steps, **numbers, amsgrad=False, maximize=False)

    return [update], 7.0 * sum(map(_bytes, p))


_BY_BYTES: dict[str, Callable[[int, str, torch.dtype], tuple[list[Call], float]]] = {
    POINTWISE: _pointwise,
    COSTLY: _costly,
    RANDOM: _random_numbers,
    REDUCTION: _reduction,
    NORM: _norm,
    COPY: _copy,
    LOOKUP: _lookup,
    OPTIMIZER: _optimizer,
}


def _random(device: str, dtype: torch.dtype, *shape: int) -> Tensor:
    """Copied from one vector: drawing numbers would take most of a calibration."""
    count = math.prod(shape)
    drawn = _drawn(device, dtype, 1 << max(count - 1, 1).bit_length())
    return drawn[:count].clone().reshape(shape)


@lru_cache(maxsize=2)  # a probe has tensors of two sizes
def _drawn(device: str, dtype: torch.dtype, count: int) -> Tensor:
    return torch.randn(count, device=device).to(dtype)


def _bytes(tensor: Tensor) -> float:
    return float(tensor.numel() * tensor.element_size())
