"""Code objects as values that can be compared: equal for functions that were compiled to the same instructions."""

from __future__ import annotations

import types
from typing import Any


def compiled(code: types.CodeType) -> tuple[Any, ...]:
    """The compiled form of a function, nested functions included, without file names and line numbers."""
    return (
        code.co_code,
        code.co_names,
        code.co_varnames,
        code.co_freevars,
        code.co_flags,
        [_constant(c) for c in code.co_consts],
    )


def _constant(value: Any) -> Any:
    if isinstance(value, types.CodeType):
        return compiled(value)
    return sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value)


def is_generated(code: types.CodeType) -> bool:
    """Whether the code is of a method that `dataclasses` made."""
    return code.co_filename == "<string>" or code.co_filename.endswith(
        ("dataclasses.py", "reprlib.py")
    )
