"""Whether code of the user runs in another thread, which may read an object while a recording has numbers in it.

    thread = reading_thread(known)     the name of such a thread and where it is; None: there is none
    thread = other_thread()            the same of any thread with code of the user, also one that waits

A live number is an object of a type of its own (`type(trainer.n) is int` is false, `json` refuses it). While a step is
recorded, these objects are where the step keeps its numbers, and any thread may read there: so no number is live while
one may.

Not such a thread: one without a frame of the user's code (loaders of data, progress bars, writers of events, idle
pools), and one that waits without a timeout (`queue.get()`, `thread.join()`): whoever wakes it hands it what it reads.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Container, Iterator
from types import FrameType

from functionalize.util.packages import is_users

_WAITS = threading.Condition.wait.__code__.co_filename
_UNTIMED = (None, -1)


def reading_thread(known: Container[int]) -> str | None:
    """Which other thread may read the user's objects now, as text: its name, file and line.

    known: the identifiers of threads that do not.
    """
    found = (users for ident, frame, users in _others() if ident not in known and not _waits(frame))
    return next(found, None)


def other_thread() -> str | None:
    """Which other thread runs code of the user, or waits inside it, as text: its name, file and line."""
    return next((users for _, _, users in _others()), None)


def _others() -> Iterator[tuple[int, FrameType, str]]:
    """Of each other thread with code of the user: its identifier, its innermost frame, its name, file and line."""
    frames = sys._current_frames()
    # A frame that holds itself would keep the step's variables until a collection.
    del frames[threading.get_ident()]
    for ident, frame in frames.items():
        users: FrameType | None = frame
        while users is not None and not is_users(users.f_globals.get("__name__")):
            users = users.f_back
        if users is not None:
            names = {each.ident: each.name for each in threading.enumerate()}
            where = f"{users.f_code.co_filename}:{users.f_lineno}"
            yield ident, frame, f"the thread {names.get(ident, str(ident))!r} ({where})"


def _waits(frame: FrameType) -> bool:
    """Whether a thread waits for another one, for as long as it takes."""
    return frame.f_code.co_filename == _WAITS and frame.f_locals.get("timeout", 0) in _UNTIMED
