"""`Patches`: attributes of classes and modules that are replaced for a time, and put back whatever happens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

Owner = type | ModuleType
Patch = tuple[Owner, str, Any]


class Patches:
    """Replacements that are made once, however many use them, and undone when the last one has left."""

    def __init__(self, patches: Callable[[], Iterator[Patch]]) -> None:
        self._patches = patches
        self._lock = threading.Lock()
        self._users = 0
        self._saved: list[tuple[Owner, str, Any, bool]] = []

    def install(self) -> None:
        """Replace what is to be replaced, once."""
        with self._lock:
            self._users += 1
            if self._users > 1:
                return
            try:
                for owner, name, new in self._patches():
                    self._replace(owner, name, new)
            except BaseException:
                self._users -= 1
                self._restore()
                raise

    def remove(self) -> None:
        """Put everything back when the last user leaves."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._restore()

    def _replace(self, owner: Owner, name: str, new: Any) -> None:
        own = name in vars(owner)
        self._saved.append((owner, name, vars(owner).get(name), own))
        setattr(owner, name, new)

    def _restore(self) -> None:
        try:
            while self._saved:
                owner, name, old, own = self._saved[-1]
                if own:
                    setattr(owner, name, old)
                elif name in vars(owner):
                    delattr(owner, name)
                self._saved.pop()
        finally:
            if self._saved:  # Ctrl-C came in between
                self._restore()
