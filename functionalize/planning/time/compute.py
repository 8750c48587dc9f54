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
from functionalize.planning.time.costs import flops, is_collective, is_free, moved
from functionalize.planning.timeline.sums import summed
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


def compute(program: Program) -> list[Work]:
    """One row per op, phase and module, in the order of the graph."""
    program.describe()
    return summed(_each(program.graph), *Work.KEYS)


def _each(graph: fx.Graph) -> Iterator[Work]:
    for node in graph.nodes:
        if is_op(node):
            phase, module = phase_of(node) or "", node.meta.get("module", "")
            yield Work(op_name(node), phase, module, 1, flops(node), moved(node))


def is_op(node: fx.Node) -> bool:
    """Whether a node is an op that needs time on the device and is not a collective."""
    return node.op == "call_function" and not is_free(node) and not is_collective(node)


def op_name(node: fx.Node) -> str:
    """The name of an op without its overload, as `aten.mm`."""
    return str(getattr(node.target, "overloadpacket", node.target))
