"""Calls of captured steps in several threads take turns: one of them records, replays or audits at a time.

    turn = TURNS.take(patience)     waits while another thread has the turn; None: it would wait for ever
    with turn: ...                  a recording, an audit, a replay

Why all calls: a guard reads, a replay writes, and a recording walks objects that the step of another thread can reach
too (a list of models, a base class). None of these is atomic; torch's `tensor.grad` is not safe to read while the
engine of another thread assigns it. While a number of a recording is live, it is in the user's objects.

A step may wait for another thread inside (a barrier, a queue), which may want a turn itself: eager runs that, so a
call does not wait for ever. If the thread that has the turn stands still for some seconds, the call goes without one:
it runs eagerly, and a recording that it may have disturbed is not judged (`disturbances`).

A step that is refused for good runs without a turn: what it does in threads of its own is no concern of ours.

The backward of a captured forward and the optimizer after it run outside of its turn. So while two threads live that
call captured forwards, these run eagerly (`forwards_elsewhere`).

A thread may take a turn inside its own: a step that calls a captured step. The child of `fork` has no turns of other
threads, which it does not have.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

PATIENCE = 5.0  # seconds for which the thread that has the turn may stand still: kernels take less
# The same among ranks, which wait for each other: as long as torch's collectives do.
PATIENCE_OF_RANKS = 1800.0
IMPATIENCE = 0.05  # the same, for a step that has once waited in vain
MOST_DISTURBED = 3  # recordings of a step, which then runs eagerly where no program covers a call
_LONGEST = 120.0  # seconds that a call waits in any case
_LOOK = 0.02  # seconds between two looks at the thread that has the turn


class Turns:
    """The turns of the threads of this process.

    disturbances: how many calls have gone without a turn.
    """

    def __init__(self) -> None:
        self.disturbances = 0
        self._threads: WeakSet[threading.Thread] = WeakSet()
        self._of_forwards: WeakSet[threading.Thread] = WeakSet()
        self._here = threading.local()
        self.forget()

    def forget(self) -> None:
        """Nobody has a turn: in the child of a fork, whose only thread may have had one, and will end it."""
        self._lock = threading.RLock()
        self._holder: int | None = None
        self._taken: list[Turn] = []  # of the holder, the innermost last

    @property
    def threads(self) -> set[int]:
        """The identifiers of threads that call captured steps, and take no numbers from those of others."""
        alive = (thread for thread in list(self._threads) if thread.is_alive())
        return {thread.ident for thread in alive if thread.ident is not None}

    def forwards_elsewhere(self) -> bool:
        """Whether another thread that lives has called captured forwards, as this one does."""
        here = threading.current_thread()
        self._of_forwards.add(here)
        return any(thread is not here and thread.is_alive() for thread in list(self._of_forwards))

    def take(self, patience: Callable[[], float]) -> Turn | None:
        """A turn, when the other threads have had theirs; None: the thread that has it stands still.

        patience: seconds for which it may stand still, asked for if another thread has the turn.
        """
        lock = self._lock
        if not hasattr(self._here, "is_known"):
            self._here.is_known = True
            self._threads.add(threading.current_thread())
        if not lock.acquire(blocking=False) and not self._wait(lock, patience()):
            self.disturbances += 1
            return None
        self._holder, turn = threading.get_ident(), Turn(self, lock)
        self._taken.append(turn)
        return turn

    def _wait(self, lock: Any, patience: float) -> bool:
        begin = since = time.monotonic()
        seen: Any = None
        while not lock.acquire(timeout=_LOOK):
            now, at = time.monotonic(), self._where()
            if at != seen:
                seen, since = at, now
            elif now - since >= patience:
                return False
            if now - begin >= max(_LONGEST, patience):
                return False
        return True

    def _where(self) -> Any:
        """Which instruction of which frame the thread that has the turn is at, in a turn that differs from others."""
        holder = self._holder
        frame = sys._current_frames().get(holder) if holder is not None else None
        return holder, id(frame), frame.f_lasti if frame is not None else -1

    def end_innermost(self) -> None:
        """End the innermost turn of this thread before its context ends: the rest of the call is eager."""
        if self._holder == threading.get_ident():
            self._taken[-1].end()

    def ended(self, turn: Turn, lock: Any) -> None:
        """A turn, which `lock` stands for, is over."""
        if lock is not self._lock:  # it began before a fork
            return
        self._taken.remove(turn)
        if not self._taken:
            self._holder = None
        lock.release()


class Turn:
    """A context: the turn is over at its end."""

    __slots__ = ("_is_over", "_lock", "_turns")

    def __init__(self, turns: Turns, lock: Any) -> None:
        self._turns, self._lock, self._is_over = turns, lock, False

    def end(self) -> None:
        """End it, once."""
        if not self._is_over:
            self._is_over = True
            self._turns.ended(self, self._lock)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc: Any) -> None:
        self.end()


TURNS = Turns()
os.register_at_fork(after_in_child=TURNS.forget)
