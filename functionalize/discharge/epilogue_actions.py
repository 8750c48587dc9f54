"""Which actions of the epilogue an input storage needs at exit, from its record.

Per input storage (`w`: contents differ from entry):

    original  final      emit
    > 0       0          Resize(x, 0)            data written before is dropped
    0         > 0        Resize(x, n), Copy(x)
    0         0          nothing, whatever happened in between
    > 0       same       Copy(x) if w
    > 0       other > 0  Resize(x, n), Copy(x) if w

One resize per storage, however many inputs alias it. An input tensor that ends on another storage or with another
geometry (`set_`, `resize_`, `t_`) also gets a `Set`, after the copies.
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
    """The actions of one input storage.

    input: the index of an input on that storage.
    slot_of: makes a value a result of the graph, and returns its slot.
    """
    actions: list[Action] = []
    if storage.nbytes != storage.original_nbytes:
        actions.append(Resize(input, storage.nbytes))
    if storage.nbytes and storage.written:
        geometry = storage.root if storage.intact else _window_to_copy(storage)
        if geometry is None:
            return actions
        # Computed even where only `geometry` is copied: a part that was never written would be a view of the input.
        value = storage.whole(emit)
        if geometry != storage.root:
            value = storage.peek(geometry, emit)
        actions.append(Copy(input, geometry, slot_of(value)))
    return actions


def _window_to_copy(storage: FunctionalStorage) -> Geometry | None:
    """The geometry to copy: the root, or its prefix if the storage or its defined bytes end inside; None: nothing."""
    root = storage.root
    if not storage.valid.spans:
        return None
    end, size = min(storage.nbytes, storage.valid.spans[-1][1]), root.dtype.itemsize
    if root.end <= end or (not root.is_dense and root.end <= storage.nbytes):
        return root
    if end <= root.start:
        return None
    if (end - root.start) % size == 0:
        return contiguous_geometry(((end - root.start) // size,), root.dtype, root.offset)
    return contiguous_geometry((end - root.start,), torch.uint8, root.start)
