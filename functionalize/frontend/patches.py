"""The two methods of torch that are replaced while a capture runs, and put back whatever happens.

    torch.UntypedStorage.resize_     does not dispatch: told to the recorder of the current thread
    torch.distributed Work.wait      gloo runs ops there: they are the collective's inside, not the program's

The replacements act only in a thread whose dispatch mode stack has a recorder on it; everywhere else they
are the originals. They are shared by all captures that run at the same time, and the last one removes them.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from functionalize._compat import current_modes, work_class


class _Patches:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._saved: list[tuple[type, str, Any, bool]] = []

    def install(self, watcher_type: type) -> None:
        """Replace the methods, once."""
        with self._lock:
            self._users += 1
            if self._users > 1:
                return
            try:
                self._replace(torch.UntypedStorage, "resize_", _watched_resize(watcher_type))
                work = work_class()
                if work is not None:
                    self._replace(work, "wait", _unwatched_wait(watcher_type, work.wait))
            except BaseException:
                self._users -= 1
                self._restore()
                raise

    def remove(self) -> None:
        """Put the methods back when the last user leaves."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._restore()

    def _replace(self, owner: type, name: str, new: Any) -> None:
        own = name in vars(owner)
        self._saved.append((owner, name, vars(owner).get(name), own))
        setattr(owner, name, new)

    def _restore(self) -> None:
        for owner, name, old, own in reversed(self._saved):
            if own:
                setattr(owner, name, old)
            else:
                delattr(owner, name)
        self._saved.clear()


PATCHES = _Patches()


def _watcher(kind: type) -> Any:
    for mode in reversed(current_modes()):
        if isinstance(mode, kind):
            return mode
    return None


def _watched_resize(kind: type) -> Any:
    original = torch.UntypedStorage.resize_

    def resize_(self: torch.UntypedStorage, size: Any) -> Any:
        watcher = _watcher(kind)
        if watcher is None or watcher.suspended:
            return original(self, size)
        return watcher.resize_storage(self, size, original)

    resize_.__doc__ = original.__doc__
    return resize_


def _unwatched_wait(kind: type, original: Any) -> Any:
    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        watcher = _watcher(kind)
        if watcher is None:
            return original(self, *args, **kwargs)
        watcher.suspended += 1
        try:
            return original(self, *args, **kwargs)
        finally:
            watcher.suspended -= 1

    wait.__doc__ = original.__doc__
    return wait
