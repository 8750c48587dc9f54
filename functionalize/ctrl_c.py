"""Ctrl-C in the command line: one line on stderr, exit code 130, no traceback, and no process left, at any moment.

    import of this package      most of a short command: torch is imported; Ctrl-C ends the process at once
    with interruptible():       a command runs: the first Ctrl-C raises `KeyboardInterrupt`, so that files, temporary
                                folders and the script's own `finally` are cleaned up; the second ends the process
    after it                    as before it

A `KeyboardInterrupt` may be lost: in a callback, which cannot raise, or in code that catches everything. So the process
ends when a callback has lost it, and `PATIENCE` seconds after the first Ctrl-C in any case.
Nothing of this is done where the package is imported by another program, and in threads.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

INTERRUPTED = 130  # the exit code of a shell's command after Ctrl-C
PATIENCE = 3.0  # seconds for cleaning up
_LINE = b"interrupted\n"
_CLEAR = b"\r\x1b[K\x1b[?25h"  # the line of a progress bar, which has hidden the cursor


def is_command() -> bool:
    """Whether this process is `functionalize` or `python -m functionalize`."""
    if os.path.basename(sys.argv[0] if sys.argv else "") == "functionalize":
        return True
    words = [*sys.orig_argv, ""]
    return "-m" in words and words[words.index("-m") + 1] == "functionalize"


def leave(*_: Any) -> NoReturn:
    """End the processes that were started, and this one, with one line."""
    if "multiprocessing.process" in sys.modules:
        for child in sys.modules["multiprocessing.process"].active_children():
            child.kill()
    os.write(2, (_CLEAR if os.isatty(2) else b"") + _LINE)
    os._exit(INTERRUPTED)


def _leave_without_a_word(*_: Any) -> NoReturn:
    os._exit(INTERRUPTED)


def _end_as_interrupted() -> None:
    """The last function at exit: an interrupt inside `exec`, though handled, lets Python end itself by a signal."""
    if signal.getsignal(signal.SIGINT) is _leave_without_a_word:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(INTERRUPTED)


def _raise(*_: Any) -> NoReturn:
    signal.signal(signal.SIGINT, leave)
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGALRM, leave)
        signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    raise KeyboardInterrupt


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """A context in which Ctrl-C raises `KeyboardInterrupt`. The yielded function says whether it was pressed.

    Whoever catches the exception, or another one that it became, inside says so: nothing is written after the context.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not (in_main and signal.getsignal(signal.SIGINT) is leave):
        yield lambda: False
        return
    callbacks = sys.unraisablehook

    def lost(found: Any) -> None:
        if issubclass(found.exc_type, KeyboardInterrupt):
            leave()
        callbacks(found)

    sys.unraisablehook = lost
    signal.signal(signal.SIGINT, _raise)
    try:
        yield lambda: signal.getsignal(signal.SIGINT) is leave
    finally:
        pressed = signal.getsignal(signal.SIGINT) is leave
        signal.signal(signal.SIGINT, _leave_without_a_word if pressed else leave)
        if pressed and hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, 0)
        sys.unraisablehook = callbacks


@contextmanager
def interrupts_held() -> Iterator[None]:
    """A context that passes SIGINT to its handler when it ends, so that Ctrl-C leaves nothing half done in it."""
    handler, pressed = signal.getsignal(signal.SIGINT), list[Any]()
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    signal.signal(signal.SIGINT, lambda *signal_and_frame: pressed.append(signal_and_frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if pressed:
            handler(*pressed[0])


@contextmanager
def held_back() -> Iterator[None]:
    """A context in which Ctrl-C waits, here and in processes that are started in it, until they call `let_through`."""
    with interrupts_held():  # another thread, of torch, may receive the signal that this one blocks
        if not hasattr(signal, "pthread_sigmask"):
            yield
            return
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def let_through() -> None:
    """In a process that was started in `held_back`: from now on Ctrl-C ends it, without a word."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


if is_command() and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, leave)
    atexit.register(_end_as_interrupted)
