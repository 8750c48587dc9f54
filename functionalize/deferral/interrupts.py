"""Ctrl-C while pending ops run is raised after them, so that no tensor is left half computed.

with interrupts_held():     a SIGINT that arrives inside is delivered on exit
    ...

Only the main thread receives signals; in others the context does nothing.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_held() -> Iterator[None]:
    """A context that delivers SIGINT when it ends."""
    handler = signal.getsignal(signal.SIGINT)
    main = threading.current_thread() is threading.main_thread()
    if not main or not callable(handler):
        yield
        return
    arrived: list[tuple[int, object]] = []
    signal.signal(signal.SIGINT, lambda number, frame: arrived.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if arrived:
            handler(arrived[0][0], None)
