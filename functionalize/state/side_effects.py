"""Side effects of a step in Python, outside its tensors. A replay does not repeat them, so such a step is refused.

    losses.append(loss)        changes a list, dict, set, deque or queue that the step can reach
    self.last = loss           assigns another object to an attribute
    random.random()            advances Python's or numpy's random generator
    file.write(...)            moves the position of a file that the step can reach

Numbers in attributes are compared by guards (`step_guards.py`); torch's random generators are inputs of the program.
"""

from __future__ import annotations

import io
import queue
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from functionalize.state.discovery import CONTAINERS, NUMBERS, Roots

_REGISTRIES = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})
_MAX_ELEMENTS = 100_000  # a container with more elements is compared by its length


@dataclass(slots=True, eq=False)
class HostState:
    """The Python state that a step can reach, at one moment.

    contents: for each container and attribute, its name, a function that reads it, and the value it returned.
    generators: the states of Python's and numpy's random generators.
    """

    contents: list[tuple[str, Callable[[], list[Any]], list[Any]]]
    generators: list[Any]

    @staticmethod
    def now(roots: Roots) -> HostState:
        """Read every container and object under `roots`."""
        readers = [*_containers(roots), *_attributes(roots)]
        return HostState([(n, read, read()) for n, read in readers], _generators())

    def difference(self) -> str | None:
        """Text about a difference between the state now and this one, or None."""
        for name, read, was in self.contents:
            now = read()
            if len(now) != len(was) or not all(map(_same, now, was)):
                return f"changes `{name}`, which a replay would not"
        if any(a != b for a, b in zip(_generators(), self.generators, strict=True)):
            return "draws from Python's or numpy's random generator, which a replay would not"
        return None


def _containers(roots: Roots) -> Iterator[tuple[str, Callable[[], list[Any]]]]:
    found = list(roots.containers)
    for name, module in roots.walk():
        found += [
            (f"{name}.{key}", value)
            for key, value in vars(module).items()
            if isinstance(value, CONTAINERS) and key not in _REGISTRIES and "hooks" not in key
        ]
    for name, container in found:
        yield name, partial(_tokens, container)


def _attributes(roots: Roots) -> Iterator[tuple[str, Callable[[], list[Any]]]]:
    for name, table in roots.objects:
        for key in table.keys() & roots.named:
            if not isinstance(table[key], (Tensor, *NUMBERS)):
                yield f"{name}.{key}", partial(_attribute, table, key)


def _attribute(table: dict[str, Any], key: str) -> list[Any]:
    return [_token(table.get(key))]


def _tokens(container: Any) -> list[Any]:
    """The contents of a container, as values that `_same` compares."""
    if isinstance(container, queue.SimpleQueue):
        return [("size", container.qsize())]
    if isinstance(container, io.IOBase):
        return [("at", _position(container))]
    if isinstance(container, queue.Queue):
        container = container.queue
    if len(container) > _MAX_ELEMENTS:
        return [("size", len(container))]
    if isinstance(container, dict):
        return [_token(each) for pair in list(container.items()) for each in pair]
    return [_token(each) for each in container]


def _token(value: Any) -> Any:
    """A value in a form that `_same` compares later: a weak reference to a tensor, an object by identity."""
    if isinstance(value, Tensor):
        return weakref.ref(value)
    return (value,) if isinstance(value, NUMBERS) else _Identity(value)


@dataclass(frozen=True, slots=True, eq=False)
class _Identity:
    value: Any


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, weakref.ref) and isinstance(b, weakref.ref):
        return a() is not None and a() is b()
    if isinstance(a, _Identity) and isinstance(b, _Identity):
        return a.value is b.value
    return type(a) is type(b) and repr(a) == repr(b)


def _position(file: Any) -> Any:
    try:
        return file.closed or file.tell()
    except (OSError, ValueError):
        return None


def _generators() -> list[Any]:
    states: list[Any] = [random.getstate()]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        _, keys, at, *rest = numpy.random.get_state()
        states.append((keys.tobytes(), at, *rest))
    return states
