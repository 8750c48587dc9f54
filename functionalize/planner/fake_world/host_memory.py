"""Host memory beside a planned accelerator: what FSDP2's `CPUOffloadPolicy` keeps there.

    fully_shard(module, offload_policy=CPUOffloadPolicy())

    sharded parameters, their gradients, optimizer state     fakes on `HOST`, another type of device than the world's
    before an all-gather, after a reduction                  `aten._to_copy` between the two, as on a GPU
    the optimizer                                            ops on `HOST`, with the defaults that torch has for the CPU

Only FSDP2's own `.cpu()` and `.to("cpu")` go to the host: those of a program return the tensor itself, as all tensors
that it makes are on the device (`cuda_api.py`). With the target "cpu" the policy copies nothing, as on real CPU ranks.
Refuses (`TargetError`): offloaded parameters that are not on the host when the first forward begins.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from functionalize._compat.fakes import HOST
from functionalize._compat.fsdp import offload_check
from functionalize.errors import TargetError
from functionalize.util.patching import Patch

_CPU = torch.device("cpu")
_FSDP2 = "torch.distributed.fsdp._fully_shard."
_PARAMETERS, _COLLECTIVES = f"{_FSDP2}_fsdp_param", f"{_FSDP2}_fsdp_collectives"


def patches(planning: Callable[[], Any]) -> Iterator[Patch]:
    """(owner, name, replacement) per attribute of torch. planning: the target of the calling thread, or None."""
    yield torch.Tensor, "cpu", _cpu(planning, torch.Tensor.cpu)
    yield torch.Tensor, "is_pinned", _is_pinned(planning, torch.Tensor.is_pinned)
    owner, name = offload_check()
    yield owner, name, _checked(planning, getattr(owner, name))


def host_for(device: Any, frame: Any) -> Any:
    """The device of a `Tensor.to` that `frame` calls: `HOST` where FSDP2 offloads a gradient."""
    if device == _CPU and frame.f_globals.get("__name__") == _COLLECTIVES:
        return HOST
    return device


def _cpu(planning: Callable[[], Any], original: Any) -> Any:
    def cpu(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if planning() is not None and sys._getframe(1).f_globals.get("__name__") == _PARAMETERS:
            return self.to(HOST)
        return original(self, *args, **kwargs)

    cpu.__doc__ = original.__doc__
    return cpu


def _is_pinned(planning: Callable[[], Any], original: Any) -> Any:
    def is_pinned(self: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
        if planning() is not None and self.device.type == HOST.type:
            return True  # `pin_memory` returns the tensor itself; only a time would differ
        return bool(original(self, *args, **kwargs))

    is_pinned.__doc__ = original.__doc__
    return is_pinned


def _checked(planning: Callable[[], Any], original: Any) -> Any:
    def check(group: Any) -> None:
        if planning() is None:
            original(group)
            return
        for param in group.fsdp_params:
            if param.offload_to_cpu and param.sharded_param.device.type != HOST.type:
                raise TargetError(
                    f"CPUOffloadPolicy: the parameter `{param._param_fqn}` was replaced after `fully_shard` by a "
                    "tensor that a plan takes for one of the device: make it on a device before `fully_shard`, not on "
                    "`meta`, as fakes take no memory"
                )

    return check
