"""A forward that runs again inside a backward runs as it does outside of one.

    with as_outside_of_backward():
        result = forward(x)

FSDP2 takes a forward that runs while autograd runs a backward for a recomputation of activation checkpointing: it
neither reshards parameters after it nor notes the order of its groups. A forward that runs again for a backward of its
own is none: it reshards as the first one did, keeps no more memory, and its op stream is that of an eager call, with
which audits compare.
Invariant: only the thread that runs the forward again gets the other answer; the backward itself runs after the block.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from functionalize._compat.fsdp import backward_query
from functionalize.util.patching import Patch, Patches

_here = threading.local()


@contextlib.contextmanager
def as_outside_of_backward() -> Iterator[None]:
    """In it, FSDP2 finds no backward running in this thread."""
    was = getattr(_here, "is_outside", False)
    _PATCHES.install()
    _here.is_outside = True
    try:
        yield
    finally:
        _here.is_outside = was
        _PATCHES.remove()


def _patches() -> Iterator[Patch]:
    found = backward_query()
    if found is None:
        return
    owner, name = found
    is_backward = getattr(owner, name)
    yield owner, name, lambda: not getattr(_here, "is_outside", False) and is_backward()


_PATCHES = Patches(_patches)
