"""Weak references to storages."""

from __future__ import annotations

import torch


class WeakStorage:
    """A weak reference to a storage: its data is freed, but its address is not used again before the reference dies.

    `StorageWeakRef` of torch.multiprocessing takes three times as long, as it ends in functions of Python.
    """

    __slots__ = ("_reference",)

    # On the class, as module globals are gone when Python ends.
    _is_expired = staticmethod(torch._C.StorageBase._expired)  # type: ignore[attr-defined]
    _free = staticmethod(torch._C.StorageBase._free_weak_ref)  # type: ignore[attr-defined]

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._reference = storage._weak_ref()

    @property
    def alive(self) -> bool:
        """Whether the storage still exists."""
        return not self._is_expired(self._reference)

    def __del__(self) -> None:
        self._free(self._reference)
