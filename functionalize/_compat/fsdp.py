"""FSDP2's classes, state and ops."""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
import sys
from collections.abc import Mapping
from typing import Any

import torch

# The labels under which FSDP2 runs its parts in the profiler (2.11 to 2.15), and what each part does to its group.
FSDP_LABEL = "FSDP::"
_LABEL = re.compile(rf"{FSDP_LABEL}(\w+)(?: \((.*)\))?")
_ROLES = {
    "pre_forward": "unshard",
    "pre_backward": "unshard",
    "all_gather": "unshard",
    "all_gather_copy_out": "copy-out",
    "post_forward": "reshard",
    "post_backward_reshard": "reshard",
    "post_backward_accumulate": "reduce",
    "post_backward_rs_wait": "wait",
    "post_backward_reduce": "reduce",
}
_PACKS = ("fsdp::all_gather_copy_in", "fsdp::chunk_cat", "aten::_chunk_cat")


def fsdp_role(label: str, recorded: Any, emitted: Any) -> tuple[str, str] | None:
    """(group, role) of an op that FSDP2 ran under a label: role is unshard, copy-out, pack, reduce, wait or reshard.

    group: the name of the module from the root that the user has sharded, "" for the root. recorded: the op. emitted:
    the op of the graph that stands for it.
    """
    match = _LABEL.fullmatch(label)
    if match is None or match[1] not in _ROLES:
        return None
    if "wait_tensor" in str(emitted):
        return match[2] or "", "wait"
    role = "pack" if _name_of(recorded).startswith(_PACKS) else _ROLES[match[1]]
    return match[2] or "", role


def _name_of(op: Any) -> str:
    schema = getattr(op, "_schema", None)
    return schema.name if schema is not None else ""


def load_fsdp_ops() -> None:
    """Register the `fsdp::*` and `c10d::*` ops; does nothing in a build without distributed."""
    with contextlib.suppress(ImportError):
        importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_collectives")


def fsdp_state_of(module: object) -> Any:
    """The FSDP2 state of a module that `fully_shard` was applied to, else None."""
    find = _fsdp_state_finder()
    return None if find is None else find(module)


def fsdp_modules() -> list[torch.nn.Module]:
    """Every module of the process that `fully_shard` was applied to (2.11 to 2.15)."""
    if _fsdp_state_finder() is None:
        return []
    from torch.distributed._composable_state import _module_state_mapping

    return [module for module in list(_module_state_mapping) if fsdp_state_of(module) is not None]


@functools.cache
def _fsdp_state_finder() -> Any:
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_state import _get_module_fsdp_state
    except ImportError:
        return None
    return _get_module_fsdp_state


def fsdp_classes() -> list[type]:
    """The classes in which FSDP2 keeps state, and `FSDPModule`, whose methods users call (2.11 to 2.15)."""
    try:
        from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group, _fsdp_state
    except ImportError:
        return []
    from torch.distributed.fsdp import FSDPModule

    state, group = _fsdp_state, _fsdp_param_group
    kinds = (state.FSDPStateContext, state.FSDPState, group.FSDPCommContext, group.FSDPParamGroup)
    return [*kinds, _fsdp_param.FSDPParam, FSDPModule]


def class_before_fsdp(kind: type) -> type:
    """The class that a module had before `fully_shard` gave it one that inherits from it (2.11 to 2.15)."""
    first, *others = kind.__bases__
    return others[0] if len(others) == 1 and first in fsdp_classes()[-1:] else kind


def is_fsdp_hook(hook: Any) -> bool:
    """Whether FSDP2 has registered a hook of a module (2.11 to 2.15)."""
    return (getattr(hook, "__module__", None) or "").startswith("torch.distributed.fsdp.")


def without_fsdp_state(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of a module without what `fully_shard` has noted among them (2.11 to 2.15)."""
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY

    def is_of_others(key: Any) -> bool:  # a function, or its name
        return getattr(key, "__name__", key) != "fully_shard"

    found = dict(attributes)
    for name in (STATE_KEY, REGISTRY_KEY):
        if name in found:
            found[name] = {key: item for key, item in found[name].items() if is_of_others(key)}
    return found


def fsdp_lazy_init(state: Any) -> None:
    """Run the lazy initialisation, which otherwise the first forward of a root module runs; it has no public name."""
    state._lazy_init()


def fully_sharded_chunks() -> list[tuple[Any, str]]:
    """(module, name) of the function by which FSDP2 splits a parameter into a chunk per rank (2.11 to 2.13)."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    return [(_fsdp_param, "_chunk_with_empty")]


def offload_check() -> tuple[Any, str]:
    """(class, name) of the method by which FSDP2 checks where offloaded parameters are (torch 2.11 to 2.13)."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    return _fsdp_param_group.FSDPParamGroup, "_validate_cpu_offload_params"


def mesh_after_forward(ranks: int, mesh_info: Any) -> Any:
    """The mesh of groups of `ranks` to which FSDP2 reshards a parameter of `mesh_info` after its forward.

    Raises `ValueError` for a number that does not divide the ranks of the mesh.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_init

    return _fsdp_init._get_post_forward_mesh_info(ranks, mesh_info)


def reshard_group_to(group: Any, mesh_info: Any) -> None:
    """Reshard an FSDP parameter group to another mesh after its forward; torch's setter takes True and False only."""
    group.post_forward_mesh_info = mesh_info
    for param in group.fsdp_params:
        param.post_forward_mesh_info = mesh_info
        param._init_sharded_post_forward_param_metadata(torch.empty(param._orig_size))


def backward_query() -> tuple[Any, str] | None:
    """The module and the name of the function by which FSDP2 asks whether a backward runs (2.13, 2.15).

    None: FSDP2 is not imported, or this release does not ask.
    """
    owner = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_param_group")
    return (owner, "is_bw") if hasattr(owner, "is_bw") else None
