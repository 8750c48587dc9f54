"""Restrict Python's garbage collector to the youngest generation while a capture or passes run or a graph is described.

A recording makes many objects that live until it is discharged, so the collector promotes them, runs older
generations, and each full collection walks every object of the process: half the time of a capture. Garbage
that the step makes is still collected while it is young; older garbage is collected after the capture.

What is young at the beginning is collected first: the finalizer (`__del__`) of an object that was garbage before would
run within some line of the step, and what it does be taken for the step's.

Passes run no code of the user's, and what they look up they drop by themselves: `no_collections` spares the walks over
what is alive, a tenth of their time.

Invariant: when the last of the captures that run at the same time (in other threads, or nested) has ended, the
thresholds are as before the first; also after a Ctrl-C between two lines of this file: a context that was entered and
not left restores the thresholds when it is itself collected (`__del__`).
"""

from __future__ import annotations

import gc
import threading
from typing import Any

_NEVER = 2**30


class _Thresholds:
    """GC thresholds are process-wide; captures that overlap are counted, so they are raised and restored once."""

    def __init__(self) -> None:
        self._lock, self._users = threading.RLock(), dict[int, int | None]()
        self._before = gc.get_threshold()

    def raise_(self, user: int, young: int | None) -> None:
        """young: the threshold of the youngest generation; None: as it is. The lowest that was asked for holds."""
        with self._lock:
            if not self._users:
                self._before = gc.get_threshold()
            self._users[user] = young
            self._set()

    def restore(self, user: int) -> None:
        with self._lock:
            if user in self._users:
                del self._users[user]
                self._set()

    def _set(self) -> None:
        if not self._users:
            gc.set_threshold(*self._before)
            return
        first = self._before[0]
        asked = (first if young is None else young for young in self._users.values())
        # 0 is never: the user has turned the collector off.
        gc.set_threshold(first and min(asked), _NEVER, _NEVER)


_THRESHOLDS = _Thresholds()


class only_young_collections:
    """A context: inside, only the youngest generation is collected, and of it what was made inside."""

    _young: int | None = None

    def __enter__(self) -> None:
        gc.collect(0)
        _THRESHOLDS.raise_(id(self), self._young)

    def __exit__(self, *exc: Any) -> None:
        _THRESHOLDS.restore(id(self))

    def __del__(self) -> None:
        _THRESHOLDS.restore(id(self))


class no_collections(only_young_collections):
    """The same for what runs no code of the user's: nothing is collected that was made inside, either."""

    _young = _NEVER
