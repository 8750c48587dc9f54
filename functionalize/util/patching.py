"""`Patches`: attributes of classes, modules and objects that are replaced temporarily, and always restored.

What others put in the place of a replacement meanwhile stays. `set_profile`: the same for the profile function.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

Patch = tuple[Any, str, Any]


def set_profile(function: Any) -> None:
    """`sys.setprofile`, which raises while another thread is in it (Python 3.11)."""
    while True:
        try:
            return sys.setprofile(function)
        except RuntimeError:
            time.sleep(0)


class Patches:
    """Replacements that the first `install` makes and the last `remove` undoes; thread-safe.

    patches: yields (owner, attribute name, replacement).
    keeps: whether the replacements are kept for the next `install`, and made again only if something else stands in a
    place then; they must depend on nothing but what they replace.
    """

    def __init__(self, patches: Callable[[], Iterator[Patch]], keeps: bool = False) -> None:
        self._patches = patches
        self._keeps = keeps
        self._kept: list[tuple[Any, str, Any, Any]] = []  # with what they replace
        self._lock = threading.Lock()
        self._users = 0
        self._saved: list[tuple[Any, str, Any, Any, bool]] = []

    @property
    def active(self) -> bool:
        """Whether anyone uses the replacements."""
        return self._users > 0

    def install(self) -> None:
        """Add a user; the first one makes the replacements."""
        with self._lock:
            self._users += 1
            if self._users > 1:
                return
            try:
                if not self._put_kept():
                    for owner, name, new in self._patches():
                        self._replace(owner, name, new)
            except BaseException:
                self._kept.clear()
                self._users -= 1
                self._restore()
                raise

    def remove(self) -> None:
        """Remove a user; the last one restores the attributes."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._restore()

    def _put_kept(self) -> bool:
        """Make the replacements that were kept. Returns whether there are any, for what stands in their places."""
        for owner, name, _, old in self._kept:
            if getattr(owner, name, None) is not old:
                self._kept.clear()
        if not self._kept:
            return False
        for owner, name, new, _ in self._kept:
            self._set(owner, name, new)
        return True

    def _replace(self, owner: Any, name: str, new: Any) -> None:
        if self._keeps:
            self._kept.append((owner, name, new, getattr(owner, name, None)))
        self._set(owner, name, new)

    def _set(self, owner: Any, name: str, new: Any) -> None:
        own = vars(owner)  # a method of C++ that is read from its class is not what stands there
        self._saved.append((owner, name, new, own.get(name), name in own))
        setattr(owner, name, new)

    def _restore(self) -> None:
        try:
            while self._saved:
                owner, name, new, old, own = self._saved[-1]
                if vars(owner).get(name, new) is not new:
                    pass
                elif own:
                    setattr(owner, name, old)
                elif name in vars(owner):
                    delattr(owner, name)
                self._saved.pop()
        finally:
            if self._saved:  # interrupted by Ctrl-C: restore the rest
                self._restore()


def noted_attribute(original: Any, note: Callable[[Any], None]) -> property:
    """An attribute like that of a descriptor; `note` is called with the object before it is read, set or deleted."""

    def get(self: Any) -> Any:
        note(self)
        return original.__get__(self)

    def assign(self: Any, value: Any) -> None:
        note(self)
        original.__set__(self, value)

    def delete(self: Any) -> None:
        note(self)
        original.__delete__(self)

    return property(get, assign, delete)
