"""The functions whose calls a replay makes again: owner, name, what a call does, its door."""

from __future__ import annotations

import builtins
import logging
from collections.abc import Callable, Iterator
from typing import Any

from functionalize.calls.doors import Door
from functionalize.calls.draws import draw_patches
from functionalize.calls.logs import log_doors
from functionalize.calls.printing import PrintDoor
from functionalize.calls.progress import bar_patches, methods
from functionalize.calls.repeat import repeated_functions
from functionalize.calls.schedulers import SchedulerDoor, scheduler_patches, stepping_classes


def repeated_calls() -> Iterator[tuple[Any, str, str, Door]]:
    """The table."""
    yield builtins, "print", "prints", PrintDoor()
    for kind in stepping_classes():
        yield kind, "step", "steps a scheduler", SchedulerDoor()
    for name, door in log_doors():
        yield logging.Logger, name, "logs", door
    yield from methods()
    yield repeated_functions()


def state_patches(recorders: Callable[[], list[Any]]) -> Iterator[tuple[Any, str, Any]]:
    """(owner, name, replacement): how the state of such objects, and of generators, is read and set.

    recorders: those of this thread.
    """
    yield from scheduler_patches(recorders)
    yield from bar_patches(recorders)
    yield from draw_patches(recorders)
