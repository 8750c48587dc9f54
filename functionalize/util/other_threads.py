"""Whether code of the user runs in another thread, which may read an object while a recording has numbers in it.

    thread = reading_thread(known)     the name of such a thread and where it is; None: there is none

A live number is an object of a type of its own (`type(trainer.n) is int` is false, `json` refuses it). While a step is
recorded, these objects are where the step keeps its numbers, and any thread may read there: so no number is live while
one may.

Not such a thread: one without a frame of the user's code (loaders of data, progress bars, writers of events, idle
pools), and one that waits without a timeout (`queue.get()`, `thread.join()`): whoever wakes it hands it what it reads.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Container
from types import FrameType

from functionalize.util.packages import is_users

_WAITS = threading.Condition.wait.__code__.co_filename
_UNTIMED = (None, -1)


def reading_thread(known: Container[int]) -> str | None:
    """Which other thread may read the user's objects now, as text: its name, file and line.

    known: the identifiers of threads that do not.
    """
    frames = sys._current_frames()
    # A frame that holds itself would keep the step's variables until a collection.
    del frames[threading.get_ident()]
    for ident, frame in frames.items():
        if ident in known or _waits(frame):
            continue
        users: FrameType | None = frame
        while users is not None and not is_users(users.f_globals.get("__name__")):
            users = users.f_back
        if users is not None:
            names = {each.ident: each.name for each in threading.enumerate()}
            where = f"{users.f_code.co_filename}:{users.f_lineno}"
            return f"the thread {names.get(ident, str(ident))!r} ({where})"
    return None


def _waits(frame: FrameType) -> bool:
    """Whether a thread waits for another one, for as long as it takes."""
    return frame.f_code.co_filename == _WAITS and frame.f_locals.get("timeout", 0) in _UNTIMED
