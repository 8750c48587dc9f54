"""Parts of upper floors that lower ones need: the package says how each is imported, which happens when it is needed.

provide("memory reports", load)      the package itself, when it is imported; nothing of torch is
part("memory reports")               what `load` returns: the import
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_LOADERS: dict[str, Callable[[], Any]] = {}


def provide(name: str, load: Callable[[], Any]) -> None:
    """Set the function that imports a part and returns it."""
    _LOADERS[name] = load


def part(name: str) -> Any:
    """A part that was provided; imports it."""
    return _LOADERS[name]()
