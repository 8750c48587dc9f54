"""When the passes of a program run: when the ledger pays for them, once for all sizes of a class.

    schedule.before(recorded, call, ...)   whether a new program awaits its passes, and whether it is replayed meanwhile
    schedule.must_wait(cached)             whether a call that found it runs eagerly; passes that are due run first
    schedule.optimise(key, cached)         the passes of a program, which run once for all sizes of its class

A program is recorded when the ledger pays for that, and its passes run when the next call has found it, if the ledger
pays for them. Until then it is replayed without them, which pays for them, or, if it needs more memory than eager
without them, its calls run eagerly. Programs of calls that differ in sizes are replayed until replays have returned
what the passes cost.
Where ranks compare what passes make, and in reports, passes run when a recording is kept, which costs as much more.
Invariant: the passes change which bytes and how much time a replay takes, never what is compared.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable

import torch

from functionalize._compat.dispatch import disable_current_modes
from functionalize.errors import FunctionalizeError
from functionalize.ir.epilogue import Copy
from functionalize.lengths.length_class import LengthClass
from functionalize.lengths.shared_passes import needs_no_copies
from functionalize.program.program import Program
from functionalize.step.cache import CachedProgram
from functionalize.step.core import StepCore
from functionalize.step.outcome import Refused
from functionalize.step.policy import CLASS, GAIN
from functionalize.step.stages import Invocation
from functionalize.step.vote import Fingerprints, collectives
from functionalize.templates.call_keys import shapes_of
from functionalize.templates.symbols import Shapes
from functionalize.util.gc_pause import no_collections

log = logging.getLogger("functionalize")


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
        program = self._applied(recorded)
        self.rewritten(recorded, program)
        return program

    def _applied(self, recorded: Program) -> Program:
        options = self._core.options
        if not self._has_use(recorded):
            return recorded
        self._core.policy.ledger.pay(options.passes_cost)
        try:
            return options.applied(recorded)
        except Exception as error:
            if not options.keeps_recorded:
                raise
            # No passes were asked for, so that none may refuse the step.
            log.info("%s writes nothing in place: %s", self._core.name, error)
            return recorded

    def _has_use(self, recorded: Program) -> bool:
        """Whether the passes are asked for, or there is something that they write in place."""
        writes = any(isinstance(action, Copy) for action in recorded.epilogue)
        return writes or not self._core.options.keeps_recorded

    def restored(self, cached: CachedProgram) -> None:
        """Let a program that a file holds as it was recorded await the default passes."""
        is_recorded = self._core.options.keeps_recorded and not cached.program.history
        if is_recorded and self._has_use(cached.program):
            cached.recorded = cached.program
            cached.awaits_passes = True
            cached.replays_before_passes = needs_no_copies(cached.program)

    # -- when ------------------------------------------------------------------------------------

    def before(self, recorded: Program, call: Invocation, wants_sizes: bool) -> tuple[bool, bool]:
        """Whether a new program awaits its passes, else they run now; and whether it is replayed meanwhile.

        wants_sizes: whether programs of other sizes may be made of it.
        """
        options = self._core.options
        if not self._has_use(recorded) and not self.may_share(wants_sizes):
            return False, False
        must_pass = options.compares and bool(collectives(recorded))
        replays = needs_no_copies(recorded) and not must_pass
        if self.may_share(wants_sizes):
            return True, replays
        is_compared = options.compares or options.memory
        may_wait = options.rewrites and self._core.policy.kinds.defers and not is_compared
        return may_wait, may_wait and replays

    def may_share(self, wants_sizes: bool) -> bool:
        """Whether the passes of a recorded program may run for all sizes of its class."""
        return self._core.options.rewrites and self.may_follow and wants_sizes

    def must_wait(self, cached: CachedProgram) -> bool:
        """Whether a call that found a program runs eagerly, as its passes have not run; those that are due run now."""
        if cached.prediction is not None:  # the call is compared with what was recorded
            return False
        core = self._core
        key = core.cache.key_of(cached)
        if cached.replays_before_passes and cached.group is not None:
            cached.group.replays += 1
        if self._is_due(cached):
            self.optimise(key, cached)
            return cached not in core.cache  # a pass has refused it
        if cached.replays_before_passes:
            return False
        cached.found += 1
        core.cache.used(cached)
        core.policy.kinds.replayed(key)  # it has returned
        return True

    def _is_due(self, cached: CachedProgram) -> bool:
        group, options = cached.group, self._core.options
        may_be_ready = group is not None and bool(group.passed)
        # Most often this is all that a replay before the passes takes.
        if not may_be_ready and not self._core.policy.ledger.can_pay(
            options.passes_cost, is_owed=True
        ):
            return False
        sharing = self._sharing(cached)
        if sharing is not None and sharing.passed:
            return True
        cost = options.passes_cost if sharing is None else options.class_passes_cost
        if not cached.replays_before_passes or group is None:
            return self._core.policy.ledger.can_pay(cost, is_owed=True)
        return self._returns(cached.replays if sharing is None else sharing.replays, cost)

    def _sharing(self, cached: CachedProgram) -> LengthClass | None:
        """The class of a program, if its passes would hold for the program."""
        group = cached.group
        if group is None or group.template is None or group.is_early or group.apart is not None:
            return None
        sizes = group.sizes_of(shapes_of(self._core.cache.key_of(cached)))
        return group if group.shares_passes(sizes) else None

    def is_worth(self, replays: int) -> bool:
        """Whether the passes of a class whose programs were replayed before them run now."""
        return self._returns(replays, self._core.options.class_passes_cost)

    def _returns(self, replays: int, cost: float) -> bool:
        """Whether replays before the passes have returned what these cost, and the ledger pays for them."""
        return replays * GAIN >= cost and self._core.policy.ledger.can_pay(cost, is_owed=True)

    def why_waits(self, cached: CachedProgram) -> str | None:
        """What is missing for the passes of a program that waits for them, for messages; None: they run next."""
        options = self._core.options
        is_shared = self._sharing(cached) is not None
        cost = options.class_passes_cost if is_shared else options.passes_cost
        return self._core.policy.why_unpaid(cost, is_owed=True)

    # -- run them --------------------------------------------------------------------------------

    def optimise(self, key: Hashable, cached: CachedProgram) -> None:
        """Run the passes on a program that has been of use; if they fail, its kind is refused, or replayed without."""
        if self.share(key, cached):
            return
        core = self._core
        cached.awaits_passes, runner = False, cached.program.runner
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
        cached.awaits_passes = False
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
            if not issued:
                self._core.policy.ledger.pay(CLASS)
            passed = self._applied(program)
            issued.append(options.issued(passed))
            return passed

        try:
            with torch.no_grad(), disable_current_modes(), no_collections():
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
