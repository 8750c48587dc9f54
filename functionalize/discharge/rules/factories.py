"""Ops that take a tensor for its shape alone: `zeros_like`, `new_empty`, `rand_like`, ...

    b = torch.zeros_like(a)      ->  b = aten.full(size, 0)
    b = torch.empty_like(a.t())  ->  b = aten.empty_strided(size, stride)

Invariant: the contents of the argument are not read: its storage may be empty, or grown and never written, as in
eager. Random ops draw the same numbers into the same layout.
"""

from __future__ import annotations

from typing import Any

import torch

from functionalize.discharge.layout import output_geometry
from functionalize.discharge.rules.copies import filled
from functionalize.discharge.rules.registry import Engine, rule
from functionalize.ir.ops import Geometry, OpRecord, TensorRef

aten = torch.ops.aten

_EMPTY = (aten.empty_like.default, aten.new_empty.default, aten.new_empty_strided.default)
_FILLED: dict[Any, int | None] = {  # the value of every element; None: the op's last argument
    aten.zeros_like.default: 0,
    aten.ones_like.default: 1,
    aten.full_like.default: None,
    aten.new_zeros.default: 0,
    aten.new_ones.default: 1,
    aten.new_full.default: None,
}
_RANDOM: dict[Any, Any] = {  # the op that draws the same numbers from a size; None: there is none
    aten.rand_like.default: aten.rand.default,
    aten.randn_like.default: aten.randn.default,
    aten.randint_like.default: None,
    aten.randint_like.low_dtype: None,
}
SHAPE_ONLY = frozenset({*_EMPTY, *_FILLED, *_RANDOM})


def _made(engine: Engine, record: OpRecord) -> tuple[Geometry, torch.device]:
    """The geometry and device of the output, from the record if the op has run, else from its meta kernel."""
    out, like = record.outputs, record.args[0]
    if type(out) is not TensorRef:
        geometry = output_geometry(record.target, record.args, record.kwargs)
        device = record.kwargs.get("device")
        return geometry, torch.device(device) if device else engine.device_of(like)
    born = record.meta.get("born", {}).get(out.storage)
    return out.geometry, born[1] if born else engine.device_of(like)


@rule(*_EMPTY)
def empty(engine: Engine, record: OpRecord) -> Any:
    """`empty_like(Tensor self, *, ...)`, `new_empty(Tensor self, SymInt[] size, *, ...)`."""
    if record.kwargs.get("pin_memory"):
        return engine.pure(record)
    return engine.emit.empty(*_made(engine, record))


@rule(*_FILLED)
def full(engine: Engine, record: OpRecord) -> Any:
    """`full_like(Tensor self, Scalar fill_value, *, ...)`, and `zeros_like` and others with a fixed value."""
    if record.kwargs.get("pin_memory"):
        return engine.pure(record)
    number = _FILLED[record.target]
    return filled(engine, *_made(engine, record), record.args[-1] if number is None else number)


@rule(*_RANDOM)
def random(engine: Engine, record: OpRecord) -> Any:
    """`rand_like(Tensor self, *, ...)`; a layout that is not row-major is filled in the order of its memory."""
    geometry, device = _made(engine, record)
    from_size = _RANDOM[record.target]
    if from_size is not None and geometry.is_contiguous and not record.kwargs.get("pin_memory"):
        return engine.emit.call(from_size, list(geometry.size), dtype=geometry.dtype, device=device)
    like = record.args[0]
    empty_like = engine.emit.empty(like.geometry, engine.device_of(like))
    return engine.emit.call(record.target, empty_like, *record.args[1:], **record.kwargs)
