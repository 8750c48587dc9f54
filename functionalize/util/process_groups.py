"""Process groups and reduce ops as the dispatcher passes them, boxed in a script object; the ops for PREMUL_SUM.

Note [PREMUL_SUM]
It multiplies the tensor of each rank by a factor, and sums. FSDP2 reduces so on NCCL after
`set_gradient_divide_factor`.

    c10d._reduce_scatter_base_(out, x, pg, PREMUL_SUM(0.5))   ->  reduce_scatter_tensor_premul_sum(x, 0.5, ranks, "pg")
    c10d.allreduce_([t], pg, PREMUL_SUM(0.5))                 ->  all_reduce_premul_sum(t, 0.5, "pg")

torch's functional collectives name a reduction by a string, which has no factor, so these ops are added to their
namespace: what holds for every collective holds for them. The reduction is kept as it is, with a factor of 1.0, too.
NCCL's kernel may round a product and a sum once, which two ops would not; and NCCL chooses its algorithm by the
reduction, which must be the same on ranks that replay and on ranks that record. The dispatcher does not pass the
factor: see `recorder/patches.py`. Refused are a factor that is a tensor, and several tensors at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from functionalize._compat.distributed import process_groups, start_premul_sum
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


def has_ranks() -> bool:
    """Whether this process is one of several ranks."""
    return any(group.size() > 1 for group in process_groups())


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


@dataclass(frozen=True)
class PremulSum:
    """A reduce op in a record: Note [PREMUL_SUM]."""

    factor: float


def reduction(boxed: Any) -> str:
    """The name of a reduce op in functional collectives."""
    op = boxed.op() if hasattr(boxed, "op") else boxed
    for known, name in _REDUCTIONS.items():
        if op == known:
            return name
    raise UnsupportedOpError(
        "multiplies and sums in one collective (PREMUL_SUM), which functional collectives have for one tensor and a "
        "factor that is a number: set_force_sum_reduction_for_comms(True) makes FSDP2 multiply before and after"
        if isinstance(op, PremulSum) or op == dist.ReduceOp.PREMUL_SUM
        else f"reduces with {op}, which functional collectives do not have"
    )


def is_reduction(value: Any) -> bool:
    """Whether an op's argument in a recording is a reduce op."""
    if isinstance(value, torch.ScriptObject):
        return hasattr(value, "op")
    return isinstance(value, PremulSum)


def reduction_text(boxed: Any) -> str:
    """A reduce op as a text that is equal on all ranks."""
    if isinstance(boxed, PremulSum):
        return f"premul_sum({boxed.factor!r})"
    try:
        return reduction(boxed)
    except UnsupportedOpError:  # discharge refuses it and names it
        return str(boxed.op())


# The ops exist as long as this object.
_LIBRARY = torch.library.Library("_c10d_functional", "FRAGMENT")
_LIBRARY.define(
    "reduce_scatter_tensor_premul_sum(Tensor input, float factor, int group_size, str group_name) -> Tensor"
)
_LIBRARY.define("all_reduce_premul_sum(Tensor input, float factor, str group_name) -> Tensor")
PREMUL_REDUCE_SCATTER = torch.ops._c10d_functional.reduce_scatter_tensor_premul_sum.default
PREMUL_ALL_REDUCE = torch.ops._c10d_functional.all_reduce_premul_sum.default


@torch.library.impl(_LIBRARY, "reduce_scatter_tensor_premul_sum", "CompositeExplicitAutograd")
def _reduce_scatter(input: Tensor, factor: float, group_size: int, group_name: str) -> Tensor:
    out = _scattered(input, factor, group_size, group_name)
    start_premul_sum(out, input.contiguous(), factor, group_name)
    return out


@torch.library.impl(_LIBRARY, "all_reduce_premul_sum", "CompositeExplicitAutograd")
def _all_reduce(input: Tensor, factor: float, group_name: str) -> Tensor:
    out = input.clone(memory_format=torch.contiguous_format)
    start_premul_sum(out, None, factor, group_name)
    return out


@torch.library.register_fake("_c10d_functional::reduce_scatter_tensor_premul_sum", lib=_LIBRARY)
def _scattered(input: Tensor, factor: float, group_size: int, group_name: str) -> Tensor:
    return input.new_empty([input.shape[0] // group_size, *input.shape[1:]])


@torch.library.register_fake("_c10d_functional::all_reduce_premul_sum", lib=_LIBRARY)
def _reduced(input: Tensor, factor: float, group_name: str) -> Tensor:
    return torch.empty_like(input, memory_format=torch.contiguous_format)
