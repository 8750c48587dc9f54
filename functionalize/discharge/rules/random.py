"""Random ops that overwrite their tensor: `uniform_`, `normal_`, `random_`, `bernoulli_`, ...

    a.uniform_(0, 1)                  ->  a' = aten.uniform(aten.empty_strided(...), 0, 1)
    torch.normal(mean, std, out=a)    ->  a' = aten.normal_functional(aten.empty_strided(...)) * std + mean

Invariant: the same numbers are drawn from the generator into the same elements. Eager fills a tensor in the
order of its memory, so a tensor that is not row-major is drawn with its dimensions in that order.
Out-of-place random ops (`rand`, `native_dropout`) need no rule. A dead random node is kept in the program:
replay consumes the generator exactly as eager does.
Refusals: `normal_` of a tensor with gaps on the CPU; a `generator=` argument (see `emitters.py`).
"""

from __future__ import annotations

from typing import Any

import torch

from functionalize.discharge.rules.mutations import functional_form
from functionalize.discharge.rules.registry import Engine, rule
from functionalize.errors import UnsupportedOpError
from functionalize.ir.ops import Geometry, OpRecord, TensorRef, contiguous_geometry, map_refs

aten = torch.ops.aten


def _memory_order(g: Geometry) -> list[int]:
    """The dimensions, from the largest stride to the smallest."""
    return sorted(range(len(g.size)), key=lambda d: -g.stride[d])


def _permuted(engine: Engine, value: Any, order: list[int]) -> Any:
    if order == sorted(order):
        return value
    return engine.emit.call(aten.permute.default, value, order)


@rule(
    aten.uniform_.default,
    aten.random_.default,
    aten.random_.to,
    getattr(aten.random_, "from"),
    aten.bernoulli_.float,
    aten.bernoulli_.Tensor,
    aten.cauchy_.default,
    aten.exponential_.default,
    aten.geometric_.default,
    aten.log_normal_.default,
)
def overwrite_with_random(engine: Engine, record: OpRecord) -> None:
    """`op_(Tensor(a!) self, ..., Generator? generator=None)`; the old contents of `self` are not read."""
    target = record.args[0]
    want: Geometry = target.geometry
    engine.storage(target.storage).check_writable(want)
    form = functional_form(record.target)
    order = list(range(len(want.size))) if want.is_contiguous else _memory_order(want)

    def ordered(ref: TensorRef) -> Any:
        value = engine.read(ref)
        if order != sorted(order) and ref.geometry.size != want.size:
            value = engine.emit.call(aten.expand.default, value, list(want.size))
        return _permuted(engine, value, order)

    size = tuple(want.size[d] for d in order)
    empty = engine.emit.empty(contiguous_geometry(size, want.dtype), engine.device_of(target))
    rest = map_refs(ordered, form.complete(record.args)[1:])
    value = engine.emit.call(form.target, empty, *rest, **record.kwargs)
    value = _permuted(engine, value, [order.index(d) for d in range(len(order))])
    engine.write(target, value if want.is_dense else engine.laid_out(value, target))


@rule(aten.normal_.default)
def normal_(engine: Engine, record: OpRecord) -> None:
    """`normal_(Tensor(a!) self, float mean=0, float std=1, *, Generator? generator=None)`."""
    target = record.args[0]
    mean = record.args[1] if len(record.args) > 1 else 0.0
    std = record.args[2] if len(record.args) > 2 else 1.0
    value = _normal(engine, target, mean, std, record.kwargs)
    engine.write(target, value if target.geometry.is_dense else engine.laid_out(value, target))


def _normal(engine: Engine, target: TensorRef, mean: Any, std: Any, kwargs: dict[str, Any]) -> Any:
    """Normally distributed numbers in a dense layout.

    On a CPU, 16 or more numbers are drawn by another algorithm into a contiguous tensor than into one with gaps.
    """
    want: Geometry = target.geometry
    engine.storage(target.storage).check_writable(want)
    device, order = engine.device_of(target), _memory_order(want)
    if not want.is_dense and device.type == "cpu" and want.numel >= 16 and order == sorted(order):
        raise UnsupportedOpError(
            f"draws into {want}, a tensor with gaps, as no functional op does: draw into a contiguous "
            "tensor, then copy_()"
        )
    dense = want
    if not want.is_dense:
        packed = contiguous_geometry(tuple(want.size[d] for d in order), want.dtype)
        stride = tuple(packed.stride[order.index(d)] for d in range(len(order)))
        dense = packed._replace(size=want.size, stride=stride)
    empty = engine.emit.empty(dense, device)
    return engine.emit.call(aten.normal_functional.default, empty, mean, std, **kwargs)


@rule(
    aten.normal.float_float_out,
    aten.normal.Tensor_float_out,
    aten.normal.float_Tensor_out,
    aten.normal.Tensor_Tensor_out,
)
def normal_out(engine: Engine, record: OpRecord) -> Any:
    """`normal(mean, std, [size], *, generator=None, out)` draws into the layout and type of `out`."""
    call, out = engine.emit.call, record.kwargs["out"]
    kwargs = {k: v for k, v in record.kwargs.items() if k == "generator"}
    mean, std = (*record.args, 1.0)[:2]
    tensor_mean, tensor_std = type(mean) is TensorRef, type(std) is TensorRef
    scale = 1.0 if tensor_std else std
    value = _normal(engine, out, 0.0 if tensor_mean or tensor_std else mean, scale, kwargs)

    def rounded(value: Any, other: TensorRef) -> Any:
        dtype = out.geometry.dtype
        if torch.promote_types(other.geometry.dtype, dtype) == dtype:
            return value
        return call(aten._to_copy.default, value, dtype=dtype)

    if tensor_std:
        value = rounded(call(aten.mul.Tensor, value, engine.read(std)), std)
    if tensor_mean:
        value = rounded(call(aten.add.Tensor, value, engine.read(mean)), mean)
    elif tensor_std:
        value = call(aten.add.Tensor, value, mean)
    fits = out.geometry.is_dense and not tensor_std and not tensor_mean
    engine.write(out, value if fits else engine.laid_out(value, out))
    return None
