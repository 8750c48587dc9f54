"""Process groups and reduce ops as the dispatcher passes them: boxed in a script object."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from functionalize.errors import UnsupportedOpError


def is_group(value: Any) -> bool:
    """Whether an op's argument is a process group."""
    if isinstance(value, torch.ScriptObject):
        return str(value._type().qualified_name()).endswith(".ProcessGroup")
    return dist.is_available() and isinstance(value, dist.ProcessGroup)


def group_name(value: Any) -> str:
    """The name of a process group, which functional collectives take in its place."""
    return str(unboxed(value).group_name)


def ranks_of(group: Any) -> int:
    """How many ranks a process group has."""
    return int(unboxed(group).size())


def unboxed(group: Any) -> Any:
    """The process group in an op's argument."""
    return group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)


_REDUCTIONS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "avg",
    dist.ReduceOp.PRODUCT: "product",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.BAND: "band",
    dist.ReduceOp.BOR: "bor",
    dist.ReduceOp.BXOR: "bxor",
}


def reduction(boxed: Any) -> str:
    """The name of a reduce op in functional collectives."""
    op = boxed.op() if hasattr(boxed, "op") else boxed
    for known, name in _REDUCTIONS.items():
        if op == known:
            return name
    raise UnsupportedOpError(
        "multiplies and sums in one collective (PREMUL_SUM), which functional collectives do not have: "
        "set_force_sum_reduction_for_comms(True) makes FSDP2 multiply before and after"
        if op == dist.ReduceOp.PREMUL_SUM
        else f"reduces with {op}, which functional collectives do not have"
    )
