"""The stream of pending ops: what waits, which storages it reads and writes, and which of them are still held.

    stream.refer(args, shape, own)       arguments as references; the parts of two keys
    stream.append(func, ...)             an op waits
    stream.depends(func, tensors, ...)   whether an op that runs at once must run after it
    stream.living()                      the written storages that somebody holds

A storage from outside is held from the first op that reads it, since its owner may drop it before the stream runs. One
that the stream has made is referred to weakly: if its owner drops it, nothing computes it.
Invariant: an entry of the stream appears by one `append`, so that an interruption leaves an op recorded or not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from functionalize._compat.dispatch import count_references, storage_at
from functionalize._compat.references import address
from functionalize._compat.stacks import Stacks
from functionalize.deferral.settings import Settings
from functionalize.ir.ops import Geometry, OpRecord, TensorRef, refs_in
from functionalize.recorder.op_kinds import storage_of
from functionalize.recorder.storage_table import StorageInfo, StorageTable

_EXACT = frozenset({bool, int, str, type(None)})
_OPAQUE = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_TENSORS = (Tensor, Parameter)


class CannotWait(Exception):
    """An argument that no key can be made of, or whose contents may change unseen."""


class PendingOp(NamedTuple):
    """A pending op, or a view of what one has made.

    element: what tells it from others in the key of a stream. floats: those of its arguments that do not, in order.
    """

    record: OpRecord
    element: tuple[Any, ...]
    is_view: bool
    floats: tuple[float, ...] = ()


class OutsideStorage(NamedTuple):
    """A storage from outside: its number, and the geometry in which a program gets it."""

    serial: int
    base: Geometry
    nbytes: int


class Stream:
    """Pending ops, from one run of them to the next. settings: those of the process, under which they were recorded.

    used: the storages that they read or write. dirty: those whose contents are pending.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.entries: list[PendingOp] = []
        self.table = StorageTable()
        self.table.holds_externals = False
        self.used: set[int] = set()
        self.dirty: set[int] = set()
        self.nbytes = 0
        self.ops = 0
        self._held: dict[int, torch.UntypedStorage] = {}
        self._born: dict[int, int] = {}  # by storage: its size
        self._written: set[int] = set()  # of those from outside
        self._stacks = Stacks()
        self._stacks.handlers = 2

    # -- arguments -----------------------------------------------------------------------------

    def refer(
        self,
        arg: Any,
        shape: list[Any],
        own: list[Any],
        tensors: list[Tensor],
        floats: list[float] | None,
    ) -> Any:
        """`arg` with references for its tensors, which are added to `tensors`.

        shape: gets what the geometry of the result may depend on. own: gets the rest, numbers of storages above all.
        floats: gets the floats; None: the geometry of the result may depend on them.
        """
        kind = type(arg)
        if kind in _TENSORS or isinstance(arg, Tensor):
            ref = self._ref(arg)
            shape.append(ref[1])
            own.append(ref[0])
            tensors.append(arg)
            return ref
        if kind is float and floats is not None:
            shape.append(kind)
            own.append(kind)
            floats.append(arg)
            return arg
        if kind is float or kind is complex:
            shape.append(kind)
            # It tells 0.0 from -0.0; nan from no nan.
            (shape if floats is None else own).append(repr(arg))
            return arg
        if kind in _EXACT:
            shape.append((kind, arg))
            return arg
        if kind is list or kind is tuple:
            shape.append((kind, len(arg)))
            return kind([self.refer(each, shape, own, tensors, floats) for each in arg])
        if isinstance(arg, (list, tuple)):  # torch.Size
            shape.append((list, len(arg)))
            return [self.refer(each, shape, own, tensors, floats) for each in arg]
        if isinstance(arg, _OPAQUE):
            shape.append(arg)
            return arg
        raise CannotWait

    def _ref(self, tensor: Tensor) -> TensorRef:
        table = self.table
        info = table.info_of(tensor)
        if info is None:
            storage = storage_of(tensor)
            if not storage.resizable() or storage.is_shared():
                raise CannotWait  # memory of numpy, of another process: anybody may write to it
            if tensor.device.type != "cpu" or tensor._is_zerotensor():
                raise CannotWait
            ref = table.bring_in(tensor, f"input_{len(table.externals)}")
            info = table.infos[ref.storage]
        else:
            ref = info.ref(tensor)
        if ref.geometry.end > info.nbytes:
            raise CannotWait  # freed, or not yet allocated
        return ref

    # -- recording -----------------------------------------------------------------------------

    def append(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        number: int,
        own: list[Any],
        out: Any,
        written: Iterable[Any],
        tensors: Sequence[Tensor],
        floats: Sequence[float] = (),
    ) -> None:
        """Add an op. number: of its description in `Learned`. own, floats: from `refer`. out: its result.

        written: the arguments that it writes, as references.
        """
        table = self.table
        table.born = {}
        known = len(table.infos)
        outputs = self._out(out)
        record = OpRecord(func, args, kwargs, outputs, (), self._stacks.here())
        if table.born:
            record.meta["born"] = table.born
        for tensor, ref in zip(tensors, refs_in([args, kwargs]), strict=True):
            self._hold(ref.storage, tensor)
        for ref in refs_in(list(written)):
            self.dirty.add(ref.storage)
            if ref.storage not in self._born:
                self._written.add(ref.storage)
        for serial, (nbytes, _) in table.born.items():
            self._born[serial] = nbytes
            self.used.add(serial)
            self.dirty.add(serial)
            self.nbytes += nbytes
        self.ops += 1
        self.entries.append(PendingOp(record, (number, known, *own), False, tuple(floats)))

    def append_view(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        """Add a view, which was made already, if it is of a storage that pending ops use."""
        parent = args[0] if args else None
        if not isinstance(parent, Tensor):
            return
        info = self.table.info_of(parent)
        outs = out if isinstance(out, (list, tuple)) else (out,)
        if info is None or info.serial not in self.used:
            return
        ref = info.ref(parent)
        outputs = [info.ref(t) if self.table.info_of(t) is info else None for t in outs]
        if None in outputs or outputs == [ref]:
            return
        shape: list[Any] = []
        own: list[Any] = []
        tensors: list[Tensor] = []
        try:
            rest = tuple(self.refer(each, shape, own, tensors, None) for each in args[1:])
            named = {k: self.refer(v, shape, own, tensors, None) for k, v in kwargs.items()}
        except CannotWait:
            return
        if tensors:
            return
        single = isinstance(out, Tensor)
        made = outputs[0] if single else outputs
        record = OpRecord(func, (ref, *rest), named, made, (), self._stacks.here())
        element = (address(func), ref, tuple(shape), tuple(kwargs), *outputs)
        self.entries.append(PendingOp(record, element, True))

    def _out(self, out: Any) -> Any:
        if isinstance(out, Tensor):
            return self.table.out_ref(out)
        if isinstance(out, (list, tuple)):
            return [self._out(each) for each in out]
        return None

    def _hold(self, serial: int, tensor: Tensor) -> None:
        self.used.add(serial)
        if serial not in self._born and serial not in self._held:
            self._held[serial] = tensor.untyped_storage()

    # -- questions -----------------------------------------------------------------------------

    def info_of(self, tensor: Tensor) -> StorageInfo | None:
        """The entry of a storage that a pending op uses; raises `UnsupportedTensorError` for a tensor without one."""
        info = self.table.info_of(tensor)
        return info if info is not None and info.serial in self.used else None

    def has_met(self, storage: torch.UntypedStorage) -> bool:
        """Whether the stream has met a storage, whose size it relies on then."""
        return self.table.info_at(storage) is not None

    def depends(self, read: Iterable[Tensor], written: Iterable[Tensor]) -> bool:
        """Whether an op that reads and writes these must run after the stream."""
        for tensor in read:
            info = self.info_of(tensor)
            if info is not None and info.serial in self.dirty:
                return True
        return any(self.info_of(tensor) is not None for tensor in written)

    def living(self) -> tuple[int, ...]:
        """The storages that the stream writes and somebody holds, in order."""
        infos = self.table.infos
        born = [serial for serial in self._born if infos[serial].alive]
        held = self._held
        kept = [s for s in self._written if count_references(held[s]) > 1 or _is_shared(held[s])]
        return tuple(sorted([*born, *kept]))

    def externals(self) -> list[OutsideStorage]:
        """The storages from outside that pending ops use."""
        found = []
        for each in self.table.externals:
            serial, geometry = each.ref
            if serial in self._held:
                found.append(
                    OutsideStorage(serial, _base(geometry, each.info.nbytes), each.info.nbytes)
                )
        return found

    def storage(self, serial: int) -> torch.UntypedStorage | None:
        """A storage from outside, or one that the stream has made; None if that has died."""
        held = self._held.get(serial)
        return held if held is not None else storage_at(self.table.infos[serial]._reference)

    def is_born(self, serial: int) -> bool:
        """Whether the stream has made a storage."""
        return serial in self._born


def _is_shared(storage: torch.UntypedStorage) -> bool:
    """Whether somebody has the Python object of a storage, apart from `Stream._held` and the two calls that ask."""
    return sys.getrefcount(storage) > 3


def _base(geometry: Geometry, nbytes: int) -> Geometry:
    """The geometry in which a program gets a storage: that of the first tensor seen, if its elements are dense."""
    if geometry.is_dense and not (geometry.conj or geometry.neg):
        return geometry
    unit = geometry.dtype.itemsize
    dtype = geometry.dtype if nbytes % unit == 0 else torch.uint8
    return Geometry((nbytes // dtype.itemsize,), (1,), 0, dtype)
