"""The work of a program: what each call costs, and the sums of rows by op, phase and module.

    costs = call_costs(program)
    costs[node]                            Cost(free=False, flops=..., moved=..., message=None, on_host=False, ...)
    for row in compute(program): ...       floating-point operations and bytes moved
    summed(compute(program), "op")         as `FlopCounterMode` counts them
    summed(rows, "kind", "phase")          one row for every kind in every phase, in the order of the first of each

FLOPs are by the formulas of `torch.utils.flop_counter`, applied to the program: an op that is recomputed (phase
`recompute`) counts each time it runs. CPU attention kernels, which torch counts as 0 before 2.15, are counted by the
formulas of the GPU kernels, as torch 2.15 does. As in torch, elementwise ops and reductions count as 0, and attention
counts as if it were not causal. torch omits in-place matmuls (`addmm_`, `baddbmm_`); a program has them in their
functional form, which is counted. Views, waits and collectives have no rows.

A row of a table is a frozen dataclass: the fields in its `KEYS` identify a row, the others are added up. A key that is
not among the arguments of `summed` keeps its value if all summed rows have the same, and is empty (`""`, 0) if they
differ.
Invariant: the cost of a call equals `cost_of(node)`; it is worked out once for the nodes at one place of blocks that
are alike, which share one object. Linear in nodes, edges and rows.
Refuses (`ValueError`): a key that rows do not have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Protocol, TypeVar

from torch import fx

from functionalize.cost.costs import Cost, cost_of
from functionalize.ir.phases import phase_of
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


# -- the cost of each call -------------------------------------------------------------------------

Costs = Mapping[fx.Node, Cost]
"""The cost of each call of a graph."""


def call_costs(program: Program) -> Costs:
    """The costs of the calls of a program's graph."""
    program.evaluate_for_costs()
    repeats = program.repeats
    nodes = repeats.nodes
    found: dict[fx.Node, Cost] = {}
    for block, like in repeats.likes():
        here = nodes[block.start : block.end]
        if like is None:
            found.update((node, cost_of(node)) for node in here if node.op == "call_function")
        else:
            there = nodes[like.start : like.end]
            found.update(zip(here, map(found.__getitem__, there), strict=True))
    return found


# -- sums of rows ----------------------------------------------------------------------------------


class _SummableRow(Protocol):
    """A row of a table. KEYS: the names of the fields that identify a row."""

    KEYS: ClassVar[tuple[str, ...]]
    __dataclass_fields__: ClassVar[dict[str, Any]]


Row = TypeVar("Row", bound=_SummableRow)


def summed(rows: Iterable[Row], *keys: str) -> list[Row]:
    """The rows summed up by these keys; without any, one row, or none if there are none."""
    found: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        unknown = [key for key in keys if key not in row.KEYS]
        if unknown:
            raise ValueError(f"rows have no key `{unknown[0]}`; theirs are {', '.join(row.KEYS)}")
        at = tuple(getattr(row, key) for key in keys)
        found[at] = row if at not in found else _sum(found[at], row)
    return list(found.values())


def _sum(a: Row, b: Row) -> Row:
    changes: dict[str, Any] = {}
    for each in fields(a):
        x, y = getattr(a, each.name), getattr(b, each.name)
        if each.name not in a.KEYS:
            changes[each.name] = x + y
        elif x != y:
            changes[each.name] = type(x)()
    return replace(a, **changes)
