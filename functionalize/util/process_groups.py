"""Process groups as arguments of dispatched ops: boxed in a `torch.ScriptObject`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def is_group(value: Any) -> bool:
    """Whether an op's argument is a process group."""
    if isinstance(value, torch.ScriptObject):
        return str(value._type().qualified_name()).endswith(".ProcessGroup")
    return dist.is_available() and isinstance(value, dist.ProcessGroup)


def group_name(value: Any) -> str:
    """The name of a process group, which functional collectives take in its place."""
    group = value if isinstance(value, dist.ProcessGroup) else dist.ProcessGroup.unbox(value)
    return str(group.group_name)
