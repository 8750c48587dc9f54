"""A barrier as a node: `functionalize.barrier("0", [])`, an op without a value that no pass moves or removes.

The argument of `c10d.barrier` is a process group object, which a graph cannot hold, and `_c10d_functional` has no
barrier. It cannot be left out either: backends number their messages, so a rank that replays must issue the same
barriers as a rank that records.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.fx.node import has_side_effect

from functionalize._compat.distributed import group_of_name

_LIBRARY = torch.library.Library(
    "functionalize", "FRAGMENT"
)  # the op exists as long as this object
_LIBRARY.define("barrier(str group_name, int[] device_ids) -> ()")
BARRIER = has_side_effect(torch.ops.functionalize.barrier.default)


@torch.library.impl(_LIBRARY, "barrier", "CompositeExplicitAutograd")
def _barrier(group_name: str, device_ids: list[int]) -> None:
    dist.barrier(group_of_name(group_name), device_ids=list(device_ids) or None)


@torch.library.register_fake("functionalize::barrier", lib=_LIBRARY)
def _barrier_of_fakes(group_name: str, device_ids: list[int]) -> None:
    """Fake tensors are not communicated: nothing to wait for."""
