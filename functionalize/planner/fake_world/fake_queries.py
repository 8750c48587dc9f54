"""Reads of a fake tensor that bypass the dispatcher, in a fake world: answered where possible, else refused.

    f"{loss:.3f}"                              formats the assumed number, the same as `loss.item()`
    tensor.numpy(), numpy.asarray(tensor)      WorldError: there is no data
    DistributedDataParallel(model)             WorldError: its C++ reads data; names the alternative
    FullyShardedDataParallel(model)            the same, for FSDP1
    SyncBatchNorm, flex_attention              WorldError for a CUDA target: the CPU lacks their kernels

torch's own errors here mention tensor subclasses, or a CPU that does not occur in the user's code.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from functionalize._compat.fakes import flex_devices, is_fake
from functionalize._compat.stacks import stack_here
from functionalize.errors import WorldError
from functionalize.util.patching import Patch
from functionalize.util.user_stack import line_of

_REFUSED = (
    (
        "torch.nn.parallel.DistributedDataParallel reads data in C++, and tensors of a fake world hold none",
        "Plan it by fully_shard(model, mesh=...) on a mesh of (ranks, 1), which replicates as it does",
    ),
    (
        "FullyShardedDataParallel (FSDP1) keeps its parameters in flat tensors of a device that a fake world has not",
        "Wrap the model by torch.distributed.fsdp.fully_shard (FSDP2)",
    ),
)
_SYNC = (
    "torch.nn.SyncBatchNorm has kernels for CUDA tensors alone, and those of a fake world are on the CPU",
    "Plan the model with BatchNorm: it keeps the same for backward, and only two small all-gathers are missing",
)
_FLEX = (
    "flex_attention has no kernel whose memory could be planned for CUDA, as the CPU has none for its backward",
    "Plan the model with scaled_dot_product_attention, by is_causal or with a mask",
)


def patches(target: str, in_world: Callable[[], bool]) -> Iterator[Patch]:
    """(owner, name, replacement) per attribute of torch. in_world: whether the calling thread is in a fake world."""
    yield Tensor, "__format__", _formatted(Tensor.__format__, in_world)
    yield Tensor, "numpy", _without_data(Tensor.numpy, in_world)
    kinds: tuple[Any, ...] = (
        torch.nn.parallel.DistributedDataParallel,
        torch.distributed.fsdp.FullyShardedDataParallel,
    )
    for kind, words in zip(kinds, _REFUSED, strict=True):
        yield kind, "__init__", _refusing(kind.__init__, words, in_world)
    if target != "cpu":
        norm = torch.nn.SyncBatchNorm
        yield norm, "forward", _refusing(norm.forward, _SYNC, in_world)
        owner, name = flex_devices()
        yield owner, name, _refusing(getattr(owner, name), _FLEX, in_world)


def _formatted(original: Any, in_world: Callable[[], bool]) -> Any:
    def __format__(self: Tensor, spec: str) -> str:
        if in_world() and is_fake(self) and self.dim() == 0:
            return format(self.detach().item(), spec)
        return str(original(self, spec))

    return __format__


def _without_data(original: Any, in_world: Callable[[], bool]) -> Any:
    @functools.wraps(original)
    def numpy(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if in_world() and is_fake(self):
            raise _error(
                "Tensor.numpy() reads data, and tensors of a fake world hold none",
                "Leave it out of what is planned, or read one number by .item(), which is assumed",
            )
        return original(self, *args, **kwargs)

    return numpy


def _refusing(original: Any, words: tuple[str, str], in_world: Callable[[], bool]) -> Any:
    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        if in_world():
            raise _error(*words)
        return original(*args, **kwargs)

    return function


def _error(what: str, instead: str) -> WorldError:
    return WorldError(f"{what}\n  {line_of(stack_here())}\n  {instead}")
