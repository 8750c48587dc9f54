"""A captured step of which one new size in n is compared, and no call is audited otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import functionalize as fz
from functionalize.step import options as options_of_steps

NEVER = 1000  # new sizes between comparisons


def capture(fn: Callable[..., Any], *, every: int | None = None, **options: Any) -> Any:
    """`fz.capture`. every: one new size in so many is compared, with `dynamic=True`; None: as the options say."""
    if every is None:
        return fz.capture(fn, **options)
    with mock.patch.object(options_of_steps, "EVERY", every):
        return fz.capture(fn, dynamic=True, **options)
