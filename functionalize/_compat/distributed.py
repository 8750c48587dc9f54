"""Process groups, collectives, DTensor and device meshes."""

from __future__ import annotations

import functools
import importlib
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


def group_of_name(name: str) -> Any:
    """The process group of a name, as it occurs in functional collectives."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(name)  # type: ignore[arg-type]


def backend_of_group(name: str, device: str) -> str | None:
    """The name of the backend of a process group for a device type; None if it has none."""
    try:
        return str(group_of_name(name)._get_backend(torch.device(device)).name())
    except (RuntimeError, ValueError, LookupError):
        return None


@functools.cache
def is_dtensor_type(kind: type) -> bool:
    """Whether a class is DTensor; a build without distributed has none."""
    try:
        from torch.distributed.tensor import DTensor
    except ImportError:
        return False
    return issubclass(kind, DTensor)


@functools.cache
def is_dtensor_class(kind: type) -> bool:
    """Whether a class is DTensor itself, and no subclass."""
    return is_dtensor_type(kind) and kind.__mro__[1] is torch.Tensor


def spec_of_dtensor(made: Any) -> Any:
    """The spec of a DTensor; None for anything else, a subclass of DTensor, and a DTensor that requires a gradient."""
    kind: Any = type(made)
    if not is_dtensor_class(kind) or made.requires_grad:
        return None
    return made._spec


def make_dtensors(locals_: Iterable[torch.Tensor], specs: Iterable[Any]) -> list[Any]:
    """DTensors around local tensors, as FSDP2 makes gradients.

    `DTensor.__init__` does nothing outside of an export, and takes most of the time.
    """
    from torch.distributed.tensor import DTensor

    new: Any = functools.partial(DTensor.__new__, requires_grad=False)
    with torch._C.DisableTorchFunctionSubclass():
        return list(map(new, itertools.repeat(DTensor), locals_, specs))


def start_premul_sum(
    out: torch.Tensor, source: torch.Tensor | None, factor: float, name: str
) -> None:
    """Start to multiply and sum `out` over the ranks of a group, or `source` into it, a part for each (2.11 to 2.15).

    `_c10d_functional.wait_tensor(out)` waits for it.
    """
    from torch._C import _distributed_c10d as c10d

    group = group_of_name(name)
    options = c10d.AllreduceOptions() if source is None else c10d.ReduceScatterOptions()
    options.reduceOp = c10d._make_nccl_premul_sum(factor)
    options.asyncOp = True
    if source is None:
        work = group.allreduce([out], options)
    else:
        scatter = getattr(group, "reduce_scatter_single", group._reduce_scatter_base)
        work = scatter(out, source, options)
    c10d._register_work(out, work)


def start_send(token: torch.Tensor, sent: torch.Tensor, dst: int, tag: int, name: str) -> None:
    """Start to send a tensor to a rank of a group; `_c10d_functional.wait_tensor(token)` waits for it."""
    from torch._C import _distributed_c10d as c10d

    c10d._register_work(token, group_of_name(name).send([sent], dst, tag))


def start_receive(out: torch.Tensor, src: int, tag: int, name: str) -> None:
    """Start to receive `out` from a rank of a group; `_c10d_functional.wait_tensor(out)` waits for it."""
    from torch._C import _distributed_c10d as c10d

    c10d._register_work(out, group_of_name(name).recv([out], src, tag))


def work_of(boxed: Any) -> Any:
    """The object of Python that the callers of a collective get, from that which the dispatcher returns."""
    from torch._C._distributed_c10d import Work

    return Work.unbox(boxed)


def work_classes() -> list[type]:
    """The classes whose own `wait` completes a collective, that of fake groups too; none without distributed."""
    try:
        from torch._C._distributed_c10d import Work
    except ImportError:
        return []
    return [Work, *(kind for kind in Work.__subclasses__() if "wait" in vars(kind))]


# The modules between a call of a collective of Python objects and the functions below.
EXCHANGES_OF_OBJECTS = frozenset(
    {"torch.distributed.distributed_c10d", "torch.distributed.c10d_logger", "contextlib"}
)


def object_functions() -> Iterator[tuple[Any, str]]:
    """Owner and name of the functions that make tensors of Python objects, and objects of tensors: 2.11 to 2.15."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    for name in ("_object_to_tensor", "_tensor_to_object"):
        if hasattr(c10d, name):
            yield c10d, name


def ordered_weight_groups() -> Iterator[tuple[Any, str, Any]]:
    """(module, name, replacement) of what groups the weights of a stage for a split backward (2.11 to 2.15).

    torch goes through sets of nodes, whose order is that of addresses. In the replacement's order, that of the weights,
    the same gradients are added to the same weights, at each call at the same ops.
    """
    backward = sys.modules.get("torch.distributed.pipelining._backward")
    original = getattr(backward, "get_param_groups", None)
    if original is None:
        return

    @functools.wraps(original)
    def get_param_groups(inputs: Any, params: Any, *edges: Any) -> Any:
        place = {node: at for at, node in enumerate(params)}
        groups = original(inputs, params, *edges)
        for group in groups:
            group["params"] = sorted(group["params"], key=place.__getitem__)
            nodes = group["intermediates"]
            group["intermediates"] = sorted(nodes, key=lambda node: -node._sequence_nr())
        return sorted(groups, key=lambda group: place[group["params"][0]])

    yield backward, "get_param_groups", get_param_groups


def sequence_number(group: Any) -> int:
    """How many collectives a process group has issued; equal on all of its ranks between two collectives."""
    return int(group._get_sequence_number_for_group())  # no public name in 2.11 to 2.13


def store_of_group(group: Any) -> Any:
    """The rendezvous store of a process group; None for a fake group. It has no public name."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_process_group_store

    return None if dist.get_backend(group) == "fake" else _get_process_group_store(group)


def process_groups() -> list[Any]:
    """Every process group that this rank is in, in the order in which they were made."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return []
    return list(dist.distributed_c10d._world.pg_names)


@contextmanager
def without_process_groups() -> Iterator[None]:
    """Hide the process groups of this process, from all of its threads; afterwards they are as before (2.13, 2.15).

    torch has no public name for that. Their tables are the properties of one object, emptied and filled again; their
    names, of which the groups made meanwhile have the same, are registered again.
    """
    import torch.distributed as dist
    from torch._C._distributed_c10d import _register_process_group, _unregister_process_group

    c10d = dist.distributed_c10d
    world, default = c10d._world, dist.group.WORLD
    if default is None:
        yield
        return
    tables = {
        id(table): (table, table.copy())
        for name, kind in vars(type(world)).items()
        if isinstance(kind, property) and kind.fset is None
        if isinstance(table := getattr(world, name), (dict, list))
    }
    names, count, method = dict(world.pg_names), world.group_count, c10d._default_pg_init_method
    for name in names.values():
        _unregister_process_group(name)
    for table, _ in tables.values():
        table.clear()
    c10d._update_default_pg(None)
    try:
        yield
    finally:
        for table, held in tables.values():
            table.clear()
            table.update(held) if isinstance(table, dict) else table.extend(held)
        for group, name in names.items():
            _register_process_group(name, group)
        world.group_count, c10d._default_pg_init_method = count, method
        c10d._update_default_pg(default)


@contextmanager
def fake_process_group(rank: int, size: int) -> Iterator[None]:
    """A default process group whose collectives return at once (torch.testing has the only one)."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook = (
        sys.excepthook
    )  # `init_process_group` replaces it by one that adds `[rank0]:` to a traceback's lines
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


def fake_work_ids() -> tuple[Any, str]:
    """(module, name) of the function that numbers the `Work`s of fake collectives (2.11 to 2.13)."""
    return importlib.import_module("torch.distributed._meta_registrations"), "generate_unique_id"


def fake_collective() -> Callable[[Any], Any]:
    """The meta kernel of `_allgather_base_` and `_reduce_scatter_base_`: output and `Work` (2.11 to 2.14)."""
    module = importlib.import_module("torch.distributed._meta_registrations")
    found: Callable[[Any], Any] = module.create_fakework
    return found


def sharding_propagation() -> tuple[type, str]:
    """(class, name) of the method by which DTensor computes an op's global shape on fake tensors (2.11 to 2.13)."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    return ShardingPropagator, "_propagate_tensor_meta_non_cached"


def strided_shard_flags() -> Iterator[tuple[Any, str, Any]]:
    """(module, name, replacement) of the function by which DTensor passes on a flag of `_StridedShard`s (torch 2.13).

    torch calls it for every tensor of a list, and each call reads all tensors of all lists: quadratic in the
    parameters of a fused optimizer. The replacement reads those of a schema once, and calls torch's where it must.
    """
    from torch.distributed.tensor import _sharding_prop

    name = "_propagate_use_strided_shard_flag"
    original = getattr(_sharding_prop, name, None)
    if original is None:
        return
    last: tuple[Any, bool] = None, True  # a schema, and whether a tensor of it is strided

    @functools.wraps(original)
    def propagate(strategy: Any, schema: Any) -> None:
        nonlocal last
        known = last
        if known[0] is not schema:
            placements = (p for spec in schema.args_spec for p in spec.placements)
            strided = any(isinstance(p, _sharding_prop._StridedShard) for p in placements)
            last = known = schema, strided
        if known[1]:
            original(strategy, schema)

    yield _sharding_prop, name, propagate


def forget_shardings() -> None:
    """Clear DTensor's sharding caches: they hold meshes, and an equal mesh may have other process groups."""
    import torch.distributed.tensor.debug as debug
    from torch.distributed.tensor._redistribute import _gen_transform_infos

    for clear in (
        getattr(debug, "_clear_sharding_prop_cache", None),  # 2.11 to 2.13
        getattr(_gen_transform_infos, "cache_clear", None),
    ):
        if clear is not None:
            clear()


def mesh_methods() -> list[tuple[Any, str]]:
    """(class, name) of the methods of a device mesh that compute on its tensor of ranks (2.11 to 2.13)."""
    from torch.distributed.device_mesh import DeviceMesh

    names = ("__init__", "__getitem__", "mesh", "get_coordinate", "_flatten", "_unflatten")
    more = ("_concatenate", "from_group", "_get_all_submeshes", "__getstate__")
    return [(DeviceMesh, name) for name in (*names, *more) if name in vars(DeviceMesh)]


def share_ranks(mesh: Any, known: dict[Any, Any]) -> None:
    """Let the equal ranks of several meshes be one tuple and one tensor (2.11 to 2.14). known: those so far."""
    ranks, tensor = getattr(mesh, "_flatten_rank_map", None), getattr(mesh, "_rank_map", None)
    if ranks is not None and tensor is not None:
        found = known.setdefault((ranks, tensor.dtype), (_Ranks(ranks), tensor))
        mesh._flatten_rank_map, mesh._rank_map = found


class _Ranks(tuple[int, ...]):
    """A tuple that is equal to itself without a comparison of its items."""

    def __eq__(self, other: object) -> bool:
        return self is other or tuple.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = tuple.__hash__


def dtensor_type() -> tuple[type, ...]:
    """The class of DTensors, if this torch has it."""
    try:
        from torch.distributed.tensor import DTensor
    except ImportError:
        return ()
    return (DTensor,)


def dtensor_parts() -> tuple[list[Any], dict[Any, tuple[str, ...]]]:
    """The dataclasses in a DTensor's spec; the placement classes, each with the attributes that it is made from."""
    try:
        from torch.distributed.tensor import Partial, Replicate, Shard
        from torch.distributed.tensor import _dtensor_spec as spec
        from torch.distributed.tensor.placement_types import _StridedShard
    except ImportError:
        return [], {}
    names = ("DTensorSpec", "TensorMeta", "ShardOrderEntry")
    records = [getattr(spec, name) for name in names if hasattr(spec, name)]
    placements: dict[Any, tuple[str, ...]] = {
        Shard: ("dim",),
        Replicate: (),
        Partial: ("reduce_op",),
        _StridedShard: ("dim", "split_factor"),
    }
    return records, placements
