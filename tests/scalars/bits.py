"""Results compared down to the bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def bits(value: Any) -> Any:
    """What two equal results have in common, down to the bit and the type."""
    if isinstance(value, Tensor):
        return (
            value.dtype,
            value.shape,
            bytes(value.detach().reshape(-1).view(torch.uint8).tolist()),
        )
    if isinstance(value, (list, tuple)):
        return [bits(v) for v in value]
    return type(value), repr(value)
