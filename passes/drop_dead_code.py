"""Erase ops whose value has no users.

    sin = aten.sin(x)                                           (gone)
    mul = aten.mul(x, 2)                                        mul = aten.mul(x, 2)
    rand = aten.rand([4])                                       rand = aten.rand([4])
    return mul                                                  return mul

A captured program has none, but passes leave some. (The dead-code elimination of FX and of Inductor keeps the ops that
torch flags as impure: collectives are not flagged, an unused read of a generator's state is.)

Invariant: random ops stay, so that a replay draws as eager does; collectives, their waits and barriers stay, so that
every rank issues the same; so do ops that write. One sweep from the end, linear.

Refuses to drop an unused input: guards and sources name inputs by number, and the caller owns them anyway.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from functionalize.analysis import dead_code
from functionalize.ir.generators import is_random
from functionalize.passes.base import STAGES, Pass
from functionalize.program.program import Program


@dataclass(frozen=True)
class DropDeadCode(Pass):
    """Erase ops without users."""

    name: ClassVar[str] = "drop_dead_code"
    accepts: ClassVar[tuple[str, ...]] = STAGES

    def apply(self, program: Program) -> int:
        return dead_code.drop_dead_code(program.graph, _is_impure)


def _is_impure(node: fx.Node) -> bool:
    """Whether a node does more than make its value; a bare graph may hold ops that no program has."""
    # the only pure random op reads a generator's state
    return dead_code.is_impure(node) or (node.is_impure() and not is_random(node))
