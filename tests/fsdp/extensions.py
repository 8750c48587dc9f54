"""What users plug into FSDP2: their own collectives, tensor subclasses that are gathered in their own way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.utils import _pytree as pytree

from tests.fsdp.models import Build, Built, Net, every, mesh, momentum, wrapped

aten = torch.ops.aten


class _Allocating:
    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class AllGatherByLists(_Allocating, AllGather):
    """`all_gather` into the rows of the output."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> dist.Work | None:
        rows = list(output_tensor.chunk(group.size()))
        return dist.all_gather(rows, input_tensor, group=group, async_op=async_op)


class PersistentAllGather(AllGather):
    """One output buffer for all groups and all steps."""

    def __init__(self) -> None:
        self.buffer: Tensor | None = None

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        numel = size[0]
        if self.buffer is None:
            self.buffer = torch.zeros(4096, dtype=dtype, device=device)
        return self.buffer[:numel]

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> dist.Work | None:
        return dist.all_gather_into_tensor(
            output_tensor, input_tensor.clone(), group=group, async_op=async_op
        )


class ReduceScatterByAllToAll(_Allocating, ReduceScatter):
    """Every rank sends each part to its owner, who sums in rank order."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=group)
        torch.sum(parts.view(group.size(), -1), dim=0, out=output_tensor)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(group.size())
        return None


class ReduceScatterByAllReduce(_Allocating, ReduceScatter):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        whole = input_tensor.clone()
        work = dist.all_reduce(whole, op=op, group=group, async_op=True)
        assert work is not None
        work.wait()
        output_tensor.copy_(whole.chunk(group.size())[group.rank()])
        return None


class AllReduceHook:
    """FSDP over the inner dimension, the outer one reduced by the user: HSDP by hand."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __call__(self, reduced: Tensor) -> None:
        dist.all_reduce(reduced, group=self.group, op=dist.ReduceOp.AVG)


def hsdp_by_hook() -> Built:
    model, optimizer = wrapped(make=Net, optimizer=momentum, mesh=mesh(2, 2)["inner"])()
    every("set_all_reduce_hook", AllReduceHook(mesh(2, 2).get_group("outer")))(model)
    return model, optimizer


def halving(reduced: Tensor) -> None:
    """A hook on what was reduced that only computes."""
    reduced.mul_(0.5)


# -- a parameter that is gathered in another form --------------------------------------------------


class GatheredInBFloat16(torch.Tensor):
    """A float32 shard that travels in bfloat16 and is computed with in bfloat16."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> GatheredInBFloat16:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=inner.device,
            requires_grad=inner.requires_grad,
        )

    def __init__(self, inner: Tensor) -> None:
        self._inner = inner

    def __repr__(self) -> str:
        return f"GatheredInBFloat16({self._inner!r})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: Any) -> GatheredInBFloat16:
        return GatheredInBFloat16(inner["_inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = pytree.tree_map_only(GatheredInBFloat16, lambda t: t._inner, (args, kwargs or {}))
        out = func(*plain[0], **plain[1])
        if func is aten.detach.default and isinstance(args[0], GatheredInBFloat16):
            return GatheredInBFloat16(out)
        keeps = (
            aten.split.Tensor,
            aten.clone.default,
            aten.new_zeros.default,
            aten.slice.Tensor,
            aten.as_strided.default,
            aten.view.default,
            aten.copy_.default,
        )
        if func is aten.copy_.default:
            return args[0]
        if func in keeps and isinstance(args[0], GatheredInBFloat16):
            return pytree.tree_map_only(Tensor, GatheredInBFloat16, out)
        return out

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        return (self._inner.to(torch.bfloat16),), None

    def fsdp_post_all_gather(
        self,
        outputs: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> Any:
        (gathered,) = outputs
        if out is not None:
            return None
        return gathered, (gathered,)


class GatheredInInt8(GatheredInBFloat16):
    """A shard that travels as int8 with a scale and is decompressed into a storage of its own."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        return pytree.tree_map_only(
            GatheredInBFloat16, lambda t: t if isinstance(t, cls) else cls(t._inner), out
        )

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: Any) -> GatheredInInt8:
        return GatheredInInt8(inner["_inner"])

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], Any]:
        scale = self._inner.abs().amax().clamp(min=1e-6) / 127
        return ((self._inner / scale).round().to(torch.int8), scale.view(1)), None

    def fsdp_post_all_gather(
        self,
        outputs: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> Any:
        data, scales = outputs
        world = scales.numel()
        rows = data.view(world, -1).to(param_dtype) * scales.to(param_dtype).view(world, 1)
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.view(world, -1).copy_(rows)
            return None
        whole = rows.reshape(data.size())
        return whole, (whole,)


def gathered_as(kind: type[GatheredInBFloat16], dtype: torch.dtype | None) -> Build:
    """The weights of the blocks are `kind`, and blocks compute in `dtype`."""

    def build() -> Built:
        torch.manual_seed(0)
        model = Net()
        for block in model.blocks:
            for layer in (block.a, block.b):
                layer.weight = nn.Parameter(kind(layer.weight.detach()))
                layer.bias = None
            fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
        return model, momentum(model.parameters())

    return build


def with_comms(
    all_gather: Callable[[], Any] | None = None, reduce_scatter: Callable[[], Any] | None = None
) -> Callable[[Any], None]:
    """Custom collectives on every wrapped module, one object for all."""

    def then(model: Any) -> None:
        if all_gather is not None:
            every("set_custom_all_gather", all_gather())(model)
        if reduce_scatter is not None:
            every("set_custom_reduce_scatter", reduce_scatter())(model)

    return then
