"""What is particular to one kind of captured step: functions that its calls ask, each absent where there is none.

    class LateSizes:                       sizes of results that the step computes
        def __init__(self, step): ...
            self.hooks = Hooks(plan=self.plan, replay=self.replay, ...)
    CapturedStep(train_step, options, LateSizes)

A forward whose backward runs outside, the backward of an eager graph, an iteration inside of `fz.lazy`, and late sizes
are such kinds. A plain step has no hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from functionalize.audit.audited_call import AuditedCall
from functionalize.ir.inputs import Call
from functionalize.program.program import Program
from functionalize.recorder.recorder import Recorder
from functionalize.step.cache import CachedProgram
from functionalize.step.outcome import Built
from functionalize.step.plan import Eager, Record
from functionalize.step.predictions import Predictions
from functionalize.step.recording import StepRecording
from functionalize.step.stages import Invocation


@dataclass(frozen=True, slots=True)
class Hooks:
    """The hooks of a kind of step; None: a call does what that of a plain step does.

    Of every call:
    began: it is no part of another recording; returns whether it runs eagerly. begin: it plans what it does.
    leaves: those of the arguments with which the callable is called.
    state: of the state in which it begins, a part of its key.
    plan: what it does, if that is not for programs to say. stays_eager: as in `Predictions`; None: ask these.
    why_not: why a call that no program covers is not recorded.

    Of a call with a program:
    replay: the result. is_due, audit: as in `Audits`.

    Of a recording:
    recorder: told the recorder of a call. capture: the whole of it. before_passes: as in `PassSchedule`.
    compares: whether later calls are compared with it, whatever the options say.
    build: the program. built: the program, once it is made. add: keeps it in the cache.
    is_still: whether no place in Python moves.

    Of the programs:
    predictions: makes what predicts them. forget: they are dropped. save: they are to be written.
    why_unsaved: why no file can hold them, for messages. text: lines for `explain`.
    """

    began: Callable[[], bool] | None = None
    begin: Callable[[Invocation], None] | None = None
    leaves: Callable[[list[Any]], Sequence[Any]] | None = None
    state: Callable[[Sequence[Any]], tuple[Hashable, ...]] | None = None
    plan: Callable[[Invocation], Record | Eager | None] | None = None
    stays_eager: Callable[[Invocation], bool | None] | None = None
    why_not: Callable[[Invocation], str | None] | None = None
    replay: Callable[[CachedProgram, Call], Any] | None = None
    is_due: Callable[[CachedProgram], bool] | None = None
    audit: Callable[[AuditedCall, CachedProgram, Invocation], Any] | None = None
    recorder: Callable[[Recorder, Invocation], None] | None = None
    capture: Callable[[Invocation], Any] | None = None
    compares: Callable[[StepRecording], bool] | None = None
    before_passes: Callable[[Program], tuple[bool, bool] | None] | None = None
    build: Callable[[StepRecording, Invocation], Built | None] | None = None
    built: Callable[[Built, StepRecording, Invocation], Built] | None = None
    add: Callable[[Hashable, CachedProgram], None] | None = None
    is_still: bool = False
    forget: Callable[[], None] | None = None
    save: Callable[[], None] | None = None
    why_unsaved: str = ""
    predictions: Callable[..., Predictions] | None = None
    text: Callable[[], Iterable[str]] | None = None


NO_HOOKS = Hooks()


class Part(Protocol):
    """What holds the hooks of one step."""

    hooks: Hooks
