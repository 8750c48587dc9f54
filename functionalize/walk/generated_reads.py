"""Whether a step compares or prints objects of a dataclass, by the methods that `dataclasses` has made for it.

    reads = GeneratedReads({State})
    with reads:
        state.losses.append(loss.item())      reads.found is None
        print(state)                          reads.found: "`__repr__` of a State"

These methods name every field, and belong to the class whether or not a step calls them. So they are no code of the
step; what they read is noted when they run.
Invariant: after the context, also after an exception, the classes have their methods.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Collection, Iterator
from types import FunctionType
from typing import Any, Self

from functionalize.util.code_objects import is_generated
from functionalize.util.patching import Patch, Patches
from functionalize.util.text import with_article

_ASSIGN = frozenset({"__init__", "__setattr__", "__delattr__"})


class GeneratedReads:
    """A context. found: the first method that has run in it, of an object of these classes; None: none has."""

    def __init__(self, kinds: Collection[type]) -> None:
        self.found: str | None = None
        self._thread = threading.get_ident()
        owners = {base for kind in kinds for base in kind.__mro__}
        self._methods = [
            (owner, name, method) for owner in owners for name, method in _generated(owner)
        ]
        self._patches = Patches(self._replacements)

    def __enter__(self) -> Self:
        self._patches.install()
        return self

    def __exit__(self, *error: object) -> None:
        self._patches.remove()

    def _replacements(self) -> Iterator[Patch]:
        for owner, name, method in self._methods:
            yield owner, name, self._noting(name, method)

    def _noting(self, name: str, method: FunctionType) -> Any:
        @functools.wraps(method)
        def noting(instance: Any, *args: Any, **keywords: Any) -> Any:
            if self.found is None and threading.get_ident() == self._thread:
                self.found = f"`{name}` of {with_article(type(instance).__name__)}"
            return method(instance, *args, **keywords)

        return noting


def _generated(kind: type) -> Iterator[tuple[str, FunctionType]]:
    """The methods that `dataclasses` has made for a class and that read its fields, with their names."""
    for name, method in list(vars(kind).items()):
        if type(method) is FunctionType and name not in _ASSIGN and is_generated(method.__code__):
            yield name, method
