"""The storages a recording knows, by address, and the tensors that came from outside.

Note [Hold tensors weakly]
The recorder keeps no tensor that the program made: a strong reference would make AccumulateGrad copy a
gradient it would have stolen, and would keep memory alive. Storages are known by address, with a weak
reference that keeps the address from being reused. Tensors that come from outside are held: they were alive
before, and their contents may be needed as constants.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from functionalize.core.ops import TensorRef, geometry_of
from functionalize.frontend.op_kinds import check_plain, storage_of

_new = tuple.__new__  # makes a named tuple in half the time of calling its class


class StorageInfo:
    """What the recorder knows of one storage. `resized`: its size is not to be trusted to fit its tensors.

    `seen`: the last tensor seen on it; mostly the next one looks the same, and they share one object.
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
        "weak",
    )

    def __init__(self, serial: int, tensor: Tensor, storage: torch.UntypedStorage) -> None:
        self.serial, self.address = serial, storage._cdata
        self.weak = StorageWeakRef(storage)
        self.nbytes = self.original_nbytes = storage.nbytes()
        self.device = tensor.device
        self.name = "a temporary"
        self.resized = self.nbytes == 0
        self.seen = _new(TensorRef, (serial, geometry_of(tensor)))

    def ref(self, tensor: Tensor) -> TensorRef:
        """A tensor on this storage, as it looks now."""
        geometry = geometry_of(tensor)
        if geometry != self.seen[1]:
            self.seen = _new(TensorRef, (self.serial, geometry))
        return self.seen

    @property
    def alive(self) -> bool:
        """Whether anything still holds the storage."""
        return not self.weak.expired()


class External:
    """A tensor from outside, as it was first seen; `literal`: made by Python during the run."""

    __slots__ = ("info", "literal", "ref", "tensor")

    def __init__(self, info: StorageInfo, ref: TensorRef, tensor: Tensor, literal: bool) -> None:
        self.info, self.ref, self.tensor, self.literal = info, ref, tensor, literal


class KnownStorages:
    """What is known of every storage seen. `suspended`: how many have asked that nothing be recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.externals: list[External] = []
        self.infos: list[StorageInfo] = []
        self.suspended = 0
        self._by_address: dict[int, StorageInfo] = {}
        self._born: dict[int, tuple[int, torch.device]] = {}
        self._near_resize = False  # whether the op at hand is given a storage that was resized

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Nothing is recorded inside."""
        self.suspended += 1
        try:
            yield
        finally:
            self.suspended -= 1

    def info_of(self, tensor: Tensor) -> StorageInfo | None:
        """What is known of a tensor's storage, None if it was never seen."""
        return self._by_address.get(storage_of(tensor)._cdata)

    def serial_of(self, tensor: Tensor) -> int | None:
        """The number of a tensor's storage, None if it was never seen."""
        info = self.info_of(tensor)
        return info.serial if info is not None else None

    def _new(self, tensor: Tensor, storage: torch.UntypedStorage) -> StorageInfo:
        check_plain(tensor)
        info = StorageInfo(len(self.infos), tensor, storage)
        self._by_address[storage._cdata] = info
        self.infos.append(info)
        return info

    def bring_in(self, tensor: Tensor, name: str, literal: Tensor | None = None) -> TensorRef:
        """A tensor from outside; the first one on each storage names it and is kept.

        literal: what it held, if Python made it during the run.
        """
        storage = storage_of(tensor)
        info = self._by_address.get(storage._cdata)
        if info is not None:
            return info.ref(tensor)
        info = self._new(tensor, storage)
        info.name, ref = name, info.seen
        held = literal
        if held is None:
            held = tensor if tensor.grad_fn is None else tensor.detach()
        self.keep_size(info, storage)
        self.externals.append(External(info, ref, held, literal is not None))
        return ref

    def keep_size(self, info: StorageInfo, storage: torch.UntypedStorage) -> None:
        """Note [Views of an emptied fake]

        A view op on fakes that is found in the fake mode's cache is made with `set_`, which grows the
        storage to hold it. A view must not: eager leaves the storage empty.
        """
        if info.resized and storage.nbytes() != info.nbytes:
            with self.quiet():
                storage.resize_(info.nbytes)

    def ref(self, tensor: Tensor) -> TensorRef:
        """A tensor that an op was given."""
        try:
            info = self._by_address.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):
            info = self._by_address.get(storage_of(tensor)._cdata)
        if info is None:
            with self.quiet():
                ref = self.bring_in(tensor, f"captured_{len(self.externals)}")
            info = self.infos[ref.storage]
        if info.resized:
            self._near_resize = True
        return info.ref(tensor)

    def out_ref(self, tensor: Tensor) -> TensorRef:
        storage = storage_of(tensor)
        info = self._by_address.get(storage._cdata)
        if info is None:
            info = self._new(tensor, storage)
            self._born[info.serial] = (info.nbytes, info.device)
            return info.seen
        return info.ref(tensor)

    def note_size(self, storage: torch.UntypedStorage) -> tuple[int, int] | None:
        """The storage's new size, if it changed."""
        info = self._by_address[storage._cdata]
        nbytes = storage.nbytes()
        if nbytes == info.nbytes:
            return None
        info.nbytes, info.resized = nbytes, True
        return info.serial, nbytes
