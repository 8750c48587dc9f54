"""Ops that overwrite a tensor without reading it: `copy_`, `fill_`, `zero_`, their foreach forms, and `clone`.

    a.copy_(b)   ->  a' = aten.clone(b)                   (expanded and cast to the size and dtype of `a`)
    a.zero_()    ->  a' = aten.full(size, 0)

Invariant: the old contents are never read, not even for their shape: `a` may be an empty input.
The clone gives every base memory of its own; `elide_copies` removes it where that is not needed.
"""

from __future__ import annotations

from typing import Any

import torch

from functionalize.discharge.byte_ranges import undefined_text
from functionalize.discharge.rules.registry import Engine, rule
from functionalize.ir.ops import Geometry, OpRecord, TensorRef, contiguous_geometry

aten = torch.ops.aten


def copy_into(engine: Engine, target: TensorRef, source: Any) -> None:
    """Write the contents of `source` (a tensor) to `target`, broadcast and cast."""
    engine.storage(target.storage).check_writable(target.geometry)
    value, have, want = engine.read(source), source.geometry, target.geometry
    device = engine.device_of(target)
    kind: dict[str, Any] = {}
    if have.dtype != want.dtype:
        kind["dtype"] = want.dtype
    if engine.device_of(source) != device:
        kind["device"] = device
    if have.size != want.size:
        value = engine.emit.call(aten.expand.default, value, list(want.size))
    if kind:
        value = engine.emit.call(aten._to_copy.default, value, **kind)
    if _scattered(engine, target, value):
        return
    same_layout = have.size == want.size and (
        have.stride == want.stride or (have.is_contiguous and want.is_contiguous)
    )
    if not (kind and same_layout and have.is_dense):
        value = engine.laid_out(value, target)
    engine.write(target, value)


def fill_with(engine: Engine, target: TensorRef, number: Any) -> None:
    """Write one number (or zero-dimensional tensor) to every element of `target`."""
    engine.storage(target.storage).check_writable(target.geometry)
    want, device = target.geometry, engine.device_of(target)
    if engine.storage(target.storage).scatters(want):
        want = contiguous_geometry(want.size, want.dtype)
    if type(number) is TensorRef:
        how = aten.fill.Tensor if want.is_dense else aten.copy.default  # `fill` leaves no gaps
        value = engine.emit.call(how, engine.emit.empty(want, device), engine.read(number))
    else:
        value = filled(engine, want, device, number)
    if not _scattered(engine, target, value):
        engine.write(target, value)


def _scattered(engine: Engine, target: TensorRef, value: Any) -> bool:
    """Write `value`, of any strides, if `target` has gaps and a write of it is a scatter; returns whether it did."""
    storage, want = engine.storage(target.storage), target.geometry
    if want.is_contiguous or not storage.scatters(want):
        return False
    storage.write(want, value, engine.emit, exact=False)
    return True


def filled(engine: Engine, want: Geometry, device: torch.device, number: Any) -> Any:
    """A new value of geometry `want`, every element of which is `number`."""
    if want.is_contiguous:
        return engine.emit.call(
            aten.full.default, list(want.size), number, dtype=want.dtype, device=device
        )
    empty = engine.emit.empty(want, device)
    if want.is_dense:
        return engine.emit.call(aten.fill.Scalar, empty, number)
    one = engine.emit.call(aten.full.default, [], number, dtype=want.dtype, device=device)
    return engine.emit.call(aten.copy.default, empty, one)


@rule(aten.copy_.default)
def copy_(engine: Engine, record: OpRecord) -> None:
    """`copy_(Tensor(a!) self, Tensor src, bool non_blocking=False)`."""
    copy_into(engine, record.args[0], record.args[1])


@rule(aten._foreach_copy_.default)
def foreach_copy_(engine: Engine, record: OpRecord) -> None:
    """`_foreach_copy_(Tensor(a!)[] self, Tensor[] src, bool non_blocking=False)`."""
    for target, source in zip(record.args[0], record.args[1], strict=True):
        copy_into(engine, target, source)


@rule(aten.clone.default)
def clone(engine: Engine, record: OpRecord) -> Any:
    """`clone(Tensor self, *, memory_format=None)`.

    Note [Lazy bits are resolved before a write]
    torch has no kernels that write a tensor with a conjugate or negative bit. `torch.conj(a).zero_()` is dispatched as
    `b = clone(conj(a)); b.zero_(); conj(a).copy_(b)`: the clone copies bytes that the user does not read, and that may
    be undefined. So a copy of undefined bytes with such a bit is no error: it is undefined as a whole, and a read of it
    before a write is refused.
    """
    (source, *_), out = record.args, record.outputs
    g = source.geometry
    if (g.conj or g.neg) and type(out) is TensorRef:
        storage = engine.storage(source.storage)
        if g.end <= storage.nbytes and not storage.valid.covers_view(g):
            why = storage.copied or undefined_text(storage.name, g, storage.nbytes)
            engine.declare_undefined(record, out, why)
            return None
    return engine.pure(record)


@rule(aten.fill_.Scalar, aten.fill_.Tensor)
def fill_(engine: Engine, record: OpRecord) -> None:
    """`fill_(Tensor(a!) self, value)`."""
    fill_with(engine, record.args[0], record.args[1])


@rule(aten.zero_.default)
def zero_(engine: Engine, record: OpRecord) -> None:
    """`zero_(Tensor(a!) self)`."""
    fill_with(engine, record.args[0], 0)


@rule(aten.fill_diagonal_.default)
def fill_diagonal_(engine: Engine, record: OpRecord) -> None:
    """`fill_diagonal_(Tensor(a!) self, Scalar fill_value, bool wrap=False)`: of all dimensions at once."""
    target, number, *wrap = record.args
    g: Geometry = target.geometry
    height, width = g.size[:2]
    step, length = sum(g.stride), min(height, width)

    def fill(length: int, offset: int) -> None:
        diagonal = g._replace(size=(length,), stride=(step,), offset=offset)
        fill_with(engine, TensorRef(target.storage, diagonal), number)

    fill(length, g.offset)
    if wrap and wrap[0] and len(g.size) == 2 and height > width + 1:
        fill(-(-g.numel // (width + 1)) - length, g.offset + g.stride[0] * (width + 1))


@rule(aten._foreach_zero_.default)
def foreach_zero_(engine: Engine, record: OpRecord) -> None:
    """`_foreach_zero_(Tensor(a!)[] self)`."""
    for target in record.args[0]:
        fill_with(engine, target, 0)
