"""Facts about Python state as text: short for messages, and comparable between processes for saved programs.

    text_of(path)          `self.weights.aux`
    brief(fact)            "the code of mse_loss"
    portable(fact)         "code 3f2a...": equal in every process with this code

A fact is a plain value or a tuple of a kind and values; see `python_state.py`.
"""

from __future__ import annotations

import hashlib
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from functionalize.state.discovery import NUMBERS
from functionalize.util.code_objects import compiled

# Types of plain values, which are compared by value.
PLAIN = frozenset(
    {*NUMBERS, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, range}
)

Path = tuple[Any, ...]  # (path of the holder, name there); () is the step itself


def text_of(path: Path) -> str:
    """A path in one line: `self.weights.aux`."""
    parts: list[str] = []
    while path:
        path, name = path
        parts.append(str(name))
    return ".".join(reversed(parts)) or "the step"


def brief(fact: Any) -> str:
    """A fact for a message."""
    if isinstance(fact, types.CodeType):
        return f"the code of {fact.co_name}"
    if isinstance(fact, type):
        return f"the class {fact.__qualname__}"
    if isinstance(fact, tuple) and fact and isinstance(fact[0], type):
        kind, *rest = fact
        if kind in PLAIN:
            return str(rest[0])
        counted = issubclass(kind, (list, tuple, dict, set, frozenset, deque))
        return f"a {kind.__name__} of {rest[0]}" if counted else f"the {kind.__name__} {rest[0]}"
    if isinstance(fact, tuple) and len(fact) == 2 and fact[0] == "kind":
        return f"a {fact[1].__name__}"
    text = repr(fact)
    return text if len(text) < 80 else f"{text[:77]}..."


def portable(fact: Any) -> str:
    """A fact as text that is equal in another process; a hash if it is long."""
    text = "/".join(_words(fact))
    return text if len(text) < 80 else hashlib.sha256(text.encode()).hexdigest()[:16]


def _words(fact: Any) -> Iterator[str]:
    if isinstance(fact, types.CodeType):
        yield f"code {hashlib.sha256(repr(compiled(fact)).encode()).hexdigest()[:16]}"
    elif isinstance(fact, type):
        yield f"{fact.__module__}.{fact.__qualname__}"
    elif isinstance(fact, types.BuiltinFunctionType):
        yield f"builtin {fact.__name__}"
    elif isinstance(fact, (tuple, frozenset)):
        words = [word for each in fact for word in _words(each)]
        yield from sorted(words) if isinstance(fact, frozenset) else words
    else:
        yield repr(fact)
