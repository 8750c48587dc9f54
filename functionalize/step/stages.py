"""The four stages of a call that no program covers: record, judge, build, agree.

    run = record(fn, call, recorder)                  RecordedRun | NotYet | Refused
    verdict = judge(run, unkept, previous)            Steady | WarmUp | Refused
    outcome = build(verdict, make)                    Built | WarmUp | Refused
    agreed = agree(outcome, recorder, vote, ...)      Agreed

| stage  | does                                         | raises                                                  |
| ------ | -------------------------------------------- | ------------------------------------------------------- |
| record | runs the step for real, once                 | exceptions of the step; modes, torch's methods and      |
|        |                                              | hyperparameters are as before. `NotYet`, `Refused`:     |
|        |                                              | nothing ran                                             |
| judge  | compares state and recordings                | nothing: the step has run, and its result is returned   |
| build  | discharges, runs the passes, compiles        | nothing                                                 |
| agree  | communicates with the other ranks            | `UncapturableError` if a rank does not answer in time   |

Invariant: no stage changes the captured step (its cache, its warm-ups, its refusals), so that an error or Ctrl-C in
one of them loses only a recording. Every rank whose step ran to its end calls `agree`, whatever its own outcome:
no rank waits for a rank that has refused.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from functionalize._compat.dispatch import disable_current_modes
from functionalize._compat.graphs import pytree
from functionalize.audit.audited_call import Observer, observed
from functionalize.audit.collective_check import collective_mismatch
from functionalize.calls.late_numbers import with_late_values
from functionalize.errors import UncapturableError
from functionalize.ir.worlds import in_world, literals_noted
from functionalize.lengths.length_class import Prediction
from functionalize.recorder.recorder import Recorder
from functionalize.scalars.escaped_numbers import replace_escaped, settle_escaped
from functionalize.scalars.live_scalars import plain_keys
from functionalize.state import arguments
from functionalize.state.arguments import flatten_result, leaf_names, leaf_texts
from functionalize.state.hyperparameters import Key, lifted
from functionalize.state.module_calls import ModuleCalls
from functionalize.state.moving_state import MovingState
from functionalize.state.python_effects import in_order
from functionalize.state.read_state import ReadState
from functionalize.step.outcome import (
    Agreed,
    Built,
    NotYet,
    Outcome,
    Refused,
    Steady,
    Verdict,
    WarmUp,
)
from functionalize.step.recording import RecordingSummary, StepRecording, awaits_live_numbers
from functionalize.step.step_state import EntryState, ExitState, UnmadeError
from functionalize.step.vote import Level, RankVote, Rendezvous, has_messages, must_vote
from functionalize.util.reading import is_a
from functionalize.util.text import without_numbers
from functionalize.walk.converted_arrays import OtherArrays, tensors_by_array
from functionalize.walk.live_places import NO_PLACES, LivePlaces
from functionalize.walk.walker import PythonState

MAX_WARMUPS = 5  # for one reason
MOST_WARMUPS = 4 * MAX_WARMUPS  # for all reasons
_OTHERS_WARM_UP = "another rank does not keep its recording"
_ALONE = (
    "relies on a number that it reads, communicates in a call that a replay makes again, or has passes that change "
    "collectives, and another rank has not recorded this call: only ranks that record it together can replay it"
)
_LATE = (
    "sends messages between two ranks, here or on another rank of its process group, and one of these decides by a "
    "number that its graph computes (`.item()`): if a replay finds another number, messages are sent already. Decide "
    "outside of the step, or by a tensor (`torch.where`)"
)
_LEFT_OUT = (
    "has passes that change collectives, which are left out on another rank of its process group, as that one sends "
    "messages between two ranks: capture it with passes='default'"
)
_SENDS = "sends"  # messages between two ranks
_AGAIN = "again"  # it is not the first recording of such calls with numbers beside messages
_READS, _RELIES = "reads", "relies"  # a number that may be live in the next recording; a number


@dataclass(frozen=True, slots=True)
class Invocation:
    """One call of a captured callable that is to be recorded.

    leaves, spec: the flattened arguments. key: the key of this call in the program cache.
    reason: why no cached program could be replayed. expected: what it is compared with, when it has been recorded.
    observer: what else is observed while it runs.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: Sequence[Any]
    spec: pytree.TreeSpec
    key: Hashable
    reason: str = ""
    expected: Prediction | None = None
    observer: Observer | None = None


class FinishedRun(Protocol):
    """A run that was recorded and ran to its end: `RecordedRun`, or `JointRun` with a backward."""

    @property
    def recorder(self) -> Recorder:
        """The recorder that was active during the run."""
        ...

    @property
    def rendezvous(self) -> Rendezvous | None:
        """The ranks that record this call; None: ranks vote already, or each by itself."""
        ...

    def recording(self) -> StepRecording:
        """Compare the state after the run with that before it; may raise."""
        ...


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """A step that ran to its end. entry: the state before it.

    result: with the live numbers of the recording. returned: what the caller gets, which may hold some, too.
    changed: a change of its arguments or hyperparameters that a replay would not repeat; None: there is none.
    moving: the places in Python that it moves.
    """

    recorder: Recorder
    entry: EntryState
    result: Any
    changed: str | None
    moving: MovingState
    rendezvous: Rendezvous | None = None

    @property
    def returned(self) -> Any:
        """What the step returned to its caller."""
        return self.moving.returned

    def recording(self) -> StepRecording:
        plain_keys(self.result)
        self.entry.settle_hooks(self.recorder)
        self.entry.moving.learn(self.entry.observed.reads)
        self.moving.finish()
        key = self.moving.key
        changed = self.changed or self.moving.refusal or self.moving.unexplained
        result, calls = with_late_values(self.result, self.recorder.python_effects)
        effects = in_order(calls, self.moving.effects)
        plain_keys([value for _, value in effects])
        if self.recorder.scalar_log is not None:
            values = [value for _, value in effects]
            settle_escaped(self.recorder.scalar_log, flatten_result((self.result, values))[0])
        # In the step's own grad mode:
        exit = ExitState.now(
            self.entry,
            result,
            changed,
            effects,
            self.moving.explained,
            self.moving.on_entry,
            self.moving.one_object,
            self.moving.replaced,
        )
        if exit.changed is None:
            self.entry.observed.leave_unread(self.entry.leaves)
        with torch.no_grad():
            moving = self.moving
            return StepRecording(
                self.recorder, self.entry, exit, key, moving.moved, moving.numbers, moving.fresh
            )


def record(
    fn: Callable[..., Any],
    call: Invocation,
    recorder: Recorder,
    varying: frozenset[Key],
    hooks_run_outside: bool = False,
    live: LivePlaces = NO_PLACES,
    varies: Callable[[PythonState], LivePlaces] | None = None,
    meets_as: str | None = None,
    numbers: Sequence[int] = (),
    unowned: Sequence[weakref.ref[Tensor]] = (),
) -> RecordedRun | NotYet | Refused:
    """Inspect all objects that `fn` reaches, then run it for real while `recorder` is active.

    In a fake world `recorder` is not entered if the recording cannot be kept: to record the ops takes as long as they
    do. What the step moves and changes in Python is found, and what tensors it makes from numbers; that it steps an
    optimizer that it reaches is assumed.
    varying: hyperparameters that become live numbers, besides the learning rates. live: places in Python that earlier
    calls have moved. varies: finds those that code outside has changed, see `EntryState.now`. meets_as: the name of the
    step, under which ranks that record this call find each other. numbers: the leaves that are numbers and live.
    unowned: leaf tensors that the last recording met and nothing known holds.
    """
    try:
        names = leaf_names(fn, call.spec)
        entry = EntryState.now(
            fn,
            call.leaves,
            recorder,
            varying,
            names,
            hooks_run_outside,
            live,
            varies,
            numbers,
            unowned,
        )
        _name_arguments(recorder.checks.outside, fn, call)
        recorder.early_storages = entry.places.early()
        recorder.calls.read_state = partial(ReadState.now, entry.python_state, call.leaves)
        recorder.arrays = tensors_by_array(call.leaves)
        recorder.other_arrays = OtherArrays.of(call.leaves, partial(leaf_texts, fn, call.spec))
        recorder.tape.is_off = awaits_live_numbers(recorder, entry)
        if recorder.tape.is_off:  # no program is made of it
            recorder.observer = recorder.storages.observer = None
        is_idle = recorder.tape.is_off and in_world()
        recorder.steps_optimizers |= is_idle
        observer = recorder.observer
        calls = ModuleCalls(numbered=False) if observer is None else observer.module_calls
        if not recorder.tape.is_off:
            calls.register(entry.roots)
    except UnmadeError as unmade:
        return NotYet(str(unmade))
    except Exception as error:
        return Refused.of(error)
    hyperparameters = lifted(entry.roots.optimizers, entry.hyperparameters, recorder)
    rendezvous = Rendezvous(meets_as) if meets_as is not None else None
    try:
        with (
            hyperparameters as hyper,
            MovingState(
                entry.moving, recorder, {} if hooks_run_outside else entry.holders
            ) as moving,
            nullcontext() if recorder.tape.is_off else calls.observing(recorder),
            _only_literals(recorder) if is_idle else recorder,
            entry.observed.reads.watching(),
        ):
            result = observed(
                call.observer, lambda: moving.called(fn, call.args, call.kwargs, call.spec)
            )
            moving.take(result, may_refuse=not hooks_run_outside)
            del result
    except BaseException:
        replace_escaped(recorder.scalar_log)
        if rendezvous is not None:
            rendezvous.leave()
        raise
    recorder.checks.outside.clear()  # it keeps graphs of the caller's alive
    moving.effects += hyper.effects
    changed = hyper.changed or arguments.changed(call.args, call.kwargs, call.leaves, call.spec)
    return RecordedRun(recorder, entry, moving.result, changed, moving, rendezvous)


def _name_arguments(outside: dict[Any, str], fn: Callable[..., Any], call: Invocation) -> None:
    """The names of tensors that were made before the step, by their nodes: those of arguments as code writes them."""
    nodes = {at: leaf.grad_fn for at, leaf in enumerate(call.leaves) if is_a(leaf, Tensor)}
    if not outside.keys().isdisjoint(nodes.values()):
        texts = leaf_texts(fn, call.spec)
        outside.update({node: texts[at] for at, node in nodes.items() if node in outside})


@contextmanager
def _only_literals(recorder: Recorder) -> Iterator[None]:
    """A context: of all that `recorder` notes if it is entered, tensors that Python makes from numbers."""

    def note(tensor: Tensor) -> None:
        with disable_current_modes():
            contents = tensor.detach().clone()
            recorder.storages.bring_in(contents, "a constant", literal=contents)

    with literals_noted(note):
        yield


def judge(
    run: FinishedRun, unkept: Mapping[str, int] | None, previous: RecordingSummary | None
) -> Verdict:
    """Decide whether a run was the steady state: Note [Steady state] in `recording.py`.

    unkept: the number of recordings of such calls that were not kept, by reason; None: none was, or the step has
    settled for other calls, and is not refused because this kind of call does not settle. previous: the summary of
    the last recording, perhaps of another kind.
    """
    try:
        with disable_current_modes():
            recording = run.recording()
            recording.previous = previous
        with torch.no_grad(), disable_current_modes():
            refusal, reason = recording.refusal(), None
            if refusal is None:
                reason = recording.not_steady(previous)
    except Exception as error:
        return Refused.of(error)
    if reason is not None and unkept is not None:
        refusal = refusal or recording.changed_again()
    if reason is not None and unkept is not None and refusal is None:
        calls = sum(unkept.values()) + 1
        for_this = unkept.get(without_numbers(reason), 0) + 1
        if for_this >= MAX_WARMUPS or calls >= MOST_WARMUPS:
            refusal = f"the step did not settle in {calls} calls: {recording.unsettled(reason)}"
    if refusal is not None:
        # Later calls may not do so: a schedule of pipelining exchanges shapes at first, and after an evaluation.
        before = unkept.get(without_numbers(refusal), 0) if unkept is not None else 0
        if run.recorder.checks.has_exchanged and before + 1 < MAX_WARMUPS:
            return WarmUp(recording.summary, refusal)
        return Refused(UncapturableError(refusal))
    if reason is None:
        return Steady(recording)
    recording.entry.observed.forget_slots()
    if changes_arguments := isinstance(reason, arguments.ArgumentChange):
        reason = recording.unsettled(reason)
    return WarmUp(recording.summary, reason, changes_arguments)


def build(verdict: Verdict, make: Callable[[StepRecording], Built]) -> Outcome:
    """Make the program of a steady recording; an error becomes a refusal. Other verdicts are returned unchanged."""
    if not isinstance(verdict, Steady):
        return verdict
    try:
        with torch.no_grad(), disable_current_modes():
            return make(verdict.recording)
    except Exception as error:
        return Refused.of(error)


def agree(
    mine: Outcome,
    recorder: Recorder,
    vote: RankVote | None,
    compares: bool = False,
    rerun: bool = False,
    rendezvous: Rendezvous | None = None,
    may_change: bool = False,
) -> Agreed:
    """Replace `mine` by the worst outcome of all ranks, if different outcomes would let ranks wait for each other.

    vote: the vote of earlier calls. compares: whether passes may have changed collectives. rerun: the forward ran
    again for a backward without a program, see Note [A backward that was not recorded] in `captured_forward.py`.
    rendezvous: the ranks that record this call, for a step whose ranks have no vote.
    may_change: see `may_still_change`.
    """
    mine = _compared(mine, recorder)
    sends = has_messages(recorder)
    if sends and not recorder.checks.has_exchanged:  # no recording with an exchange is kept
        mine = _without_late_numbers(mine, recorder, vote, may_change)
        compares = False  # passes that change collectives are left out
    if rendezvous is not None:
        return _agreed_by(rendezvous, mine, recorder, compares, sends, may_change)
    joined = RankVote.of(recorder, compares)
    joined = joined | vote if joined is not None else vote
    if joined is None:
        outcome = mine
    else:
        outcome = _worst(mine, joined.worst(mine.level))
        vote = joined if isinstance(outcome, Built) else vote
    if rerun and (everyone := RankVote.among(recorder)) is not None:
        # A rank that is alone in keeping its program would replay while the others run their forwards again.
        worst = everyone.worst(outcome.level)
        if isinstance(outcome, Built) and worst is not Level.KEPT:
            outcome = WarmUp(outcome.summary, _OTHERS_WARM_UP)
    return Agreed(outcome, vote)


def _without_late_numbers(
    mine: Outcome, recorder: Recorder, vote: RankVote | None, may_change: bool
) -> Outcome:
    """A refusal of a program with messages if this rank, or one that it votes with, relies on a number of its graph.

    If such a number had another value, the step would run again and send its messages a second time, to ranks that
    have no part in the vote. Of the first recording it is a warm-up: later calls may not do so, as a schedule of
    pipelining whose ranks vote on shapes at its first call.
    """
    if isinstance(mine, Refused) or (vote is None and not must_vote(recorder)):
        return mine
    if recorder.live or vote is not None:
        return _refused(mine, _LATE, may_change)
    return WarmUp(mine.summary, _LATE) if isinstance(mine, Built) else mine


def may_still_change(unkept: Mapping[str, int] | None) -> bool:
    """Whether no other recording of such calls had numbers beside messages. unkept: those not kept, by reason."""
    return unkept is None or without_numbers(_LATE) not in unkept


def _refused(mine: Outcome, why: str, may_change: bool) -> Outcome:
    if not may_change or not isinstance(mine, (Built, WarmUp)):
        return Refused(UncapturableError(why))
    return mine if isinstance(mine, WarmUp) else WarmUp(mine.summary, why)


def _agreed_by(
    rendezvous: Rendezvous,
    mine: Outcome,
    recorder: Recorder,
    compares: bool,
    sends: bool,
    may_change: bool,
) -> Agreed:
    """The outcome of ranks without a vote, and their vote if any of them relies on a number: Note [Who records].

    compares: they vote in any case, once all of them keep their programs. sends: whether this rank has messages.
    """
    everyone = RankVote.among(recorder)
    if everyone is None:
        rendezvous.leave()
        return Agreed(mine, None)
    reads = must_vote(recorder) and not recorder.checks.has_exchanged
    words = [
        mine.level.name,
        *([_READS] if reads or compares else []),
        *([_RELIES] if reads and recorder.live else []),
        *([_SENDS] if sends else []),
        *([] if may_change else [_AGAIN]),
    ]
    every = [*Level.__members__, _READS, _RELIES, _SENDS, _AGAIN]
    said = rendezvous.gather(everyone.groups, words, every)
    if said is None:
        if (reads or compares) and isinstance(mine, Built):
            mine = WarmUp(mine.summary, _ALONE)
        return Agreed(mine, None)
    if _SENDS in said and _RELIES in said and not isinstance(mine, Refused):
        mine = _refused(mine, _LATE, _AGAIN not in said)
    elif _SENDS in said and compares and isinstance(mine, Built):
        mine = Refused(UncapturableError(_LEFT_OUT))
    if _READS not in said:
        return Agreed(mine, None)
    outcome = _worst(mine, max(level for level in Level if level.name in said))
    # A number beside messages is none of the calls that are replayed.
    votes = _SENDS not in said and _RELIES in said
    votes |= compares and isinstance(outcome, Built)
    return Agreed(outcome, replace(everyone, compares=compares) if votes else None)


def _compared(mine: Outcome, recorder: Recorder) -> Outcome:
    """A refusal if a neighbour rank recorded other collectives; the neighbours see a refused recording too."""
    try:
        mismatch = collective_mismatch(recorder)
    except Exception as error:
        return mine if isinstance(mine, Refused) else Refused.of(error)
    if mismatch is None or isinstance(mine, Refused):
        return mine
    return Refused(UncapturableError(mismatch))


def _worst(mine: Outcome, worst: Level) -> Outcome:
    """The outcome of this rank if `worst` is the worst level of all ranks."""
    if worst is Level.REFUSED:
        other = UncapturableError("another rank cannot capture this step")
        return Refused(mine.error if isinstance(mine, Refused) else other, everywhere=True)
    if isinstance(mine, Built) and worst is not Level.KEPT:
        return WarmUp(mine.summary, _OTHERS_WARM_UP)
    return mine
