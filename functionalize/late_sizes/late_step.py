"""A captured step whose results may have sizes that it computes: which calls are recorded, which are replayed.

    step = LateStep(train_step, options)      as `CapturedStep`; calls without such sizes are handled by that

A recording with such sizes has no program of its own: none would fit the next call. It is one of those that determine
the program of its class (`late_class.py`), which is then replayed for any sizes that the step computes, and once in a
while recorded again and compared. A replay that meets a size that was not compared changes nothing: the call is
recorded, or runs eagerly where recordings have not been returned by replays.
Invariant: ranks that vote record together, or run eagerly together: which, the votes say.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import torch

from functionalize._compat.dispatch import disable_current_modes
from functionalize.audit.signature import Signature
from functionalize.errors import GuardError, SaveError
from functionalize.ir.guards import Miss
from functionalize.ir.inputs import Call
from functionalize.late_sizes.late_class import LateClass
from functionalize.late_sizes.late_classes import LateClasses, Turn
from functionalize.late_sizes.late_guards import late_guards
from functionalize.late_sizes.late_instances import LateInstance
from functionalize.late_sizes.late_observer import LateObserver
from functionalize.lengths.references import Reference
from functionalize.program.program import Program
from functionalize.recorder.recorder import Recorder
from functionalize.step.cache import CachedProgram
from functionalize.step.captured_step import CapturedStep
from functionalize.step.options import CaptureOptions
from functionalize.step.outcome import Built
from functionalize.step.predicted_step import REPLAYS_BEFORE_PASSES
from functionalize.step.recording import StepRecording
from functionalize.step.stages import Invocation
from functionalize.step.vote import RARE, Level
from functionalize.templates.call_keys import LATE, shapes_of, with_late_sizes
from functionalize.templates.fitting import Sizes
from functionalize.util.user_warning import warn_uncapturable

log = logging.getLogger("functionalize")
_DUE = "calls whose sizes the step computes are recorded until they are one program, and one in so many later"
_EVERY = 32  # calls between recordings, at first: each compares other sizes


class LateStep(CapturedStep):
    """A captured step, with one program for all sizes that its ops give their results."""

    def __init__(self, train_step: Callable[..., Any], options: CaptureOptions) -> None:
        super().__init__(train_step, options)
        self._late = self._no_classes()
        self._turn: Turn | None = None  # of this call, if its kind has computed sizes
        self._records_missed = True  # whether a call whose replay fails is recorded

    def _no_classes(self) -> LateClasses:
        dynamic = self._options.dynamic
        return LateClasses(_EVERY if isinstance(dynamic, (bool, str)) else dynamic)

    def forget(self) -> None:
        super().forget()
        self._late = self._no_classes()

    def save(self, path: Any) -> None:
        late = [cached for cached in self._cache if isinstance(cached.program, LateInstance)]
        for cached in late:
            self._cache.drop(cached)  # the class makes it again
        if not len(self._cache) and len(self._late):
            raise SaveError("has no program but those whose sizes it computes, which are not saved")
        super().save(path)

    # -- recordings ----------------------------------------------------------------------------

    def _takes_late_sizes(self) -> bool:
        """Whether results may have sizes that are known only while the graph runs."""
        options = self._options
        compares_all = options.dynamic is not True and options.dynamic == 1
        return self._lengths is not None and not compares_all and not options.compares

    def _recorder(self, call: Invocation) -> Recorder:
        recorder = super()._recorder(call)
        recorder.checks.sizes.takes_late = recorder.ignore_fake and self._takes_late_sizes()
        if isinstance(call.observer, LateObserver):
            recorder.checks.sizes.counted = call.observer.counted
        return recorder

    def _capture(self, call: Invocation) -> Any:
        kind = self._late.of(call.key)
        if kind is not None:
            call = replace(call, observer=kind.group.observer(shapes_of(call.key)))
        return super()._capture(call)

    def _before_passes(self, recorded: Program, call: Invocation) -> tuple[int, bool]:
        return (0, True) if late_guards(recorded) else super()._before_passes(recorded, call)

    def _signature(self, recording: StepRecording, key: Hashable) -> Callable[[], Signature] | None:
        if recording.recorder.checks.sizes.has_counts:
            return recording.signature()
        return super()._signature(recording, key)

    def _build(self, recording: StepRecording, call: Invocation) -> Built:
        built = super()._build(recording, call)
        cached = built.cached
        guards = late_guards(cached.program)
        if not guards:
            return built
        key: Any = self._key_with_sizes(call.key, cached.program)
        names = recording.entry.roots.arguments
        found = Reference.of(key, names, call.leaves, cached.program, cached)
        assert found is not None
        late = with_late_sizes(key, [guard.value for guard in guards])
        reference = replace(found, key=late, names=[*found.names, LATE])
        observer = call.observer if isinstance(call.observer, LateObserver) else None
        recorder = recording.recorder
        sources = recorder.checks.sizes.late(recorder.early_records())
        self._late.learn(key, reference, sources, observer)
        self._drop_old()
        return replace(built, reference=None, is_replayed=False)

    # -- calls ---------------------------------------------------------------------------------

    def _is_unpredicted(self, call: Invocation) -> bool:
        kind = self._late.of(call.key)
        if kind is None:
            return super()._is_unpredicted(call)
        if self._turn is Turn.REPLAY and self._has_late(call):
            return False
        return self._turn is Turn.REST or not kind.may_record

    def _has_late(self, call: Invocation) -> bool:
        """Whether there is a program for arguments of these sizes and all computed ones; makes it if it can be made."""
        kind, programs = self._late.of(call.key), self._cache.at(call.key)
        if any(isinstance(cached.program, LateInstance) for cached in programs):
            return True
        if kind is None or not kind.group.is_ready:
            return False
        sizes = kind.group.sizes_of(shapes_of(call.key))
        if isinstance(sizes, str) or kind.group.why_compared(sizes) is not None:
            return False
        return self._take_late(kind.group, sizes, call)

    def _take_late(self, group: LateClass, sizes: Sizes, call: Invocation) -> bool:
        """Keep a program for arguments of these sizes, if there is one."""
        rest, program = group.references[-1].rest, group.at(sizes)
        if program is None:
            return False
        reason = f"a prediction from {group.recorded} recorded calls that computed other sizes"
        parts = {"op_stream": None, "reason": reason, "group": None, "is_bare": False}
        self._cache.add(call.key, replace(rest, program=program, **parts))
        return True

    def _is_skipped(self, call: Invocation) -> bool:
        self._begin_turn(call)
        return super()._is_skipped(call)

    def _begin_turn(self, call: Invocation) -> None:
        kind = self._late.of(call.key)
        if kind is None or self._turn is not None:
            return
        if any(not isinstance(each.program, LateInstance) for each in self._cache.at(call.key)):
            self._turn = Turn.REPLAY  # Python decides by a number whether it computes such sizes
            self._has_late(call)
            return
        was_left, self._turn = kind.is_left, kind.turn()
        if kind.is_left and not was_left:
            warn_uncapturable(f"{self._name} runs eagerly: {kind.group.text}")
            for group in kind.classes:
                group.release()

    def _run_in_turn(self, args: Any, kwargs: Any) -> Any:
        self._turn, self._records_missed = None, True
        return super()._run_in_turn(args, kwargs)

    def _try_replay(self, call: Invocation) -> tuple[bool | None, Any]:
        self._begin_turn(call)
        if self._turn in (None, Turn.REPLAY):
            return super()._try_replay(call)
        is_rare = self._turn is Turn.REST or not self._may_record(call.key)
        worst = Level.NOT_YET
        if self._vote is not None:
            worst = self._vote.before_replay(None, is_rare=is_rare)
        elif is_rare:
            worst = Level.RARE
        self._is_left_eager = worst is Level.RARE
        self.stats.rare += self._is_left_eager
        return False, RARE if self._is_left_eager else _DUE

    def _may_record(self, key: Hashable, miss: Miss | None = None) -> bool:
        return self._records_missed and super()._may_record(key, miss)

    def _replay(self, cached: CachedProgram, call: Call) -> Any:
        program, kind = cached.program, self._late.of(self._cache.key_of(cached))
        self._records_missed = kind is None or kind.may_record
        group: LateClass | None = program.group if isinstance(program, LateInstance) else None
        try:
            result = super()._replay(cached, call)
        except GuardError:
            if kind is not None and group is not None:
                kind.replayed(group, fits=False)
            if self._after is None:
                self._is_left_eager = not self._records_missed
            raise
        if kind is not None and group is not None:
            kind.replayed(group, fits=True)
            if (
                group.replays >= REPLAYS_BEFORE_PASSES
                and group.passed is None
                and self._options.rewrites
            ):
                self._pass(group)
        return result

    def _pass(self, group: LateClass) -> None:
        """Run the passes for a class that has been of use."""
        group.passed = self._options.why_apart
        if group.passed is None:
            try:
                with torch.no_grad(), disable_current_modes():
                    group.run_passes(self._options.applied)
            except Exception as error:  # its programs stay as they are
                group.passed = f"the passes fail: {type(error).__name__}: {error}"
        if group.passed:
            log.info("the passes of %s do not run: %s", self._name, group.passed)
        self._drop_old()

    def _drop_old(self) -> None:
        """Drop the programs of templates that have been replaced."""
        for cached in list(self._cache):
            if isinstance(cached.program, LateInstance) and not cached.program.is_current:
                self._cache.drop(cached)

    @property
    def _sizes_text(self) -> str:
        lines = [super()._sizes_text, *(each.text for each in self._late)]
        return "\n".join(lines)
