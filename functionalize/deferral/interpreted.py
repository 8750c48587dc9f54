"""Pending ops run one by one, as eager would have run them: a stream that is new, or of which no program can be made.

    run_one_by_one(stream, living)

The ops that no living storage depends on are left out. If an op raises, the storages are as eager would have left them
at that op; tensors that only later ops made are filled with NaN (zeros, if they hold no floats), and the error gets a
note with the line that recorded the op.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from functionalize._compat.dispatch import entry_of
from functionalize.deferral.stream import PendingOp, Stream
from functionalize.discharge.rules.mutations import is_mutating, written_arguments
from functionalize.ir.ops import Geometry, TensorRef, map_refs, refs_in
from functionalize.util.user_stack import line_of

aten = torch.ops.aten


def run_one_by_one(stream: Stream, living: Iterable[int]) -> None:
    """Run what the contents of the storages `living` depend on, and leave their contents in them."""
    living = frozenset(living)
    needed = _needed(stream.entries, living)
    last = {serial: i for i, entry in enumerate(needed) for serial in storages_of(entry)}
    run = _OneByOne(stream, living)
    for i, entry in enumerate(needed):
        try:
            run.entry(entry)
        except BaseException as error:
            error.add_note(f"{entry.record.target} was recorded {line_of(entry.record.traceback)}")
            run.fill_the_rest()
            raise
        for serial in storages_of(entry):
            if last[serial] == i:
                run.drop(serial)


def window_on(storage: torch.UntypedStorage, geometry: Geometry) -> Tensor:
    """A new tensor of this geometry on a storage; it shares no version counter with others."""
    size, stride, offset, dtype = geometry[:4]
    made = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, stride)
    if geometry.conj:
        made = aten._conj.default(made)
    return aten._neg_view.default(made) if geometry.neg else made


def fill(tensor: Tensor) -> None:
    """Mark the contents as never computed."""
    tensor.fill_(float("nan") if tensor.is_floating_point() or tensor.is_complex() else 0)


def storages_of(entry: PendingOp) -> set[int]:
    """The storages of the arguments and results of a pending op."""
    record = entry.record
    return {ref.storage for ref in refs_in([record.args, record.kwargs, record.outputs])}


def _needed(entries: Sequence[PendingOp], living: frozenset[int]) -> list[PendingOp]:
    """The ops that the contents of `living` depend on, in order."""
    wanted, found = set(living), []
    for entry in reversed(entries):
        if entry.is_view:
            continue
        record = entry.record
        changed = set(record.meta.get("born", ()))
        if is_mutating(record.target):
            changed |= {ref.storage for ref in refs_in(_written(entry))}
        if not wanted.isdisjoint(changed):
            wanted |= {ref.storage for ref in refs_in([record.args, record.kwargs])}
            found.append(entry)
    return found[::-1]


def _written(entry: PendingOp) -> list[Any]:
    args, kwargs = entry.record.args, entry.record.kwargs
    places = written_arguments(entry.record.target)
    return [kwargs.get(k) if at is None or at >= len(args) else args[at] for at, k in places]


class _OneByOne:
    """One run: the storages that its ops compute with, by number."""

    def __init__(self, stream: Stream, living: frozenset[int]) -> None:
        self._stream, self._living = stream, living
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._computed: set[int] = set()

    def entry(self, entry: PendingOp) -> None:
        """Run one op."""
        record = entry.record
        args = map_refs(self._tensor, record.args)
        out = entry_of(record.target)(*args, **map_refs(self._tensor, record.kwargs))
        self._keep(record.outputs, out, record.meta.get("born", ()))

    def _tensor(self, ref: TensorRef) -> Tensor:
        return window_on(self._storage(ref.storage), ref.geometry)

    def _storage(self, serial: int) -> torch.UntypedStorage:
        found = self._storages.get(serial)
        if found is None:
            found = self._stream.storage(serial)
            assert found is not None
            self._storages[serial] = found
        return found

    def _keep(self, outputs: Any, out: Any, born: Any) -> None:
        if type(outputs) is TensorRef:
            if outputs.storage not in born:
                return
            home = (
                self._stream.storage(outputs.storage) if outputs.storage in self._living else None
            )
            if home is None:
                self._storages[outputs.storage] = out.untyped_storage()
                return
            window_on(home, outputs.geometry).copy_(out)
            self._storages[outputs.storage] = home
            self._computed.add(outputs.storage)
        elif isinstance(outputs, list):
            for ref, each in zip(outputs, out, strict=True):
                self._keep(ref, each, born)

    def drop(self, serial: int) -> None:
        """No later op uses this storage."""
        self._storages.pop(serial, None)

    def fill_the_rest(self) -> None:
        """Fill the tensors that were not computed."""
        missing = {s for s in self._living if self._stream.is_born(s)} - self._computed
        for entry in self._stream.entries:
            for ref in refs_in(entry.record.outputs):
                if ref.storage in missing and ref.storage in entry.record.meta.get("born", ()):
                    storage = self._stream.storage(ref.storage)
                    if storage is not None:
                        fill(window_on(storage, ref.geometry))
