"""Collectives, in their c10d, functional and FSDP2 spellings, as `_c10d_functional` nodes.

    c10d._allgather_base_(out, in, pg)   ->  all_gather_into_tensor(in, world, "pg"); wait_tensor
    fsdp.all_gather_copy_in(...)         ->  cat of the flattened shards
    fsdp.split_with_sizes_copy(out=)     ->  aten.split_with_sizes_copy
    fsdp.chunk_cat(out=)                 ->  aten._chunk_cat, cast to the dtype of `out`

Their schemas do not tell what they write or alias, so each has a rule here.
Refusal: any other op of `c10d` or `fsdp`, by name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from functionalize._compat import load_fsdp_ops
from functionalize.core.ops import OpRecord, TensorRef
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
}


def _group_name(boxed: Any) -> str:
    group = boxed if isinstance(boxed, dist.ProcessGroup) else dist.ProcessGroup.unbox(boxed)
    return str(group.group_name)


def _reduction(boxed: Any) -> str:
    op = boxed.op() if hasattr(boxed, "op") else boxed
    for known, name in _REDUCTIONS.items():
        if op == known:
            return name
    raise UnsupportedOpError(f"reduces with {op}, which functional collectives do not have")


def _written(engine: Functionalizer, value: Any, have: tuple[int, ...], target: TensorRef) -> None:
    """Wait for a collective's result of size `have` and write it to `target`."""
    value = engine.emit.call(FUNCTIONAL.wait_tensor.default, value)
    if tuple(have) != tuple(target.geometry.size):
        value = engine.emit.call(aten.view.default, value, list(target.geometry.size))
    engine.write(target, value)


def wait_tensor(engine: Functionalizer, record: OpRecord) -> None:
    """Returns the tensor it was given, now complete."""
    (target,) = record.args
    value = engine.emit.call(record.target, engine.read(target))
    engine.write(target, value)


def allgather_base_(engine: Functionalizer, record: OpRecord) -> Any:
    """`_allgather_base_(output, input, process_group, async_op, timeout) -> (Tensor, Work)`."""
    output, shard, group = record.args[:3]
    g, world = shard.geometry, output.geometry.numel // max(shard.geometry.numel, 1)
    value = engine.emit.call(
        FUNCTIONAL.all_gather_into_tensor.default,
        engine.read(shard),
        world,
        _group_name(group),
    )
    _written(engine, value, (g.size[0] * world, *g.size[1:]), output)
    return [None, None]


def reduce_scatter_base_(engine: Functionalizer, record: OpRecord) -> Any:
    """`_reduce_scatter_base_(output, input, process_group, reduce_op, async_op, timeout)`."""
    output, whole, group, op = record.args[:4]
    g, world = whole.geometry, whole.geometry.numel // max(output.geometry.numel, 1)
    value = engine.emit.call(
        FUNCTIONAL.reduce_scatter_tensor.default,
        engine.read(whole),
        _reduction(op),
        world,
        _group_name(group),
    )
    _written(engine, value, (g.size[0] // world, *g.size[1:]), output)
    return [None, None]


def allreduce_(engine: Functionalizer, record: OpRecord) -> Any:
    """`allreduce_(tensors, process_group, reduce_op, ...) -> (Tensor[], Work)`."""
    tensors, group, op = record.args[:3]
    for t in tensors:
        value = engine.emit.call(
            FUNCTIONAL.all_reduce.default,
            engine.read(t),
            _reduction(op),
            _group_name(group),
        )
        _written(engine, value, t.geometry.size, t)
    return [None, None]


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


def check_known_collective(target: Any) -> None:
    """Raise for an op of `c10d` or `fsdp` that has no rule: what it writes is not in its schema."""
    if target.namespace in ("c10d", "fsdp"):
        raise UnsupportedOpError(
            "is a communication op without a rule: its schema does not tell what it writes"
        )


def _register() -> None:
    """Register the rules whose ops exist in this build of torch."""
    load_fsdp_ops()
    rule(FUNCTIONAL.wait_tensor.default)(wait_tensor)
    if dist.is_available():
        rule(torch.ops.c10d._allgather_base_.default)(allgather_base_)
        rule(torch.ops.c10d._reduce_scatter_base_.default)(reduce_scatter_base_)
        rule(torch.ops.c10d.allreduce_.default)(allreduce_)
    if hasattr(torch.ops.fsdp, "all_gather_copy_in"):
        rule(torch.ops.fsdp.all_gather_copy_in.default)(all_gather_copy_in)
        rule(torch.ops.fsdp.split_with_sizes_copy.default)(split_with_sizes_copy)
        rule(torch.ops.fsdp.chunk_cat.default)(chunk_cat)


_register()
