"""The resize rule: what `resize_storage_bytes_(t, n)` does to the record of t's storage. It emits nothing.

`o`: bytes on entry, `c`: bytes before the resize, `n`: bytes after it:

    n == c           nothing
    n == 0           contents dropped; if o == 0 the base is the original base again
    0 == c < n       contents undefined until written
    0 < n < c        the first n bytes survive
    0 < c < n        the first c bytes survive, the rest is undefined until written

The case o == n == 0 is why a parameter of FSDP2 leaves no trace in the program: the tensor that autograd saved is the
original zero-byte tensor again, not "version 2" of it, and no view of it holds a value.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from functionalize.discharge.storage import FunctionalStorage
from functionalize.errors import ResizeError


def checked_nbytes(nbytes: Any, name: str) -> int:
    """`nbytes` as a size in bytes; raises `ResizeError` for anything but a non-negative integer."""
    if isinstance(nbytes, bool) or not isinstance(nbytes, int):
        text = "a tensor" if isinstance(nbytes, Tensor) else repr(nbytes)
        raise ResizeError(
            f"resizes the storage of `{name}` to {text}, which is no integer: sizes are whole bytes"
        )
    if nbytes < 0:
        raise ResizeError(f"resizes the storage of `{name}` to {nbytes} bytes, a negative size")
    return nbytes


def resize(storage: FunctionalStorage, nbytes: int) -> None:
    """Record that `storage` holds `nbytes` bytes from now on."""
    old = storage.nbytes
    if nbytes == old:
        return
    storage.nbytes, storage.intact, storage.copied = nbytes, False, None
    if nbytes == 0:
        storage.forget()
        if storage.original_nbytes == 0:
            root, storage.base = storage.top, storage.original_base
            root.hold(storage.base, root.version)
            storage.written = False
    elif nbytes < old:
        storage.keep_prefix(nbytes)
