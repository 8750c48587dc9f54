"""What recordings must know of a fake world, which the planner makes: that there is one, and its device.

    in_world()                       whether the calling thread is inside a fake world
    placed(torch.device("cuda"))     the device to record: of fake tensors on the CPU that stand for those of a GPU

`FakeWorld` is the mode by which a world is recognised; the planner's mode derives from it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from functionalize._compat.dispatch import current_modes
from functionalize._compat.fakes import FakeTensorMode

ON_CPU: set[int] = set()  # the threads in which fake CPU tensors stand for those of a GPU


class FakeWorld(FakeTensorMode):
    """The fake mode of a world.

    target: the name of the device that is planned for.
    note_literal: is called with each tensor that Python makes from numbers.
    """

    target: str
    note_literal: Callable[[Tensor], None] | None

    def known(self, func: Any, op: Callable[..., Any], args: Any, kwargs: Any, refs: Any) -> Any:
        """The result of a call as that of one alike, else by `op`, for a mode that is directly above this one.

        refs: the arguments as `FakeResultCache.run` takes them.
        """
        raise NotImplementedError


def in_world() -> bool:
    """Whether the calling thread is inside a fake world."""
    return any(isinstance(mode, FakeWorld) for mode in current_modes())


@contextmanager
def literals_noted(note: Callable[[Tensor], None]) -> Iterator[None]:
    """A context in a fake world: `note` is called with each tensor that Python makes from numbers; these are real."""
    mode = next(each for each in current_modes() if isinstance(each, FakeWorld))
    before, mode.note_literal = mode.note_literal, note
    try:
        yield
    finally:
        mode.note_literal = before


def world_directly_below() -> FakeWorld | None:
    """The mode of the calling thread's world, if it is the only mode: the next mode entered dispatches to it alone."""
    modes = current_modes()
    return modes[0] if len(modes) == 1 and isinstance(modes[0], FakeWorld) else None


def world_target() -> str | None:
    """The name of the target of the calling thread's world; None outside of one."""
    return next((m.target for m in current_modes() if isinstance(m, FakeWorld)), None)


def placed(device: torch.device) -> torch.device:
    """The device to record for an op on `device`: under a CUDA target, CPU tensors stand for CUDA tensors."""
    if device.type == "cuda" and threading.get_ident() in ON_CPU:
        return torch.device("cpu")
    return device
