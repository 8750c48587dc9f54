"""Which actions of the epilogue an input storage needs at exit.

Per input storage (`w`: contents differ from entry):

    original  final      emit
    > 0       0          Resize(x, 0)            data written before is dropped
    0         > 0        Resize(x, n), Copy(x)
    0         0          nothing, whatever happened in between
    > 0       same       Copy(x) if w
    > 0       other > 0  Resize(x, n), Copy(x) if w

One resize per storage, however many inputs alias it. An input tensor that ends on another storage or with another
geometry (`set_`, `resize_`, `t_`) gets a `Set` besides, after the copies.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from functionalize.discharge.storage import FunctionalStorage
from functionalize.discharge.values import Emitter, Value
from functionalize.ir.epilogue import Action, Copy, Resize
from functionalize.ir.ops import Geometry, contiguous_geometry


def actions_of(
    storage: FunctionalStorage, input: int, emit: Emitter, slot_of: Callable[[Value], int]
) -> list[Action]:
    """The actions of one input storage. `input`: one on it; `slot_of`: returns a value from the graph."""
    actions: list[Action] = []
    if storage.nbytes != storage.original_nbytes:
        actions.append(Resize(input, storage.nbytes))
    if storage.nbytes and storage.written and storage.valid.spans:
        geometry = _window_to_copy(storage)
        if geometry is None:
            return actions
        # Also for a part that was never written: else it would be a view of the input itself.
        value = storage.whole(emit)
        if geometry != storage.root:
            value = storage.peek(geometry, emit)
        actions.append(Copy(input, geometry, slot_of(value)))
    return actions


def _window_to_copy(storage: FunctionalStorage) -> Geometry | None:
    """What is copied: the base, or its beginning if the storage or what is defined of it ends before."""
    root = storage.root
    end, size = min(storage.nbytes, storage.valid.spans[-1][1]), root.dtype.itemsize
    if root.end <= end or (not root.is_dense and root.end <= storage.nbytes):
        return root
    if end <= root.start:
        return None
    if (end - root.start) % size == 0:
        return contiguous_geometry(((end - root.start) // size,), root.dtype, root.offset)
    return contiguous_geometry((end - root.start,), torch.uint8, root.start)
