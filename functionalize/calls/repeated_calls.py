"""The functions whose calls a replay makes again: owner, name, what a call does, its interceptor."""

from __future__ import annotations

import builtins
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from functionalize.calls.draws import draw_patches
from functionalize.calls.interceptors import Interceptor
from functionalize.calls.logs import log_interceptors
from functionalize.calls.printing import PrintInterceptor
from functionalize.calls.progress import bar_patches, methods
from functionalize.calls.repeat import repeated_functions
from functionalize.calls.schedulers import SchedulerInterceptor, scheduler_patches, stepping_classes
from functionalize.calls.warned import WarningInterceptor


def repeated_calls() -> Iterator[tuple[Any, str, str, Interceptor]]:
    """The table."""
    yield builtins, "print", "prints", PrintInterceptor()
    for kind in stepping_classes():
        yield kind, "step", "steps a scheduler", SchedulerInterceptor()
    for name, interceptor in log_interceptors():
        yield logging.Logger, name, "logs", interceptor
    yield warnings, "warn", "warns", WarningInterceptor()
    yield from methods()
    yield repeated_functions()


def state_patches(recorders: Callable[[], list[Any]]) -> Iterator[tuple[Any, str, Any]]:
    """(owner, name, replacement): how the state of such objects, and of generators, is read and set.

    recorders: those of this thread.
    """
    yield from scheduler_patches(recorders)
    yield from bar_patches(recorders)
    yield from draw_patches(recorders)
