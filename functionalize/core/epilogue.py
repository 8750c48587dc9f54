"""What each storage still owes the caller at exit, and how it is paid.

Per input storage (`w`: contents differ from entry):

    original  final      emit
    > 0       0          Resize(x, 0)            data written before is dropped
    0         > 0        Resize(x, n), Copy(x)
    0         0          nothing, whatever happened in between
    > 0       same       Copy(x) if w
    > 0       other > 0  Resize(x, n), Copy(x) if w

One resize per storage, however many inputs alias it. An input tensor that ends on another storage or with
another geometry (`set_`, `resize_`, `t_`) gets a `Set`, after the copies.
Invariant: actions run only after every guard has passed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from functionalize.core.ops import Geometry, contiguous_geometry, geometry_of
from functionalize.core.storage import Emitter, FunctionalStorage, Value


@dataclass(frozen=True, slots=True)
class Resize:
    """`resize_storage_bytes_(input, nbytes)`."""

    input: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Copy:
    """`copy_` of the graph's result at `slot` into the input's storage, seen as `geometry`."""

    input: int
    geometry: Geometry
    slot: int


@dataclass(frozen=True, slots=True)
class Set:
    """The input tensor becomes `geometry` of another input's storage, or of the result at `slot`."""

    input: int
    geometry: Geometry
    other: int | None
    slot: int | None


Action = Resize | Copy | Set


def owed(
    storage: FunctionalStorage, input: int, emit: Emitter, slot_of: Callable[[Value], int]
) -> list[Action]:
    """The actions of one input storage; `input`: an input on it, `slot_of`: returns a value from the graph."""
    actions: list[Action] = []
    if storage.nbytes != storage.original_nbytes:
        actions.append(Resize(input, storage.nbytes))
    if storage.nbytes and storage.written and storage.valid.spans:
        geometry = storage.root
        if geometry.end > storage.nbytes:
            itemsize = geometry.dtype.itemsize
            elements = (storage.nbytes - geometry.start) // itemsize
            geometry = contiguous_geometry((elements,), geometry.dtype, geometry.offset)
        elif not storage.valid.covers(geometry.start, geometry.end):
            elements = storage.valid.spans[0][1] // geometry.dtype.itemsize
            if storage.valid.spans[0][0] == 0 and len(storage.valid.spans) == 1:
                geometry = contiguous_geometry((elements,), geometry.dtype)
        value = storage.base if geometry == storage.root else storage.read(geometry, emit)
        actions.append(Copy(input, geometry, slot_of(value)))
    return actions


def window(tensor: Tensor, geometry: Geometry) -> Tensor:
    """`tensor`'s storage seen as `geometry`; `tensor` itself if that is how it looks already."""
    if geometry == geometry_of(tensor):
        return tensor
    plain = tensor.detach()
    if geometry.dtype == tensor.dtype and not (geometry.conj or geometry.neg or tensor.is_conj()):
        return plain.as_strided(geometry.size, geometry.stride, geometry.offset)
    made = torch.empty(0, dtype=geometry.dtype, device=tensor.device)
    made.set_(tensor.untyped_storage(), geometry.offset, geometry.size, geometry.stride)
    if geometry.conj:
        made = torch._conj(made)
    return torch._neg_view(made) if geometry.neg else made


def apply_epilogue(
    actions: Sequence[Action], inputs: Sequence[Tensor], results: Sequence[Any]
) -> None:
    """Pay every action, in order (under `no_grad`)."""
    for action in actions:
        target = inputs[action.input]
        if isinstance(action, Resize):
            target.untyped_storage().resize_(action.nbytes)
        elif isinstance(action, Copy):
            window(target, action.geometry).copy_(results[action.slot])
        else:
            source = results[action.slot] if action.slot is not None else inputs[action.other or 0]
            g = action.geometry
            target.data = window(source, g) if target.dtype != g.dtype else target.data
            target.set_(source.untyped_storage(), g.offset, g.size, g.stride)
