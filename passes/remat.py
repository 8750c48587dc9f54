"""Recompute activations in backward instead of keeping them: activation checkpointing, as a pass.

    addmm = aten.addmm(b, x, t)                    addmm = aten.addmm(b, x, t)
    gelu = aten.gelu(addmm)                        gelu = aten.gelu(addmm)
    addmm_1 = aten.addmm(b_1, gelu, t_1)           addmm_1 = aten.addmm(b_1, gelu, t_1)
    ... the rest of forward ...                    ... the rest of forward ...
                                                   addmm_2 = aten.addmm(b_2, x, t_2)      b_2, t_2: of the backward's
                                                   gelu_1 = aten.gelu(addmm_2)            own all-gather
    mm_1 = aten.mm(grad, gelu)                     mm_1 = aten.mm(grad, gelu_1)
    gelu_backward(mm_1, addmm)                     gelu_backward(mm_1, addmm_2)

Values passed between layers stay saved (`functionalize/cost/decide/recompute.py`): at most one layer is recomputed
at a time, right before its backward. `functionalize/cost/decide/recompute.py` decides which values can be
recomputed.

    remat                                          every layer
    remat{select=layer,layers=0+2-5}               layers 0, 2, 3, 4 and 5 of every forward
    remat{select=budget,budget_mb=100}             as little as brings the peak to 100 MiB: most bytes per second first

The budget limits the memory that the graph allocates, as `Liveness(graph).peak` counts it; if it cannot be met, the
pass chooses the lowest peak that it found. torch's `remat_using_tags_for_fwd_loss_bwd_graph` is not used: it supports
one backward per graph, keeps the forward's parameters alive for recomputation, removes collectives as dead code, and
recurses as deep as a chain of ops.

Invariant: the same kernels on the same values; random ops and collectives run as often and in the order they did.
Refuses (0 rewrites): a graph without phases, which no capture made; a recomputation that would not lower the peak.
Refuses (`PassError`): an unknown `select`, `machine` or layer; a budget without `budget_mb`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from functionalize._compat.autograd import RECOMPUTE
from functionalize.analysis.dead_code import drop_dead_code
from functionalize.cost.decide.budget import within
from functionalize.cost.decide.recompute import PlannedNode, Recomputation, RecomputeTrial
from functionalize.cost.decide.saved import SavedStorage
from functionalize.cost.machines.presets import machine_named
from functionalize.errors import PassError
from functionalize.passes.base import Pass
from functionalize.passes.metadata import set_value
from functionalize.passes.rewiring import Rewiring
from functionalize.program.program import Program

_SELECTS = ("all", "layer", "budget")
_MB = 1 << 20


@dataclass(frozen=True)
class Remat(Pass):
    """Compute activations again in backward.

    select: all, layer or budget. layers: numbers and ranges `2-5`, for `layer`. budget_mb: the peak in MiB, for
    `budget`. machine: whose times are modelled, a name of `functionalize.cost.machines.presets.MACHINES` or auto.
    """

    name: ClassVar[str] = "remat"
    select: str = "all"
    layers: tuple[str, ...] = ()
    budget_mb: float | None = None
    machine: str = "auto"

    def apply(self, program: Program) -> int:
        self._check()
        copies = 0
        while again := self._once(program.graph):
            copies += again
            if (
                self.select != "budget"
            ):  # out of reach, the lowest peak found may not be the last word
                break
        return copies

    def _once(self, graph: fx.Graph) -> int:
        plan = Recomputation(graph, machine_named(self.machine, graph))
        trial = self._trial(plan) if plan.candidates else None
        if trial is None or trial.peak >= plan.live.peak:
            return 0
        _rewrite(graph, trial.steps)
        drop_dead_code(graph)
        return trial.copies

    def _check(self) -> None:
        if self.select not in _SELECTS:
            raise PassError(f"`remat`: select is one of {', '.join(_SELECTS)}, not {self.select!r}")
        if (self.select == "budget") != (self.budget_mb is not None):
            raise PassError(
                "`remat`: select=budget and budget_mb go together; give both or neither"
            )
        if (self.select == "layer") != bool(self.layers):
            raise PassError("`remat`: select=layer and layers go together; give both or neither")

    def _trial(self, plan: Recomputation) -> RecomputeTrial | None:
        if self.select == "budget":
            budget = int((self.budget_mb or 0) * _MB)
            order = sorted(plan.candidates, key=lambda s: _worth(plan, s), reverse=True)
            return within(order, plan.without, budget) if plan.live.peak > budget else None
        if self.select == "layer":
            chosen = _numbers(self.layers, max(map(len, plan.layers)))
            return plan.without(s for s in plan.candidates if plan.layer_of(s) in chosen)
        return plan.without(plan.candidates)


def _worth(plan: Recomputation, saved: SavedStorage) -> float:
    return saved.storage.nbytes / (plan.price(saved) or 1e-9)


def _numbers(layers: Sequence[str], count: int) -> set[int]:
    """The layers that an option names."""
    found: set[int] = set()
    for item in layers:
        first, dash, last = item.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise PassError(f"`remat`: layers are numbers and ranges such as 0+2-5, not {item!r}")
        numbers = range(int(first), int(last or first) + 1)
        if not numbers or numbers[-1] >= count:
            raise PassError(f"`remat`: no layer {item}; this program has layers 0 to {count - 1}")
        found |= set(numbers)
    return found


def _rewrite(graph: fx.Graph, steps: Sequence[PlannedNode]) -> None:
    """Make the copies of a new order, each before the node that comes after it."""
    copies: dict[fx.Node, fx.Node] = {}
    wiring = Rewiring(graph)
    waiting: list[PlannedNode] = []
    for step in steps:
        if step.value.copied:
            waiting.append(step)
            continue
        node = step.value.node
        for each in waiting:
            with graph.inserting_before(node):
                copies[each.value.node] = _copy(graph, each, copies)
        waiting.clear()
        if step.reads:
            wiring.read(node, _sources(step, copies))
    wiring.settle()


def _copy(graph: fx.Graph, step: PlannedNode, copies: dict[fx.Node, fx.Node]) -> fx.Node:
    sources = _sources(step, copies)
    copy = graph.node_copy(step.value.node, lambda n: sources.get(n, n))
    copy.meta["phase"] = RECOMPUTE
    set_value(copy)
    return copy


def _sources(step: PlannedNode, copies: dict[fx.Node, fx.Node]) -> dict[fx.Node, fx.Node]:
    return {n: copies[v.node] if v.copied else v.node for n, v in step.reads.items()}
