"""A training step at any world size, on this machine: fake tensors, a fake process group, another device's kernels.

    with fz.world(size=16384, target="cuda"):
        model = build()                       unmodified: fully_shard, optimizers, Hugging Face models from a config
        step = fz.capture(train_step)
        step(batch), step(batch)              recorded as on any machine; nothing is allocated or sent

What differs from a job of real ranks, inside the `with`:
- every tensor is fake (a shape without data), and on the CPU whatever device the program names;
- the process group is torch's fake one: collectives return at once. `mesh` shapes the default mesh;
- the tensors of ranks of device meshes are real, and equal tuples of ranks are one object: `fully_shard` makes a mesh
  for each module, of all ranks, and DTensor compares meshes: at 16,384 ranks the tuples of 127 meshes are 80 MB, and
  their comparisons a second;
- `fully_shard` makes the one chunk of a parameter that it keeps; torch makes one per rank, O(parameters * world);
- the sharding propagation of DTensor runs under its own fake mode, so that its ops are neither recorded nor counted;
- other libraries see the tensors as real (`isinstance(t, FakeTensor)` is False): with fake tensors, Hugging Face
  builds attention masks that it leaves out in real training;
- a number that Python reads from a fake tensor (`item()`, `f"{loss:.3f}"`) is assumed, and listed in `World.assumed`:
  the fill value if the tensor comes from a factory (`torch.zeros(1)`; in-place ops do not change it), False for `any`,
  True for `all`, else 1 (`True`);
- the kernels, defaults and autocast lists are the target's, see `target.py`.

Process groups of the process are hidden meanwhile, from all of its threads.

Invariant: after the `with` everything is as before, also if its body raised.
Refuses (`WorldError`): a world inside a world, a mesh that does not fit the size or is of a fake tensor of ranks,
results whose shape depends on data, decisions on data other than numbers (`torch.equal`), loops that read without end;
what reads data past the dispatcher, where torch's own errors mention tensor subclasses or a CPU that does not occur in
the user's code: `tensor.numpy()`, `DistributedDataParallel`, `FullyShardedDataParallel`; for a CUDA target also
`SyncBatchNorm` and `flex_attention`, whose kernels the CPU lacks.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from functionalize._compat.dispatch import disable_current_modes
from functionalize._compat.distributed import (
    fake_collective,
    fake_process_group,
    fake_work_ids,
    forget_shardings,
    mesh_methods,
    sharding_propagation,
    share_ranks,
    strided_shard_flags,
    without_process_groups,
)
from functionalize._compat.fakes import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    fakes_module,
    flex_devices,
    is_fake,
)
from functionalize._compat.fsdp import fully_sharded_chunks
from functionalize._compat.graphs import pytree
from functionalize._compat.references import address
from functionalize._compat.stacks import CapturedTraceback, stack_here
from functionalize.errors import WorldError
from functionalize.ir.fake_mode import distinct_results
from functionalize.ir.fakes import FakeResultCache
from functionalize.ir.worlds import FakeWorld, in_world
from functionalize.planner.fake_world.cuda_api import is_cuda
from functionalize.planner.fake_world.target import Choices, Target, target_named
from functionalize.util.patching import Patch, Patches
from functionalize.util.user_stack import line_of

aten = torch.ops.aten
_MOST_READS = 20_000  # of one line: a loop that waits for a number to change would never end


def _same_as_first(tensor: Any, *args: Any) -> Any:
    """The number assumed for the op's first argument; None if there is none."""
    return getattr(tensor, "assumed", None)


# The number that a one-element tensor is assumed to hold, computed from the arguments of the op that makes it.
_ASSUMED: Mapping[Any, Callable[..., Any]] = types.MappingProxyType(
    {
        **dict.fromkeys((aten.any.default, aten.any.dim, aten.any.dims), lambda *args: False),
        **dict.fromkeys((aten.all.default, aten.all.dim, aten.all.dims), lambda *args: True),
        **dict.fromkeys((aten.zeros.default, aten.zeros_like.default), lambda *args: 0),
        **dict.fromkeys((aten.ones.default, aten.ones_like.default), lambda *args: 1),
        **dict.fromkeys((aten.full.default, aten.full_like.default), lambda first, value: value),
        aten.scalar_tensor.default: lambda value: value,
        **dict.fromkeys(
            (aten.clone.default, aten._to_copy.default, aten.detach.default, aten.alias.default),
            _same_as_first,
        ),
        **dict.fromkeys((aten.view.default, aten.reshape.default), _same_as_first),
    }
)
_ASSUMED_AT = types.MappingProxyType({address(op): rule for op, rule in _ASSUMED.items()})
_DEVICE = torch.ops.prim.device.default
_LIFT_FRESH = aten.lift_fresh.default
_MOST_RANKS = 2**20  # the largest real integer tensor that still counts as a list of ranks
# FSDP2's collectives return their output and a new `Work`, which no cache of results may hold.
_COLLECTIVES = frozenset(
    address(getattr(torch.ops.c10d, name).default)
    for name in ("_allgather_base_", "_reduce_scatter_base_")
)
_RECEIVES = (torch.ops.c10d.recv_.default, torch.ops.c10d.recv_any_source_.default)
_NUMBERS = (aten._local_scalar_dense.default, aten.item.default)


@dataclass(frozen=True, eq=False, repr=False)
class World:
    """A fake world, as `world()` yields it.

    size: the number of ranks. rank: the rank whose step is recorded. mesh: the default `DeviceMesh`.
    target: the device that is planned for. choices: which kernels the target runs, and why.
    assumed: the user's lines that read a number from a fake tensor -> how often.
    """

    size: int
    rank: int
    mesh: Any
    target: Target
    choices: Choices
    assumed: Counter[str] = field(default_factory=Counter)

    def __repr__(self) -> str:
        shape = " x ".join(map(str, self.mesh.shape))
        return (
            f"<World of {self.size:,} ranks ({shape}), seen from rank {self.rank}: {self.target}>"
        )


class WorldMode(FakeWorld):
    """The fake mode of a world.

    Real tensors from outside are converted to fake ones of the same geometry, except small integer tensors on the CPU
    (the ranks of a mesh, indices): an op whose tensor arguments are all of that kind runs for real.
    """

    def __init__(self, target: str = "cpu") -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.target = target
        self.assumed: Counter[str] = Counter()
        self.note_literal: Callable[[Tensor], None] | None = None
        self._fake_results = FakeResultCache(self)
        self._fake_collective = fake_collective()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device
        if func is _LIFT_FRESH and self.note_literal and type(args[0]) is not FakeTensor:
            self.note_literal(args[0])
        if (
            torch.is_inference_mode_enabled()
        ):  # inference tensors have no version counter, which a fake view shares
            with torch.inference_mode(False), torch.no_grad():
                return self.__torch_dispatch__(func, types, args, kwargs)
        if not types and _are_ranks(args, kwargs):
            kwargs = dict(kwargs or {})
            if self.target != "cpu" and is_cuda(kwargs.get("device")):
                kwargs["device"] = torch.device("cpu")
            return func(*args, **kwargs)
        if func.namespace == "profiler":  # FSDP2 enters ranges in every hook; they hold no tensor
            return func(*args, **(kwargs or {}))
        op = functools.partial(super().__torch_dispatch__, func, types, args, kwargs)
        try:
            return self._known(func, args, kwargs or {}, op)
        except DataDependentOutputException:
            if func in _NUMBERS:
                return self._assume(args[0])
            raise _needs_data(func, "decides by data") from None
        except DynamicOutputShapeException:
            raise _needs_data(func, "gives a result whose size depends on data") from None

    def known(self, func: Any, op: Callable[..., Any], args: Any, kwargs: Any, refs: Any) -> Any:
        if torch.is_inference_mode_enabled():
            return op(*args, **kwargs)
        return self._known(func, args, kwargs, functools.partial(op, *args, **kwargs), refs)

    def _known(
        self, func: Any, args: Any, kwargs: Any, op: Callable[[], Any], refs: Any = None
    ) -> Any:
        if address(func) in _COLLECTIVES and all(type(each) is FakeTensor for each in args[:2]):
            return self._fake_collective(args)
        out = self._fake_results.run(func, args, kwargs, op, refs)
        assumed = _ASSUMED_AT.get(address(func))
        if assumed is not None and type(out) is FakeTensor and out.numel() == 1:
            out.assumed = assumed(*args)  # type: ignore[attr-defined]
        elif func in _RECEIVES:
            for each in args[0]:
                each.assumed = None  # what it was made with is overwritten
        return out

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return distinct_results(func, super().dispatch(func, types, args, kwargs or {}))

    def _assume(self, tensor: Tensor) -> Any:
        """The number that is returned in place of the one that `tensor` would hold."""
        where = line_of(CapturedTraceback.extract())
        self.assumed[where] += 1
        if self.assumed[where] > _MOST_READS:
            raise WorldError(
                f"a number is read {_MOST_READS:,} times and never changes, as tensors of a fake world hold no data\n"
                f"  {where}\n  Leave a loop that waits for a number out of what is planned"
            )
        known = getattr(tensor, "assumed", None)
        return torch.full((), 1 if known is None else known, dtype=tensor.dtype).tolist()


def _are_ranks(args: Any, kwargs: Any) -> bool:
    """Whether there are tensor arguments and all are small integer tensors on the CPU."""
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    return bool(tensors) and all(
        t.device.type == "cpu"
        and t.numel() <= _MOST_RANKS
        and not (t.is_floating_point() or t.is_complex())
        for t in tensors
    )


def _needs_data(func: Any, what: str) -> WorldError:
    where = line_of(CapturedTraceback.extract())
    return WorldError(
        f"{func} {what}, and tensors of a fake world hold none\n  {where}\n"
        "  Give the step a form whose shapes follow from those of its arguments"
    )


@contextmanager
def world(
    size: int | None = None,
    mesh: Sequence[int] | Mapping[str, int] | None = None,
    *,
    rank: int = 0,
    target: str | Target = "cuda",
) -> Iterator[World]:
    """A world of `size` ranks, of which this process is one.

    size: the number of ranks; the product of `mesh` if None.
    mesh: the shape of the default mesh, with dimension names (`{"dp": 2048, "tp": 8}`) or without; one dimension of
    all ranks if None.
    rank: the rank of this process, whose shards the model holds (uneven shards differ by rank).
    target: the device whose kernels and defaults apply: "cuda", "cpu" or a `Target`.
    Raises `WorldError` for arguments that do not fit; inside the `with`, for code that needs the data of a tensor.

        >>> import torch.distributed as dist
        >>> with fz.world(16384, target="cuda"):
        ...     x = torch.ones(4, 4)  # no data
        ...     dist.all_reduce(x)  # nothing is sent
        ...     print(dist.get_world_size(), tuple(x.shape))
        16384 (4, 4)
    """
    shape, names, size = world_shape(size, mesh, rank)
    if in_world():
        raise WorldError("a fake world inside a fake world: leave the one before entering another")
    kind = target_named(target)
    with ExitStack() as stack:
        stack.enter_context(without_process_groups())
        stack.enter_context(fake_process_group(rank, size))
        forget_shardings()
        stack.callback(forget_shardings)
        mode = WorldMode(kind.name)
        patches = Patches(functools.partial(_patches, FakeTensorMode(), kind.name))
        patches.install()
        stack.callback(patches.remove)
        default = dist.init_device_mesh("cpu", shape, mesh_dim_names=names)
        stack.enter_context(_hidden_fakes())
        stack.enter_context(mode)
        choices = stack.enter_context(kind.applied())
        yield World(size, rank, default, kind, choices, mode.assumed)


def world_shape(
    size: int | None, mesh: Sequence[int] | Mapping[str, int] | None, rank: int = 0
) -> tuple[tuple[int, ...], tuple[str, ...] | None, int]:
    """The mesh's shape, the names of its dimensions, and the number of ranks. Raises `WorldError`, as `world`."""
    if mesh is not None and (isinstance(mesh, str) or not isinstance(mesh, (Sequence, Mapping))):
        raise WorldError(f"a mesh is a shape, as (64, 8), or names with sizes, and not {mesh!r}")
    names = tuple(mesh) if isinstance(mesh, Mapping) else None
    if mesh is None:
        shape: tuple[int, ...] = (1 if size is None else size,)
    else:
        shape = tuple(mesh.values()) if isinstance(mesh, Mapping) else tuple(mesh)
    if not shape or any(type(n) is not int or n < 1 for n in shape):
        raise WorldError(f"the sizes of a mesh are positive whole numbers, not {shape}")
    if names is not None and not all(isinstance(name, str) for name in names):
        raise WorldError(f"the names of a mesh's dimensions are texts, not {names}")
    ranks = math.prod(shape)
    if size is not None and size != ranks:
        raise WorldError(f"a mesh of shape {shape} has {ranks} ranks, the world {size}")
    if type(rank) is not int or not 0 <= rank < ranks:
        raise WorldError(f"rank {rank} is not in a world of {ranks} ranks")
    return shape, names, ranks


# -- what is replaced in torch ---------------------------------------------------------------------


def _patches(apart: FakeTensorMode, target: str) -> Iterator[Patch]:
    """(owner, name, replacement) per attribute of torch. apart: the fake mode in which sharding propagation runs."""
    yield from _queries(target, in_world)
    owner, name = sharding_propagation()
    yield owner, name, _under_mode(getattr(owner, name), apart)
    yield from strided_shard_flags()
    for owner, name in fully_sharded_chunks():
        yield owner, name, _Chunks
    yield (*fake_work_ids(), itertools.count().__next__)  # torch draws them from Python's generator
    yield from _meshes(in_world)


class _NoFake:
    """A class without instances, shown to other libraries as `FakeTensor`."""


class _FakesModule(types.ModuleType):
    """torch's module of fake tensors: modules other than torch's and ours read a `FakeTensor` without instances."""

    @property
    def FakeTensor(self) -> type:
        """The class of fakes, or one without instances."""
        caller = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
        return _NoFake if in_world() and caller not in ("torch", "functionalize") else FakeTensor


@contextmanager
def _hidden_fakes() -> Iterator[None]:
    """Hide `FakeTensor` from other libraries, which branch on it."""
    module = fakes_module()
    before = module.__class__
    module.__class__ = _FakesModule
    try:
        yield
    finally:
        module.__class__ = before


def _under_mode(original: Callable[..., Any], apart: FakeTensorMode) -> Callable[..., Any]:
    """In a world, `original` runs under the mode `apart` only; outside, unchanged.

    An op that returns nothing, as those of optimizers on lists of all parameters, has no shapes to compute.
    """

    @functools.wraps(original)
    def propagate(self: Any, op_schema: Any) -> Any:
        if not in_world():
            return original(self, op_schema)
        if not op_schema.op._schema.returns:
            return None
        with disable_current_modes(), apart:
            return original(self, op_schema)

    return propagate


class _Chunks(Sequence[Tensor]):
    """The result of `torch.chunk`, padded with empty tensors to `count` items; an item is made when it is indexed."""

    def __init__(self, tensor: Tensor, count: int, dim: int) -> None:
        self._tensor, self._count, self._dim = tensor, count, dim
        self._each = -(-tensor.size(dim) // count) if tensor.dim() else 0

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        start = index * self._each
        left = self._tensor.size(self._dim) - start
        if left <= 0 and index:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(self._each, left))


# -- reads that bypass the dispatcher --------------------------------------------------------------

_REFUSED = (
    (
        "torch.nn.parallel.DistributedDataParallel reads data in C++, and tensors of a fake world hold none",
        "Plan it by fully_shard(model, mesh=...) on a mesh of (ranks, 1), which replicates as it does",
    ),
    (
        "FullyShardedDataParallel (FSDP1) keeps its parameters in flat tensors of a device that a fake world has not",
        "Wrap the model by torch.distributed.fsdp.fully_shard (FSDP2)",
    ),
)
_SYNC = (
    "torch.nn.SyncBatchNorm has kernels for CUDA tensors alone, and those of a fake world are on the CPU",
    "Plan the model with BatchNorm: it keeps the same for backward, and only two small all-gathers are missing",
)
_FLEX = (
    "flex_attention has no kernel whose memory could be planned for CUDA, as the CPU has none for its backward",
    "Plan the model with scaled_dot_product_attention, by is_causal or with a mask",
)


def _queries(target: str, in_world: Callable[[], bool]) -> Iterator[Patch]:
    """(owner, name, replacement) per attribute of torch. in_world: whether the calling thread is in a fake world."""
    yield Tensor, "__format__", _formatted(Tensor.__format__, in_world)
    yield Tensor, "numpy", _without_data(Tensor.numpy, in_world)
    kinds: tuple[Any, ...] = (
        torch.nn.parallel.DistributedDataParallel,
        torch.distributed.fsdp.FullyShardedDataParallel,
    )
    for kind, words in zip(kinds, _REFUSED, strict=True):
        yield kind, "__init__", _refusing(kind.__init__, words, in_world)
    if target != "cpu":
        norm = torch.nn.SyncBatchNorm
        yield norm, "forward", _refusing(norm.forward, _SYNC, in_world)
        owner, name = flex_devices()
        yield owner, name, _refusing(getattr(owner, name), _FLEX, in_world)


def _formatted(original: Any, in_world: Callable[[], bool]) -> Any:
    def __format__(self: Tensor, spec: str) -> str:
        if in_world() and is_fake(self) and self.dim() == 0:
            return format(self.detach().item(), spec)
        return str(original(self, spec))

    return __format__


def _without_data(original: Any, in_world: Callable[[], bool]) -> Any:
    @functools.wraps(original)
    def numpy(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if in_world() and is_fake(self):
            raise _error(
                "Tensor.numpy() reads data, and tensors of a fake world hold none",
                "Leave it out of what is planned, or read one number by .item(), which is assumed",
            )
        return original(self, *args, **kwargs)

    return numpy


def _refusing(original: Any, words: tuple[str, str], in_world: Callable[[], bool]) -> Any:
    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        if in_world():
            raise _error(*words)
        return original(*args, **kwargs)

    return function


def _error(what: str, instead: str) -> WorldError:
    return WorldError(f"{what}\n  {line_of(stack_here())}\n  {instead}")


# -- device meshes ---------------------------------------------------------------------------------


def _meshes(in_world: Callable[[], bool]) -> Iterator[Patch]:
    """(owner, name, replacement) per method of `DeviceMesh`. in_world: whether the calling thread is in a world."""
    known: dict[Any, Any] = {}
    for owner, name in mesh_methods():
        yield owner, name, _for_real(vars(owner)[name], known, in_world)


def _for_real(original: Any, known: dict[Any, Any], in_world: Callable[[], bool]) -> Any:
    """A method of `DeviceMesh`, run without modes in a world: the tensors of ranks that a mesh keeps stay real.

    known: the tuples of ranks that meshes share.
    """
    if isinstance(original, property):
        return property(_for_real(original.fget, known, in_world))
    if isinstance(original, staticmethod):
        return staticmethod(_for_real(original.__func__, known, in_world))

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        if not in_world():
            return original(*args, **kwargs)
        with disable_current_modes():
            if original.__name__ != "__init__":
                return original(*args, **kwargs)
            args, kwargs = _on_cpu(args, kwargs)
            original(*args, **kwargs)
            share_ranks(args[0], known)

    return method


def _on_cpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """The arguments of `DeviceMesh.__init__` (`self` included) with the device "cpu" and a real tensor of ranks."""
    mesh = args[2] if len(args) > 2 else kwargs.get("mesh")
    if isinstance(mesh, FakeTensor):
        raise WorldError(
            "a mesh is made of a tensor of ranks, which holds none in a fake world: use "
            "torch.distributed.init_device_mesh(device, shape), or give DeviceMesh the ranks as a list"
        )
    ranks = kwargs.get("_rank_map")
    if isinstance(ranks, FakeTensor):  # `init_device_mesh` has just counted them
        kwargs = {**kwargs, "_rank_map": torch.arange(ranks.numel(), dtype=ranks.dtype)}
    if len(args) > 1:
        return (args[0], "cpu", *args[2:]), kwargs
    return args, {**kwargs, "device_type": "cpu"}
