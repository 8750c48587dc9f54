"""`capture`: a whole training step, run for real while it is recorded, replayed from then on.

    step = functionalize.capture(train_step)
    step(batch)      runs eagerly and records, until the step is in its steady state
    step(batch)      replays: one flat sequence of functional ops, then the epilogue

Which recording is kept: see Note [Steady state] in `recording.py`. Several programs live side by side, see
`programs.py`; when ranks must agree on replay or capture, see `agreement.py`.
Invariants: a step is never lost and never run twice. A guard that fails means that the call runs eagerly,
recording; nothing was changed before. An exception passes through as eager raised it, and no program is kept.
Refusals (see `recording.py`): what a replay could not repeat, and state that never settles. The step that was
recorded is returned; the next call raises `UncapturableError` before it runs anything, or runs eagerly
(`on_uncapturable="eager"`).
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from functionalize._compat import current_modes, disable_current_modes, pytree
from functionalize.core.collector import only_young_collections
from functionalize.core.inputs import Call
from functionalize.core.program import Program
from functionalize.core.sequence import fingerprints
from functionalize.errors import FunctionalizeError, GuardError, UncapturableError
from functionalize.frontend import arguments
from functionalize.frontend.agreement import Level, Vote
from functionalize.frontend.dispatch import Recorder
from functionalize.frontend.explain import explanation
from functionalize.frontend.handshake import disagreement
from functionalize.frontend.history import without_history
from functionalize.frontend.lifetime_recorder import LifetimeObserver
from functionalize.frontend.lifted import Key, lifted
from functionalize.frontend.live import plain_tree
from functionalize.frontend.memory import StepMemory
from functionalize.frontend.names import leaf_names
from functionalize.frontend.options import Compile, OnUncapturable, Options
from functionalize.frontend.outcome import Outcome, Warmup, agreed
from functionalize.frontend.persist import Saved, load_step, save_step
from functionalize.frontend.programs import Kept, Programs, key_of
from functionalize.frontend.recording import Entry, Exit, Recording, Remains
from functionalize.frontend.release import warn_if_untested
from functionalize.frontend.sources import leave
from functionalize.frontend.stats import Stats
from functionalize.frontend.world import in_world

log = logging.getLogger("functionalize")
_MAX_WARMUPS = 5


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
    on_uncapturable: what the calls after one that cannot be captured do: raise `UncapturableError` before anything
    ran, or run eagerly (a warning tells why, once).
    max_programs: how many programs are kept side by side (shapes, train and eval, microbatches); the least recently
    used goes.
    backward: it is a forward, whose outputs are gone backward from outside: by a program, too, see `forward.py`.
    compile: what runs the programs: Inductor (not bit for bit), CUDA graphs, or (None) one op after the other. A
    program that it cannot take is refused as one that cannot be captured, with a `CompileError`.
    memory: note when storages come and go, for `step.memory`, and which module each op belongs to.
    Whatever the step itself raises passes through. Raises `ValueError` for a mode it does not know, and for `memory`
    with `backward`.
    """
    options = Options.of(passes, on_uncapturable, max_programs, compile, memory)
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
    if backward:
        if memory:
            raise ValueError(
                "memory=True records whole steps: a forward (backward=True) is a part of one"
            )
        from functionalize.frontend.forward import CapturedForward  # which builds on this file

        return CapturedForward(train_step, options)
    return CapturedStep(train_step, options)


class CapturedStep:
    """A training step that is recorded in its steady state and replayed after."""

    def __init__(self, train_step: Callable[..., Any], options: Options) -> None:
        functools.update_wrapper(self, train_step)
        self.stats = Stats()
        self._fn, self._options = train_step, options
        self._name = getattr(train_step, "__name__", type(train_step).__name__)
        self._programs = Programs(self._name, options.max_programs)
        self._warmups: dict[Hashable, Warmup] = {}
        self._refused: dict[Hashable, FunctionalizeError] = {}
        self._lifted: frozenset[Key] = frozenset()
        self._remains: Remains | None = None
        self._vote: Vote | None = None
        self._do_not_fit = False  # whether the programs of this call issue different collectives

    @property
    def program(self) -> Program | None:
        """The program that was last made or replayed."""
        latest = self._programs.latest
        return latest.program if latest is not None else None

    @property
    def memory(self) -> StepMemory | None:
        """What the step holds at every moment, with eager's lifetimes and with the program's; None without `memory`."""
        latest = self._programs.latest
        return latest.memory if latest is not None else None

    @property
    def programs(self) -> tuple[Program, ...]:
        """Every program kept, the last used at the end."""
        return tuple(kept.program for kept in self._programs)

    def explain(self) -> str:
        """Why each program exists, which guards missed, where each input comes from, what was refused."""
        return explanation(self._name, self.stats, self._programs, self._refused.values())

    def forget(self) -> None:
        """Drop every program: the next call records, at once if one was captured before."""
        self._programs = Programs(self._name, self._options.max_programs)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the programs to a file (one per rank: `step.rank0.fzp`), for `load` in another process.

        Raises `SaveError`, with nothing written, if a program refers to something that no name leads to.
        """
        save_step(path, self._fn, Saved(list(self._programs.items()), self._lifted, self._vote))

    def load(self, path: str | os.PathLike[str]) -> None:
        """Add the programs that `save` wrote: the next call replays if the guards of one hold.

        Every rank must call it: it sets FSDP2 up where that has not run yet. Raises `LoadError`, with nothing
        loaded on any rank, if a file is damaged or is for another version, world, model, optimizer or code.
        """
        saved = load_step(path, self._fn)
        for key, kept in saved.programs:
            self._programs.add(key, kept)
        self._lifted |= saved.lifted
        self._vote = saved.vote | self._vote if saved.vote is not None else self._vote

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step: a replay if every guard of a program holds, else for real, recording.

        Inside another recording it is a part of that one: it runs as the callable that it was made from.
        """
        gradients = torch.is_grad_enabled()
        try:
            return self._call(args, kwargs)
        except Exception:
            raise
        except BaseException:  # Ctrl-C can come between a change of the grad mode and its undoing
            torch.set_grad_enabled(gradients)
            raise

    @property
    def is_busy(self) -> bool:
        """Whether another recording is going on here, of which this call is a part."""
        return any(isinstance(mode, Recorder) for mode in current_modes())

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.is_busy:
            self.stats.eager += 1
            return self._fn(*args, **kwargs)
        given, spec = arguments.flatten(args, kwargs)
        leaves = self._leaves(given)
        key = key_of(leaves, spec)
        refused = self._refusal(key)
        if refused is not None:
            return self._run_refused(refused, args, kwargs)
        done, result = self._try(key, leaves, spec)
        if done:
            return result
        reason = str(result)
        self._note_miss(reason)
        if self._gives_up(key):
            self.stats.eager += 1
            return self._fn(*args, **kwargs)
        return self._record(args, kwargs, leaves, spec, key, reason)

    def _leaves(self, given: list[Any]) -> Any:
        """The leaves of the arguments, as they are recorded."""
        return given

    def _gives_up(self, key: Hashable) -> bool:
        """Whether to run this call eagerly, unrecorded; where ranks agree, all do or none."""
        return self._do_not_fit or (self._programs.thrashing and self._vote is None)

    def _refusal(self, key: Hashable) -> FunctionalizeError | None:
        return self._refused.get(key) or self._refused.get(_ANY)

    def _run_refused(self, error: FunctionalizeError, args: Any, kwargs: Any) -> Any:
        if self._options.raises:
            raise error
        if self._vote is None or _ANY in self._refused:
            self.stats.eager += 1
            return self._fn(*args, **kwargs)
        self._vote.before_replay(None)  # the others wait to hear, record, and wait to hear again
        return self._run_unseen(error, args, kwargs)

    def _refused_before(self, key: Hashable, error: Exception, args: Any, kwargs: Any) -> Any:
        """Nothing ran yet, and what the step can reach cannot be looked at."""
        refused = error if isinstance(error, FunctionalizeError) else _bug(error)
        self._refuse(key, refused)
        if self._options.raises and refused is error:
            raise error
        return self._run_unseen(refused, args, kwargs)

    def _run_unseen(self, error: FunctionalizeError, args: Any, kwargs: Any) -> Any:
        """Run a call that cannot be recorded; where ranks agree, none captures the step any more."""
        result = self._fn(*args, **kwargs)
        if self._vote is not None:
            self._vote.worst(Level.REFUSED)
            self._refuse(_ANY, error)
        self.stats.eager += 1
        return result

    def _note_miss(self, reason: str) -> None:
        if len(self._programs):
            log.info("recording %s again: %s", self._name, reason)
            self.stats.missed(reason)

    # -- replay --------------------------------------------------------------------------------

    def _try(self, key: Hashable, leaves: Sequence[Any], spec: Any) -> tuple[bool, Any]:
        """A replay of a program whose guards hold, on every rank if they must agree; else why there is none."""
        matching = self._programs.matching(key, leaves, spec)
        found = next(matching, None)
        if self._vote is not None:
            worst = self._vote.before_replay(found[0].issued if found is not None else None)
            self._do_not_fit = worst is Level.DIFFERENT
            if self._do_not_fit:
                if _DO_NOT_FIT not in self.stats.guard_failures:
                    log.warning("%s runs eagerly: %s", self._name, _DO_NOT_FIT)
                return False, _DO_NOT_FIT
            if worst is not Level.KEPT:
                return False, self._programs.reason or "a guard failed on another rank"
        while found is not None:
            try:
                return True, self._replay(*found)
            except GuardError as error:
                self._programs.missed(str(error))
            # One that communicates has done so: the ranks now run the step again together.
            found = None if self._vote is not None else next(matching, None)
        return False, self._programs.reason

    def _replay(self, kept: Kept, call: Call) -> Any:
        vote = self._vote
        if vote is not None and vote.compares and not kept.program.value_guards:
            vote = None  # what was compared says that no rank has any
        result, gradients = kept.program.replay(call, vote)
        leave(call, kept.slots, gradients, kept.effects)
        self._programs.used(kept)
        self.stats.replays += 1
        return without_history(result, kept.history)

    # -- record --------------------------------------------------------------------------------

    def _record(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: Sequence[Any],
        spec: pytree.TreeSpec,
        key: Hashable,
        reason: str,
    ) -> Any:
        warn_if_untested()
        warmup = self._warmups.setdefault(key, Warmup())
        # A recording before has shown that the step keeps no number where it would stay live.
        live = bool(warmup.calls or self.stats.captures or len(self._programs))
        observer = LifetimeObserver() if self._options.memory else None
        recorder = Recorder(not in_world(), live=live, for_real=True, observer=observer)
        try:
            with only_young_collections():
                names = leaf_names(self._fn, spec)
                entry = Entry.now(self._fn, leaves, recorder, self._varying(), names)
            recorder.arguments = entry.places.arguments()
            if observer is not None:
                observer.notes.calls.know(entry.roots)
        except Exception as error:
            return self._refused_before(key, error, args, kwargs)
        with only_young_collections():
            with lifted(entry.roots.optimizers, entry.lifted, recorder) as hyper, recorder:
                result = self._fn(*args, **kwargs)
            changed = hyper.changed or arguments.changed(args, kwargs, leaves, spec)
            self._conclude(entry, recorder, result, changed, spec, key, reason, warmup)
        return plain_tree(result)

    def _conclude(
        self,
        entry: Entry,
        recorder: Recorder,
        result: Any,
        changed: str | None,
        spec: pytree.TreeSpec,
        key: Hashable,
        reason: str,
        warmup: Warmup,
    ) -> None:
        """A call ran to its end, recorded: decide what comes of it."""

        def take() -> Recording:
            after = Exit.now(entry, result, changed)  # in the step's own grad mode
            with torch.no_grad():
                return Recording(recorder, entry, after)

        outcome = self._outcome(take, spec, reason, warmup)
        self._settle(self._agreed(outcome, recorder), key, warmup)

    def _varying(self) -> frozenset[Key]:
        """Hyperparameters that were seen to change between calls: live from now on, as `lr` always is."""
        for kept in self._programs:
            for fact in kept.program.facts:
                self._lifted |= getattr(fact, "changed_keys", frozenset)()
        return self._lifted

    def _outcome(
        self,
        take: Callable[[], Recording],
        spec: pytree.TreeSpec,
        reason: str,
        warmup: Warmup,
    ) -> Outcome:
        """What comes of a recording on this rank. The step has run: nothing is raised from here on."""
        try:
            with disable_current_modes():
                taken = take()
            with torch.no_grad(), disable_current_modes():
                unsettled = self._unsettled(taken, warmup)
                if unsettled is not None:
                    log.info("warming up %s: %s", self._name, unsettled)
                    return Outcome(taken.remains)
                return Outcome(taken.remains, self._kept(taken, spec, reason))
        except FunctionalizeError as error:
            return Outcome(refused=error)
        except Exception as bug:
            return Outcome(refused=_bug(bug))

    def _unsettled(self, taken: Recording, warmup: Warmup) -> str | None:
        """Why the step is not in its steady state; raises if it never will be."""
        refused = taken.refused() or disagreement(taken.recorder)
        if refused is not None:
            raise UncapturableError(refused)
        unsettled = taken.unsettled(warmup.remains or self._remains)
        if unsettled is not None and warmup.calls + 1 >= _MAX_WARMUPS:
            calls = warmup.calls + 1
            raise UncapturableError(f"the step did not settle in {calls} calls: {unsettled}")
        return unsettled

    def _kept(self, taken: Recording, spec: pytree.TreeSpec, reason: str) -> Kept:
        recorded = taken.program(spec)
        program = self._options.applied(recorded)
        self.stats.count(taken.recorder, recorded.nodes(), program)
        issued = fingerprints(program) if self._options.compares else {}
        exit, memory = taken.exit, StepMemory.of(taken, recorded, program)
        return Kept(program, exit.assigned, exit.effects, exit.history, reason, 0, issued, memory)

    def _agreed(self, mine: Outcome, recorder: Recorder) -> Outcome:
        """The outcome, or the worst on any rank where all must do the same from here on."""
        vote = Vote.of(recorder, self._options.compares)
        if vote is None and self._vote is None:
            return mine
        vote = vote | self._vote if vote is not None else self._vote
        assert vote is not None
        outcome = agreed(mine, vote)
        if outcome is mine:
            self._vote = vote
        return outcome

    def _settle(self, outcome: Outcome, key: Hashable, warmup: Warmup) -> None:
        """Act on an outcome."""
        if outcome.refused is not None:
            self._refuse(_ANY if outcome.everywhere else key, outcome.refused)
            self.stats.warmups += 1
        elif outcome.kept is not None:
            self._keep(key, outcome.kept)
            self._warmups.pop(key, None)
            self._remains = outcome.remains
            self.stats.captures += 1
        else:
            warmup.calls, warmup.remains = warmup.calls + 1, outcome.remains
            self.stats.warmups += 1

    def _keep(self, key: Hashable, kept: Kept) -> None:
        self._programs.add(key, kept)

    def _refuse(self, key: Hashable, error: FunctionalizeError) -> None:
        self._warmups.pop(key, None)
        self._refused[key] = error
        then = "its next call will raise" if self._options.raises else "it runs eagerly from now on"
        log.warning("%s cannot be captured, %s: %s", self._name, then, error)


_DO_NOT_FIT = (
    "after the passes the programs of the ranks issue different collectives for this call, as they may where ranks "
    "have arguments of different sizes: give passes that decide by memory no budget"
)
_ANY = object()  # the key of a refusal that holds for every call


def _bug(bug: Exception) -> UncapturableError:
    """A refusal for what should not have happened; the step itself must not suffer."""
    log.error("a bug in functionalize, please report it", exc_info=bug)
    refused = UncapturableError(f"a bug in functionalize: {type(bug).__name__}: {bug}")
    refused.__cause__ = bug
    return refused
