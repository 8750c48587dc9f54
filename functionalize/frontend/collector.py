"""Keep Python's garbage collector to young objects while a capture runs.

A recording makes many objects that live until it is discharged, so the collector promotes them, runs older
generations, and each full collection walks every object of the process: half the time of a capture. Garbage
that the step makes is still collected while it is young; the rest is when the capture has ended.

Invariant: when the last of the captures that run at the same time (in other threads, or one inside another) has
ended, the thresholds are what they were before the first.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_NEVER = 2**30


class _Thresholds:
    """Those of the process: there is one collector, whatever thread captures."""

    def __init__(self) -> None:
        self._lock, self._users = threading.Lock(), 0
        self._before = gc.get_threshold()

    def raise_(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._before = gc.get_threshold()
                gc.set_threshold(self._before[0], _NEVER, _NEVER)

    def restore(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                gc.set_threshold(*self._before)


_THRESHOLDS = _Thresholds()


@contextmanager
def only_young_collections() -> Iterator[None]:
    """Inside, only the youngest generation is collected."""
    _THRESHOLDS.raise_()
    try:
        yield
    finally:
        _THRESHOLDS.restore()
