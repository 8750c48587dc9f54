"""The options of `capture`, checked before any step runs: passes, runner, size of the cache, refusals."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from functionalize.audit.schedule import AuditOption, AuditSchedule
from functionalize.errors import UnknownValueError
from functionalize.lengths.coverage import EVERY
from functionalize.lengths.length_classes import LengthClasses
from functionalize.program.collective_order import fingerprints, groups_of
from functionalize.program.program import Program
from functionalize.run import runner
from functionalize.run.boxed import boxed
from functionalize.step.policy import (
    ALLOWANCE,
    BUILDING,
    CLASS,
    PASS,
    PASSES,
    RECORDING,
    SIZES,
    Policy,
)
from functionalize.templates.template import EARLY, FEWEST
from functionalize.util.switches import mode

log = logging.getLogger("functionalize")

OnUncapturable = Literal["raise", "eager"]
Compile = Literal["inductor", "cudagraphs"] | None
Dynamic = bool | Literal["auto"]
_DEFAULT = AuditSchedule.of("auto")
# A replay writes parameters and states in place, as eager does. Else it would keep a second copy of them, and take up
# to three times as long as eager where the time of a step is that of its optimizer's memory.
DEFAULT_PASSES = "reinplace"


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """The checked options of `capture`.

    passes: the passes that are applied to a recorded program. runner: makes the callable that runs its graph.
    compares: whether ranks compare the collectives of their programs, since passes may change collectives.
    raises: whether a step that cannot be captured raises; else it runs eagerly.
    memory: whether lifetimes of storages and modules of ops are recorded.
    audit: which calls are audited. allowance: what the step may cost beyond eager, in eager steps; None: any.
    dynamic: whether programs are predicted for sizes that were not recorded; False if "auto" does not go with the other
    options. why_static: why they are not; empty if they are. keeps_recorded: whether a program is also kept as it was
    recorded, since no passes were asked for, and `step.program` is the functional one. is_off: whether every call runs
    eagerly, by a switch of the environment.
    """

    passes: tuple[Any, ...]
    runner: Callable[[Program], Callable[..., Sequence[Any]]]
    compares: bool
    raises: bool
    memory: bool = False
    audit: AuditSchedule = _DEFAULT
    allowance: float | None = ALLOWANCE
    dynamic: Dynamic = False
    why_static: str = "dynamic=False"
    keeps_recorded: bool = False
    is_off: bool = False

    @staticmethod
    def of(
        pipeline: Sequence[Any] | str | None,
        on_uncapturable: OnUncapturable,
        compile: Compile,
        memory: bool = False,
        audit: AuditOption = "auto",
        allowance: float | None = ALLOWANCE,
        dynamic: Dynamic = False,
        backward: bool = False,
    ) -> CaptureOptions:
        """pipeline: None: `DEFAULT_PASSES` for whole steps that run op by op without a report of their memory, else
        none. backward: of a forward with its backward.

        Raises `ValueError` for an unknown mode or schedule, `PassError` for a text that cannot be parsed."""
        if on_uncapturable not in ("raise", "eager"):
            raise ValueError(f"on_uncapturable is 'raise' or 'eager', not {on_uncapturable!r}")
        if allowance is not None and not allowance >= 0:
            raise ValueError(f"allowance is at least 0 eager steps, or None, not {allowance}")
        if type(dynamic) is not bool and dynamic != "auto":
            raise ValueError(f"dynamic is True, False or 'auto', not {dynamic!r}")
        other = "memory=True" if memory else f"compile={compile!r}" if compile is not None else ""
        if dynamic == "auto":
            why_static = other or ("backward=True, without dynamic=True" if backward else "")
            dynamic = False if why_static else dynamic
        elif dynamic and other:
            raise ValueError(f"dynamic=True predicts programs that run op by op: not with {other}")
        else:
            why_static = "" if dynamic else "dynamic=False"
        is_default = pipeline is None
        if pipeline is None:
            pipeline = () if backward or memory or compile is not None else DEFAULT_PASSES
        passes = _parsed(pipeline)
        compares = any(each.changes_collectives for each in passes)
        raises = on_uncapturable == "raise"
        made = runner(compile)
        switch = mode()
        schedule = AuditSchedule.of(1 if switch == "audit" else audit)
        return CaptureOptions(
            passes,
            made,
            compares,
            raises,
            memory,
            schedule,
            allowance,
            dynamic,
            why_static,
            keeps_recorded=is_default and bool(passes),
            is_off=switch == "off",
        )

    def policy(self) -> Policy:
        """When the step records, audits and compares; whoever asks for predictions or reports pays for them."""
        is_bounded = self.dynamic in (False, "auto") and not self.memory
        program = RECORDING + BUILDING
        # However long the pipeline is, the allowance pays for a first program after three recordings that are not kept;
        # after two, where its passes cannot wait for what replays return.
        unkept = 2 if self.compares or self.memory else 3
        most = max((self.allowance or ALLOWANCE) - unkept * RECORDING, program)
        return Policy(self.allowance, is_bounded, min(program + self.passes_cost, most))

    @property
    def passes_cost(self) -> float:
        """What the passes of one program cost, in eager steps. A compiler is not counted: who asks for one waits."""
        return PASSES + PASS * len(self.passes) if self.passes else 0

    @property
    def class_passes_cost(self) -> float:
        """What the passes of a class of lengths cost, which run once for all its sizes."""
        return SIZES * self.passes_cost + CLASS if self.passes else 0

    def lengths(self) -> LengthClasses | None:
        """What predicts programs for other sizes; None without `dynamic`."""
        if not self.dynamic:
            return None
        # Ranks that compare what programs send replay none before its passes, which an early template does not have.
        fewest = FEWEST if self.compares else EARLY
        return LengthClasses(self.audit.every or EVERY, self.dynamic == "auto", fewest)

    @property
    def rewrites(self) -> bool:
        """Whether a recorded program is rewritten or compiled before it runs."""
        return bool(self.passes) or self.runner is not boxed

    @property
    def why_apart(self) -> str | None:
        """Why the passes run for each size by itself; None: once for all sizes."""
        for each in self.passes:
            if getattr(each, "budget_mb", None) is not None:
                return f"`{each}` bounds the memory of each program"
            if not type(each).__module__.startswith("functionalize.passes."):
                return f"`{each}` may decide by sizes"
        return None

    def alike(self) -> CaptureOptions | None:
        """The options without the passes that ranks ran differently and may leave out; None if there are none."""
        kept = tuple(each for each in self.passes if not getattr(each, "is_optional", False))
        if len(kept) == len(self.passes):
            return None
        return replace(self, passes=kept)  # `compares` stays: the ranks vote as before

    def issued(self, program: Program) -> Mapping[str, int]:
        """The fingerprints of what a program after the passes issues, by process group; empty if no pass changes it."""
        if not self.compares:
            return {}
        return fingerprints(program.graph)

    def applied(self, program: Program) -> Program:
        """The program, or a copy of it after the passes, ready to run.

        One with a value of unknown size is left alone; if it issues collectives, `UnknownValueError` is raised.
        """
        if self.passes:
            from functionalize import passes  # here, as `passes` imports `functionalize`

            try:
                program = passes.run(program, self.passes)
            except UnknownValueError as error:
                # Other ranks may run theirs after the passes.
                if any(groups_of(n.target, n.args) for n in program.graph.nodes):
                    raise
                log.warning("a program for other sizes runs without its passes: %s", error)
        elif self.compares:
            program.describe()  # the sizes of what collectives send
        program.runner = self.runner
        if self.runner is not boxed:
            program.prepare()  # compile now: a failure becomes a refusal, and no replay waits for the compiler
        return program


def _parsed(pipeline: Sequence[Any] | str) -> tuple[Any, ...]:
    from functionalize import passes

    if isinstance(pipeline, str):
        return passes.parse(pipeline)
    found = tuple(pipeline) if isinstance(pipeline, Iterable) else (pipeline,)
    if all(isinstance(each, passes.Pass) for each in found):
        return found
    raise ValueError(
        f"passes is the text of a pipeline ('default', '' for none) or a sequence of `Pass` objects, not {pipeline!r}"
    )
