"""Ops that change which bytes a tensor refers to: storage resizes, `aten.resize_`, `set_`, in-place views.

None of them emits anything. A resize changes the storage's record. `set_` and the in-place views move a
tensor to another storage or geometry; later records refer to it by that, since a record identifies a tensor by
(storage, geometry) and not by the Python object.
"""

from __future__ import annotations

from typing import Any

import torch

from functionalize._compat.dispatch import all_op_names, load_resize_op
from functionalize.discharge.rules.mutations import is_mutating
from functionalize.discharge.rules.registry import Engine, rule
from functionalize.errors import ForeignStorageError
from functionalize.ir.ops import OpRecord, TensorRef

aten = torch.ops.aten
load_resize_op()
RESIZE_STORAGE = torch.ops.inductor.resize_storage_bytes_.default


@rule(RESIZE_STORAGE)
def resize_storage_bytes_(engine: Engine, record: OpRecord) -> None:
    """`resize_storage_bytes_(Tensor variable, SymInt new_size)`; `new_size` in bytes."""
    engine.resize(record.args[0].storage, record.args[1])


def is_inplace_view(target: object) -> bool:
    """Whether an op changes only the geometry or storage of a tensor object (`t_`, `set_`, `resize_`, ...)."""
    return torch.Tag.inplace_view in getattr(target, "tags", ())


def _inplace_views() -> list[object]:
    """Those of `aten`. Its in-place ops end with an underscore: to look up all its ops takes a tenth of a second."""
    found = []
    for full in all_op_names():
        packet, _, overload = full.removeprefix("aten::").partition(".")
        if not (full.startswith("aten::") and packet.endswith("_")):
            continue
        target = getattr(getattr(aten, packet, None), overload or "default", None)
        if target is not None and is_inplace_view(target) and is_mutating(target):
            found.append(target)
    return found


@rule(*_inplace_views())
def inplace_view(engine: Engine, record: OpRecord) -> Any:
    """Later records refer to the tensor by its new storage and geometry; a storage that grew is in `resized`."""
    out = record.outputs
    if type(out) is not TensorRef or out.storage in engine.storages:
        return None
    nbytes, device = record.meta["born"][out.storage]
    if nbytes:
        raise ForeignStorageError(
            f"moves a tensor to a storage of {nbytes} bytes that belongs to no "
            "argument and no result of the program (`copy.deepcopy` does so): clone the tensor "
            "(`x.detach().clone()`), or pass it as an argument"
        )
    return engine.emit.empty(out.geometry, device)  # `set_()`
