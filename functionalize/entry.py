"""`capture`: record a training step, or a forward with its backward, and replay it from then on.

step = functionalize.capture(train_step)                     a whole step: `captured_step.py`
forward = functionalize.capture(loss_of, backward=True)      a forward and its backward: `captured_forward.py`
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from functionalize.step.captured_step import CapturedStep
from functionalize.step.options import CaptureOptions, Compile, OnUncapturable
from functionalize.step_backward.captured_forward import CapturedForward


def capture(
    train_step: Callable[..., Any] | None = None,
    *,
    passes: Sequence[Any] | str = (),
    on_uncapturable: OnUncapturable = "raise",
    max_programs: int = 16,
    backward: bool = False,
    compile: Compile = None,
    memory: bool = False,
) -> Any:
    """Record `train_step` (any callable; also a decorator) and replay it from then on.

    passes: a pipeline for the programs: its text (`"elide_copies"`) or `Pass` objects, see `docs/passes.md`.
    on_uncapturable: what calls do after a call that could not be captured: raise `UncapturableError` before anything
    runs, or run eagerly (one warning names the reason).
    max_programs: how many programs are kept side by side (shapes, train and eval, microbatches); the least recently
    used is dropped.
    backward: `train_step` is a forward, and `backward()` is called on its outputs outside of it: the backward is a
    program, too, see `captured_forward.py`.
    compile: what runs the programs: Inductor (not bit for bit), CUDA graphs, or (None) one op after the other. A
    program that cannot be compiled is refused like a step that cannot be captured, with a `CompileError`.
    memory: record when storages come and go, for `step.memory`, and which module each op belongs to.
    Whatever the step itself raises passes through. Raises `ValueError` for an unknown mode, and for `memory`
    with `backward`.
    """
    options = CaptureOptions.of(passes, on_uncapturable, max_programs, compile, memory)
    if train_step is None:
        return functools.partial(
            capture,
            passes=passes,
            on_uncapturable=on_uncapturable,
            max_programs=max_programs,
            backward=backward,
            compile=compile,
            memory=memory,
        )
    if not backward:
        return CapturedStep(train_step, options)
    if memory:
        raise ValueError(
            "memory=True records whole steps: a forward (backward=True) is a part of one"
        )
    return CapturedForward(train_step, options)
