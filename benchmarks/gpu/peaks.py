"""The bytes that one call needs beyond what was live before it: recorded in a fake world, measured by the allocator.

    attention backward, flash, bfloat16, head size 64: peak      12,582,912 bytes      12,599,296 bytes

Outputs, temporaries and scratch: what differs is what an op allocates inside itself and no table has
(`planner/scratch`), or what the plan assumes otherwise (cuDNN's recurrent layers). Requested bytes. A call runs twice
before it is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import functionalize as fz
from benchmarks.gpu.device import Device
from benchmarks.gpu.options import Options
from benchmarks.gpu.rows import Prediction, Rows, words
from functionalize.planner.timeline.timeline import BEFORE

Call = Callable[[], Any]
_CALLS = 2  # before the one that is measured: libraries set themselves up
_HALF = torch.bfloat16


def _leaf(device: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype, device=device, requires_grad=True)


def _backward(out: Tensor, inputs: tuple[Tensor, ...]) -> Call:
    """The backward of a graph that is kept."""
    gradient = torch.ones_like(out)
    return lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True)


@dataclass(frozen=True)
class AttentionBackward:
    """The backward of one kernel of attention."""

    backend: SDPBackend
    dtype: torch.dtype
    size: int
    key_heads: int = 8
    length: int = 512

    def __call__(self, device: str) -> Call:
        """The call to measure."""
        q = _leaf(device, 2, 8, self.length, self.size, dtype=self.dtype)
        k, v = (
            _leaf(device, 2, self.key_heads, self.length, self.size, dtype=self.dtype)
            for _ in range(2)
        )
        with sdpa_kernel(self.backend):
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=self.key_heads != 8
            )
        return _backward(out, (q, k, v))


def _optimizer(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> Callable[[str], Call]:
    def build(device: str) -> Call:
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).to(device)
        for each in model.parameters():
            each.grad = torch.ones_like(each)
        return kind(model.parameters(), lr=1e-3, **options).step

    return build


def _clip(device: str) -> Call:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).to(device)
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    return lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def _autocast(device: str) -> Call:
    """One weight in three products: its copy in bfloat16 is made once and lives to the end of the context."""
    x, weight = torch.randn(64, 512, device=device), _leaf(device, 512, 512)

    def call() -> Tensor:
        with torch.autocast(device, dtype=_HALF):
            return F.linear(F.linear(F.linear(x, weight), weight), weight)

    return call


def _linear(dtype: torch.dtype) -> Callable[[str], Call]:
    def build(device: str) -> Call:
        x, w, b = (_leaf(device, *shape, dtype=dtype) for shape in ((256, 512), (512, 512), (512,)))

        def call() -> Any:
            return torch.autograd.grad(F.linear(x, w, b).sum(), (x, w, b))

        return call

    return build


def _convolution(dtype: torch.dtype) -> Callable[[str], Call]:
    def build(device: str) -> Call:
        x, w = _leaf(device, 8, 32, 56, 56, dtype=dtype), _leaf(device, 64, 32, 3, 3, dtype=dtype)

        def call() -> Any:
            out = F.conv2d(x, w, padding=1)
            return torch.autograd.grad(out, (x, w), torch.ones_like(out))

        return call

    return build


def _recurrent(device: str) -> Call:
    layer: Any = nn.LSTM(128, 128, 2).to(device)
    x = _leaf(device, 32, 8, 128)

    def call() -> Any:
        out = layer(x)[0]
        return torch.autograd.grad(out, tuple(layer.parameters()), torch.ones_like(out))

    return call


def _norm(call: Callable[[Tensor], Tensor], *shape: int, dtype: torch.dtype) -> Any:
    def build(device: str) -> Call:
        x = _leaf(device, *shape, dtype=dtype)

        def both() -> Any:
            out = call(x)
            return torch.autograd.grad(out, x, torch.ones_like(out))

        return both

    return build


def _embedding(device: str) -> Call:
    table = _leaf(device, 1024, 256)
    tokens = torch.randint(1024, (8, 512), device=device)

    def call() -> Any:
        out = F.embedding(tokens, table)
        return torch.autograd.grad(out, table, torch.ones_like(out))

    return call


def _cross_entropy(device: str) -> Call:
    logits, labels = _leaf(device, 512, 4096), torch.randint(4096, (512,), device=device)
    return lambda: torch.autograd.grad(F.cross_entropy(logits, labels), logits)


def cases(device: str, small: bool) -> dict[str, Callable[[str], Call]]:
    """Fact -> a function that builds, on a device, the call to measure."""
    flash, efficient, cudnn = (
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
    )
    calls: dict[str, Callable[[str], Call]] = {
        "AdamW, foreach": _optimizer(torch.optim.AdamW, foreach=True),
        "autocast, one weight used three times": _autocast,
        "layer norm, both, float32": _norm(
            lambda x: F.layer_norm(x, (512,)), 512, 512, dtype=torch.float32
        ),
    }
    if not small:
        calls |= {
            "AdamW, fused": _optimizer(torch.optim.AdamW, fused=True),
            "AdamW, loop": _optimizer(torch.optim.AdamW, foreach=False),
            "SGD with momentum, foreach": _optimizer(torch.optim.SGD, momentum=0.9, foreach=True),
            "clip_grad_norm_": _clip,
            "linear, both, float32": _linear(torch.float32),
            "linear, both, bfloat16": _linear(_HALF),
            "convolution, both, float32": _convolution(torch.float32),
            "convolution, both, bfloat16": _convolution(_HALF),
            "LSTM, both, float32": _recurrent,
            "rms norm, both, bfloat16": _norm(
                lambda x: F.rms_norm(x, (512,)), 512, 512, dtype=_HALF
            ),
            "group norm, both, float32": _norm(
                lambda x: F.group_norm(x, 8), 8, 64, 32, 32, dtype=torch.float32
            ),
            "batch norm, both, float32": _norm(
                lambda x: F.batch_norm(x, None, None, training=True), 8, 64, 32, 32,
                dtype=torch.float32,
            ),
            "dropout, both, float32": _norm(
                lambda x: F.dropout(x, 0.1), 512, 512, dtype=torch.float32
            ),
            "softmax, both, bfloat16": _norm(lambda x: x.softmax(-1), 512, 512, dtype=_HALF),
            "embedding, both": _embedding,
            "cross entropy, both": _cross_entropy,
        }  # fmt: skip
    kernels: list[tuple[str, SDPBackend, torch.dtype, int, int]] = [
        ("flash", flash, torch.float32, 64, 8)
    ]
    if device == "cuda":
        kernels = [
            (name, backend, _HALF, size, 8)
            for name, backend in (("flash", flash), ("efficient", efficient), ("cudnn", cudnn))
            for size in (64, 96, 128)
        ]
        kernels += [
            ("efficient", efficient, torch.float32, 64, 8),
            ("flash", flash, _HALF, 256, 8),
            ("flash, grouped heads", flash, _HALF, 64, 2),
            ("cudnn, grouped heads", cudnn, _HALF, 64, 2),
        ]
    for name, backend, dtype, size, heads in kernels:
        fact = f"attention backward, {name}, {str(dtype).removeprefix('torch.')}, head size {size}"
        calls[fact] = AttentionBackward(backend, dtype, size, heads)
    return {f"{name}: peak": build for name, build in calls.items()}


def predict(options: Options) -> dict[str, Prediction]:
    """The peak of every call, recorded in a fake world."""
    found = {}
    for fact, build in cases(options.device, options.small).items():
        try:
            found[fact] = Prediction(_planned(build, options), "bytes")
        except Exception as error:
            found[fact] = Prediction(None, "bytes", error=words(error))
    return found


def _planned(build: Callable[[str], Call], options: Options) -> int:
    with fz.world(size=1, target=options.target):
        call = build(options.device)
        for _ in range(_CALLS):
            call()
        recorded = fz.record_memory(call)
        recorded()
        assert recorded.memory is not None
        timeline = recorded.memory.timeline()
    before = sum(each.nbytes for each in timeline.allocations if each.made == BEFORE)
    return timeline.peak - before


def measure(options: Options, rows: Rows) -> None:
    """The peak of every call on the device."""
    device = Device(options.device)
    for fact, build in cases(options.device, options.small).items():
        with rows.guarded(fact):
            call = build(options.device)
            for _ in range(_CALLS):
                call()
            before = device.live()
            with device.peak() as peak:
                result = call()
            del result
            rows.add(fact, peak.requested - before.requested, "bytes")
