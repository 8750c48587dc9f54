"""What a pass is: a frozen dataclass whose fields are its options, with a name, its stages and `apply`.

A pass analyses first and mutates second, and refuses when it is unsure. It works on `program.graph`, keeps every
`node.meta` right (`metadata.set_value`), and leaves the meaning of inputs, outputs and epilogue as it was.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from functionalize.program.program import Program

FUNCTIONAL, PARTITIONED, INPLACE = "FUNCTIONAL", "PARTITIONED", "INPLACE"


STAGES = (FUNCTIONAL, PARTITIONED, INPLACE)


@dataclass(frozen=True)
class Pass(ABC):
    """One rewrite of a program. The fields of a subclass are its options.

    name: as in pipelines and in the history. accepts: the stages it can run at. produces: the stage
    it leaves a program at that it rewrote (None: the one it found). changes_collectives: it may merge, split, drop or
    reorder them, so that ranks must run it alike. is_optional: a captured step leaves it out once ranks ran it
    differently.

        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Count(fz.passes.Pass):
        ...     name = "count"
        ...
        ...     def apply(self, program):
        ...         print(program.nodes(), "nodes")
        ...         return 0
        >>> program = fz.functions.trace(lambda x: x.sin(), torch.ones(2))
        >>> fz.passes.run(program, [Count()]).history
        1 nodes
        ('count: 0',)
    """

    name: ClassVar[str]
    accepts: ClassVar[tuple[str, ...]] = (FUNCTIONAL,)
    produces: ClassVar[str | None] = None
    changes_collectives: ClassVar[bool] = False
    is_optional: ClassVar[bool] = False

    @abstractmethod
    def apply(self, program: Program) -> int:
        """Rewrite `program` itself; returns the number of rewrites, 0 if it is unchanged."""

    def __str__(self) -> str:
        """`name{option=value, ...}` with the options that differ from their defaults."""
        values = [(f.name, getattr(self, f.name), f.default) for f in fields(self)]
        options = ", ".join(f"{n}={option_text(v)}" for n, v, default in values if v != default)
        return f"{self.name}{{{options}}}" if options else self.name


def option_text(value: Any) -> str:
    """The value of an option as a pipeline spells it."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, tuple):
        return "+".join(option_text(v) for v in value)
    if callable(value):
        return str(getattr(value, "__qualname__", value))
    return str(value)
