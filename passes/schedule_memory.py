"""Run nodes in another order, so that less memory is live at once. No value changes.

    wait_0 = wait_tensor(reduce_scatter_0)     used by the optimizer only, holds its input until then

    pack_1 = _chunk_cat([..])                              wait_0 = wait_tensor(reduce_scatter_0)
    reduce_scatter_1 = reduce_scatter_tensor(pack_1)       pack_1 = _chunk_cat([..])
    big = aten.mm(x, y)                              ->    reduce_scatter_1 = reduce_scatter_tensor(pack_1)
    small = aten.sum(z)       the last use of z            small = aten.sum(z)
    wait_0 = wait_tensor(reduce_scatter_0)                 big = aten.mm(x, y)
    out = aten.add(big, small)                             out = aten.add(big, small)

What frees more than it makes runs earlier, what makes more than it frees later (`cost/decide/ordering.py`), the
rest stays where it was. With `overlap`, communication keeps what it runs beside: a wait stays, but that one reduction
is in flight at a time, as FSDP2 has it on a GPU; an all-gather starts no later than the wait before it. Without, a
collective is waited for at once, and starts right before that, as FSDP2 does on the CPU; then, where the peak stays,
it starts earlier and is waited for later (`overlap.py`). By default it is as FSDP2's.
torch/_inductor/memory.py has three such orders (lpmf, bfs, dfs), over Inductor's scheduler nodes; they know neither
what a collective holds nor an order between collectives, and one is quadratic.

Invariant: nodes and their arguments are the same. Collectives, random ops, barriers and whatever has a side effect
keep their order; where ops write, so does everything on that memory, and nothing passes the `commit`.
Refuses an order whose peak (`cost/liveness.py`) is not lower by at least 1/256, more overlap apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from functionalize.cost.decide.ordering import Constraints, Schedule, Uses
from functionalize.cost.liveness import Liveness
from functionalize.ir.commit import is_commit
from functionalize.passes.base import FUNCTIONAL, INPLACE, Pass
from functionalize.passes.constraints import effects_of, is_wait, kind_of, memory_chains, reorder
from functionalize.passes.overlap import overlapped, scratch_in
from functionalize.program.program import Program

_WORTH = 1 / 256


@dataclass(frozen=True)
class ScheduleMemory(Pass):
    """Reorder nodes for a smaller peak.

    overlap: keep communication beside the compute that it was beside (None: where tensors are not the CPU's).
    """

    name: ClassVar[str] = "schedule_memory"
    accepts: ClassVar[tuple[str, ...]] = (FUNCTIONAL, INPLACE)
    overlap: bool | None = None

    def apply(self, program: Program) -> int:
        """Returns the number of nodes that moved."""
        overlap = _is_on_device(program.graph) if self.overlap is None else self.overlap
        live = Liveness(program.graph)
        rules = _Rules.of(live, overlap)
        uses = Uses.among(live, {} if overlap else scratch_in(live))
        first = Schedule(uses, list(range(len(live.nodes))))
        constraints = rules.constraints(first)
        found = _better(first, rules, constraints)
        best = found if found.peak < first.peak * (1 - _WORTH) else first
        order = best.order
        if not overlap:
            order = overlapped(best, constraints, live, best.peak)
        return reorder([live.nodes[i] for i in order]) if order != first.order else 0


def _better(now: Schedule, rules: _Rules, order: Constraints) -> Schedule:
    """The best of a few orders: what makes memory moved later, what frees memory moved earlier, in both sequences.

    Of large steps `earlier(later)` is best; a second round has found no lower peak in any step that was measured.
    order: the constraints, unless `rules.overlap`: then waits move first, and the constraints are on what follows.
    """
    start = now
    if rules.overlap:
        start = Schedule(now.uses, _one_reduction_in_flight(now))
        order = rules.constraints(start)

    def later(each: Schedule) -> Schedule:
        return Schedule(now.uses, order.later(each))

    def earlier(each: Schedule) -> Schedule:
        return Schedule(now.uses, order.earlier(each))

    first, second = later(start), earlier(start)
    # A sweep of an order that stayed as it was has been done.
    both = second if first.order == start.order else earlier(first)
    other = first if second.order == start.order else later(second)
    return min((start, first, both, second, other), key=lambda each: (each.peak, each.total))


# -- what must stay in order -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Rules:
    """What `Constraints` asks for, the same whatever the order to start from."""

    overlap: bool
    chains: list[list[int]]
    fixed: list[int]
    walls: list[int]
    late: list[int]

    def constraints(self, start: Schedule) -> Constraints:
        """The constraints on an order that is made of another one: the same for all orders that keep to them."""
        return Constraints(start, self.chains, self.fixed, self.walls, self.late)

    @staticmethod
    def of(live: Liveness, overlap: bool) -> _Rules:
        ordered = set(effects_of(live))
        effects = [n for n in live.nodes if n in ordered or (overlap and is_wait(n))]
        fixed = [n for n in effects if not (_is_gather(n) or is_commit(n))]
        late = () if overlap else filter(_is_wait_of_gather, live.nodes)

        def numbers(nodes: Iterable[fx.Node]) -> list[int]:
            return [live.place[node] for node in nodes]

        return _Rules(
            overlap,
            [numbers(chain) for chain in (effects, *memory_chains(live))],
            numbers(fixed),
            numbers(filter(is_commit, effects)),
            numbers(late),
        )


def _is_on_device(graph: fx.Graph) -> bool:
    """Whether a collective is on something else than the CPU."""
    sent = (t for n in graph.nodes if kind_of(n) for t in n.all_input_nodes)
    return any(t.meta["val"].device.type != "cpu" for t in sent if hasattr(t.meta["val"], "device"))


def _is_gather(node: fx.Node) -> bool:
    return kind_of(node).startswith("all_gather")


def _is_wait_of_gather(node: fx.Node) -> bool:
    return is_wait(node) and any(_is_gather(n) for n in node.all_input_nodes)


# -- one reduction in flight -----------------------------------------------------------------------


def _one_reduction_in_flight(now: Schedule) -> list[int]:
    """The nodes with every reduction waited for before the next one of its kind is packed."""
    nodes, place = now.uses.nodes, now.place
    number = {node: i for i, node in enumerate(nodes)}
    reductions = [i for i, node in enumerate(nodes) if "reduce" in kind_of(node)]
    moved: set[int] = set()
    before: dict[int, list[int]] = {}
    latest: dict[tuple[str, object], int] = {}
    for i in sorted(reductions, key=place.__getitem__):
        key = (kind_of(nodes[i]), nodes[i].args[-1])  # which ends in the group
        start = latest.get(key)
        latest[key] = i
        if start is None:
            continue
        pack = _pack_of(now, i)
        to = pack if place[pack] > place[start] else i
        for late in (number[node] for node in _waits(nodes[start])):
            if place[late] > place[to] and late not in moved:
                moved.add(late)
                before.setdefault(to, []).append(late)
    found = []
    for i in now.order:
        found += before.get(i, [])
        if i not in moved:
            found.append(i)
    return found


def _pack_of(now: Schedule, start: int) -> int:
    """The last node that makes what a collective reads; the collective itself if that is the caller's."""
    uses = now.uses
    made = [now.first[storage] for i in uses.reads[start] for storage in uses.of[i]]
    return now.order[max(made)] if made else start


def _waits(start: fx.Node) -> Iterator[fx.Node]:
    """The waits of a collective, each after the node that takes its result out of a list."""
    for user in start.users:
        if is_wait(user):
            yield user
        elif len(user.all_input_nodes) == 1:
            yield user
            yield from (n for n in user.users if is_wait(n))
