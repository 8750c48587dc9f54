"""Work as a number that is the same on every machine: the calls that Python makes."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

SLACK = 1.15  # sorting; sets and dictionaries that grow


def calls(work: Callable[[], Any]) -> int:
    """How many functions Python calls, its own and C's, while `work` runs; none of finalizers of earlier garbage."""
    count = 0

    def profile(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before, collects = sys.getprofile(), gc.isenabled()
    gc.disable()
    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()
    return count
