"""Warnings for the user: that a step, or some of its calls, cannot be captured and runs eagerly.

    warn_uncapturable("step cannot be captured, it runs eagerly: ...")

Invariant: it never raises. Where warnings are errors the message is logged: a training run must not end in its middle
because a step is slower than it could be.
"""

from __future__ import annotations

import sys
import warnings
from types import FrameType

from functionalize.errors import UncapturableWarning
from functionalize.util.switches import REFUSALS
from functionalize.util.user_stack import is_internal


def warn_uncapturable(message: str) -> None:
    """Warn at the user's line that has called the step."""
    level, frame = 2, sys._getframe(1)
    caller: FrameType | None = frame
    while caller is not None and is_internal(caller.f_code.co_filename):
        level, caller = level + 1, caller.f_back
    try:
        warnings.warn(UncapturableWarning(message), stacklevel=level)
    except UncapturableWarning:
        REFUSALS.warning("%s", message)
