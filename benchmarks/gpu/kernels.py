"""Which attention kernel, autograd node and dtype a call has: predicted by `Target`, measured by running it.

    attention bfloat16, head size 64, causal, trains        cudnn       flash
    node of rms_norm bfloat16                               FusedRmsNormBackward0
    autocast: dtype of layer_norm                           float32

Predicted: the ops that a dispatch mode sees in a fake world; "math" where the target refuses. Measured: the ops in the
trace of `torch.profiler`. The autograd node determines what is saved for backward. The note of an attention is the
longest kernel on the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import functionalize as fz
from benchmarks.gpu.device import Device
from benchmarks.gpu.options import Options
from benchmarks.gpu.rows import Prediction, Rows, words
from functionalize._compat.dispatch import TorchDispatchMode
from functionalize.errors import TargetError

_PREFIX = "_scaled_dot_product_"
FUSED = {
    f"{_PREFIX}cudnn_attention": "cudnn",
    f"{_PREFIX}flash_attention": "flash",
    f"{_PREFIX}flash_attention_for_cpu": "flash",
    f"{_PREFIX}efficient_attention": "efficient",
}


@dataclass(frozen=True)
class Attention:
    """A call of attention. mask: "no", "bool" or "float". lengths: of the query, and of key and value."""

    dtype: torch.dtype
    size: int
    mask: str = "no"
    causal: bool = False
    trains: bool = True
    grouped: bool = False
    lengths: tuple[int, int] = (128, 128)

    @property
    def fact(self) -> str:
        """The call in words."""
        options = [f"{self.mask} mask"] if self.mask != "no" else []
        for name in ("causal", "trains", "grouped"):
            options += [name] * getattr(self, name)
        options += [f"lengths {self.lengths}"] if self.lengths != (128, 128) else []
        return ", ".join([f"attention {_short(self.dtype)}, head size {self.size}", *options])

    def __call__(self, device: str) -> Tensor:
        """The output on a device."""
        rows, columns = self.lengths
        options: dict[str, Any] = {
            "dtype": self.dtype, "device": device, "requires_grad": self.trains,
        }  # fmt: skip
        q = torch.randn(2, 4, rows, self.size, **options)
        heads = 2 if self.grouped else 4
        k, v = (torch.randn(2, heads, columns, self.size, **options) for _ in range(2))
        mask = None
        if self.mask == "bool":
            mask = torch.ones(rows, columns, dtype=torch.bool, device=device).tril()
        elif self.mask == "float":
            mask = torch.zeros(rows, columns, dtype=self.dtype, device=device)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=self.causal, enable_gqa=self.grouped
        )


def attentions(small: bool) -> Iterator[Attention]:
    """The grid: dtypes, head sizes, masks, causal, with and without gradient; and grouped heads, unequal lengths."""
    half, full = torch.bfloat16, torch.float32
    if small:
        yield from (
            Attention(full, 16, causal=True),
            Attention(full, 16, mask="float", trains=False),
        )
        return
    dtypes, sizes = (half, torch.float16, full), (16, 20, 64, 72, 96, 128, 192, 256)
    kinds = (("no", False), ("no", True), ("bool", False), ("float", False))
    for dtype, size, (mask, causal), trains in itertools.product(
        dtypes, sizes, kinds, (True, False)
    ):
        yield Attention(dtype, size, mask, causal, trains)
    for dtype, size in itertools.product((half, full), (64, 128)):
        yield Attention(dtype, size, causal=True, grouped=True)
        yield Attention(dtype, size, causal=True, lengths=(64, 128))
        yield Attention(dtype, size, lengths=(1, 128))
        yield Attention(dtype, size, lengths=(128, 1))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _leaf(device: str, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype, device=device, requires_grad=True)


def _lstm(device: str) -> Tensor:
    layer: Any = nn.LSTM(32, 32).to(device)
    out: Tensor = layer(_leaf(device, 4, 2, 32))[0]
    return out


def nodes(small: bool) -> dict[str, Callable[[str], Tensor]]:
    """Name -> a call that autograd records."""
    half = torch.bfloat16
    found: dict[str, Callable[[str], Tensor]] = {
        "layer_norm float32": lambda d: F.layer_norm(_leaf(d, 4, 64), (64,)),
        "rms_norm float32": lambda d: F.rms_norm(_leaf(d, 4, 64), (64,)),
    }
    if small:
        return found
    return found | {
        "layer_norm bfloat16": lambda d: F.layer_norm(_leaf(d, 4, 64, dtype=half), (64,)),
        "rms_norm bfloat16": lambda d: F.rms_norm(
            _leaf(d, 4, 64, dtype=half), (64,), _leaf(d, 64, dtype=half)
        ),
        "group_norm float32": lambda d: F.group_norm(_leaf(d, 2, 8, 4, 4), 2),
        "batch_norm float32": lambda d: F.batch_norm(_leaf(d, 8, 8, 4, 4), None, None, training=True),
        "dropout float32": lambda d: F.dropout(_leaf(d, 64, 64), 0.1),
        "softmax float16 to float32": lambda d: F.softmax(
            _leaf(d, 4, 64, dtype=torch.float16), -1, dtype=torch.float32
        ),
        "conv2d float32": lambda d: F.conv2d(_leaf(d, 2, 8, 8, 8), _leaf(d, 8, 8, 3, 3)),
        "lstm float32": _lstm,
    }  # fmt: skip


def casts(small: bool) -> dict[str, Callable[[Tensor], Tensor]]:
    """Name -> an op whose dtype autocast determines, of a square float32 matrix."""
    found: dict[str, Callable[[Tensor], Tensor]] = {
        "linear": lambda x: F.linear(x, x),
        "layer_norm of bfloat16": lambda x: F.layer_norm(x.bfloat16(), (x.size(-1),)),
    }
    if small:
        return found
    return found | {
        "softmax of bfloat16": lambda x: x.bfloat16().softmax(-1),
        "sum of bfloat16": lambda x: x.bfloat16().sum(),
        "cat of two dtypes": lambda x: torch.cat([x, x.bfloat16()]),
        "gelu of bfloat16": lambda x: F.gelu(x.bfloat16()),
        "exp of bfloat16": lambda x: x.bfloat16().exp(),
        "rms_norm of bfloat16": lambda x: F.rms_norm(x.bfloat16(), (x.size(-1),)),
        "mse_loss of bfloat16": lambda x: F.mse_loss(x.bfloat16(), x.bfloat16()),
        "cumsum of bfloat16": lambda x: x.bfloat16().cumsum(0),
        "prod of bfloat16": lambda x: x.bfloat16().prod(),
        "baddbmm": lambda x: torch.baddbmm(x[None], x[None], x[None]),
    }


def _cast(call: Callable[[Tensor], Tensor], device: str) -> str:
    with torch.autocast(device, dtype=torch.bfloat16):
        return _short(call(torch.randn(16, 16, device=device)).dtype)


def _default_step(device: str) -> torch.optim.Optimizer:
    """An optimizer without options, and gradients for it."""
    model = nn.Linear(8, 8).to(device)
    for each in model.parameters():
        each.grad = torch.ones_like(each)
    return torch.optim.AdamW(model.parameters())


def _form(names: list[str]) -> str:
    return "foreach" if any(name.startswith("_foreach_") for name in names) else "for loop"


# -- predicted ---------------------------------------------------------------------------------------


class Ops(TorchDispatchMode):
    """The names of all ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func).split(".")[1])
        return func(*args, **(kwargs or {}))


def predict(options: Options) -> dict[str, Prediction]:
    """Every fact of this section, as the target has it."""
    found: dict[str, Prediction] = {}

    def claim(fact: str, call: Callable[[], Any]) -> None:
        try:
            found[fact] = Prediction(call())
        except Exception as error:
            found[fact] = Prediction(None, error=words(error))

    device = options.device
    with fz.world(size=1, target=options.target):
        for case in attentions(options.small):
            claim(case.fact, lambda case=case: _planned_kernel(case, device))
        for name, call in nodes(options.small).items():
            claim(f"node of {name}", lambda call=call: call(device).grad_fn.name())
        for name, cast in casts(options.small).items():
            claim(f"autocast: dtype of {name}", lambda cast=cast: _cast(cast, device))
        claim("AdamW by default", lambda: _planned_form(device))
    return found


def _planned_kernel(case: Attention, device: str) -> str:
    try:
        with Ops() as ops:
            case(device)
    except TargetError:
        return "math"
    return next((FUSED[name] for name in ops.names if name in FUSED), "math")


def _planned_form(device: str) -> str:
    optimizer = _default_step(device)
    with Ops() as ops:
        optimizer.step()
    return _form(ops.names)


# -- measured ----------------------------------------------------------------------------------------


def measure(options: Options, rows: Rows) -> None:
    """Run every call on the device."""
    device = Device(options.device)
    for case in attentions(options.small):
        with rows.guarded(case.fact):
            names, longest = _traced(lambda case=case: case(options.device), device)
            rows.add(case.fact, _kernel(names), note=longest)
    for name, call in nodes(options.small).items():
        with rows.guarded(f"node of {name}"):
            node: Any = call(options.device).grad_fn
            rows.add(f"node of {name}", node.name())
    for name, cast in casts(options.small).items():
        with rows.guarded(f"autocast: dtype of {name}"):
            rows.add(f"autocast: dtype of {name}", _cast(cast, options.device))
    with rows.guarded("AdamW by default"):
        optimizer = _default_step(options.device)
        rows.add("AdamW by default", _form(_traced(optimizer.step, device)[0]))


def _kernel(names: list[str]) -> str:
    found = [FUSED[name] for name in names if name in FUSED]
    return found[0] if found else "math" if f"{_PREFIX}attention_math" in names else "none"


def _traced(call: Callable[[], Any], device: Device) -> tuple[list[str], str]:
    """The names of the ops of a call, and that of its longest kernel on the device."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * device.on_gpu
    with profile(activities=activities, acc_events=True) as profiler:
        call()
        device.synchronize()
    names = [event.name.removeprefix("aten::") for event in profiler.events()]
    kernels = [
        (event.self_device_time_total, event.name)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    return names, max(kernels, default=(0, ""))[1][:60]
