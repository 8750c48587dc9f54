"""How `fully_shard` has sharded a live model, read from FSDP2's objects, and done again to a copy of it.

    shards = LiveShards.of(model)            None: the model is not sharded
    shards.ranks                             of its mesh
    shards.begin(optimizer, memo)            before `copy.deepcopy`: copies are as before `fully_shard`
    shards.again(memo)                       in a fake world, after it: `fully_shard` of the copies

        parameter in shards ──memo──▶ fake parameter of its full size ──fully_shard──▶ its shard in a fake world

What `fully_shard` was given is read back: modules of a group, resharding, policies, placements, parameters that it
ignores; then the settings that `FSDPModule` has methods for. A mesh of one dimension is that of all ranks; one with
replicas keeps the number of ranks over which it shards, so that a larger world has more replicas.
Refuses (`PlanError`): a mesh of a part of the ranks, several meshes, tensor parallelism and other parameters that were
DTensors before, extensions of the all-gather, collectives and hooks of the user's.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import OffloadPolicy, fully_shard

from functionalize._compat.fsdp import class_before_fsdp, is_fsdp_hook, without_fsdp_state
from functionalize._compat.graphs import pytree
from functionalize.errors import PlanError
from functionalize.fsdp.contract import ATTRIBUTES
from functionalize.fsdp.objects import PLAIN, fsdp_params, fsdp_states, groups_of

Memo = dict[int, Any]  # of `copy.deepcopy`: id of an object -> its copy
_MESHES = ("mesh_info", "post_forward_mesh_info")  # what `fully_shard` makes of its arguments


@dataclass(frozen=True, eq=False)
class LiveShards:
    """The sharding of a model. states: of its FSDP modules, parents first. sizes, names: of its mesh's dimensions."""

    model: nn.Module
    states: list[Any]
    sizes: tuple[int, ...]
    names: tuple[str, ...] | None

    @staticmethod
    def of(model: nn.Module) -> LiveShards | None:
        """Raises `PlanError` for a sharding that cannot be done again."""
        states = list(fsdp_states(model))
        if not states:
            return None
        meshes = [group.mesh_info.mesh for state in states for group in groups_of(state)]
        for reason in _reasons(model, states, meshes):
            raise PlanError(
                f"{type(model).__name__} is sharded already, {reason}: give the model as it was before, and `shard=`, "
                "a function that shards its copy"
            )
        return LiveShards(model, states, tuple(meshes[0].shape), meshes[0].mesh_dim_names)

    @property
    def ranks(self) -> int:
        """The ranks of the mesh."""
        return self.sizes[0] * self.sizes[-1] if len(self.sizes) > 1 else self.sizes[0]

    def begin(self, optimizer: torch.optim.Optimizer, memo: Memo) -> None:
        """Fill the memo with what is copied otherwise: parameters, their states, modules. In a fake world."""
        for _, param in fsdp_params(self.states):
            live = param.sharded_param
            full = torch.empty(param._orig_size, dtype=live.dtype)
            made = nn.Parameter(full, requires_grad=live.requires_grad)
            for each in _registered(param):
                memo[id(each)] = made
            for each in pytree.tree_leaves(optimizer.state.get(live)):
                if type(each) is type(live.data) and each.shape == live.shape:
                    memo[id(each)] = torch.empty(each.shape, dtype=each.dtype)
        modules = [each for state in self.states for each in state._modules]
        for module in modules:
            memo[id(module)] = object.__new__(class_before_fsdp(type(module)))
        for module in self.model.modules():
            for name, hooks in vars(module).items():
                if name.endswith("_hooks") and isinstance(hooks, dict):
                    own = {key: hook for key, hook in hooks.items() if not is_fsdp_hook(hook)}
                    memo[id(hooks)] = type(hooks)(copy.deepcopy(own, memo))
        for module in modules:
            memo[id(module)].__dict__ |= copy.deepcopy(without_fsdp_state(vars(module)), memo)

    def again(self, memo: Memo) -> None:
        """Shard the copies as their originals are, over the ranks of the fake world."""
        managed = {id(param.sharded_param): param for _, param in fsdp_params(self.states)}
        placements = {memo[key]: param.fsdp_placement for key, param in managed.items()}
        registered = {memo[id(each)] for each in self.model.parameters()}
        mesh = self._mesh()
        for state in reversed(self.states):
            modules = [memo[id(each)] for each in state._modules]
            fully_shard(
                modules if len(modules) > 1 else modules[0],
                mesh=mesh,
                reshard_after_forward=_reshard(state),
                shard_placement_fn=placements.__getitem__,
                mp_policy=state._mp_policy,
                offload_policy=next(
                    (group.offload_policy for group in groups_of(state)), OffloadPolicy()
                ),
                ignored_params=registered - set(placements),
            )
        for state in self.states:
            self._set(state, memo)

    def _mesh(self) -> Any:
        ranks = dist.get_world_size()
        if len(self.sizes) == 1:
            return dist.init_device_mesh("cpu", (ranks,), mesh_dim_names=self.names)
        shard = self.sizes[-1]
        if ranks % shard:
            raise PlanError(
                f"{type(self.model).__name__} is sharded over {shard} ranks in {self.sizes[0]} replicas, and a world "
                f"of {ranks} ranks has no such mesh: give a multiple of {shard}, or `shard=`, which shards its copy"
            )
        return dist.init_device_mesh("cpu", (ranks // shard, shard), mesh_dim_names=self.names)

    def _set(self, state: Any, memo: Memo) -> None:
        """Take over the settings of an FSDP module."""

        def copied(value: Any) -> Any:
            is_states = isinstance(value, list) and all(hasattr(each, "_modules") for each in value)
            return [state_of(each) for each in value] if is_states else value

        def state_of(live: Any) -> Any:
            return memo[id(live._modules[0])]._get_fsdp_state()

        made = state_of(state)
        pairs = [(state, made), (state._state_ctx, made._state_ctx)]
        for group, its in zip(groups_of(state), groups_of(made), strict=True):
            pairs += [(group, its), *zip(group.fsdp_params, its.fsdp_params, strict=True)]
        for live, its in pairs:
            for name in _settings(live):
                value = getattr(live, name)
                if isinstance(value, (*PLAIN, list)):
                    setattr(its, name, copied(value))


# -- what is read ----------------------------------------------------------------------------------


def _registered(param: Any) -> list[Tensor]:
    """The sharded and, once there is one, the unsharded parameter; one of both is registered."""
    return [
        vars(param)[name] for name in ("sharded_param", "_unsharded_param") if name in vars(param)
    ]


def _settings(live: Any) -> Iterator[str]:
    """The attributes of an object of FSDP2 that a user sets, but those that `fully_shard` makes."""
    table = next(
        ATTRIBUTES[base.__name__] for base in type(live).__mro__ if base.__name__ in ATTRIBUTES
    )
    for name, entry in table.items():
        if entry.reason == "a setting" and name not in _MESHES and name in vars(live):
            yield name


def _reshard(state: Any) -> bool | int | None:
    """The argument `reshard_after_forward`."""
    groups = groups_of(state)
    if state._auto_reshard_after_forward or not groups:
        return None
    after = groups[0].post_forward_mesh_info
    if after is None or after is groups[0].mesh_info:
        return after is not None
    return int(after.shard_mesh_size)


def _reasons(model: nn.Module, states: list[Any], meshes: list[Any]) -> Iterator[str]:
    """Why a sharding cannot be done again."""
    shapes = {(tuple(mesh.shape), mesh.mesh_dim_names) for mesh in meshes}
    if not meshes:
        yield "without a parameter in it"
    if len(shapes) > 1 or any(len(groups_of(state)) > 1 for state in states):
        yield f"over several meshes, {' and '.join(str(shape) for shape, _ in sorted(shapes, key=str))}"
    ranks = meshes[0].mesh.flatten().tolist()
    world = dist.get_world_size() if dist.is_initialized() else len(ranks)
    if ranks != list(range(world)):
        yield f"over a part of the ranks, {ranks}"
    managed = set[int]()
    for name, param in fsdp_params(states):
        managed |= {id(each) for each in _registered(param)}
        if param.is_dtensor:
            yield f"and its parameter {name} was a DTensor before, as with tensor parallelism"
        if type(param._sharded_local_tensor) is not Tensor:
            yield f"and the shard of {name} is a {type(param._sharded_local_tensor).__name__}"
    for name, each in model.named_parameters():
        if id(each) not in managed and type(each) is not nn.Parameter:
            yield f"and its parameter {name} is a {type(each).__name__}"
    for state in states:
        for group in groups_of(state):
            for name in _settings(group):
                value = getattr(group, name)
                is_own = not (value is None or isinstance(value, PLAIN) or _is_of_torch(value))
                if is_own:
                    yield f"with `{name}` of yours"


def _is_of_torch(value: Any) -> bool:
    made = value if inspect.isroutine(value) else type(value)
    return getattr(made, "__module__", "").startswith("torch.")
