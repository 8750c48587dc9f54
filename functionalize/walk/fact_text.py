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

from functionalize.util.code_objects import compiled
from functionalize.util.packages import home_of
from functionalize.util.text import with_article, without_article

NUMBERS = (bool, int, float, complex, str, bytes, type(None))
# Types of plain values, which are compared by value.
PLAIN = frozenset(
    {*NUMBERS, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, range}
)


def has_plain_parts(value: Any) -> bool:
    """Whether a value consists of numbers and texts, so that it may be compared by `==`."""
    if type(value) in (tuple, list):
        return all(map(has_plain_parts, value))
    return (
        all(map(has_plain_parts, value.values())) if type(value) is dict else type(value) in PLAIN
    )


# Of tensors in a list, a dict or another object that the step replaces by one with other tensors. A replay makes
# no such object anew, since what else holds it would not see later changes.
CARRIED = (
    ": carry tensors to the next call in a tuple (`self.state = (h, c)`), or each in an attribute of its own "
    "(`self.h = h`)"
)

# What to do instead, at the end of messages.
OUTSIDE = ": do so outside the step"
MORE_ITEMS = (
    ": append to it alone, and read it outside the step, or make it as long as it will be at once; a replay appends, "
    "too"
)
NO_BOUND = ": give it a bound (`deque(maxlen=n)`): a replay moves the elements of one that is full"
FEWER_ITEMS = ": take items outside the step, and pass the step what it needs as an argument"
KEPT_OBJECT = ": keep one object, and assign to its attributes or items"
NEXT_OUTSIDE = ": call `next()` outside the step, and pass the step what it gives as an argument"
HELD_TOO = "that something else holds, too, where a replay would make another one"
COMPUTED = ": compute it of what was there (`n + 1`), or keep it in an attribute of its own"
OWN_TEXTS = ": make it outside the step; a replay puts no texts there but those that code of the step writes out"
WRITE_INTO = ": write into it (`with torch.no_grad(): tensor.copy_(new)`)"

# The same of a captured forward: a backward that no program covers runs it again, and would move them twice.
_IN_FORWARD = f"{WRITE_INTO}, or capture the whole step: a captured forward (`backward=True`) puts no other one there"


def in_forward(change: str) -> str:
    """The text about a change that a captured forward has made, with advice that holds for one."""
    for advice in (CARRIED, WRITE_INTO):
        if advice in change:
            return change.replace(advice, _IN_FORWARD)
    return change


Path = tuple[Any, ...]  # (path of the holder, name there); () is the step itself


def text_of(path: Path) -> str:
    """A path in one line: `self.weights.aux`."""
    parts: list[str] = []
    while path:
        path, name = path
        parts.append(str(name))
    return ".".join(reversed(parts)) or "the step"


def change_text(path: Path, new: Any, old: Any) -> str:
    """Two different facts of one path, for a message."""
    if _attributes(new) is not None and _attributes(old) is not None and new[1] is old[1]:
        changed = ", ".join(sorted(map(str, new[2] ^ old[2])))
        return f"`{text_of(path)}` has other attributes: {changed}"
    now, was = brief(new), brief(old)
    if now == was:
        if _is_array(new):
            return f"`{text_of(path)}` ({without_article(now)}) has other contents"
        return f"`{text_of(path)}` is another {without_article(now)}"
    return f"`{text_of(path)}` is {now}, was {was}"


def _is_array(fact: Any) -> bool:
    """Whether a fact is the contents of an array of numpy, or of Python: see `parts.py`."""
    return (
        isinstance(fact, tuple)
        and bool(fact)
        and isinstance(fact[0], type)
        and (hasattr(fact[0], "tobytes") and fact[0] is not memoryview)
    )


def advice_on(fact: Any, was: Any = None, owner: type | None = None) -> str:
    """What to do about state that a step changes and a replay would not.

    was: the fact before. owner: the type of the object that holds what has changed.
    """
    if _is_array(fact):
        return ": keep it as a tensor (`torch.from_numpy(array)`), which a replay writes, too"
    if owner is not None and issubclass(owner, Iterator):
        return NEXT_OUTSIDE
    if _is_list(fact) and _is_list(was):
        return FEWER_ITEMS if fact[1] < was[1] else MORE_ITEMS
    if _is_deque(fact) and _is_deque(was) and fact[1] > was[1] and fact[2] is None:
        return NO_BOUND
    advice: str = getattr(fact, "advice", "")
    return advice or OUTSIDE


def _is_list(fact: Any) -> bool:
    """Whether a fact is the number of elements of a list, and more."""
    is_counted = isinstance(fact, tuple) and len(fact) > 1 and isinstance(fact[0], type)
    return is_counted and issubclass(fact[0], list) and isinstance(fact[1], int)


def _is_deque(fact: Any) -> bool:
    """Whether a fact is the number of elements of a deque, and the most that it takes."""
    is_counted = isinstance(fact, tuple) and len(fact) == 3 and isinstance(fact[0], type)
    return is_counted and issubclass(fact[0], deque) and isinstance(fact[1], int)


def draws_text(name: str, mover: Any) -> str:
    """Why a step is refused that has moved an iterator, a generator or another object that only reads by moving."""
    text = f"draws from `{name}`, reads or writes it, which a replay would not"
    if isinstance(mover, Iterator):
        return text + NEXT_OUTSIDE
    if hasattr(mover, "random") or hasattr(mover, "bit_generator") or mover is None:
        return f"{text}: draw outside the step, and pass the step what it gives as an argument"
    return text + OUTSIDE


def _attributes(fact: Any) -> Any:
    is_object = isinstance(fact, tuple) and len(fact) == 3 and fact[0] == "object"
    return fact[2] if is_object else None


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
        return (
            f"{with_article(kind.__name__)} of {rest[0]}"
            if counted
            else f"the {kind.__name__} {rest[0]}"
        )
    if isinstance(fact, tuple) and len(fact) > 1 and fact[0] in ("kind", "object"):
        if issubclass(fact[1], (torch.SymFloat, torch.SymInt)):
            return "a number that the step reads from a tensor"
        return with_article(fact[1].__name__)
    if isinstance(fact, tuple) and len(fact) == 2 and fact[0] == "again":
        return f"`{text_of(fact[1])}`"  # the object that is found there, too
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
        yield f"{home_of(fact.__module__)}.{fact.__qualname__}"
    elif isinstance(fact, types.BuiltinFunctionType):
        yield f"builtin {fact.__name__}"
    elif isinstance(fact, (tuple, frozenset)):
        words = [word for each in fact for word in _words(each)]
        yield from sorted(words) if isinstance(fact, frozenset) else words
    else:
        yield repr(fact)
