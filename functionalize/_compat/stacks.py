"""Python stacks of recorded ops, captured cheaply."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
from torch._C._profiler import (  # makes the content of a CapturedTraceback
    gather_traceback as _gather,
)
from torch._C._profiler import (  # its frames
    symbolize_tracebacks as _symbolize,
)
from torch.utils._traceback import (  # a stack that is symbolised lazily
    CapturedTraceback,
)

from functionalize._compat.references import address

__all__ = [
    "CapturedTraceback",
]  # names of torch that are used elsewhere

_ENGINE_CODE = (
    torch.autograd.graph._engine_run_backward.__code__
)  # the only caller of autograd's engine


def stack_here() -> CapturedTraceback:
    """`CapturedTraceback.extract()` in a third of the time: it imports the module at every call."""
    return CapturedTraceback(_gather(True, False, False), 1)  # Python frames; names cost a third


def symbolized(stacks: Sequence[CapturedTraceback]) -> list[list[dict[str, Any]]]:
    """The frames of stacks (`filename`, `line`, `name`), innermost first; those that are equal are one dict.

    The stacks of a recording consist of few frames: together they take a hundredth of the time that each alone takes.
    """
    held = [stack for stack in stacks if stack.tb is not None]
    found = iter(_symbolize([stack.tb for stack in held]))
    return [[] if stack.tb is None else next(found)[stack.skip :] for stack in stacks]


def entered_frame() -> FrameType | None:
    """The outermost Python frame that the innermost running call of autograd's engine has called; None if none."""
    frame: FrameType | None = sys._getframe(1)
    below: FrameType | None = None
    while frame is not None and frame.f_code is not _ENGINE_CODE:
        frame, below = frame.f_back, frame
    return below if frame is not None else None


class Stacks:
    """`stack_here()` for the ops of a recording; the ops of one backward outside of hooks share one: half of a step.

    While a backward runs, the Python function that called autograd's engine does not advance: the ops of C++ nodes all
    have the same Python stack.
    handlers: how many handlers of modes of this package call one another for each op.
    shared: the stack of the ops of the running backward that its nodes in C++ ran, and no hook.
    main: the thread of the recording. away: the thread that runs these nodes, if it is another one; else 0.
    """

    def __init__(self) -> None:
        self.handlers = 1
        self._task = -1
        self._engine = 0  # where the frame of the engine's caller is, as long as the task runs
        self.shared: CapturedTraceback | None = None
        self.main = self.away = 0

    def here(self) -> CapturedTraceback:
        """The stack of the op that is being dispatched, for a function that a mode's handler calls."""
        frame = sys._getframe(1 + self.handlers).f_back
        task = torch._C._current_graph_task_id()
        if task == self._task and address(frame) == self._engine:
            assert self.shared is not None
            return self.shared
        while frame is not None and frame.f_code.co_name == "__torch_dispatch__":  # of other modes
            frame = frame.f_back
        if frame is None or frame.f_code is not _ENGINE_CODE:
            return stack_here()
        if self.shared is None or task != self._task:
            self._task, self.shared, self._engine = task, stack_here(), address(frame)
            thread = threading.get_ident()
            self.away = 0 if thread == self.main else thread
        return self.shared
