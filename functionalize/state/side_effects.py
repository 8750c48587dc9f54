"""What a step does in Python beside its tensors: a replay does not do it again, so the step is refused.

    losses.append(loss)        a list, dict, set, deque or queue that the step can reach has other contents
    self.last = loss           an attribute of an object holds another thing
    random.random()            Python's or numpy's generator moved
    file.write(...)            a file that the step can reach is at another place

Numbers that Python keeps are guarded (`guards.py`); the generators of torch are part of the program.
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
_MAX_ELEMENTS = 100_000  # of one container; more are compared by their number


@dataclass(slots=True, eq=False)
class HostState:
    """What the step can reach, as it was: contents by name, and Python's generators."""

    contents: list[tuple[str, Callable[[], list[Any]], list[Any]]]
    generators: list[Any]

    @staticmethod
    def now(roots: Roots) -> HostState:
        """Look at every container and object under `roots`."""
        looks = [*_containers(roots), *_attributes(roots)]
        return HostState([(n, look, look()) for n, look in looks], _generators())

    def difference(self) -> str | None:
        """What is not as it was."""
        for name, look, was in self.contents:
            now = look()
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
    """What tells the contents of a container apart."""
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
    """A value to compare with later; a tensor is not kept alive."""
    if isinstance(value, Tensor):
        return weakref.ref(value)
    return (value,) if isinstance(value, NUMBERS) else _Same(value)


@dataclass(frozen=True, slots=True, eq=False)
class _Same:
    value: Any


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, weakref.ref) and isinstance(b, weakref.ref):
        return a() is not None and a() is b()
    if isinstance(a, _Same) and isinstance(b, _Same):
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
