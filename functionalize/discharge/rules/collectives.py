"""Collectives, in their c10d, functional and FSDP2 spellings, as `_c10d_functional` nodes.

    c10d._allgather_base_(out, in, pg)   ->  all_gather_into_tensor(in, world, "pg"); wait_tensor
    c10d.allgather_([[a, b]], [x], pg)   ->  all_gather_into_tensor(x, 2, "pg"); wait_tensor; select
    c10d.alltoall_([a, b], [x, y], pg)   ->  cat; all_to_all_single; wait_tensor; split_with_sizes
    c10d.send([x], pg, dst, tag)         ->  send_message(x, dst, tag, "pg"); wait_tensor where eager waits
    c10d.recv_([y], pg, src, tag)        ->  receive_message(..., src, tag, "pg"); wait_tensor
    c10d.allreduce_coalesced_(list, pg)  ->  all_reduce_coalesced(list, "sum", "pg"); wait_tensor
    fsdp.all_gather_copy_in(...)         ->  cat of the flattened shards
    fsdp.split_with_sizes_copy(out=)     ->  aten.split_with_sizes_copy
    fsdp.chunk_cat(out=)                 ->  aten._chunk_cat, cast to the dtype of `out`
    fsdp.chunk_cat_mixed_dtype(out=)     ->  the same; tensors of several dtypes are cast before
    fsdp.record_grad_output_stream       ->  nothing: it orders a free after a read, and values are not freed

Their schemas do not say what they write or alias, so each has a rule here. A rank sends the same messages as in eager,
so replaying and eager ranks work together. torch's coalescing manager turns several collectives into one of a list.
Refusals: any other op of `c10d`, `fsdp` or `_c10d_functional`, by name; an `all_gather` of a list of tensors that
differ in size or type, which each backend splits up in its own way. `unlisted_ops` finds the ops of the installed torch
that are not named in this file.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx

from functionalize._compat.dispatch import all_op_names
from functionalize._compat.fsdp import load_fsdp_ops
from functionalize.discharge.rules.registry import BY_NAME, Engine, rule_of
from functionalize.errors import UnsupportedOpError
from functionalize.ir.barrier import BARRIER
from functionalize.ir.ops import OpRecord, TensorRef, contiguous_geometry
from functionalize.ir.point_to_point import RECEIVE, SEND
from functionalize.util.process_groups import (
    PREMUL_ALL_REDUCE,
    PREMUL_REDUCE_SCATTER,
    PremulSum,
    group_name,
    ranks_of,
    reduction,
    unboxed,
)

aten = torch.ops.aten
_FUNCTIONAL = torch.ops._c10d_functional


def _sent(engine: Engine, ref: TensorRef) -> Any:
    """The value of a tensor that is sent; refuses one that is not contiguous."""
    if not ref.geometry.is_contiguous:
        raise UnsupportedOpError(
            f"sends a tensor that is not contiguous ({ref.geometry}), of which backends send the memory as "
            "it lies: call .contiguous() on it"
        )
    value = engine.read(ref)
    return value if ref.geometry.size else engine.emit.call(aten.view.default, value, [1])


def _received(engine: Engine, value: Any, have: tuple[int, ...], target: TensorRef) -> None:
    """Write a complete result of size `have` to `target`."""
    size = target.geometry.size
    if tuple(have) != tuple(size):
        value = engine.emit.call(aten.view.default, value, list(size))
    engine.put(target, value, contiguous_geometry(size, target.geometry.dtype))


def _reduced(engine: Engine, ref: TensorRef, collective: Callable[[Any], Any]) -> None:
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
    value = _wait(engine, collective(value))
    if not g.is_contiguous:
        value = engine.emit.call(
            aten.permute.default, value, [order.index(i) for i in range(len(order))]
        )
    engine.write(ref, value)


def _wait(engine: Engine, value: Any) -> Any:
    """The result of a collective, complete."""
    return engine.emit.call(_FUNCTIONAL.wait_tensor.default, value)


def _rows(size: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """The size of the concatenation of all ranks' tensors of `size`."""
    return (size[0] * ranks, *size[1:]) if size else (ranks,)


def wait_tensor(engine: Engine, record: OpRecord) -> Any:
    """Returns its argument, now complete; its fake kernel returns a new tensor, to which the value is then bound."""
    (target,) = record.args
    _complete(engine, target)
    out = record.outputs
    born = type(out) is TensorRef and out.storage in record.meta.get("born", ())
    return engine.read(target) if born else None


def wait_tensors(engine: Engine, record: OpRecord) -> Any:
    """`wait_tensors(Tensor[] tensors) -> Tensor[]`: `wait_tensor` of each (torch 2.15)."""
    for target in record.args[0]:
        _complete(engine, target)
    return [None] * len(record.args[0])


def _complete(engine: Engine, target: TensorRef) -> None:
    """Wait for a tensor; for the whole result if it is a view of one (`AsyncCollectiveTensor.view` does not wait)."""
    storage = engine.storage(target.storage)
    if _is_started(storage.base):
        target = TensorRef(target.storage, storage.root)
    engine.write(target, _wait(engine, engine.read(target)))


def _is_started(value: Any) -> bool:
    """Whether a value is a node that starts a collective, or a part of its results."""
    while isinstance(value, fx.Node) and value.target is operator.getitem:
        value = value.args[0]
    if not isinstance(value, fx.Node) or value.target is _FUNCTIONAL.wait_tensor.default:
        return False
    return getattr(value.target, "namespace", "") == "_c10d_functional"


def collective_into_out(engine: Engine, record: OpRecord) -> Any:
    """`all_gather_into_tensor_out`, `reduce_scatter_tensor_out`: they return `out`, complete or not."""
    name = record.target._schema.name.split("::")[1].removesuffix("_out")
    target, (source, *rest) = record.kwargs["out"], record.args
    functional = getattr(_FUNCTIONAL, name).default
    value = _wait(engine, engine.emit.call(functional, _sent(engine, source), *rest))
    engine.put(target, value, contiguous_geometry(target.geometry.size, target.geometry.dtype))
    return value


def allgather_base_(engine: Engine, record: OpRecord) -> Any:
    """`_allgather_base_(output, input, process_group, async_op, timeout) -> (Tensor, Work)`."""
    output, shard, group = record.args[:3]
    ranks = ranks_of(group)
    value = engine.emit.call(
        _FUNCTIONAL.all_gather_into_tensor.default, _sent(engine, shard), ranks, group_name(group)
    )
    _received(engine, _wait(engine, value), _rows(shard.geometry.size, ranks), output)
    return [None, None]


def reduce_scatter_base_(engine: Engine, record: OpRecord) -> Any:
    """`_reduce_scatter_base_(output, input, process_group, reduce_op, async_op, timeout)`."""
    output, whole, group, op = record.args[:4]
    g, ranks, has_factor = whole.geometry, ranks_of(group), isinstance(op, PremulSum)
    value = engine.emit.call(
        PREMUL_REDUCE_SCATTER if has_factor else _FUNCTIONAL.reduce_scatter_tensor.default,
        _sent(engine, whole),
        op.factor if has_factor else reduction(op),
        ranks,
        group_name(group),
    )
    _received(engine, _wait(engine, value), (g.size[0] // ranks, *g.size[1:]), output)
    return [None, None]


def allreduce_(engine: Engine, record: OpRecord) -> Any:
    """`allreduce_(tensors, process_group, reduce_op, ...) -> (Tensor[], Work)`."""
    tensors, group, op = record.args[:3]
    has_factor, name = isinstance(op, PremulSum), group_name(group)
    target = PREMUL_ALL_REDUCE if has_factor else _FUNCTIONAL.all_reduce.default
    how = op.factor if has_factor else reduction(op)
    for t in tensors:
        _reduced(engine, t, lambda v: engine.emit.call(target, v, how, name))
    return [None, None]


def broadcast_(engine: Engine, record: OpRecord) -> Any:
    """`broadcast_(tensors, process_group, root_rank, root_tensor, ...)`; `root_rank` in the group."""
    tensors, group, root = record.args[:3]
    if len(tensors) != 1:
        raise UnsupportedOpError("broadcasts several tensors at once: broadcast them one by one")
    (target,) = tensors
    storage, g = engine.storage(target.storage), target.geometry
    if not storage.valid.spans and unboxed(group).rank() != root:
        # Only the root's contents are sent: on other ranks the tensor may be undefined.
        engine.write(target, engine.emit.empty(g, storage.device))
    name = group_name(group)
    _reduced(
        engine, target, lambda v: engine.emit.call(_FUNCTIONAL.broadcast.default, v, root, name)
    )
    return [None, None]


def alltoall_base_(engine: Engine, record: OpRecord) -> Any:
    """`alltoall_base_(output, input, process_group, output_split_sizes, input_split_sizes, ...)`, in rows."""
    output, source, group, out_splits, in_splits = record.args[:5]
    ranks, value = ranks_of(group), _sent(engine, source)
    have, want = source.geometry.size or (1,), output.geometry.size or (1,)
    if have[1:] != want[1:]:  # rows of different sizes: split by elements
        value = engine.emit.call(aten.view.default, value, [source.geometry.numel])
        in_splits = [n * math.prod(have[1:]) for n in in_splits]
        out_splits = [n * math.prod(want[1:]) for n in out_splits]
        have, want = (source.geometry.numel,), (output.geometry.numel,)
    value = engine.emit.call(
        _FUNCTIONAL.all_to_all_single.default,
        value,
        list(out_splits) or [want[0] // ranks] * ranks,
        list(in_splits) or [have[0] // ranks] * ranks,
        group_name(group),
    )
    _received(engine, _wait(engine, value), want, output)
    return None


def barrier(engine: Engine, record: OpRecord) -> None:
    """`barrier(tensor, process_group, device_ids, ...)`; the tensor only selects the backend."""
    engine.emit.call(BARRIER, group_name(record.args[1]), list(record.args[2]))


# -- lists of tensors ------------------------------------------------------------------------------


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
            _FUNCTIONAL.all_gather_into_tensor.default,
            _sent(engine, shard),
            ranks,
            group_name(group),
        )
        whole = _wait(engine, value)
        if _rows(g.size, ranks) != (ranks, *g.size):
            whole = engine.emit.call(aten.view.default, whole, [ranks, *g.size])
        for i, target in enumerate(outputs):
            _received(engine, engine.emit.call(aten.select.int, whole, 0, i), g.size, target)
    return [None, None]


def alltoall_(engine: Engine, record: OpRecord) -> Any:
    """`alltoall_(Tensor[] outputs, Tensor[] inputs, process_group, ...) -> (Tensor[], Work)`."""
    outputs, inputs, group = record.args[:3]
    flat = [
        engine.emit.call(aten.view.default, _sent(engine, t), [t.geometry.numel]) for t in inputs
    ]
    sizes = [t.geometry.numel for t in outputs]
    value = engine.emit.call(
        _FUNCTIONAL.all_to_all_single.default,
        engine.emit.call(aten.cat.default, flat),
        sizes,
        [t.geometry.numel for t in inputs],
        group_name(group),
    )
    parts = engine.emit.call(aten.split_with_sizes.default, _wait(engine, value), sizes)
    for i, target in enumerate(outputs):
        _received(engine, engine.part(parts, i), (sizes[i],), target)
    return [None, None]


def allgather_into_tensor_coalesced_(engine: Engine, record: OpRecord) -> None:
    """`(Tensor[] outputs, Tensor[] inputs, process_group, ...) -> Work`."""
    outputs, inputs, group = record.args[:3]
    ranks = ranks_of(group)
    values = engine.emit.call(
        _FUNCTIONAL.all_gather_into_tensor_coalesced.default,
        [_sent(engine, t) for t in inputs],
        ranks,
        group_name(group),
    )
    _received_all(engine, values, [_rows(t.geometry.size, ranks) for t in inputs], outputs)


def reduce_scatter_tensor_coalesced_(engine: Engine, record: OpRecord) -> None:
    """`(Tensor[] outputs, Tensor[] inputs, process_group, reduce_op, ...) -> Work`."""
    outputs, inputs, group, op = record.args[:4]
    ranks = ranks_of(group)
    values = engine.emit.call(
        _FUNCTIONAL.reduce_scatter_tensor_coalesced.default,
        [_sent(engine, t) for t in inputs],
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
        _FUNCTIONAL.all_reduce_coalesced.default,
        [_sent(engine, t) for t in tensors],
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
    complete = [_wait(engine, engine.part(values, i)) for i in range(len(targets))]
    for value, size, target in zip(complete, have, targets, strict=True):
        _received(engine, value, size, target)


# -- messages between two ranks --------------------------------------------------------------------


def send(engine: Engine, record: OpRecord) -> None:
    """`send(Tensor[] tensors, process_group, dst, tag) -> Work`; `dst` in the group. See `ir/point_to_point.py`."""
    (source,), group, dst, tag = record.args
    engine.sends.append(engine.emit.call(SEND, _sent(engine, source), dst, tag, group_name(group)))


def message_sent(engine: Engine, record: OpRecord) -> None:
    """Eager has waited for a send, by its number in the op stream."""
    (number,) = record.args
    token, engine.sends[number] = engine.sends[number], None
    if token is not None:
        _wait(engine, token)


def recv_(engine: Engine, record: OpRecord) -> None:
    """`recv_(Tensor[] tensors, process_group, src, tag) -> Work`; `src` in the group."""
    (target,), group, src, tag = record.args
    g, device = target.geometry, engine.device_of(target)
    value = engine.emit.call(RECEIVE, list(g.size), g.dtype, device, src, tag, group_name(group))
    _received(engine, _wait(engine, value), g.size, target)


def recv_any_source_(engine: Engine, record: OpRecord) -> None:
    """`recv_any_source_(Tensor[] tensors, process_group, tag) -> Work`."""
    raise UnsupportedOpError(
        "receives from whichever rank sends first, so that who sends is data: name the source (`dist.recv(x, src=...)`)"
    )


# -- FSDP2's ops -----------------------------------------------------------------------------------


def all_gather_copy_in(engine: Engine, record: OpRecord) -> Any:
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


def split_with_sizes_copy(engine: Engine, record: OpRecord) -> None:
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


def chunk_cat(engine: Engine, record: OpRecord) -> None:
    """`(tensors, dim, num_chunks, *, out)`; it only copies, so tensors of one dtype are cast together after it."""
    tensors, dim, chunks = record.args
    target = record.kwargs["out"]
    values, source = [engine.read(t) for t in tensors], tensors[0]
    if any(t.geometry.dtype != source.geometry.dtype for t in tensors):
        values = [_cast(engine, v, t, target) for v, t in zip(values, tensors, strict=True)]
        source = target
    value = engine.emit.call(aten._chunk_cat.default, values, dim, chunks)
    engine.write(target, _cast(engine, value, source, target))


def copy_(engine: Engine, record: OpRecord) -> None:
    """`fsdp::copy_(tensor, data)`, both of one size: FSDP2 calls it under a compiler."""
    target, source = record.args
    engine.write(target, _cast(engine, engine.read(source), source, target))


def record_grad_output_stream(engine: Engine, record: OpRecord) -> None:
    """`(buffer, stream_id, device_index, device_type)`: informs the CUDA allocator of a read; no value changes."""


def _cast(engine: Engine, value: Any, source: TensorRef, target: TensorRef) -> Any:
    if source.geometry.dtype == target.geometry.dtype:
        return value
    return engine.emit.call(aten._to_copy.default, value, dtype=target.geometry.dtype)


# -- what is refused -------------------------------------------------------------------------------


# Functional collectives without a rule: their schemas say all that they do.
_PURE = frozenset(
    {
        "_wrap_tensor_autograd",
        "all_gather_into_tensor",
        "all_gather_into_tensor_coalesced",
        "all_reduce",
        "all_reduce_",
        "all_reduce_coalesced",
        "all_reduce_coalesced_",
        "all_reduce_premul_sum",
        "all_to_all_single",
        "broadcast",
        "broadcast_",
        "reduce_scatter_tensor",
        "reduce_scatter_tensor_coalesced",
        "reduce_scatter_tensor_premul_sum",
        "receive_message",
        "send_message",
    }
)
_NAMESPACES = ("_c10d_functional", "c10d", "fsdp")
_NO_COUNTERPART = {
    "gather_": "all_gather",
    "gather_into_tensor_": "all_gather_into_tensor",
    "monitored_barrier_": "barrier",
    "reduce_": "all_reduce",
    "reduce_scatter_": "reduce_scatter_tensor",
    "allgather_coalesced_": "all_gather",
    "scatter_": "broadcast",
}


_NAN_CHECK = (
    "raises where a tensor holds NaN, by a kernel that a replay would run without an error to name: unset "
    "TORCH_NCCL_NAN_CHECK, or assert torch.isfinite(x).all() in the step"
)


@cache
def refusal_of_collective(target: Any) -> str | None:
    """Why a collective cannot be captured; None for those that can, and for ops of other namespaces."""
    namespace, name = target._schema.name.split("::")
    if namespace not in _NAMESPACES or rule_of(target) is not None:
        return None
    if namespace == "_c10d_functional" and name in _PURE:
        return None
    if namespace == "c10d" and name in _NO_COUNTERPART:
        return (
            "has no functional counterpart with the same messages: use "
            f"dist.{_NO_COUNTERPART[name]}, or keep it out of the step"
        )
    return _NAN_CHECK if name == "check_for_nan" else _NO_RULE


_NO_RULE = "is a communication op without a rule: its schema does not say what it writes"


def check_known_collective(target: Any) -> None:
    """Raise for an op that communicates and has no rule: its schema does not say what it writes."""
    refused = refusal_of_collective(target)
    if refused is not None:
        raise UnsupportedOpError(refused)


def unlisted_ops() -> Iterator[str]:
    """Ops of the installed torch that communicate, and have neither a rule nor a refusal with a reason of its own."""
    load_fsdp_ops()
    for full in all_op_names():
        namespace, _, rest = full.partition("::")
        if namespace not in _NAMESPACES:
            continue
        name, _, overload = rest.partition(".")
        packet = getattr(getattr(torch.ops, namespace), name)
        if refusal_of_collective(getattr(packet, overload or "default")) == _NO_RULE:
            yield f"{namespace}.{rest}"


def point_to_point(engine: Engine, record: OpRecord) -> Any:
    """`isend`, `irecv`, `batch_p2p_ops`: they write and return their arguments, which their schemas do not say."""
    raise UnsupportedOpError(
        "writes and returns an argument, which its schema does not say: use dist.isend, dist.irecv or "
        "dist.batch_isend_irecv"
    )


# By name: FSDP2's ops exist once it is imported, which takes long, and the others in builds with distributed.
BY_NAME |= {
    "_c10d_functional::wait_tensor": wait_tensor,
    "_c10d_functional::wait_tensors": wait_tensors,
    "_c10d_functional::all_gather_into_tensor_out": collective_into_out,
    "_c10d_functional::reduce_scatter_tensor_out": collective_into_out,
    "_c10d_functional::isend": point_to_point,
    "_c10d_functional::irecv": point_to_point,
    "_c10d_functional::batch_p2p_ops": point_to_point,
    "c10d::_allgather_base_": allgather_base_,
    "c10d::_reduce_scatter_base_": reduce_scatter_base_,
    "c10d::allgather_": allgather_,
    "c10d::allgather_into_tensor_coalesced_": allgather_into_tensor_coalesced_,
    "c10d::allreduce_": allreduce_,
    "c10d::allreduce_coalesced_": allreduce_coalesced_,
    "c10d::alltoall_": alltoall_,
    "c10d::alltoall_base_": alltoall_base_,
    "c10d::barrier": barrier,
    "c10d::broadcast_": broadcast_,
    "c10d::recv_": recv_,
    "c10d::recv_any_source_": recv_any_source_,
    "c10d::reduce_scatter_tensor_coalesced_": reduce_scatter_tensor_coalesced_,
    "c10d::send": send,
    "functionalize::message_sent": message_sent,
    "fsdp::all_gather_copy_in": all_gather_copy_in,
    "fsdp::chunk_cat": chunk_cat,
    "fsdp::chunk_cat_mixed_dtype": chunk_cat,
    "fsdp::copy_": copy_,
    "fsdp::record_grad_output_stream": record_grad_output_stream,
    "fsdp::split_with_sizes_copy": split_with_sizes_copy,
}
