"""The work of a program: floating-point operations and bytes moved, by op, phase and module.

    for row in compute(program): ...
    summed(compute(program), "op")         as `FlopCounterMode` counts them

FLOPs are by the formulas of `torch.utils.flop_counter`, applied to the program: an op that is recomputed (phase
`recompute`) counts each time it runs. CPU attention kernels, which torch counts as 0 before 2.15, are counted by the
formulas of the GPU kernels, as torch 2.15 does. As in torch, elementwise ops and reductions count as 0, and attention
counts as if it were not causal. torch omits in-place matmuls (`addmm_`, `baddbmm_`); a program has them in their
functional form, which is counted. Views, waits and collectives have no rows. Linear in nodes and edges.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from functionalize.ir.phases import phase_of
from functionalize.planner.time.call_costs import Costs, call_costs
from functionalize.planner.timeline.sums import summed
from functionalize.program.program import Program


@dataclass(frozen=True, slots=True)
class Work:
    """Ops of one kind, of one module in one phase.

    op: its name without the overload, as `aten.mm`. count: the number of ops. nbytes: bytes read plus bytes written.
    """

    KEYS: ClassVar[tuple[str, ...]] = ("op", "phase", "module")

    op: str
    phase: str
    module: str
    count: int
    flops: int
    nbytes: int


def compute(program: Program, costs: Costs | None = None) -> list[Work]:
    """One row per op, phase and module, in the order of the graph. costs: of the program, if they are known."""
    return summed(_each(costs or call_costs(program)), *Work.KEYS)


def _each(costs: Costs) -> Iterator[Work]:
    for node, cost in costs.items():
        if not cost.free and cost.message is None:
            phase, module = phase_of(node) or "", node.meta.get("module", "")
            yield Work(op_name(node), phase, module, 1, cost.flops, cost.moved)


def op_name(node: fx.Node) -> str:
    """The name of an op without its overload, as `aten.mm`."""
    return str(getattr(node.target, "overloadpacket", node.target))
