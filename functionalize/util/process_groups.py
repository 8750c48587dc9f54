"""Process groups as the dispatcher gets them: boxed in a script object."""

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
    """The name by which functional collectives know a process group."""
    group = value if isinstance(value, dist.ProcessGroup) else dist.ProcessGroup.unbox(value)
    return str(group.group_name)
