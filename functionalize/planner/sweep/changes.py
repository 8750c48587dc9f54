"""Changes to a model that `build` returned: resharding after forward, activation checkpointing.

    change(built, reshard=False, checkpoint=True)       every wrapped module but the root
    change(built, reshard=8)                            resharded to groups of eight ranks

Refuses (`PlanError`): other values; a result of `build` without a module that `fully_shard` wraps below a root.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from functionalize._compat.fsdp import mesh_after_forward, reshard_group_to
from functionalize._compat.graphs import pytree
from functionalize._compat.modules import checkpoint_module
from functionalize.errors import PlanError
from functionalize.fsdp.objects import fsdp_states, groups_of


def change(built: Any, reshard: Any = None, checkpoint: Any = None) -> None:
    """Set resharding after forward and activation checkpointing in every wrapped module but the root.

    False is accepted for a model without such a module.
    """
    check_changes(reshard, checkpoint)
    wrapped = list(_wrapped(built))
    needed = reshard or checkpoint or (reshard is not None and not modules_of(built))
    if needed and not wrapped:
        raise PlanError(
            "`reshard` and `checkpoint` change the modules that `build` wraps by `fully_shard` below a root, and it "
            "returned none: give `build` a parameter of that name, or return the model"
        )
    if reshard is not None:
        set_reshard(dict.fromkeys(wrapped, reshard))
    if checkpoint:
        for module in wrapped:
            checkpoint_module(module)


def check_changes(reshard: Any = None, checkpoint: Any = None, ranks: int | None = None) -> None:
    """Raises `PlanError` for values that no model in a world of `ranks` (None: not known) can have."""
    if checkpoint not in (None, True, False):
        raise PlanError(
            f"`checkpoint` is True or False, not {checkpoint!r}: for other values give `build` a parameter of that name"
        )
    if reshard is not None and not isinstance(reshard, int):
        raise PlanError(
            f"`reshard` is True, False or a number of ranks, as `reshard_after_forward` of fully_shard, not {reshard!r}"
        )
    if ranks is None or reshard is None or isinstance(reshard, bool):
        return
    if reshard < 1 or ranks % reshard:
        raise PlanError(
            f"`reshard` {reshard}: a number of ranks is a factor of {ranks:,}, the world's"
        )


def set_reshard(values: Mapping[Any, int]) -> None:
    """Set `reshard_after_forward` of modules that `fully_shard` wraps: True, False or a number of ranks."""
    meshes: dict[Any, Any] = {}
    for module, value in values.items():
        if isinstance(value, bool):
            module.set_reshard_after_forward(value, recurse=False)
        else:
            _reshard_to(module, value, meshes)


def _reshard_to(module: Any, ranks: int, meshes: dict[Any, Any]) -> None:
    """Reshard a module to groups of `ranks` after its forward, which torch's setter cannot do.

    meshes: (mesh of parameters, ranks) -> the mesh after the forward, which modules share as after one `fully_shard`.
    """
    state = module._get_fsdp_state()
    state._auto_reshard_after_forward = False
    for group in groups_of(state):
        mesh = group.mesh_info.mesh
        if (mesh, ranks) not in meshes:
            try:
                meshes[mesh, ranks] = mesh_after_forward(ranks, group.mesh_info)
            except ValueError as error:
                raise PlanError(f"`reshard` {ranks}: {error}") from None
        reshard_group_to(group, meshes[mesh, ranks])


def modules_of(built: Any) -> list[nn.Module]:
    """The modules in the result of `build`."""
    return [leaf for leaf in pytree.tree_leaves(built) if isinstance(leaf, nn.Module)]


def _wrapped(built: Any) -> Iterator[Any]:
    for root in modules_of(built):
        for state in fsdp_states(root):
            if root not in state._modules:
                yield from state._modules
