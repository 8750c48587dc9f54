"""`capture`: record a training step, or a forward with its backward, and replay it from then on.

step = functionalize.capture(train_step)                     a whole step: `captured_step.py`
forward = functionalize.capture(loss_of, backward=True)      a forward and its backward: `captured_forward.py`
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, overload

from functionalize.audit.schedule import AuditOption
from functionalize.late_sizes.late_sizes import LateSizes, takes_late_sizes
from functionalize.state.memory_reports import memory_reports
from functionalize.step.captured_step import CapturedStep
from functionalize.step.options import (
    CaptureOptions,
    Compile,
    Dynamic,
    OnUncapturable,
)
from functionalize.step.policy import ALLOWANCE
from functionalize.step_backward.captured_forward import captured_forward

P = ParamSpec("P")
R = TypeVar("R")


@overload
def capture(
    train_step: Callable[P, R],
    *,
    passes: Sequence[Any] | str | None = None,
    on_uncapturable: OnUncapturable = "eager",
    backward: bool = False,
    compile: Compile = None,
    memory: bool = False,
    audit: AuditOption = "auto",
    allowance: float | None = ALLOWANCE,
    dynamic: Dynamic = "auto",
) -> CapturedStep[P, R]: ...
@overload
def capture(
    train_step: None = None,
    *,
    passes: Sequence[Any] | str | None = None,
    on_uncapturable: OnUncapturable = "eager",
    backward: bool = False,
    compile: Compile = None,
    memory: bool = False,
    audit: AuditOption = "auto",
    allowance: float | None = ALLOWANCE,
    dynamic: Dynamic = "auto",
) -> Callable[[Callable[P, R]], CapturedStep[P, R]]: ...
def capture(
    train_step: Callable[..., Any] | None = None,
    *,
    passes: Sequence[Any] | str | None = None,
    on_uncapturable: OnUncapturable = "eager",
    backward: bool = False,
    compile: Compile = None,
    memory: bool = False,
    audit: AuditOption = "auto",
    allowance: float | None = ALLOWANCE,
    dynamic: Dynamic = "auto",
) -> Any:
    """Record `train_step` (any callable) and replay it in later calls; also a decorator.

    passes: a pipeline of passes for the programs: its text (`"default"`) or `Pass` objects, see `docs/passes.md`. None:
    `"reinplace"`, so that replays write parameters and states in place as eager does; no passes with `compile`,
    `memory` or `backward`. `""`: none.
    on_uncapturable: the behaviour of calls after one that could not be captured: "eager" runs them, after one
    `UncapturableWarning` per reason, with the object, the line and what to change; "raise" raises `UncapturableError`
    before anything runs, for tests and for those who want to know.
    backward: whether `train_step` is a forward on whose outputs the caller calls `backward()`: the backward becomes a
    program as well, see `captured_forward.py`.
    compile: the runner of the programs: Inductor (not bit for bit), CUDA graphs, or (None) op by op. A
    program that cannot be compiled is refused like a step that cannot be captured, with a `CompileError`.
    memory: record the lifetimes of storages, for `step.memory`, and the module of each op.
    audit: which calls run for real and are compared with the program: "auto" (a schedule with ever longer distances),
    a number n (every n-th call, and every n-th new size; 1: all), False (none), "raise" ("auto", and a difference
    raises `AuditError`). A difference drops the program and is logged, see `docs/capture/audits.md`.
    allowance: what the step may cost beyond eager, in eager steps, besides 5 % of its calls and what replays return:
    `docs/capture/recording.md`. None: any, so every call that no program covers is recorded at once, as with
    `backward`.
    dynamic: once two or three calls that differ in sizes only were recorded, predict the programs for other sizes. The
    first call of new sizes is replayed where it is known that nothing decides by them otherwise, else it runs for real
    and is compared with its program; one in eight is compared in any case. With "auto" this begins at the second
    recorded size of a kind of call, and never with `memory`, `compile` or `backward`. False: each size has a program of
    its own. See `docs/capture/lengths.md`.

    Exceptions of the step propagate unchanged. Raises `ValueError` for an unknown mode, for `memory` with `backward`,
    and for `dynamic=True` with `memory` or `compile`.

        >>> weight = torch.ones(2, requires_grad=True)
        >>> optimizer = torch.optim.SGD([weight], lr=0.1)
        >>> @fz.capture
        ... def train_step(x):
        ...     loss = (weight * x).sum()
        ...     loss.backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        ...     return loss.detach()
        >>> for _ in range(8):
        ...     loss = train_step(torch.ones(2))
        >>> train_step.stats.captures, train_step.stats.replays > 0
        (1, True)
    """
    if backward:
        allowance = None  # a forward that runs again on one rank runs again on all of them
    options = CaptureOptions.of(
        passes,
        on_uncapturable,
        compile,
        memory,
        audit,
        allowance,
        dynamic,
        backward,
    )
    if memory:
        memory_reports()  # imports the planner before the first call
    if train_step is None:
        return functools.partial(
            capture,
            passes=passes,
            on_uncapturable=on_uncapturable,
            backward=backward,
            compile=compile,
            memory=memory,
            audit=audit,
            allowance=allowance,
            dynamic=dynamic,
        )
    if not backward:
        return CapturedStep(train_step, options, LateSizes if takes_late_sizes(options) else None)
    if memory:
        raise ValueError(
            "memory=True records whole steps: a forward (backward=True) is a part of one"
        )
    return captured_forward(train_step, options)
