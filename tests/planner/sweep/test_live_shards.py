"""Plans of models that are sharded already, on real ranks: figures of scripts, and objects that stay as they are."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import functionalize as fz
from functionalize.errors import PlanError
from functionalize.fsdp.objects import fsdp_objects
from tests.planner.sweep.nets import WIDTH, Net, adam, figures, shard, step
from tests.ranks import run_on_ranks


def resharded(model: Any) -> None:
    fully_shard(model.blocks[0], reshard_after_forward=False)
    fully_shard(model.blocks[1])
    fully_shard(model, reshard_after_forward=True)


def mixed(model: Any) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    fully_shard(model.blocks[1], mp_policy=policy)
    fully_shard(model)


def grouped(model: Any) -> None:
    fully_shard([model.head, model.tied], reshard_after_forward=False)
    fully_shard(model)


def other_dimension(model: Any) -> None:
    fully_shard(model, shard_placement_fn=lambda p: Shard(p.dim() - 1))


def ignoring(model: Any) -> None:
    ignored = {model.blocks[0].a.bias.requires_grad_(False)}
    for module in (*model.blocks, model):
        fully_shard(module, ignored_params=ignored)


def offloaded(model: Any) -> None:
    for module in (*model.blocks, model):
        fully_shard(module, offload_policy=CPUOffloadPolicy(pin_memory=False))


def set_later(model: Any) -> None:
    shard(model)
    first, second = model.blocks
    first.set_modules_to_forward_prefetch([second])
    second.set_modules_to_backward_prefetch([first])
    model.set_reshard_after_backward(False)
    model.set_requires_all_reduce(False)
    first.set_gradient_divide_factor(3.0)
    first.set_force_sum_reduction_for_comms(True)  # gloo has no other for a factor


def replicas(model: Any) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("r", "s"))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)


QUICK = (shard, set_later)
LONG = (resharded, mixed, grouped, other_dimension, ignoring, offloaded, replicas)


def planned(sharding: Any, after_steps: bool) -> list[bool]:
    """On a rank: whether plans in the own world and in another one have the figures of functions that do the same."""
    model, batch = Net(), torch.randn(4, WIDTH)
    sharding(model)
    optimizer = adam(model)
    if after_steps:
        step(model, optimizer, batch)
    equal = []
    for ranks in (2, 4):

        def build() -> Any:
            made = Net()
            sharding(made)
            return made, adam(made)

        own = {} if ranks == 2 else {"world": ranks}
        found = fz.plan(model, optimizer, batch, step=step, **own)
        expected = fz.plan(build, step, inputs=lambda: batch.clone(), world=ranks)
        equal.append(figures(found) == figures(expected))
    return equal


@pytest.mark.parametrize(
    "sharding",
    [*QUICK, *(pytest.param(each, marks=pytest.mark.long) for each in LONG)],
    ids=lambda each: each.__name__,
)
def test_figures_are_those_of_functions(sharding: Any) -> None:
    assert run_on_ranks(planned, sharding, sharding is not offloaded, world=2) == [[True, True]] * 2


def around_a_plan(is_planned: bool, is_unsharded: bool) -> tuple[list[str], list[Tensor]]:
    """On a rank: what a plan has changed; the parameters after a step that follows."""
    model, batch = Net(), torch.randn(4, WIDTH)
    shard(model)
    optimizer = adam(model)
    step(model, optimizer, batch)
    if is_unsharded:
        model.unshard()
    before = state_of(model, optimizer)
    if is_planned:
        fz.plan(model, optimizer, batch, step=step, grid={"world": [2, 8]})
    after = state_of(model, optimizer)
    changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    assert dist.get_world_size(dist.new_group([0, 1])) == 2  # its name is free
    step(model, optimizer, batch)
    return changed, [p.full_tensor() for p in model.parameters()]


def state_of(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """The attributes of all modules and objects of FSDP2, by identity; bits of tensors; torch's tables of groups."""
    found: dict[str, Any] = {}

    def note(name: str, values: dict[Any, Any]) -> None:
        for key, value in values.items():
            inner = list(value.items()) if isinstance(value, dict) else None
            found[f"{name}.{key}"] = id(value), None if inner is None else [*map(ids, inner)]

    def ids(item: tuple[Any, Any]) -> tuple[Any, int]:
        return item[0], id(item[1])

    for name, module in model.named_modules():
        found[f"class of {name}"] = type(module)
        note(name, vars(module))
    for name, each in fsdp_objects(model):
        if isinstance(each, dict):
            note(name, {**each, "_orig_param_uid": None})
    for number, (p, kept) in enumerate(optimizer.state.items()):
        note(f"state {number}", kept)
        for tensor in (p, *kept.values()):
            local = getattr(tensor, "_local_tensor", tensor).detach()
            found[f"bits {number} {len(found)}"] = local.numpy().tobytes(), id(tensor)
    groups = dist.distributed_c10d._world
    found["groups"] = dict(groups.pg_names), groups.group_count, id(dist.group.WORLD)
    return found


@pytest.mark.parametrize("is_unsharded", [False, True])
def test_the_objects_stay_as_they_are(is_unsharded: bool) -> None:
    run = functools.partial(run_on_ranks, around_a_plan, world=2)
    (changed, found), _ = run(True, is_unsharded)
    (_, expected), _ = run(False, is_unsharded)
    assert changed == []
    assert all(map(torch.equal, found, expected))


def refusals() -> list[str]:
    """On a rank of two."""
    found = []

    def note(model: nn.Module, **given: Any) -> None:
        try:
            fz.plan(model, torch.optim.SGD(model.parameters()), torch.randn(4, WIDTH), **given)
        except PlanError as error:
            found.append(str(error))

    alone, mesh = Net(), init_device_mesh("cpu", (2,))
    fully_shard(alone, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))["b"])
    split = Net()
    parallelize_module(split.blocks[0].a, mesh, ColwiseParallel())
    fully_shard(split.blocks[1], mesh=mesh)
    two = Net()
    fully_shard(two.blocks[0])
    fully_shard(two, mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("r", "s")))
    hooked = Net()
    shard(hooked)
    hooked.set_all_reduce_hook(lambda gradient: None)
    sharded = Net()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("r", "s")))
    for model in (alone, split, two, hooked):
        note(model)
    note(sharded, world=3)
    return found


def test_refusals() -> None:
    found, _ = run_on_ranks(refusals, world=2)
    texts = ["over a part of the ranks, [0]:", "blocks.0.a.weight is a DTensor", "several meshes, "]
    texts += [
        "with `_all_reduce_hook` of yours:",
        "a world of 3 ranks has no such mesh: give a mul",
    ]
    assert len(found) == len(texts)
    for text, error in zip(texts, found, strict=True):
        assert text in error
