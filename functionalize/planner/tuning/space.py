"""What is searched: the settings of a step, and the axes that its script does not parametrise.

    space = Space.of(script, world, machine, ...)
    space.meshes                 fsdp, hsdp over nodes: if `build` has a parameter `mesh`
    space.offloads               False and True: if `build` has a parameter `offload`, and the target is no CPU
    space.settings(place, ...)   batch and accumulation with the same tokens per step: parameters `batch`, `accumulate`
    space.reshards               `reshard_after_forward`: of every layer that `fully_shard` wraps
    space.left_out               why an axis is not searched, in words

A mesh is given to `build` as a `DeviceMesh` with the dimensions `shard`, or `replicate` and `shard`, and after them
`tp` where sizes of it are asked for; meshes of your own may have others. Batches are those of one rank and microbatch.
Refuses (`TuneError`): a step that is smaller than one sample per rank; a mesh where `build` has no such parameter; a
mesh, or a size of tensor parallelism, that the world does not have.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from functionalize.cost.machines.machine import Machine
from functionalize.errors import TuneError
from functionalize.planner.tuning.policy import Mesh

TENSOR_PARALLEL = "tp"  # the dimension of a mesh that `build` splits ops over
_NODES = (1, 2, 4)  # sizes of a group that shards, in nodes
_DIVISORS = 6  # microbatches that are tried at most
_DOUBLINGS = 12
MeshKey = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Setting:
    """What all layers share. mesh: None: `build` makes it. batch: of a rank and microbatch; None: `inputs` decides.

    offload: whether FSDP2 offloads to the host; None: `build` decides.
    """

    mesh: MeshKey | None
    batch: int | None = None
    accumulate: int = 1
    offload: bool | None = None

    @property
    def place(self) -> Setting:
        """The setting without its batch and accumulation."""
        return replace(self, batch=None, accumulate=1)

    def text(self) -> str:
        """`shard 64, batch 2 x 1`."""
        mesh = " x ".join(f"{name} {size}" for name, size in self.mesh or ())
        batch = "" if self.batch is None else f"batch {self.batch}"
        if self.accumulate > 1:
            batch = f"{batch or 'batch'} x {self.accumulate}"
        offloaded = "offloaded" if self.offload else ""
        return ", ".join(filter(None, (mesh, batch, offloaded))) or "as built"


@dataclass(frozen=True)
class Space:
    """The axes of a search. batches: to search; None: those that `tokens` allow.

    accumulates: whether the script accumulates gradients. tokens: of a step over all ranks; None: not fixed.
    """

    meshes: tuple[MeshKey | None, ...]
    offloads: tuple[bool | None, ...]
    reshards: tuple[bool | int, ...]
    has_batch: bool
    accumulates: bool
    batches: tuple[int, ...] | None
    tokens: int | None
    left_out: tuple[str, ...]

    @staticmethod
    def of(
        functions: Sequence[Callable[..., Any] | None],
        world: int,
        machine: Machine,
        meshes: Sequence[Mesh] | None = None,
        batches: Sequence[int] | None = None,
        tokens: int | None = None,
        tp: Sequence[int] | None = None,
        offload: bool | None = None,
        has_host: bool = True,
    ) -> Space:
        """functions: `build`, `inputs`, `step`. tp: sizes of tensor parallelism beside none.

        offload: the one value of it; None: both. has_host: whether the target has a host with memory of its own.
        """
        names = [_parameters(f) for f in functions]
        left_out = []
        has_mesh, has_batch = "mesh" in names[0], any("batch" in found for found in names)
        accumulates = any("accumulate" in found for found in names)
        if meshes is not None and not has_mesh:
            raise TuneError(_no_parameter("meshes", "`build`", "`mesh` (a DeviceMesh)"))
        if tp is not None and not has_mesh:
            raise TuneError(_no_parameter("tp", "`build`", "`mesh` (a DeviceMesh)"))
        if tp is not None and meshes is not None:
            raise TuneError(
                f"`tp` adds meshes to those that are searched, and `meshes` replaces them: remove `tp`, and add a last "
                f"dimension `{TENSOR_PARALLEL}` to each of `meshes` that splits ops"
            )
        has_offload = "offload" in names[0]
        if offload is not None and not has_offload:
            raise TuneError(_no_parameter("offload", "`build`", "`offload` (True or False)"))
        if offload and not has_host:
            raise TuneError(
                "`offload` needs a device with memory apart from its host's: remove it, or use the target `cuda`"
            )
        if batches is not None and not has_batch:
            raise TuneError(_no_parameter("batches", "`inputs` or `step`", "`batch`"))
        if tokens is not None and not (has_batch or accumulates):
            raise TuneError(
                _no_parameter("batch_tokens", "`inputs` or `step`", "`batch` or `accumulate`")
            )
        if not has_mesh:
            left_out.append("mesh: `build` has no parameter `mesh` (a DeviceMesh)")
        elif meshes is None and tp is None:
            left_out.append("tensor parallelism: `tp` names no sizes of it")
        if not has_offload:
            left_out.append("offload: `build` has no parameter `offload` (True or False)")
        elif offload is None and not has_host:
            left_out.append("offload: the target has no memory apart from its host's")
        if not has_batch:
            left_out.append("batch: no function has a parameter `batch`")
        if not accumulates:
            left_out.append("accumulation: no function has a parameter `accumulate`")
        own = tuple(tuple(mesh.items()) for mesh in meshes or ())
        node = machine.ranks_per_node or world
        for mesh in own:
            if math.prod(size for _, size in mesh) != world:
                raise TuneError(
                    f"`meshes`: the sizes of {dict(mesh)} do not multiply to the {world:,} ranks of the world"
                )
        for size in tp or ():
            if world % size:
                raise TuneError(
                    f"`tp` {size}: sizes of tensor parallelism must divide the {world:,} ranks of the world"
                )
        found = [
            mesh for size in dict.fromkeys((1, *(tp or ()))) for mesh in _meshes(world, node, size)
        ]
        return Space(
            own or (tuple(found) if has_mesh else (None,)),
            _offloads(has_offload, offload, has_host),
            (True, False, *([node] if node < world and not world % node else [])),
            has_batch,
            accumulates,
            None if batches is None else tuple(batches),
            tokens,
            tuple(left_out),
        )

    @property
    def places(self) -> list[Setting]:
        """Each mesh with each value of `offload`."""
        return [Setting(mesh, offload=offload) for mesh in self.meshes for offload in self.offloads]

    def settings(self, place: Setting, each: int, ranks: int) -> list[Setting]:
        """The settings of a place. each: tokens or samples of a rank at batch 1. ranks: that train on different ones.

        Raises `TuneError` for tokens or batches that it cannot have.
        """
        if self.batches is not None and self.tokens is None:
            return [replace(place, batch=batch) for batch in self.batches]
        if self.tokens is None:
            most = _DOUBLINGS if self.has_batch else 1
            return [replace(place, batch=1 << i if self.has_batch else None) for i in range(most)]
        rounds = round(self.tokens / (each * ranks))
        if rounds < 1:
            raise TuneError(
                f"`batch_tokens` {self.tokens:,} is less than one sample of {each:,} on each of {ranks:,} ranks: raise "
                "`batch_tokens`, or use fewer ranks"
            )
        if not self.accumulates:
            return [replace(place, batch=rounds)]
        if not self.has_batch:
            return [replace(place, accumulate=rounds)]
        divisors = [n for n in self.batches or range(1, rounds + 1) if not rounds % n]
        if len(divisors) > _DIVISORS:  # evenly among them, the first and the last included
            last = len(divisors) - 1
            divisors = [divisors[i * last // (_DIVISORS - 1)] for i in range(_DIVISORS)]
        if not divisors:
            raise TuneError(
                f"`batches` {self.batches}: none divides the {rounds} samples of a rank in a step; change `batches` or "
                "`batch_tokens`"
            )
        return [replace(place, batch=n, accumulate=rounds // n) for n in divisors]

    def reshards_on(self, mesh: MeshKey | None, world: int) -> tuple[bool | int, ...]:
        """The values of `reshard_after_forward` that a mesh allows: a number of ranks divides those that shard."""
        ranks = dict(mesh).get("shard", world) if mesh else world
        return tuple(
            r for r in self.reshards if isinstance(r, bool) or (r < ranks and not ranks % r)
        )


def _parameters(function: Callable[..., Any] | None) -> frozenset[str]:
    if function is None:
        return frozenset()
    return frozenset(inspect.signature(function).parameters)


def _no_parameter(argument: str, function: str, parameter: str) -> str:
    return f"`{argument}` needs a parameter {parameter} of {function}: add the parameter, or remove `{argument}`"


def _offloads(has_offload: bool, offload: bool | None, has_host: bool) -> tuple[bool | None, ...]:
    if not has_offload:
        return (None,)
    return (False, True) if offload is None and has_host else (bool(offload),)


def _meshes(world: int, node: int, tp: int = 1) -> tuple[MeshKey, ...]:
    """Sharding over all ranks, and over one, two and four nodes with replicas of each. tp: ranks that split ops."""
    world, node = world // tp, max(node // tp, 1)
    split = ((TENSOR_PARALLEL, tp),) if tp > 1 else ()
    sizes = [node * n for n in _NODES if node * n < world and not world % (node * n)]
    if world <= node:
        sizes = [n for n in (world // 2,) if n > 1 and not world % n]
    hybrid: list[MeshKey] = [(("replicate", world // n), ("shard", n)) for n in sizes]
    return tuple((*mesh, *split) for mesh in ((("shard", world),), *hybrid))
