"""Python stacks of recorded ops."""

from __future__ import annotations

import sys

import torch
from torch._C._profiler import (  # what CapturedTraceback holds
    gather_traceback as _gather,
)
from torch.utils._traceback import (  # lazily symbolised stack
    CapturedTraceback,
)

__all__ = [
    "CapturedTraceback",
]  # names of torch that are used elsewhere

_ENGINE_CODE = torch.autograd.graph._engine_run_backward.__code__  # all that calls the engine


def stack_here() -> CapturedTraceback:
    """`CapturedTraceback.extract()` in half of the time: it imports the module at every call."""
    return CapturedTraceback(_gather(python=True, script=False, cpp=False), 1)


class Stacks:
    """`stack_here()` for the ops of a recording; those that one backward runs without a hook share one: half of a step.

    While a backward runs, what called autograd's engine waits where it is, so nothing below the op has changed.
    """

    def __init__(self) -> None:
        self._task = -1
        self._stack: CapturedTraceback | None = None

    def here(self) -> CapturedTraceback:
        """The stack, for the handler that asks."""
        frame = sys._getframe(1).f_back
        if frame is None or frame.f_code is not _ENGINE_CODE:
            return stack_here()
        task = torch._C._current_graph_task_id()
        if self._stack is None or task != self._task:
            self._task, self._stack = task, stack_here()
        return self._stack
