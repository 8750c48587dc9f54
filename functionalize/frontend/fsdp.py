"""The only module that knows FSDP2's internals: where it keeps tensors, and what state it enters a step in.

    fsdp_params(module)     every FSDPParam under a module, with its fully qualified name
    fsdp_tensors(module)    the tensors FSDP2 keeps beside the parameters, with names
    FSDPStateGuard          groups idle, parameters sharded or not, synchronisation flags as at capture

Seen in torch 2.11 (one parameter group per module) and 2.13 (several).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from functionalize._compat import fsdp_state_of
from functionalize.core.inputs import Call

_GROUP_FLAGS = (
    "_training_state",
    "_sharded_state",
    "reduce_grads",
    "all_reduce_grads",
    "reshard_after_backward",
    "gradient_divide_factor",
    "force_sum_reduction_for_comms",
    "unshard_in_backward",
)


def fsdp_groups(module: nn.Module) -> Iterator[Any]:
    """Every FSDP parameter group under `module`, each once."""
    for child in module.modules():
        state = fsdp_state_of(child)
        if state is None:
            continue
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:
            groups = [state._fsdp_param_group]
        for group in groups:
            if group is not None and child is group.modules[0]:
                yield group


def fsdp_params(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Every FSDPParam under `module` with its fully qualified name."""
    for group in fsdp_groups(module):
        for param in group.fsdp_params:
            info = param._module_info
            yield param._param_fqn or info.param_name, param


@dataclass(frozen=True, slots=True, eq=False)
class FSDPTensor:
    """A tensor FSDP2 keeps for one parameter: `attribute` of its FSDPParam, `index` if that is a list."""

    param: Any
    attribute: str
    index: int | None

    def resolve(self, call: Call) -> Tensor:
        value = getattr(self.param, self.attribute)
        return value if self.index is None else value[self.index]


def fsdp_tensors(module: nn.Module) -> Iterator[tuple[str, FSDPTensor]]:
    """Tensors FSDP2 keeps beside `parameters()`: padded shards, unsharded storages, accumulated grads."""
    for fqn, param in fsdp_params(module):
        for attribute in ("_sharded_param_data", "unsharded_accumulated_grad"):
            if isinstance(getattr(param, attribute, None), Tensor):
                yield f"{fqn}.{attribute.lstrip('_')}", FSDPTensor(param, attribute, None)
        for i in range(len(param.all_gather_outputs)):
            yield f"{fqn}.unsharded_{i}", FSDPTensor(param, "all_gather_outputs", i)


@dataclass(frozen=True, slots=True, eq=False)
class FSDPStateGuard:
    """FSDP2 enters the step in the state it was captured in."""

    groups: tuple[Any, ...]
    flags: tuple[tuple[Any, ...], ...]

    @staticmethod
    def of(modules: list[nn.Module]) -> FSDPStateGuard:
        """The guard for the state now."""
        groups = tuple(g for m in modules for g in fsdp_groups(m))
        return FSDPStateGuard(groups, tuple(_flags(g) for g in groups))

    def failure(self, call: Call) -> str | None:
        for group, flags in zip(self.groups, self.flags, strict=True):
            now = _flags(group)
            if now != flags:
                changed = [
                    f"{name} is {new}, was {old}"
                    for name, new, old in zip(_GROUP_FLAGS, now, flags, strict=True)
                    if new != old
                ]
                return f"FSDP group `{group._module_fqn or 'root'}`: {'; '.join(changed)}"
        return None


def _flags(group: Any) -> tuple[Any, ...]:
    return tuple([getattr(group, name, None) for name in _GROUP_FLAGS])
