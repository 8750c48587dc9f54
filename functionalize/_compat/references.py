"""References to objects that cost one call of C: addresses, and weak references to storages.

    seen[address(tensor)] = ...              as by `id`
    WeakStorage(storage).alive               until the last tensor on it dies

Invariant: neither keeps anything alive. An address is that of another object once its own has died.
"""

from __future__ import annotations

import torch

# As `id`, which raises an audit event in CPython: with a hook on these, as every recording has, it takes three times
# as long.
address = object.__hash__


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
