"""The storages of a recording: the tensors on each, its size in bytes, and whether it comes from outside or from an op.

    table = StorageTable()
    table.bring_in(x, "x")        TensorRef(s0, f32[3]): `x` comes from outside
    table.ref(x)                  the same, for an argument of an op
    table.out_ref(x.sin())        TensorRef(s1, f32[3]): the op has allocated a storage
    table.note_size(storage)      (1, 0): storage 1 was resized to 0 bytes

A storage is identified by a number, its index in `infos`. Invariant: the table keeps no tensor alive that an op of the
run made, see Note [Hold tensors weakly]. Refusals (`UnsupportedTensorError`): tensors without a storage, quantised and
nested tensors.

Note [Hold tensors weakly]
A strong reference to a tensor that the run makes would cause AccumulateGrad to copy a gradient instead of stealing it,
and would keep memory alive. So storages are identified by their address; a weak reference prevents its reuse. Tensors
from outside are held: they were alive before, and the program may need their contents as constants.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from functionalize._compat.dispatch import disable_current_modes
from functionalize._compat.references import WeakStorage
from functionalize.ir.ops import Geometry, OpRecord, TensorRef, geometry_fields
from functionalize.recorder.op_kinds import QUANTISED, check_plain, storage_of

_new_tuple = tuple.__new__  # makes a named tuple in half the time of calling its class
_NOT_HELD = torch.empty(0)


class StorageInfo(WeakStorage):
    """The table's entry for one storage; a weak reference to it.

    serial: its number. name: for messages. nbytes, original_nbytes: its size now, and when the table first saw it.
    resized: whether a tensor on it may extend past its end.
    seen: the reference to the last tensor seen; the next tensor mostly has the same geometry and shares this object.
    """

    __slots__ = (
        "address",
        "device",
        "name",
        "nbytes",
        "original_nbytes",
        "resized",
        "seen",
        "serial",
    )

    def __init__(
        self,
        serial: int,
        tensor: Tensor,
        storage: torch.UntypedStorage,
        geometry: Geometry,
    ) -> None:
        self._reference = storage._weak_ref()  # `WeakStorage.__init__`, without its call
        self.serial, self.address = serial, storage._cdata
        self.nbytes = self.original_nbytes = nbytes = storage.nbytes()
        self.device, self.name, self.resized = tensor.device, "a temporary", nbytes == 0
        self.seen = _new_tuple(TensorRef, (serial, geometry))

    def ref(self, tensor: Tensor) -> TensorRef:
        """A tensor on this storage, with its geometry now."""
        fields = geometry_fields(tensor)
        if fields != self.seen[1]:
            self.seen = _new_tuple(TensorRef, (self.serial, _new_tuple(Geometry, fields)))
        return self.seen


class _Geometries(dict[tuple[Any, ...], Geometry]):
    """Geometries by their fields: the tensors of a recording that have equal ones share an object.

    The layers of a model have few kinds of tensors, and a recording that is kept has two geometries per op.
    """

    def __missing__(self, fields: tuple[Any, ...]) -> Geometry:
        made = self[fields] = _new_tuple(Geometry, fields)
        return made

    def of(self, fields: tuple[Any, ...]) -> Geometry:
        """The shared geometry; a new one if sizes cannot be looked up, as those of an enclosing tracer."""
        try:
            return self[fields]
        except TypeError:
            return _new_tuple(Geometry, fields)


class External:
    """A tensor from outside, with its geometry when first seen.

    literal: Python made it from numbers during the run.
    """

    __slots__ = ("info", "literal", "ref", "tensor")

    def __init__(self, info: StorageInfo, ref: TensorRef, tensor: Tensor, literal: bool) -> None:
        self.info, self.ref, self.tensor, self.literal = info, ref, tensor, literal

    @property
    def is_held(self) -> bool:
        """Whether `tensor` is the tensor itself, and not an empty one in its place."""
        return self.tensor is not _NOT_HELD

    @property
    def is_index(self) -> bool:
        """Whether it is a mask, or indices or lengths, and no parameter or other state that training moves."""
        dtype = self.ref.geometry.dtype
        return not (dtype.is_floating_point or dtype.is_complex)


class StorageObserver(Protocol):
    """The callbacks of a table: a new storage, and a change of a storage's size."""

    def storage_seen(self, info: StorageInfo, storage: torch.UntypedStorage) -> None: ...

    def storage_resized(self, serial: int, nbytes: int) -> None: ...


class RecordingObserver(StorageObserver, Protocol):
    """The callbacks of a recorder: when it is entered and left, and for each record."""

    @property
    def module_calls(self) -> Any:
        """The calls of modules that it notes once it is attached: a `ModuleCalls` of state/module_calls.py."""

    def attach(self, records: list[OpRecord]) -> None:
        """`records` is the list to which every record will be appended."""

    def start(self, recorder: Any) -> None:
        """The recorder is entered."""

    def stop(self) -> None:
        """The recorder is left; also called if it could not be entered."""

    def recorded(self, record: OpRecord, args: tuple[Any, ...]) -> None:
        """A record was appended. args: with which the op ran; empty for a resize that did not dispatch."""


class StorageTable:
    """All storages that one recording has seen.

    infos: the entries, by number.
    externals: the first tensor from outside on each storage, in the order of discovery.
    met_resized: set by `ref` if the storage was resized; the recorder clears it before each op.
    born: bytes and device of each storage that the current op has allocated; the recorder replaces it for each op.
    holds_externals: whether `bring_in` keeps the tensor alive. False while the places of a step are searched before
    the run: if the step frees a tensor (`zero_grad()`), its memory must be freed.
    observer: is called for new storages and for changed sizes.
    """

    __slots__ = (
        "_by_address",
        "_geometries",
        "born",
        "externals",
        "holds_externals",
        "infos",
        "met_resized",
        "observer",
    )

    def __init__(self, observer: StorageObserver | None = None) -> None:
        self.infos: list[StorageInfo] = []
        self.externals: list[External] = []
        self.met_resized = False
        self.born: dict[int, tuple[int, torch.device]] = {}
        self.holds_externals = True
        self._by_address: dict[int, StorageInfo] = {}
        self._geometries = _Geometries()
        self.observer = observer

    def info_of(self, tensor: Tensor) -> StorageInfo | None:
        """The entry of a tensor's storage; None if the table has not seen it."""
        return self._by_address.get(storage_of(tensor)._cdata)

    def info_at(self, storage: torch.UntypedStorage) -> StorageInfo | None:
        """The entry of a storage; None if the table has not seen it."""
        return self._by_address.get(storage._cdata)

    def serial_of(self, tensor: Tensor) -> int | None:
        """The number of a tensor's storage; None if the table has not seen it."""
        info = self.info_of(tensor)
        return info.serial if info is not None else None

    def bring_in(
        self, tensor: Tensor, name: str, literal: Tensor | None = None, holds: bool = True
    ) -> TensorRef:
        """Add a tensor from outside. The first one on each storage names the storage and becomes an `External`.

        literal: a copy of its contents, if Python made it from numbers during the run. holds: whether the table may
        keep the tensor alive: not a gradient, which the step may drop.
        """
        try:  # `storage_of`, without its call
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            storage = storage_of(tensor)
        info = self._by_address.get(storage._cdata)
        if info is not None:
            return info.ref(tensor)
        info = self._add(tensor, storage)
        info.name, ref = name, info.seen
        held = literal
        if held is None:
            held = self._held(tensor) if holds and self.holds_externals else _NOT_HELD
        if info.resized:
            self.keep_size(info, storage)
        self.externals.append(External(info, ref, held, literal is not None))
        return ref

    def _held(self, tensor: Tensor) -> Tensor:
        if tensor.grad_fn is None:
            return tensor
        with disable_current_modes():  # neither this recording nor an enclosing one records it
            return tensor.detach()

    def ref(self, tensor: Tensor) -> TensorRef:
        """The reference to an argument of an op. If its storage is new, the tensor comes from outside."""
        try:
            info = self._by_address.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):
            info = self._by_address.get(storage_of(tensor)._cdata)
        if info is None:
            ref = self.bring_in(tensor, f"captured_{len(self.externals)}")
            info = self.infos[ref.storage]
        if info.resized:
            self.met_resized = True
        fields = geometry_fields(tensor)  # `info.ref(tensor)`, without its call
        seen = info.seen
        if fields != seen[1]:
            seen = info.seen = _new_tuple(TensorRef, (info.serial, self._geometries.of(fields)))
        return seen

    def out_ref(self, tensor: Tensor) -> TensorRef:
        """The reference to a result of an op. If its storage is new, the op has allocated it."""
        try:  # `storage_of`, without its call
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            storage = storage_of(tensor)
        info = self._by_address.get(storage._cdata)
        if info is None:
            info = self._add(tensor, storage)
            self.born[info.serial] = (info.nbytes, info.device)
            return info.seen
        fields = geometry_fields(tensor)  # `info.ref(tensor)`, without its call
        seen = info.seen
        if fields != seen[1]:
            seen = info.seen = _new_tuple(TensorRef, (info.serial, self._geometries.of(fields)))
        return seen

    def note_size(self, storage: torch.UntypedStorage) -> tuple[int, int] | None:
        """Number and size of a storage whose size has changed since the table last compared it, else None."""
        info = self._by_address[storage._cdata]
        nbytes = storage.nbytes()
        if nbytes == info.nbytes:
            return None
        info.nbytes, info.resized = nbytes, True
        if self.observer is not None:
            self.observer.storage_resized(info.serial, nbytes)
        return info.serial, nbytes

    def keep_size(self, info: StorageInfo, storage: torch.UntypedStorage) -> None:
        """Note [Views of an emptied fake]

        For a view op in its cache, the fake mode calls `set_`, which grows an empty storage until the view fits. Eager
        leaves the storage empty, so this method restores the size.
        """
        if info.resized and storage.nbytes() != info.nbytes:
            with disable_current_modes():  # no recording records this resize
                storage.resize_(info.nbytes)

    def register(self, info: StorageInfo) -> None:
        """Add an entry, whose number is the number of entries."""
        self._by_address[info.address] = info
        self.infos.append(info)

    def _add(self, tensor: Tensor, storage: torch.UntypedStorage) -> StorageInfo:
        if tensor.is_nested or tensor.dtype in QUANTISED:
            check_plain(tensor)  # raises
        infos = self.infos
        geometry = self._geometries.of(geometry_fields(tensor))
        info = StorageInfo(len(infos), tensor, storage, geometry)
        self._by_address[info.address] = info  # `register`, without its call
        infos.append(info)
        if self.observer is not None:
            self.observer.storage_seen(info, storage)
        return info
