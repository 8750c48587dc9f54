"""Faults to put into a training step, and what must be as it was when one has passed through a capture.

    trap = Trap()                          trap.spring("backward") does nothing until it is armed
    trap.arm("backward", ValueError("no"))   then it raises, once
    with Tripwire(7, error): step(x)       the eighth op that reaches the dispatcher raises
    with surroundings(optimizer): ...      torch, the collector, modes and hyperparameters are left as they were

Nothing here needs pytest, so that the ranks can import it.
"""

from __future__ import annotations

import gc
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from functionalize.frontend.live import is_live
from tests.ranks import leftovers

Error = BaseException | Callable[[], None]
HIDDEN = "hidden"  # where a trap keeps its state, so that no guard of a program knows it


def interrupt() -> None:
    """Ctrl-C, as the operating system delivers it."""
    signal.raise_signal(signal.SIGINT)


def throw(error: Error) -> None:
    """Raise it, or call it."""
    if isinstance(error, BaseException):
        raise error
    error()


class Trap:
    """Places of a step where a fault can be had. It disarms itself as it springs."""

    def __init__(self) -> None:
        self._state: list[tuple[str, Error]] = []
        # A closure that the search of a step does not look into: a trap is no part of what a step depends on.
        self.spring = torch.jit.ignore(self._spring) if False else _Spring(self._state)

    def arm(self, where: str, error: Error) -> None:
        """The next `spring(where)` raises `error`."""
        self._state[:] = [(where, error)]

    def disarm(self) -> bool:
        """Whether it was still armed."""
        armed = bool(self._state)
        self._state.clear()
        return armed
