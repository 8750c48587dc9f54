"""A barrier as a node: `functionalize.barrier("0", [])`, an op with no value that stays where it is.

`c10d.barrier` is given a process group, which a graph cannot hold, and `_c10d_functional` has no barrier. It
cannot be left out either: backends number their messages, so a rank that replays must issue it as one that
records does.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.fx.node import has_side_effect

from functionalize._compat.distributed import group_of_name

_LIBRARY = torch.library.Library("functionalize", "FRAGMENT")  # while it lives, so does the op
_LIBRARY.define("barrier(str group_name, int[] device_ids) -> ()")
BARRIER = has_side_effect(torch.ops.functionalize.barrier.default)


@torch.library.impl(_LIBRARY, "barrier", "CompositeExplicitAutograd")
def _barrier(group_name: str, device_ids: list[int]) -> None:
    dist.barrier(group_of_name(group_name), device_ids=list(device_ids) or None)


@torch.library.register_fake("functionalize::barrier", lib=_LIBRARY)
def _barrier_of_fakes(group_name: str, device_ids: list[int]) -> None:
    """Nobody to wait for."""
