"""Collectives that take lists of tensors, as their `_c10d_functional` counterparts.

    c10d.allgather_([[a, b]], [x], pg)     ->  all_gather_into_tensor(x, 2, "pg"); wait_tensor; select
    c10d.alltoall_([a, b], [x, y], pg)     ->  cat; all_to_all_single; wait_tensor; split_with_sizes
    c10d.allreduce_coalesced_([a, b], pg)  ->  all_reduce_coalesced([a, b], "sum", "pg"); wait_tensor

torch's coalescing manager turns several collectives into one of the last kind.
Refusal: `all_gather` of tensors that differ in size or type, which each backend splits up in its own way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from functionalize.discharge.rules.collectives import (
    FUNCTIONAL,
    received,
    rows,
    sent,
    wait,
)
from functionalize.discharge.rules.registry import Engine, rule
from functionalize.errors import UnsupportedOpError
from functionalize.ir.ops import OpRecord, TensorRef
from functionalize.util.process_groups import group_name, ranks_of, reduction

aten = torch.ops.aten


def allgather_(engine: Engine, record: OpRecord) -> Any:
    """`allgather_(Tensor[][] outputs, Tensor[] inputs, process_group, ...) -> (Tensor[][], Work)`."""
    lists, inputs, group = record.args[:3]
    ranks = ranks_of(group)
    for outputs, shard in zip(lists, inputs, strict=True):
        g = shard.geometry
        if any((t.geometry.size, t.geometry.dtype) != (g.size, g.dtype) for t in outputs):
            raise UnsupportedOpError(
                "gathers tensors that differ in size or type from rank to rank, which no functional "
                "collective does: pad them to one size"
            )
        value = engine.emit.call(
            FUNCTIONAL.all_gather_into_tensor.default, sent(engine, shard), ranks, group_name(group)
        )
        whole = wait(engine, value)
        if rows(g.size, ranks) != (ranks, *g.size):
            whole = engine.emit.call(aten.view.default, whole, [ranks, *g.size])
        for i, target in enumerate(outputs):
            received(engine, engine.emit.call(aten.select.int, whole, 0, i), g.size, target)
    return [None, None]


def alltoall_(engine: Engine, record: OpRecord) -> Any:
    """`alltoall_(Tensor[] outputs, Tensor[] inputs, process_group, ...) -> (Tensor[], Work)`."""
    outputs, inputs, group = record.args[:3]
    flat = [
        engine.emit.call(aten.view.default, sent(engine, t), [t.geometry.numel]) for t in inputs
    ]
    sizes = [t.geometry.numel for t in outputs]
    value = engine.emit.call(
        FUNCTIONAL.all_to_all_single.default,
        engine.emit.call(aten.cat.default, flat),
        sizes,
        [t.geometry.numel for t in inputs],
        group_name(group),
    )
    parts = engine.emit.call(aten.split_with_sizes.default, wait(engine, value), sizes)
    for i, target in enumerate(outputs):
        received(engine, engine.part(parts, i), (sizes[i],), target)
    return [None, None]


def allgather_into_tensor_coalesced_(engine: Engine, record: OpRecord) -> None:
    """`(Tensor[] outputs, Tensor[] inputs, process_group, ...) -> Work`."""
    outputs, inputs, group = record.args[:3]
    ranks = ranks_of(group)
    values = engine.emit.call(
        FUNCTIONAL.all_gather_into_tensor_coalesced.default,
        [sent(engine, t) for t in inputs],
        ranks,
        group_name(group),
    )
    _received_all(engine, values, [rows(t.geometry.size, ranks) for t in inputs], outputs)


def reduce_scatter_tensor_coalesced_(engine: Engine, record: OpRecord) -> None:
    """`(Tensor[] outputs, Tensor[] inputs, process_group, reduce_op, ...) -> Work`."""
    outputs, inputs, group, op = record.args[:4]
    ranks = ranks_of(group)
    values = engine.emit.call(
        FUNCTIONAL.reduce_scatter_tensor_coalesced.default,
        [sent(engine, t) for t in inputs],
        reduction(op),
        ranks,
        group_name(group),
    )
    have = [(t.geometry.size[0] // ranks, *t.geometry.size[1:]) for t in inputs]
    _received_all(engine, values, have, outputs)


def allreduce_coalesced_(engine: Engine, record: OpRecord) -> None:
    """`(Tensor[] tensors, process_group, reduce_op, ...) -> Work`."""
    tensors, group, op = record.args[:3]
    values = engine.emit.call(
        FUNCTIONAL.all_reduce_coalesced.default,
        [sent(engine, t) for t in tensors],
        reduction(op),
        group_name(group),
    )
    have = [t.geometry.size or (1,) for t in tensors]
    _received_all(engine, values, have, tensors)


def _received_all(
    engine: Engine,
    values: Any,
    have: Sequence[tuple[int, ...]],
    targets: Sequence[TensorRef],
) -> None:
    complete = [wait(engine, engine.part(values, i)) for i in range(len(targets))]
    for value, size, target in zip(complete, have, targets, strict=True):
        received(engine, value, size, target)


def _register() -> None:
    """Register the rules whose ops exist in this build of torch."""
    if not dist.is_available():
        return
    c10d = torch.ops.c10d
    rule(c10d.allgather_.default)(allgather_)
    rule(c10d.alltoall_.default)(alltoall_)
    rule(c10d.allgather_into_tensor_coalesced_.default)(allgather_into_tensor_coalesced_)
    rule(c10d.reduce_scatter_tensor_coalesced_.default)(reduce_scatter_tensor_coalesced_)
    rule(c10d.allreduce_coalesced_.default)(allreduce_coalesced_)


_register()
