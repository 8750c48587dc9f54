"""Fake tensors."""

from __future__ import annotations

import importlib
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
