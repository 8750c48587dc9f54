"""Record a run, and undo afterwards what it has written to tensors that were there before.

    recorder = UndoingRecorder(...)
    with recorder:
        loss.backward(retain_graph=True)     gradients are accumulated, buffers written, storages resized
    recorder.undo()                          contents, sizes and version counters are as before

A storage is copied right before the first op that may write it. An op of another namespace than `aten` may write any of
its arguments: `c10d` and `fsdp` declare no aliases.
Invariant: nothing of the run is kept alive. Objects in Python are not restored, other than by the caller.
Refusal, noted in the recording: an op that changes the size or the strides of a tensor that was there before.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from functionalize._compat.autograd import KeptVersions
from functionalize._compat.dispatch import disable_current_modes, plain_resize
from functionalize.discharge.rules.mutations import written_arguments
from functionalize.discharge.rules.resizes import is_inplace_view
from functionalize.ir.ops import OpRecord
from functionalize.recorder.op_kinds import OpKind, storage_of, tensors_in
from functionalize.recorder.recorder import Recorder

_DECLARING = ("aten", "prims")  # namespaces whose schemas declare what an op writes
_UNDECLARED = torch.ops.aten.native_batch_norm.default  # writes `running_mean` and `running_var`


class UndoingRecorder(Recorder):
    """See `Recorder`. It copies what is about to be written."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._contents: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}
        self._counters: dict[int, tuple[Tensor, Any]] = {}
        self._outside: set[int] = set()  # numbers of storages that were there before
        self._sorted = 0  # how many externals are in it

    def _begin(
        self, op: OpKind, record: OpRecord, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        func = record.target
        for tensor in _written(func, args, kwargs):
            if self._was_there(storage_of(tensor)):
                if is_inplace_view(func):
                    self.checks.note(f"{func} changes the size or strides of a tensor in place")
                self._copy(tensor)
        return super()._begin(op, record, args, kwargs)

    def resize_storage(self, storage: torch.UntypedStorage, size: Any, original: Any) -> Any:
        if self._was_there(storage):
            self._copy_storage(storage)
        return super().resize_storage(storage, size, original)

    def _was_there(self, storage: torch.UntypedStorage) -> bool:
        info, externals = self.storages.info_at(storage), self.storages.externals
        new = externals[self._sorted :]
        self._outside.update(e.info.serial for e in new if not e.literal)
        self._sorted = len(externals)
        return info is None or info.serial in self._outside

    def _copy(self, tensor: Tensor) -> None:
        self._copy_storage(storage_of(tensor))
        if id(tensor) not in self._counters:
            self._counters[id(tensor)] = tensor, KeptVersions([tensor])

    def _copy_storage(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._contents:
            with torch.no_grad(), disable_current_modes():
                self._contents[storage._cdata] = storage, _bytes_of(storage).clone()

    def undo(self) -> None:
        """Restore what the run has written."""
        with torch.no_grad(), disable_current_modes():
            for storage, contents in self._contents.values():
                if storage.nbytes() != contents.numel():
                    plain_resize(storage, contents.numel())
                _bytes_of(storage).copy_(contents)
            for _, counter in reversed(self._counters.values()):  # views share one
                counter.__exit__(None, None, None)
        self._contents, self._counters = {}, {}


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[Tensor]:
    """The tensors that an op may write."""
    if func.namespace not in _DECLARING or func is _UNDECLARED:
        return tensors_in((args, kwargs))
    written = written_arguments(func)
    found = [
        args[at] if at is not None and at < len(args) else kwargs.get(name) for at, name in written
    ]
    return tensors_in(found)
