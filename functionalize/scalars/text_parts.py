"""What is on the stack of a function that puts a text together: see `call_sites.py`.

    f"loss {loss:.3f}"                    Text(("loss ", offset))
    [f"{a}", "b"]                         BuiltItems((Text((offset,)), CodeConstant("b")))
    (f"{v:.3f}" for v in values)          Comprehension(its code, offset of the call that makes it)
    ", ".join(...) of the two             Text((offset, ", ", "b")), Text((offset of `join`,))

An offset is that of the instruction that formats a value; -1 stands for an unknown text.
"""

from __future__ import annotations

import inspect
from types import CodeType
from typing import Any, NamedTuple


class Text(NamedTuple):
    """A text put together: constants, and the offsets of the instructions that format values; -1: an unknown text."""

    parts: tuple[str | int, ...]


class CodeConstant(NamedTuple):
    """A constant of the code."""

    value: Any


class BuiltItems(NamedTuple):
    """A list or tuple that is put together."""

    values: tuple[Any, ...]


class Comprehension(NamedTuple):
    """A generator expression, or the list of a list comprehension. at: the offset of the call that makes it."""

    code: CodeType
    at: int


def is_constant_text(value: Any) -> bool:
    """Whether this is a constant text."""
    return type(value) is CodeConstant and type(value.value) is str


def parts_of_join(at: int, separator: str, joined: Any) -> tuple[str | int, ...] | None:
    """The parts of the text that `separator.join(joined)` makes at `at`; None if it is not known what is joined.

    The elements of a comprehension have one offset: of the call during which its code runs.
    """
    if type(joined) is Comprehension:
        is_generator = bool(joined.code.co_flags & inspect.CO_GENERATOR)
        return (at if is_generator else joined.at,)
    if type(joined) is not BuiltItems:
        return None
    found: list[str | int] = []
    for value in joined.values:
        found += [separator] if found else []
        constant = value.value if is_constant_text(value) else -1
        found += value.parts if type(value) is Text else [constant]
    return tuple(found)


# What other instructions take from the stack and put on it.
EFFECTS = {
    "GET_ITER": (1, 1),
    "BINARY_SUBSCR": (2, 1), "COMPARE_OP": (2, 1), "CONTAINS_OP": (2, 1),
    "IS_OP": (2, 1), "UNARY_NEGATIVE": (1, 1), "UNARY_NOT": (1, 1), "UNARY_INVERT": (1, 1),
    "TO_BOOL": (1, 1), "BINARY_SLICE": (3, 1), "STORE_FAST": (1, 0), "STORE_DEREF": (1, 0),
    "STORE_GLOBAL": (1, 0), "POP_TOP": (1, 0), "STORE_ATTR": (2, 0), "STORE_SUBSCR": (3, 0),
}  # fmt: skip
BUILDS = {"BUILD_SET": 1, "BUILD_SLICE": 1, "BUILD_MAP": 2, "BUILD_CONST_KEY_MAP": 1}
CLOSURE = 8  # of `MAKE_FUNCTION`: a tuple of cells lies below the code
