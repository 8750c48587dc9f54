"""Collectives, in their c10d, functional and FSDP2 spellings, as `_c10d_functional` nodes.

    c10d._allgather_base_(out, in, pg)   ->  all_gather_into_tensor(in, world, "pg"); wait_tensor
    fsdp.all_gather_copy_in(...)         ->  cat of the flattened shards
    fsdp.split_with_sizes_copy(out=)     ->  aten.split_with_sizes_copy
    fsdp.chunk_cat(out=)                 ->  aten._chunk_cat, cast to the dtype of `out`

Their schemas do not tell what they write or alias, so each has a rule here, or in `collective_lists.py` if it
takes lists of tensors. A rank sends what eager sends: one that replays works with one that runs eagerly.
Refusal: any other op of `c10d` or `fsdp`, by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from functionalize._compat import load_fsdp_ops
from functionalize.core.barrier import BARRIER
from functionalize.core.ops import OpRecord, TensorRef, contiguous_geometry
from functionalize.core.rules.registry import rule
from functionalize.errors import UnsupportedOpError

if TYPE_CHECKING:
    from functionalize.core.discharge import Functionalizer

aten = torch.ops.aten
FUNCTIONAL = torch.ops._c10d_functional

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


def _unboxed(group: Any) -> Any:
    return group if isinstance(group, dist.ProcessGroup) else dist.ProcessGroup.unbox(group)


def name_of(group: Any) -> str:
    """The name by which functional collectives know a process group."""
    return str(_unboxed(group).group_name)


def ranks_of(group: Any) -> int:
    """How many ranks a process group has."""
    return int(_unboxed(group).size())


def reduction(boxed: Any) -> str:
    """What functional collectives call a reduce op."""
    op = boxed.op() if hasattr(boxed, "op") else boxed
    for known, name in _REDUCTIONS.items():
        if op == known:
            return name
    raise UnsupportedOpError(
        "multiplies and sums in one collective (PREMUL_SUM), which functional collectives do not have: "
        "set_force_sum_reduction_for_comms(True) makes FSDP2 multiply before and after"
        if op == dist.ReduceOp.PREMUL_SUM
        else f"reduces with {op}, which functional collectives do not have"
    )


def sent(engine: Functionalizer, ref: TensorRef) -> Any:
    """The value of a tensor that is sent; its bytes travel in the order of its indices."""
    if not ref.geometry.is_contiguous:
        raise UnsupportedOpError(
            f"sends a tensor that is not contiguous ({ref.geometry}), of which backends send the memory as "
            "it lies: call .contiguous() on it"
        )
    value = engine.read(ref)
    return value if ref.geometry.size else engine.emit.call(aten.view.default, value, [1])


def received(engine: Functionalizer, value: Any, have: tuple[int, ...], target: TensorRef) -> None:
    """Write a complete result of size `have` to `target`."""
    size = target.geometry.size
    if tuple(have) != tuple(size):
        value = engine.emit.call(aten.view.default, value, list(size))
    engine.put(target, value, contiguous_geometry(size, target.geometry.dtype))


def reduced(engine: Functionalizer, ref: TensorRef, collective: Callable[[Any], Any]) -> None:
    """Replace a tensor by what `collective` makes of it; its bytes travel in the order of memory."""
    g = ref.geometry
    order = sorted(range(len(g.size)), key=lambda dim: g.stride[dim], reverse=True)
    if not g.is_contiguous and not g.is_dense:
        raise UnsupportedOpError(
            f"communicates in place on a tensor with gaps ({g}): give it a contiguous one"
        )
    value = engine.read(ref)
    if not g.is_contiguous:
        value = engine.emit.call(aten.permute.default, value, order)
    value = wait(engine, collective(value))
    if not g.is_contiguous:
        value = engine.emit.call(
            aten.permute.default, value, [order.index(i) for i in range(len(order))]
        )
    engine.write(ref, value)


def wait(engine: Functionalizer, value: Any) -> Any:
    """The result of a collective, complete."""
    return engine.emit.call(FUNCTIONAL.wait_tensor.default, value)


def rows(size: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """The size of what all ranks' tensors of `size` make, one after the other."""
    return (size[0] * ranks, *size[1:]) if size else (ranks,)


def wait_tensor(engine: Functionalizer, record: OpRecord) -> Any:
    """Returns the tensor it was given, now complete; its fake kernel returns another one."""
    (target,) = record.args
    value = wait(engine, engine.read(target))
    engine.write(target, value)
    out = record.outputs
    born = type(out) is TensorRef and out.storage in record.meta.get("born", ())
    return value if born else None


def into_given(engine: Functionalizer, record: OpRecord) -> Any:
    """`all_gather_into_tensor_out`, `reduce_scatter_tensor_out`: they return `out`, complete or not."""
    name = record.target._schema.name.split("::")[1].removesuffix("_out")
    target, (given, *rest) = record.kwargs["out"], record.args
    functional = getattr(FUNCTIONAL, name).default
    value = wait(engine, engine.emit.call(functional, sent(engine, given), *rest))
    engine.put(target, value, contiguous_geometry(target.geometry.size, target.geometry.dtype))
    return value


def allgather_base_(engine: Functionalizer, record: OpRecord) -> Any:
    """`_allgather_base_(output, input, process_group, async_op, timeout) -> (Tensor, Work)`."""
    output, shard, group = record.args[:3]
    ranks = ranks_of(group)
    value = engine.emit.call(
        FUNCTIONAL.all_gather_into_tensor.default, sent(engine, shard), ranks, name_of(group)
    )
    received(engine, wait(engine, value), rows(shard.geometry.size, ranks), output)
    return [None, None]


def reduce_scatter_base_(engine: Functionalizer, record: OpRecord) -> Any:
    """`_reduce_scatter_base_(output, input, process_group, reduce_op, async_op, timeout)`."""
    output, whole, group, op = record.args[:4]
    g, ranks = whole.geometry, ranks_of(group)
    value = engine.emit.call(
        FUNCTIONAL.reduce_scatter_tensor.default,
        sent(engine, whole),
        reduction(op),
        ranks,
        name_of(group),
    )
    received(engine, wait(engine, value), (g.size[0] // ranks, *g.size[1:]), output)
    return [None, None]


def allreduce_(engine: Functionalizer, record: OpRecord) -> Any:
    """`allreduce_(tensors, process_group, reduce_op, ...) -> (Tensor[], Work)`."""
    tensors, group, op = record.args[:3]
    op, name = reduction(op), name_of(group)
    for t in tensors:
        reduced(engine, t, lambda v: engine.emit.call(FUNCTIONAL.all_reduce.default, v, op, name))
    return [None, None]


def broadcast_(engine: Functionalizer, record: OpRecord) -> Any:
    """`broadcast_(tensors, process_group, root_rank, root_tensor, ...)`; `root_rank` in the group."""
    tensors, group, root = record.args[:3]
    if len(tensors) != 1:
        raise UnsupportedOpError("broadcasts several tensors at once: broadcast them one by one")
    (target,) = tensors
    storage, g = engine.storage(target.storage), target.geometry
    if not storage.valid.spans and _unboxed(group).rank() != root:
        engine.write(
            target, engine.emit.empty(g, storage.device)
        )  # only the root's contents matter
    name = name_of(group)
    reduced(engine, target, lambda v: engine.emit.call(FUNCTIONAL.broadcast.default, v, root, name))
    return [None, None]


def alltoall_base_(engine: Functionalizer, record: OpRecord) -> Any:
    """`alltoall_base_(output, input, process_group, output_split_sizes, input_split_sizes, ...)`, in rows."""
    output, given, group, out_splits, in_splits = record.args[:5]
    ranks, value = ranks_of(group), sent(engine, given)
    have, want = given.geometry.size or (1,), output.geometry.size or (1,)
    if have[1:] != want[1:]:  # rows of two kinds: count elements
        value = engine.emit.call(aten.view.default, value, [given.geometry.numel])
        in_splits = [n * math.prod(have[1:]) for n in in_splits]
        out_splits = [n * math.prod(want[1:]) for n in out_splits]
        have, want = (given.geometry.numel,), (output.geometry.numel,)
    value = engine.emit.call(
        FUNCTIONAL.all_to_all_single.default,
        value,
        list(out_splits) or [want[0] // ranks] * ranks,
        list(in_splits) or [have[0] // ranks] * ranks,
        name_of(group),
    )
    received(engine, wait(engine, value), want, output)
    return None


def barrier(engine: Functionalizer, record: OpRecord) -> None:
    """`barrier(tensor, process_group, device_ids, ...)`; the tensor says which backend is meant."""
    engine.emit.call(BARRIER, name_of(record.args[1]), list(record.args[2]))


def all_gather_copy_in(engine: Functionalizer, record: OpRecord) -> Any:
    """`(inputs, output, split_sizes, numel, rank) -> (slice of output, output)`."""
    inputs, output = record.args[:2]
    shard = record.outputs[0]
    flat = []
    for ref in inputs:
        value = engine.read(ref)
        if len(ref.geometry.size) != 1:
            value = engine.emit.call(aten.view.default, value, [ref.geometry.numel])
        if ref.geometry.dtype != output.geometry.dtype:
            value = engine.emit.call(aten._to_copy.default, value, dtype=output.geometry.dtype)
        flat.append(value)
    engine.write(shard, engine.emit.call(aten.cat.default, flat))
    return [None, None]


def split_with_sizes_copy(engine: Functionalizer, record: OpRecord) -> None:
    """`(all_gather_output, sizes, dim=0, *, out)`."""
    whole, *rest = record.args
    parts = engine.emit.call(
        aten.split_with_sizes_copy.default,
        engine.read(whole),
        *rest,
        **{k: v for k, v in record.kwargs.items() if k != "out"},
    )
    for i, target in enumerate(record.kwargs["out"]):
        engine.write(target, _cast(engine, engine.part(parts, i), whole, target))


def chunk_cat(engine: Functionalizer, record: OpRecord) -> None:
    """`(tensors, dim, num_chunks, *, out)`; a pure copy, so the cast may come after it."""
    tensors, dim, chunks = record.args
    target = record.kwargs["out"]
    values = [engine.read(t) for t in tensors]
    value = engine.emit.call(aten._chunk_cat.default, values, dim, chunks)
    engine.write(target, _cast(engine, value, tensors[0], target))


def _cast(engine: Functionalizer, value: Any, source: TensorRef, target: TensorRef) -> Any:
    if source.geometry.dtype == target.geometry.dtype:
        return value
    return engine.emit.call(aten._to_copy.default, value, dtype=target.geometry.dtype)


_NO_COUNTERPART = {
    "gather_": "all_gather",
    "monitored_barrier_": "barrier",
    "recv_": "broadcast",
    "recv_any_source_": "broadcast",
    "reduce_": "all_reduce",
    "reduce_scatter_": "reduce_scatter_tensor",
    "allgather_coalesced_": "all_gather",
    "scatter_": "broadcast",
    "send": "broadcast",
}


def check_known_collective(target: Any) -> None:
    """Raise for an op of `c10d` or `fsdp` that has no rule: what it writes is not in its schema."""
    if target.namespace not in ("c10d", "fsdp"):
        return
    instead = _NO_COUNTERPART.get(target._schema.name.split("::")[1])
    if target.namespace == "c10d" and instead is not None:
        raise UnsupportedOpError(
            f"has no functional counterpart with the same messages: use dist.{instead}, or keep it out of "
            "the step"
        )
    raise UnsupportedOpError(
        "is a communication op without a rule: its schema does not tell what it writes"
    )


def point_to_point(engine: Functionalizer, record: OpRecord) -> Any:
    """`isend`, `irecv`, `batch_p2p_ops`: they write and return what they were given; no schema says so."""
    raise UnsupportedOpError(
        "sends to one rank or receives from it, which is not a value: use a collective, or keep it out of "
        "the step"
    )


def _register() -> None:
    """Register the rules whose ops exist in this build of torch."""
    load_fsdp_ops()
    rule(FUNCTIONAL.wait_tensor.default)(wait_tensor)
    for name in ("all_gather_into_tensor_out", "reduce_scatter_tensor_out"):
        rule(getattr(FUNCTIONAL, name).default)(into_given)
    for name in ("isend", "irecv", "batch_p2p_ops"):
        if hasattr(FUNCTIONAL, name):
            rule(getattr(FUNCTIONAL, name).default)(point_to_point)
    if dist.is_available():
        rule(torch.ops.c10d._allgather_base_.default)(allgather_base_)
        rule(torch.ops.c10d._reduce_scatter_base_.default)(reduce_scatter_base_)
        rule(torch.ops.c10d.allreduce_.default)(allreduce_)
        rule(torch.ops.c10d.broadcast_.default)(broadcast_)
        rule(torch.ops.c10d.alltoall_base_.default)(alltoall_base_)
        rule(torch.ops.c10d.barrier.default)(barrier)
    if hasattr(torch.ops.fsdp, "all_gather_copy_in"):
        rule(torch.ops.fsdp.all_gather_copy_in.default)(all_gather_copy_in)
        rule(torch.ops.fsdp.split_with_sizes_copy.default)(split_with_sizes_copy)
        rule(torch.ops.fsdp.chunk_cat.default)(chunk_cat)


_register()
