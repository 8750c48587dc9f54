"""What `capture` was asked for, checked before any step runs: how programs are made, run, kept and refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from functionalize.core.program import Program
from functionalize.run import runner
from functionalize.run.boxed import boxed

OnUncapturable = Literal["raise", "eager"]
Compile = Literal["inductor", "cudagraphs"] | None


@dataclass(frozen=True, slots=True)
class Options:
    """passes, runner: what becomes of a recorded program. compares: whether passes may change its collectives.

    raises: whether a step that cannot be captured raises, or runs eagerly. max_programs: kept side by side.
    memory: whether lifetimes and modules are recorded, too.
    """

    passes: tuple[Any, ...]
    runner: Callable[[Program], Callable[..., Sequence[Any]]]
    compares: bool
    raises: bool
    max_programs: int
    memory: bool = False

    @staticmethod
    def of(
        pipeline: Sequence[Any] | str,
        on_uncapturable: OnUncapturable,
        max_programs: int,
        compile: Compile,
        memory: bool = False,
    ) -> Options:
        """Raises `ValueError` for a mode it does not know, `PassError` for a pipeline it cannot read."""
        if on_uncapturable not in ("raise", "eager"):
            raise ValueError(f"on_uncapturable is 'raise' or 'eager', not {on_uncapturable!r}")
        if max_programs < 1:
            raise ValueError(f"max_programs is at least 1, not {max_programs}")
        passes = _parsed(pipeline)
        compares = any(each.changes_collectives for each in passes)
        raises = on_uncapturable == "raise"
        return Options(passes, runner(compile), compares, raises, max_programs, memory)

    def applied(self, program: Program) -> Program:
        """The program, or a copy of it after the passes, ready to be run."""
        if self.passes:
            import passes  # the arrow of imports points from passes to here

            program = passes.run(program, self.passes)
        program.runner = self.runner
        if self.runner is not boxed:  # which asks for nothing that the first replay could not do
            program.prepare()
        return program


def _parsed(pipeline: Sequence[Any] | str) -> tuple[Any, ...]:
    if not isinstance(pipeline, str):
        return tuple(pipeline)
    import passes

    return passes.parse(pipeline)
