"""Memory that a library keeps once it is used: the constants of `planner/machines/constants.py`, in a fresh process.

    CUDA context and libraries                      at most 524,288,000 bytes
    cuBLAS workspace, first product                 33,554,432 bytes
    cuBLAS workspace, first product in backward     0 bytes: one for each stream is claimed

Kept bytes: what torch's allocator has more after a call than before, without the call's result. The bytes of the
context and of NCCL are those that the driver counts, less what torch's allocator has reserved; they include those of
any other process on the device.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.device import Device
from benchmarks.gpu.options import Options
from benchmarks.gpu.rows import Prediction, Rows
from functionalize.planner.machines.constants import declared

CONTEXT, NCCL = "CUDA context and libraries", "NCCL communicator of one rank"
FIRST, SECOND = (
    "cuBLAS workspace, first product",
    "cuBLAS workspace, first product on a second stream",
)
BACKWARD = "cuBLAS workspace, first product in backward"
BIASED, AGAIN = "kept by a linear layer with bias", "kept by a second product"
CONVOLUTION = "kept by a convolution, forward and backward"  # fmt: skip


def predict(options: Options) -> dict[str, Prediction]:
    """The declared constants; whatever is not declared is claimed to be 0."""
    context, communicator, workspace = (each.nbytes for each in declared(options.machine))
    return {
        CONTEXT: Prediction(context, "bytes", "at most"),
        FIRST: Prediction(workspace, "bytes"),
        AGAIN: Prediction(0, "bytes"),
        BACKWARD: Prediction(0, "bytes"),
        SECOND: Prediction(workspace, "bytes"),
        BIASED: Prediction(0, "bytes"),
        CONVOLUTION: Prediction(0, "bytes"),
        NCCL: Prediction(communicator, "bytes", "at most"),
    }


def measure(options: Options, rows: Rows) -> None:
    """Each library's first use, in this order."""
    device = Device(options.device)
    with rows.guarded(CONTEXT):
        torch.zeros(1, device=options.device)
        rows.add(CONTEXT, _outside())
    x = torch.randn(256, 256, device=options.device, requires_grad=True)

    def kept(fact: str, call: Callable[[], Any]) -> None:
        with rows.guarded(fact):
            before = device.live().requested
            result = call()
            del result
            rows.add(fact, device.live().requested - before)

    kept(FIRST, lambda: x.detach() @ x.detach())
    kept(AGAIN, lambda: x.detach() @ x.detach())
    kept(BACKWARD, lambda: torch.autograd.grad((x @ x).sum(), x))
    kept(SECOND, lambda: _on_a_stream(x.detach()))
    kept(BIASED, lambda: F.linear(x.detach(), x.detach(), x.detach()[0]))
    image, weight = (
        torch.randn(*shape, device=options.device, requires_grad=True)
        for shape in ((4, 16, 32, 32), (16, 16, 3, 3))
    )
    kept(
        CONVOLUTION, lambda: torch.autograd.grad(F.conv2d(image, weight).sum(), (image, weight))
    )  # fmt: skip
    with rows.guarded(NCCL), tempfile.TemporaryDirectory() as folder:
        before = _outside()
        dist.init_process_group("nccl", f"file://{folder}/rendezvous", rank=0, world_size=1)
        dist.all_reduce(torch.ones(1, device=options.device))
        rows.add(NCCL, _outside() - before)
        dist.destroy_process_group()


def _outside() -> int:
    """Bytes of the device in use outside of torch's allocator."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def _on_a_stream(x: Tensor) -> None:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        _ = x @ x
    stream.synchronize()
