"""Fake tensors."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._subclasses.fake_tensor import (  # fakes for `trace`; has no public home
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
]  # names of torch that are used elsewhere

# The device of fakes in host memory beside a planned accelerator, whose own fakes are on the CPU. The one type beside
# "cpu" and "meta" for which torch's autograd has a stream without a driver; others abort the process (2.11 to 2.13).
HOST = torch.device("lazy", 0)


def has_symbolic_sizes(tensor: torch.Tensor) -> bool:
    """Whether a size, a stride or the offset of a tensor is a `SymInt`; `type(n)` of each takes ten times as long."""
    return bool(tensor._has_symbolic_sizes_strides)


def accelerators(kinds: Iterable[str]) -> list[str]:
    """The types of accelerators among types of devices, sorted; host memory of a fake world is none."""
    return sorted({*kinds} - {"cpu", "meta", HOST.type})


class FakeMaker:
    """Makes fakes of one mode, gradients off, as the constructor does; three times as fast.

    What the constructor sets is the same for all fakes of a device: it is copied from one. If a fake that is made so
    differs from one of the constructor in its attributes or its dispatch keys, the constructor is used.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._states: dict[torch.device, dict[str, Any] | None] = {}
        allowed = (
            mode._allow_unsafe_data_ptr_access
        )  # whether a read of the address warns or raises
        name = (
            "_set_warn_deprecated_on_mutable_data_ptr"
            if allowed
            else "_set_throw_on_mutable_data_ptr"
        )
        self._on_address: Any = getattr(torch._C, name)

    def make(self, meta: torch.Tensor, device: torch.device) -> Any:
        """`FakeTensor(mode, meta, device)`. meta: a meta tensor that needs no gradient."""
        state = self._states.get(device)
        if state is None:
            if device not in self._states:
                self._states[device] = self._learned(meta, device)
            return FakeTensor(self._mode, meta, device)
        return self._copied(meta, device, state)

    def _copied(self, meta: torch.Tensor, device: torch.device, state: dict[str, Any]) -> Any:
        made = torch.Tensor._make_subclass(
            FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device
        )
        self._on_address(made)
        made.__dict__ = state.copy()
        return made

    def _learned(self, meta: torch.Tensor, device: torch.device) -> dict[str, Any] | None:
        made = FakeTensor(self._mode, meta, device)
        # A dict that shares its keys with those of other instances, as its copies do: a third of the bytes.
        state = made.__dict__.copy()
        copied = self._copied(meta, device, state)
        keys = torch._C._dispatch_keys
        return state if keys(copied) == keys(made) and copied.__dict__ == state else None


def fakes_module() -> Any:
    """The module from which libraries import `FakeTensor` to test whether they are traced (torch 2.11 to 2.13)."""
    return importlib.import_module("torch._subclasses")


def is_fake(value: Any) -> bool:
    """Whether a tensor is fake, or wraps one."""
    from torch._subclasses.fake_tensor import is_fake

    return bool(is_fake(value))


def flex_devices() -> tuple[Any, str]:
    """(module, name) of the function by which flex attention refuses devices (torch 2.11 to 2.13)."""
    return importlib.import_module("torch.nn.attention.flex_attention"), "_validate_device"


def swap_fakes(a: torch.Tensor, b: torch.Tensor) -> None:
    """`torch.utils.swap_tensors` for fakes, without its checks for other references to the tensors."""
    a.__dict__, b.__dict__ = b.__dict__, a.__dict__
    torch._C._swap_tensor_impl(a, b)


def values_unread(mode: FakeTensorMode) -> AbstractContextManager[Any]:
    """A context: a mode without a ShapeEnv makes fakes that do not remember the number in a 0-dimensional tensor.

    Torch 2.14 and 2.15 read the number, unless a compiler is tracing; 2.11 to 2.13 do not.
    """
    context: AbstractContextManager[Any] = torch._guards.tracing(torch._guards.TracingContext(mode))
    return context
