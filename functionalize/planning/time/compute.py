"""What a program computes: floating-point operations and bytes moved, by op, phase and module.

    for row in compute(program): ...
    summed(compute(program), "op")         what `FlopCounterMode` tells, for the program

FLOPs are by the formulas of `torch.utils.flop_counter`, on the program: what a step runs, it counts, each op that is
run again (`recompute`) as often as it runs. The attention kernels of CPUs, of which torch counts nothing before 2.15,
are counted by the formulas of those of GPUs, as 2.15 does. As in torch, elementwise ops and reductions count as
nothing, and attention counts as if it were not causal. What in-place matmuls (`addmm_`, `baddbmm_`) compute torch
leaves out; a program has them in their functional form, which is counted.
Views, waits and collectives have no rows. Linear in nodes and edges.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from functionalize.ir.phases import phase_of
from functionalize.planning.time.costs import flops, is_collective, is_free, moved
from functionalize.planning.timeline.sums import summed
from functionalize.program.program import Program


@dataclass(frozen=True, slots=True)
class Work:
    """Ops of one kind, of one module in one phase.

    op: as torch names it without its overload, `aten.mm`. nbytes: read and written.
    """

    KEYS: ClassVar[tuple[str, ...]] = ("op", "phase", "module")

    op: str
    phase: str
    module: str
    count: int
    flops: int
    nbytes: int


def compute(program: Program) -> list[Work]:
    """A row for everything that differs in op, phase or module, in the order of the graph."""
    program.describe()
    return summed(_each(program.graph), *Work.KEYS)


def _each(graph: fx.Graph) -> Iterator[Work]:
    for node in graph.nodes:
        if is_op(node):
            phase, module = phase_of(node) or "", node.meta.get("module", "")
            yield Work(op_name(node), phase, module, 1, flops(node), moved(node))


def is_op(node: fx.Node) -> bool:
    """Whether a node is an op that takes time on the device and is no collective."""
    return node.op == "call_function" and not is_free(node) and not is_collective(node)


def op_name(node: fx.Node) -> str:
    """`aten.mm`"""
    return str(getattr(node.target, "overloadpacket", node.target))
