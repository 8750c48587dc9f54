"""What Python compiled a function to, as values that are equal where the code does the same."""

from __future__ import annotations

import types
from typing import Any


def compiled(code: types.CodeType) -> tuple[Any, ...]:
    """What Python compiled a function to, without lines and comments."""
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
