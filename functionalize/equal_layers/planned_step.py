"""A captured step of a fake world that is recorded whole once, and then without most of its equal layers.

    step = PlannedStep(train_step)
    step(model, optimizer, *batch)         recorded as any captured step, whole
    step.forget()
    step(model, optimizer, *other)         recorded without layers that equal others, which are put back

A call is recorded whole, as any captured step is, if the step has no equal layers; if these were recorded differently;
if they read what differs among them, as the number of a layer, which is compared from then on; if other arguments
change more than sizes in them; or if the step leaves other state behind. `whole_because` says which.
Invariant: a program and its memory are those of a whole recording: tests compare them, event for event.
Refuses (`ShortRunError`): a short run that raised. The model may be in any state then; the caller builds another one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Set
from dataclasses import replace
from typing import Any

from functionalize._compat.modules import has_hooks_of_modules
from functionalize.equal_layers.expansion import expand
from functionalize.equal_layers.layers import EqualLayers
from functionalize.equal_layers.left_gradients import LeftGradients
from functionalize.equal_layers.left_out import LeftOut
from functionalize.equal_layers.recorded_run import RunRecord, Unlike
from functionalize.equal_layers.short_run import ShortRun
from functionalize.lifetimes.observer import LifetimeObserver
from functionalize.recorder.recorder import Recorder
from functionalize.step.cache import CachedProgram
from functionalize.step.captured_step import CapturedStep
from functionalize.step.options import CaptureOptions
from functionalize.step.outcome import Refused
from functionalize.step.stages import FinishedRun, Invocation, RecordedRun

_PROGRAMS = 16  # that are kept at once, as by default
_FIRST = "it is the first one"
log = logging.getLogger("functionalize")


class ShortRunError(Exception):
    """A run of a step without most of its equal layers raised an error, which the whole step may not."""


class _Whole:
    """What is kept of a step that was recorded whole. Raises `Unlike` if no short run can follow."""

    def __init__(self, run: RecordedRun, program: CachedProgram, read: Set[str]) -> None:
        """read: attributes that layers read, which must be equal."""
        if not program.effects.are_none:
            raise Unlike("the step changes what FSDP2 keeps in Python")
        named = run.entry.roots.walk()
        self.layers = EqualLayers.of(named, read)
        if not self.layers.runs:
            raise Unlike("it has no equal layers")
        try:
            self.left_out = LeftOut(_run_record(run, self.layers), self.layers)
        except Unlike:  # they may be equal where what differs is equal, too
            self.layers = EqualLayers.of(named, read | self.layers.attributes)
            if not self.layers.runs:
                raise
            self.left_out = LeftOut(_run_record(run, self.layers), self.layers)
        self.gradients = LeftGradients(self.layers, run.recorder.storages)
        self._leaves = _left_behind(run, program)

    def leaves_as(self, run: FinishedRun, program: CachedProgram) -> bool:
        """Whether a run leaves as much behind: gradients, and changes of Python objects."""
        return isinstance(run, RecordedRun) and self._leaves == _left_behind(run, program)


class PlannedStep(CapturedStep):
    """A captured step that is planned for one batch after the other. short: whether to leave out layers.

    whole_because: why the last call that was recorded was recorded whole; None: it was not.
    """

    def __init__(self, train_step: Callable[..., Any], short: bool = True) -> None:
        options = CaptureOptions.of("", "raise", _PROGRAMS, None, memory=True)
        super().__init__(train_step, options)
        self.whole_because: str | None = _FIRST if short else "short runs are off"
        self._short = short
        self._read: set[str] = set()  # by layers, of what differs among them
        self._recorded: tuple[RecordedRun, CachedProgram] | None = None  # whole, the last one
        self._whole: _Whole | None = None

    def _record(self, call: Invocation, recorder: Recorder) -> RecordedRun | Refused:
        if self._short and self._recorded is not None:
            try:
                self._whole, self._recorded = _Whole(*self._recorded, self._read), None
            except Unlike as error:
                self._short = False
                self._is_whole(str(error))
        if self._whole is not None and has_hooks_of_modules():
            self._is_whole("hooks on all modules may see every layer")
        if self._short and self._whole is not None:
            try:
                return self._expanded(self._whole, call, recorder)
            except Unlike as error:
                self._is_whole(str(error))
                # So that the recording finds what a whole run leaves behind, not a short one.
                self._fn(*call.args, **call.kwargs)
                recorder = self._recorder(call)
        return super()._record(call, recorder)

    def _expanded(self, whole: _Whole, call: Invocation, recorder: Recorder) -> RecordedRun:
        """A short run of a call, made whole."""
        short = ShortRun(whole.layers)
        try:
            run = super()._record(replace(call, observer=short), recorder)
        except Exception as error:
            raise ShortRunError(f"a run without equal layers raised {error!r}") from error
        if not isinstance(run, RecordedRun):
            raise Unlike(str(run.error))
        if short.ran_whole is not None:
            raise Unlike(short.ran_whole)
        if short.read:
            self._read |= short.read
            raise Unlike(f"equal layers read {', '.join(sorted(short.read))}")
        whole.gradients.check()
        try:
            expanded = expand(whole.left_out, _run_record(run, whole.layers))
            whole.gradients.leave(expanded.made, run.recorder.storages)
        except Unlike:
            raise
        except Exception as error:  # a bug: the step is recorded whole all the same
            log.warning(
                "%s is recorded whole: equal layers cannot be put back", self._name, exc_info=True
            )
            raise Unlike(f"equal layers cannot be put back: {error!r}") from error
        for slot, count in run.entry.deaths.items():
            run.entry.deaths[slot] = expanded.places[count - 1] + 1 if count else 0
        self.whole_because = None
        return run

    def _finish(self, run: FinishedRun, call: Invocation, rerun: bool = False) -> None:
        super()._finish(run, call, rerun)
        latest = self._cache.latest
        if self.whole_because is not None:
            if latest is not None and isinstance(run, RecordedRun) and self._short:
                self._recorded, self._whole = (run, latest), None
        elif latest is None or self._whole is None or not self._whole.leaves_as(run, latest):
            self._short, self._cache = False, self._empty_cache()
            self._refused.clear()  # of a short run
            self._is_whole("the step leaves other state behind")

    def _is_whole(self, why: str) -> None:
        log.info("%s is recorded whole: %s", self._name, why)
        self.whole_because, self._recorded, self._whole = why, None, None


def _run_record(run: RecordedRun, layers: EqualLayers) -> RunRecord:
    observer = run.recorder.observer
    assert isinstance(observer, LifetimeObserver)  # a planned step records memory
    return RunRecord(run.recorder, observer.notes, run.entry.places.widest, layers)


def _left_behind(run: RecordedRun, program: CachedProgram) -> Any:
    """What a step changes outside of tensors that were there: FSDP2's state, gradients, numbers and objects."""
    effects, moves = program.effects.are_none, run.moving.key
    return effects, len(program.slots), len(program.python_effects), moves and moves[:2]
