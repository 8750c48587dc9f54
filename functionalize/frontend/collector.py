"""Keep Python's garbage collector to young objects while a capture runs.

A recording makes many objects that live until it is discharged, so the collector promotes them, runs older
generations, and each full collection walks every object of the process: half the time of a capture. Garbage
that the step makes is still collected while it is young; the rest is when the capture has ended.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_NEVER = 2**30


@contextmanager
def only_young_collections() -> Iterator[None]:
    """Inside, only the youngest generation is collected."""
    before = gc.get_threshold()
    gc.set_threshold(before[0], _NEVER, _NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*before)
