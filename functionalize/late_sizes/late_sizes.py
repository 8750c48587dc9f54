"""Calls whose results have sizes that the step computes: which are recorded, which are replayed.

    CapturedStep(train_step, options, LateSizes)         calls without such sizes do what those of a plain step do
    classes.learn(key, reference, sources, observer)     a recorded call; key: of the call, without computed sizes
    kind = classes.of(key)                               None: no such call was recorded
    kind.turn()                                          what the next call of this kind does

A recording with such sizes has no program of its own: none would fit the next call. It is one of those that determine
the program of its class (`late_class.py`), which is then replayed for any sizes that the step computes, and once in a
while recorded again and compared. A replay that meets a size that was not compared changes nothing: the call is
recorded, or runs eagerly where recordings have not been returned by replays.
Such a replay costs its own time beside that of the call. So a kind of which more than `_MOST_MISSES` of the last
`_WINDOW` replays did so runs eagerly for a while, and then tries again.
Invariant: ranks that vote record together, or run eagerly together: which, the votes say.
Refusals: a kind of which `_MOST_APART` recordings are no one program, as of a step that decides by what it computes how
many ops it runs; the error says where they part.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from functionalize._compat.dispatch import disable_current_modes
from functionalize.errors import GuardError, SaveError, UncapturableError
from functionalize.ir.inputs import Call
from functionalize.late_sizes.late_class import LateClass, LateObserver
from functionalize.late_sizes.late_instances import LateInstance, late_guards
from functionalize.lengths.coverage import THINNEST
from functionalize.lengths.recorded_calls import RecordedCall
from functionalize.program.program import Program
from functionalize.recorder.recorder import Recorder
from functionalize.step.cache import CachedProgram
from functionalize.step.captured_step import CapturedStep
from functionalize.step.core import StepCore
from functionalize.step.hooks import Hooks
from functionalize.step.options import CaptureOptions
from functionalize.step.outcome import Built
from functionalize.step.plan import Eager, Record
from functionalize.step.policy import CLASS
from functionalize.step.recording import StepRecording
from functionalize.step.stages import Invocation
from functionalize.step.vote import RARE
from functionalize.templates.call_keys import LATE, open_key, shapes_of, with_late_sizes
from functionalize.templates.fitting import Sizes
from functionalize.templates.template import first_difference
from functionalize.util.switches import SIZES
from functionalize.util.user_warning import warn_uncapturable

_DUE = "calls whose sizes the step computes are recorded until they are one program, and one in so many later"
_EVERY = 32  # calls between recordings, at first: each compares other sizes


def takes_late_sizes(options: CaptureOptions) -> bool:
    """Whether results of a step may have sizes that are known only while the graph runs."""
    return bool(options.dynamic) and not options.compares


class LateSizes:
    """One program for all sizes that the ops of a step give their results."""

    def __init__(self, step: CapturedStep[..., Any]) -> None:
        self._step, self._core = step, step.core
        self.classes = _no_classes(self._core)
        self._turn: _Turn | None = None  # of this call, if its kind has computed sizes
        self.hooks = Hooks(
            begin=self._begin,
            plan=self._plan,
            stays_eager=self._stays_eager,
            replay=self._replay,
            recorder=self._take_recorder,
            capture=self._capture,
            compares=_has_counts,
            before_passes=_before_passes,
            built=self._built,
            forget=self._forget,
            save=self._save,
            text=self._text,
        )

    def _forget(self) -> None:
        self.classes = _no_classes(self._core)

    def _save(self) -> None:
        cache = self._core.cache
        late = [cached for cached in cache if isinstance(cached.program, LateInstance)]
        for cached in late:
            cache.drop(cached)  # the class makes it again
        if not len(cache) and len(self.classes):
            raise SaveError("has no program but those whose sizes it computes, which are not saved")

    def _text(self) -> Iterator[str]:
        return (each.text for each in self.classes)

    # -- recordings ----------------------------------------------------------------------------

    def _take_recorder(self, recorder: Recorder, call: Invocation) -> None:
        recorder.checks.sizes.takes_late = recorder.ignore_fake
        if isinstance(call.observer, LateObserver):
            recorder.checks.sizes.counted = call.observer.counted

    def _capture(self, call: Invocation) -> Any:
        kind = self.classes.of(call.key)
        if kind is not None:
            call = replace(call, observer=kind.group.observer(shapes_of(call.key)))
        return self._step.capture(call)

    def _built(self, built: Built, recording: StepRecording, call: Invocation) -> Built:
        cached = built.cached
        guards = late_guards(cached.program)
        if not guards:
            return built
        key: Any = self._core.key_with_sizes(call.key, cached.program)
        names = recording.entry.roots.arguments
        found = RecordedCall.of(key, names, call.leaves, cached.program, cached)
        assert found is not None
        late = with_late_sizes(key, [guard.value for guard in guards])
        reference = replace(found, key=late, names=[*found.names, LATE])
        observer = call.observer if isinstance(call.observer, LateObserver) else None
        recorder = recording.recorder
        sources = recorder.checks.sizes.late(recorder.early_records())
        self.classes.learn(key, reference, sources, observer)
        self._drop_old()
        return replace(built, reference=None, is_replayed=False)

    # -- calls ---------------------------------------------------------------------------------

    def _begin(self, call: Invocation) -> None:
        """Decide whether a call of a kind with computed sizes is replayed, recorded, or runs eagerly; counts it."""
        self._turn, self._core.records_missed = None, True
        kind = self.classes.of(call.key)
        if kind is None:
            return
        programs = self._core.cache.at(call.key)
        if any(not isinstance(each.program, LateInstance) for each in programs):
            self._turn = _Turn.REPLAY  # Python decides by a number whether it computes such sizes
            self._has_late(call)
            return
        was_left, self._turn = kind.is_left, kind.turn()
        if kind.is_left and not was_left:
            warn_uncapturable(f"{self._core.name} runs eagerly: {kind.group.text}")
            for group in kind.classes:
                group.release()

    def _plan(self, call: Invocation) -> Record | Eager | None:
        if self._turn in (None, _Turn.REPLAY):
            return None
        self._core.cache.begin_call()  # no program is asked
        if self._turn is _Turn.REST or not self._core.may_record(call.key):
            return Eager(RARE, is_rare=True)
        return Record(_DUE)

    def _stays_eager(self, call: Invocation) -> bool | None:
        kind = self.classes.of(call.key)
        if kind is None:
            return None
        if self._turn is _Turn.REPLAY and self._has_late(call):
            return False
        return self._turn is _Turn.REST or not kind.may_record

    def _has_late(self, call: Invocation) -> bool:
        """Whether there is a program for arguments of these sizes and all computed ones; makes it if it can be made."""
        kind, programs = self.classes.of(call.key), self._core.cache.at(call.key)
        if any(isinstance(cached.program, LateInstance) for cached in programs):
            return True
        if kind is None or not kind.group.is_ready:
            return False
        sizes = kind.group.sizes_of(shapes_of(call.key))
        if isinstance(sizes, str) or kind.group.why_compared(sizes) is not None:
            return False
        return self._take(kind.group, sizes, call)

    def _take(self, group: LateClass, sizes: Sizes, call: Invocation) -> bool:
        """Keep a program for arguments of these sizes, if there is one."""
        cached, program = group.references[-1].cached, group.at(sizes)
        if program is None:
            return False
        reason = f"a prediction from {group.recorded} recorded calls that computed other sizes"
        parts = {"op_stream": None, "reason": reason, "group": None, "awaits_passes": False}
        self._core.cache.add(call.key, cached.with_program(program, **parts))
        return True

    def _replay(self, cached: CachedProgram, call: Call) -> Any:
        core = self._core
        kind = self.classes.of(core.cache.key_of(cached)) if len(self.classes) else None
        if kind is None:
            return self._step.replay(cached, call)
        program = cached.program
        core.records_missed = kind.may_record
        group: LateClass | None = program.group if isinstance(program, LateInstance) else None
        try:
            result = self._step.replay(cached, call)
        except GuardError:
            if group is not None:
                kind.replayed(group, fits=False)
            raise
        if group is not None:
            kind.replayed(group, fits=True)
            may_pass = core.options.rewrites and group.passed is None
            if may_pass and self._step.passes.is_worth(group.replays):
                self._pass(group)
        return result

    def _pass(self, group: LateClass) -> None:
        """Run the passes for a class that has been of use."""
        options = self._core.options
        group.passed = options.why_apart
        if group.passed is None:
            self._core.policy.ledger.pay(CLASS)
            try:
                with torch.no_grad(), disable_current_modes():
                    group.run_passes(self._step.passes.apply)
            except Exception as error:  # its programs stay as they are
                group.passed = f"the passes fail: {type(error).__name__}: {error}"
        if group.passed:
            SIZES.info("the passes of %s do not run: %s", self._core.name, group.passed)
        self._drop_old()

    def _drop_old(self) -> None:
        """Drop the programs of templates that have been replaced."""
        for cached in list(self._core.cache):
            if isinstance(cached.program, LateInstance) and not cached.program.is_current:
                self._core.cache.drop(cached)


def _no_classes(core: StepCore) -> _LateClasses:
    return _LateClasses(core.options.audit.every or _EVERY)


def _has_counts(recording: StepRecording) -> bool:
    """Whether a recording counts elements by values that it computed."""
    return bool(recording.recorder.checks.sizes.has_counts)


def _before_passes(recorded: Program) -> tuple[bool, bool] | None:
    return (True, True) if late_guards(recorded) else None


# -- the classes of a step -------------------------------------------------------------------------

_MOST_APART = 4  # recordings of as many classes, none of which has a template
_MOST_KINDS = 64
_MOST = 14  # recordings of a kind before replays have returned their time
_REPLAYS = 64  # a recording takes as long as so many replays return
_WINDOW, _MOST_MISSES = 32, 8  # a replay returns a third of what one that misses costs
_FIRST_REST = 128  # calls that run eagerly before replays are tried again


class _Turn(enum.Enum):
    """What a call does."""

    REPLAY = enum.auto()
    RECORD = enum.auto()
    REST = enum.auto()


@dataclass(slots=True, eq=False)
class _LateKind:
    """One kind of call. every: one in so many calls is recorded. is_left: whether it is not recorded any more.

    new: calls since the last recording. gap: after so many the next one is recorded. rest: calls that run eagerly.
    """

    every: int
    classes: list[LateClass] = field(default_factory=list)
    new: int = 0
    gap: int = 0
    rest: int = 0
    is_left: bool = False
    _next_rest: int = _FIRST_REST
    _recent: deque[bool] = field(default_factory=lambda: deque(maxlen=_WINDOW))

    @property
    def group(self) -> LateClass:
        """The class that is replayed, or that most recordings are of."""
        return max(self.classes, key=lambda each: (each.is_ready, each.replays, each.recorded))

    @property
    def recorded(self) -> int:
        """The number of recordings."""
        return sum(each.recorded for each in self.classes)

    @property
    def may_record(self) -> bool:
        """Whether the time of another recording has been saved by replays."""
        replays = sum(each.replays for each in self.classes)
        return self.group.lost is None and self.recorded < _MOST + replays // _REPLAYS

    def turn(self) -> _Turn:
        """What the next call does; counts it."""
        if not self.group.is_ready:
            self.is_left = not self.may_record
            return _Turn.REST if self.is_left else _Turn.RECORD
        if self.rest:
            self.rest -= 1
            return _Turn.REST
        self.new += 1
        if self.new < self.gap:
            return _Turn.REPLAY
        self.gap = min(2 * self.gap, THINNEST * self.every)
        return _Turn.RECORD

    def replayed(self, group: LateClass, fits: bool) -> None:
        """A replay has run its graph. fits: whether all sizes did, on all ranks."""
        group.replays += fits
        group.misses += not fits
        self._recent.append(fits)
        if self._recent.count(False) > _MOST_MISSES:
            self._recent.clear()
            self.rest, self._next_rest = self._next_rest, 2 * self._next_rest


class _LateClasses:
    """every: one in so many calls is recorded, and compared."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._kinds: dict[Hashable, _LateKind] = {}

    def __len__(self) -> int:
        return len(self._kinds)

    def __iter__(self) -> Iterator[LateClass]:
        return (each for kind in self._kinds.values() for each in kind.classes)

    def of(self, key: Any) -> _LateKind | None:
        """The kind of a call; None: none with computed sizes was recorded."""
        return self._kinds.get(open_key(key)) if self._kinds else None

    def learn(
        self,
        key: Any,
        reference: RecordedCall,
        sources: Sequence[str | None],
        observer: LateObserver | None,
    ) -> None:
        """Add a recorded call. sources: of each size of a result, what gives it; None: it is known early.

        Raises `UncapturableError` if recordings of this kind are no one program.
        """
        kind = self.of(key)
        if kind is None:
            kind = self._kinds[open_key(key)] = _LateKind(self._every, gap=self._every)
            if len(self._kinds) > _MOST_KINDS:
                for each in self._kinds.pop(next(iter(self._kinds))).classes:
                    each.templates = each.instances = None  # its programs are dropped
        kind.new = 0
        tokens = hash((reference.tokens, open_key(reference.key)))
        found = next((each for each in kind.classes if each.tokens == tokens), None)
        if found is None:
            found = LateClass(tokens, self._every)
            kind.classes.append(found)
        found.add(reference, [text is not None for text in sources], observer)
        why = _why_apart(kind, reference)
        if why is not None:
            text = next(text for text in sources if text is not None)
            raise UncapturableError(f"{text}, and {why}")


def _why_apart(kind: _LateKind, latest: RecordedCall) -> str | None:
    """Where recordings of a kind part, if as many with arguments of one size are no one program; None: they may be."""
    shapes = latest.shapes[:-1]
    alike = [each for each in kind.classes if any(r.shapes[:-1] == shapes for r in each.references)]
    if len(alike) < _MOST_APART or any(each.templates is not None for each in kind.classes):
        return None
    first = next(r for each in alike for r in each.references if r.shapes[:-1] == shapes)
    difference = first_difference(first.leaves[0], latest.leaves[0])
    where = ": ".join(difference) if difference is not None else "a size is 0 or 1 in some of them"
    return f"{len(alike)} recorded calls are no one program, at {where}"
