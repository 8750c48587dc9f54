"""When the passes of a program run: at once, when it has been of use, or once for all sizes of its class.

    schedule.before(recorded, call, ...)     how many calls must find a new program first; whether replays do
    schedule.waits(cached)                   a call that found it runs eagerly, as its passes have not run; counts it
    schedule.optimise(key, cached)           the passes of a program, which run once for all sizes of its class
    schedule.after_replay(cached)            of a program that is replayed before its passes: they may run now

Programs of calls that differ in sizes are replayed without their passes until these would take a small share of the
time of all replays (`is_bare`). A program that then needs more memory than eager waits: its calls run eagerly, and the
passes run as soon as they can for all sizes. Those of a class without a template run for each size.
Invariant: the passes change which bytes and how much time a replay takes, never what is compared.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable

import torch

from functionalize._compat.dispatch import disable_current_modes
from functionalize.errors import FunctionalizeError
from functionalize.lengths.length_class import LengthClass
from functionalize.lengths.shared_passes import needs_no_copies
from functionalize.program.program import Program
from functionalize.recorder.recorder import Recorder
from functionalize.step.cache import (
    CALLS_BEFORE_FIRST_PASSES,
    CALLS_BEFORE_PASSES,
    CALLS_BEFORE_SECOND_RECORDING,
    LARGE,
    MANY,
    CachedProgram,
)
from functionalize.step.core import StepCore
from functionalize.step.outcome import Refused
from functionalize.step.stages import Invocation
from functionalize.step.vote import Fingerprints, collectives, must_vote
from functionalize.templates.call_keys import shapes_of
from functionalize.templates.symbols import Shapes

log = logging.getLogger("functionalize")
# The passes of a class run twice, each time as long as some 20 eager steps (`cache.py`), and return little time: after
# as many replays that is less than a sixth of the run. Eager calls in between need the memory of these programs.
REPLAYS_BEFORE_PASSES = 256
_REPLAYS_ALONE = 64  # of one size at which the passes of its class do not hold, with the same sum


class PassSchedule:
    """The passes of one step's programs.

    may_follow: whether a program may be replayed before its passes run. rewritten: told each recorded program and what
    the passes made of it.
    """

    def __init__(self, core: StepCore) -> None:
        self._core = core
        self.may_follow = core.policy.kinds.defers
        self.rewritten: Callable[[Program, Program], None] = lambda recorded, program: None

    def apply(self, recorded: Program) -> Program:
        """The program of a recording after the passes."""
        program = self._core.options.applied(recorded)
        self.rewritten(recorded, program)
        return program

    # -- when ------------------------------------------------------------------------------------

    def before(self, recorded: Program, call: Invocation, wants_sizes: bool) -> tuple[int, bool]:
        """How many calls must show that a program is of use before the passes run; whether replays do (`is_bare`).

        None if as many have waited for the recording. wants_sizes: whether programs of other sizes may be made of it.
        """
        core = self._core
        if self.may_share(wants_sizes):
            must_pass = core.options.compares and bool(collectives(recorded))
            is_bare = needs_no_copies(recorded) and not must_pass
            return 0 if is_bare else CALLS_BEFORE_PASSES, is_bare
        unkept = core.unkept.get(call.key)
        if not self._may_wait(wants_sizes) or (unkept is not None and unkept.has_waited):
            return 0, False
        return core.cache.calls_before_passes(call.key, recorded), False

    def may_share(self, wants_sizes: bool) -> bool:
        """Whether the passes of a recorded program may run for all sizes of its class."""
        return self._core.options.rewrites and self.may_follow and wants_sizes

    def _may_wait(self, wants_sizes: bool) -> bool:
        """Whether passes may run later: the ranks, a report or a prediction do not compare their result."""
        options = self._core.options
        is_compared = options.compares or options.memory or wants_sizes
        return self._core.policy.kinds.defers and options.rewrites and not is_compared

    def let_wait(self, call: Invocation, recorder: Recorder, wants_sizes: bool) -> None:
        """After the first recording of a large step, which is not kept: the next one, and the passes, may wait.

        Ranks that vote, or will, record alike: theirs do not wait.
        """
        core = self._core
        is_first = core.stats.warmups == 1 and not core.has_settled
        is_long = is_first and len(recorder.records) >= MANY and self._may_wait(wants_sizes)
        if is_long and core.vote is None and not must_vote(recorder):
            unkept = core.unkept[call.key]
            unkept.waits, unkept.has_waited = CALLS_BEFORE_SECOND_RECORDING, True
            log.info(
                "%s runs eagerly for %d calls before it is recorded and its passes run, which take as long as some 20 "
                "steps: with `record_after=1` they run at once",
                core.name,
                CALLS_BEFORE_SECOND_RECORDING,
            )

    def waits(self, cached: CachedProgram) -> bool:
        """Whether a call that a program covers runs eagerly, as its passes have not run; the last one runs them."""
        group, core = cached.group, self._core
        if cached.waits and group is not None and group.template is not None and not group.is_early:
            if self.share(core.cache.key_of(cached), cached):
                return False
            cached.waits = 1  # this call is the last one
        if not cached.waits or cached.prediction is not None:
            return False
        cached.waits, cached.found = cached.waits - 1, cached.found + 1
        core.cache.used(cached)
        key = core.cache.key_of(cached)
        core.policy.kinds.replayed(key)  # it has returned
        if not cached.waits:
            self.optimise(key, cached)
        return True

    def after_replay(self, cached: CachedProgram) -> None:
        """Run the passes of a program that is replayed before them, once they are worth it."""
        if cached.is_bare and self._is_worth(cached):
            self.optimise(self._core.cache.key_of(cached), cached)

    def _is_worth(self, cached: CachedProgram) -> bool:
        group = cached.group
        if group is None or group.template is None or group.apart is not None:
            is_large = cached.program.nodes() >= LARGE
            enough = CALLS_BEFORE_FIRST_PASSES if is_large else CALLS_BEFORE_PASSES
            return cached.replays >= enough
        group.replays += 1
        is_often = cached.replays >= _REPLAYS_ALONE
        is_due = bool(group.passed) or group.replays >= REPLAYS_BEFORE_PASSES
        if not (is_often or is_due):
            return False
        sizes = group.sizes_of(shapes_of(self._core.cache.key_of(cached)))
        return is_due if group.shares_passes(sizes) else is_often

    # -- run them --------------------------------------------------------------------------------

    def optimise(self, key: Hashable, cached: CachedProgram) -> None:
        """Run the passes on a program that has been of use; if they fail, its kind is refused, or replayed without."""
        if self.share(key, cached):
            return
        core = self._core
        cached.is_bare = False
        cached.waits, runner = 0, cached.program.runner
        try:
            with torch.no_grad(), disable_current_modes():
                cached.rewrite(self.apply)
                cached.fingerprints = core.options.issued(cached.program)
        except Exception as error:
            is_bug = not isinstance(error, FunctionalizeError)  # that must not end a loop
            if core.vote is not None or (is_bug and cached.replays):  # who refuses does not vote
                cached.program.runner = runner
                log.error("%s replays a program without its passes: %s", core.name, error)
                return
            core.cache.drop(cached)
            core.refuse(key, Refused.of(error).error)
        else:
            core.stats.nodes = cached.program.nodes()

    def share(self, key: Hashable, cached: CachedProgram) -> bool:
        """Give a program the passes of its class; whether these run for all sizes."""
        group = cached.group
        if group is None or group.template is None or group.is_early:
            return False
        self._run_for_class(group)
        sizes = group.sizes_of(shapes_of(key))
        programs = None if isinstance(sizes, str) else group.passed_at(sizes)
        if programs is None:
            return False
        cached.takes(programs)
        cached.waits, cached.is_bare = 0, False
        cached.fingerprints = group.issued or {}
        self._core.stats.nodes = sum(each.nodes() for each in programs)
        return True

    def _run_for_class(self, group: LengthClass) -> None:
        """Run the passes for all sizes of a class, once."""
        options = self._core.options
        group.apart = group.apart or options.why_apart
        issued: list[Fingerprints] = []
        if self._core.must_issue_alike and group.issued is None:
            group.passed = []  # of a file

        def apply(program: Program) -> Program:
            passed = options.applied(program)
            issued.append(options.issued(passed))
            return passed

        try:
            with torch.no_grad(), disable_current_modes():
                group.run_passes(apply)
        except Exception as error:  # they run for each size, where an error is reported
            group.apart = f"the passes fail: {type(error).__name__}: {error}"
            log.info("the passes of %s do not run for all sizes: %s", self._core.name, error)
        if issued:
            group.issued = issued[0]
            if issued[0] != issued[-1]:
                group.apart = "what collectives send depends on sizes"

    def issued(self, group: LengthClass, shapes: Shapes) -> Fingerprints | None:
        """The fingerprints of the program for these shapes after the passes of its class; None: it has none."""
        if not group.shares_passes(group.sizes_of(shapes)):
            return None
        self._run_for_class(group)
        return group.issued if group.apart is None else None
