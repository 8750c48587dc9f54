"""In a backward, first what a collective depends on, so that it runs beside what does not depend on it.

    a = mm(dy, w)              dw0 = mm(x, dy)                              a = mm(dy, w)
    dw0 = mm(x, dy)            a = mm(dy, w)                                c = all_to_all_single(a)
    c = all_to_all_single(a)   c = all_to_all_single(a)   order{...} ->     dw0 = mm(x, dy)
    dz = wait_tensor(c)        dz = wait_tensor(c)                          dz = wait_tensor(c)

    order                                          all collectives of every backward
    order{first=all_to_all}                        these collectives
    order{first=all_to_all, module=layers.*.moe}   those of these modules; `*` matches any text
    Order(first=lambda node: ...)                  what a function chooses

The engine runs, of the nodes that are ready, the one that the forward made last, whatever waits for it; eager's answer
is `_set_sequence_nr` by hand, an order that is recorded as it ran. Here a chosen collective starts once all that it
depends on has run; what does not depend on it runs before its wait, in the order that it had. The next chosen
collective starts before that if it does not depend on the first.

Invariant: the same nodes, in an order with the constraints of `constraints.py`. Collectives keep their order, so ranks
that choose otherwise still issue equal sequences. `reorder` lets the chosen ones pass the others; then all ranks must
run this pass with equal options, on graphs that differ in sizes only. Linear in nodes and edges, but for sorting.
Memory is not bounded: what was delayed holds its inputs until the wait. `schedule_memory` has an order of its own: run
this pass after it.
Refuses (`PassError`) a kind of collective that it does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import ClassVar

from torch import fx

from functionalize.cost.decide.ordering import Constraints
from functionalize.cost.liveness import Liveness
from functionalize.errors import PassError
from functionalize.ir.phases import in_backward
from functionalize.passes.base import FUNCTIONAL, INPLACE, Pass
from functionalize.passes.constraints import backwards, constraints_of, is_wait, kind_of, reorder
from functionalize.passes.patterns import is_collective
from functionalize.program.program import Program

_KINDS = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True)
class Order(Pass):
    """Issue chosen collectives of a backward as early as what they depend on allows.

    first: kinds of collectives (none: all), or a function that chooses nodes. module: those of modules with such a
    name, or a name that ends so. reorder: they may pass other collectives.
    """

    name: ClassVar[str] = "order"
    accepts: ClassVar[tuple[str, ...]] = (FUNCTIONAL, INPLACE)
    first: tuple[str, ...] | Callable[[fx.Node], bool] = ()
    module: str = ""
    reorder: bool = False

    def __post_init__(self) -> None:
        if callable(self.first):
            return
        unknown = [kind for kind in self.first if kind not in _KINDS]
        if unknown:
            raise PassError(f"`order`: no collective `{unknown[0]}`; there are {', '.join(_KINDS)}")

    @property
    def changes_collectives(self) -> bool:  # type: ignore[override]
        """Whether the chosen collectives may pass others."""
        return self.reorder

    def apply(self, program: Program) -> int:
        """Returns the number of nodes that moved."""
        live = Liveness(program.graph)
        chosen = {node for node in live.nodes if in_backward(node) and self._chooses(node)}
        if not chosen:
            return 0
        constraints = constraints_of(live, chosen if self.reorder else ())
        order = list(range(len(live.nodes)))
        for places in backwards(live):
            order[places.start : places.stop] = _BackwardOrder(
                live, constraints, places, chosen
            ).order
        return reorder([live.nodes[i] for i in order])

    def _chooses(self, node: fx.Node) -> bool:
        if callable(self.first):
            return is_collective(node) and self.first(node)
        if not is_collective(node) or not kind_of(node).startswith(self.first or ""):
            return False
        module = node.meta.get("module", "")
        return not self.module or any(
            fnmatchcase(module, p) for p in (self.module, f"*.{self.module}")
        )


class _BackwardOrder:
    """The new order of the nodes of one backward, by number.

    after: per node, the last of the chosen collectives whose result it needs; counted from 1, 0: none.
    """

    def __init__(
        self, live: Liveness, constraints: Constraints, places: range, chosen: set[fx.Node]
    ) -> None:
        self.places, self.follows = places, constraints.follows
        collectives = [i for i in places if live.nodes[i] in chosen]
        self.after = self._after(live, {live.nodes[i]: n for n, i in enumerate(collectives, 1)})
        self.order: list[int] = []
        self._placed: set[int] = set()
        of_stage: dict[int, list[int]] = {}
        for i in places:
            of_stage.setdefault(self.after[i - places.start], []).append(i)
        filled, begun = 0, 1  # begun: the first of the collectives in flight
        for n, i in enumerate(collectives, 1):
            needed = self._needed(i)
            if any(self.after[j - places.start] >= begun for j in needed):
                self._place(j for stage in range(filled, begun) for j in of_stage.get(stage, ()))
                filled, begun = begun, n
            self._place(needed)
        self._place(j for stage in range(filled, begun) for j in of_stage.get(stage, ()))
        self._place(places)

    def _after(self, live: Liveness, number: dict[fx.Node, int]) -> list[int]:
        first = self.places.start
        found: list[int] = []
        for i in self.places:
            node = live.nodes[i]
            before = [found[j - first] for j in self.follows[i] if j >= first]
            if is_wait(node):
                before.append(number.get(_source(node), 0))
            found.append(max(before, default=0))
        return found

    def _needed(self, i: int) -> list[int]:
        """What must run before a node and has not, and the node."""
        found, waiting = {i}, [i]
        while waiting:
            for j in self.follows[waiting.pop()]:
                if j >= self.places.start and j not in self._placed and j not in found:
                    found.add(j)
                    waiting.append(j)
        return list(found)

    def _place(self, nodes: Iterable[int]) -> None:
        """Place those that have no place yet, in the order that they had."""
        new = sorted(j for j in nodes if j not in self._placed)
        self._placed.update(new)
        self.order += new


def _source(wait: fx.Node) -> fx.Node:
    """The collective that a wait is for, past the parts of its result."""
    node = wait.all_input_nodes[0]
    while not is_collective(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node
