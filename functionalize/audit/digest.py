"""A number for the contents of a tensor: two tensors with equal digests hold the same bytes.

    digest(torch.tensor([1.0]))        (torch.Size([1]), torch.float32, 5693...)

The bytes are read as 64-bit lanes; each is multiplied by an odd number of its own, and the products are added modulo
2**64. So one changed lane always changes the sum, and other changes do except with a probability of about 2**-64.
Invariant: it runs on the tensor's device, in blocks. `digest_here` is the same where no mode is active and no gradients
are: most of a small tensor's time would be the switches.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from functionalize._compat.dispatch import disable_current_modes

Digest = tuple[torch.Size, torch.dtype, int]

_BLOCK = 2**16  # lanes
_MIX = 0x9E3779B97F4A7C15  # odd, with its bits well mixed (2**64 divided by the golden ratio)
_MASK = 2**64 - 1


def digest(tensor: Tensor) -> Digest:
    """The digest of a plain tensor: its size, its dtype, and a number of 64 bits for its elements in order."""
    with torch.no_grad(), disable_current_modes():
        return digest_here(tensor)


def digest_here(tensor: Tensor) -> Digest:
    """`digest` inside `no_grad` and `disable_current_modes`."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    octets, total = flat.view(torch.uint8), 0
    count = octets.numel() // 8
    if rest := octets.numel() % 8:
        total = int.from_bytes(bytes(octets[-rest:].tolist()), "little")
        octets = octets[:-rest]
    lanes = (octets.clone() if flat.data_ptr() % 8 else octets).view(torch.int64)
    weights = _weights(tensor.device)
    for start in range(0, count, _BLOCK):
        block = lanes[start : start + _BLOCK] if count > _BLOCK else lanes
        total = (total * _MIX + int((block * weights[: block.numel()]).sum())) & _MASK
    return tensor.shape, tensor.dtype, total


@cache
def _weights(device: torch.device) -> Any:
    """An odd number for each lane of a block, as signed 64-bit integers."""
    mix = _MIX - 2**64
    return (torch.arange(_BLOCK, device=device) * mix) | 1
