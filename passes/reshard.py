"""Choose which gathered parameters are kept from forward to backward, and which are gathered again.

    keep="none" (ZeRO-3)                               keep="all" (ZeRO-2)
    w = wait(all_gather(shard))                        w = wait(all_gather(shard))
    y = mm(x, w)                                       y = mm(x, w)
    ...                                                ...
    w_1 = wait(all_gather(shard))                      dx = mm(dy, t(w))
    dx = mm(dy, t(w_1))

Two gathers of the same shards have the same value. To keep the parameters is to erase the second gather; to reshard
is to repeat the first one, with the views that lead from it to its readers, before the first reader in another phase.
The time between two phases that read one parameter group is a gap. `keep="budget"` keeps the parameters over as many
gaps as fit, in the order of time saved per byte (`cost/costs.py`), of equal ones the shortest first. With
microbatches there is a gap between each forward and backward, and a group may be kept over some of them.

budget_mb bounds the peak (`cost/liveness.py`) of the resulting graph, in MiB. The peak includes
activations, whose sizes may differ between ranks, so that ranks would choose differently: use kept_mb then, which
bounds only the gathered parameters kept at the same time; their sizes are equal on all ranks. growth bounds the peak
by a multiple of what the program needs as eager runs it (`as_eager.py`), nearly what it needs after `default`. If the
ranks of a captured step choose differently then, all leave this pass out.

Invariant: every reader reads the same bits. Collectives that are neither erased nor added keep their order.
Refuses
- gathers of different values: other shards (an optimizer ran in between), pieces, casts or ranks;
- a gather that `passes/patterns.py` does not recognise, or whose parts have another layout;
- to repeat a gather that is returned to the caller, who keeps it anyway.
If a budget cannot be met, the history says so, and the peak is lowered as far as possible.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from functionalize.analysis.aliases import is_view
from functionalize.cost.costs import seconds
from functionalize.cost.liveness import Liveness, Storage
from functionalize.cost.machines.presets import machine_named
from functionalize.errors import PassError
from functionalize.ir.fakes import Fakes
from functionalize.passes.as_eager import live_as_eager
from functionalize.passes.base import Pass
from functionalize.passes.metadata import origin_meta, revalue, set_value
from functionalize.passes.overlap import scratch_in
from functionalize.passes.patterns import Gather
from functionalize.passes.periods import Gap, Period, chain_of, gaps_of, nodes_of, split_node
from functionalize.program.program import Program
from functionalize.tape.queries import AUTOGRAD

_MB = 2**20
_KEEP = ("all", "none", "budget")


_Choose = Callable[["_GapRoom"], list[Gap]]
_Change = Callable[[fx.Graph, list[Gap]], int]


@dataclass(frozen=True)
class Reshard(Pass):
    """Keep gathered parameters for backward, or gather them again.

    keep: `all`, `none`, or `budget`: with a peak of at most budget_mb MiB, and at most kept_mb MiB of kept
    parameters, or with a peak of at most growth times the one of eager. machine: the machine whose times are modelled,
    see `cost/machines`.
    """

    name: ClassVar[str] = "reshard"
    changes_collectives: ClassVar[bool] = True
    keep: str = "all"
    budget_mb: float | None = None
    kept_mb: float | None = None
    machine: str = "auto"
    growth: float | None = None

    def __post_init__(self) -> None:
        if self.keep not in _KEEP:
            raise PassError(f"`reshard`: keep is all, none or budget, not {self.keep!r}")
        limits = self.budget_mb is not None or self.kept_mb is not None
        if limits and self.growth is not None:
            raise PassError(
                "`reshard`: growth is a limit of its own, without budget_mb and kept_mb"
            )
        if (limits or self.growth is not None) != (self.keep == "budget"):
            raise PassError(
                "`reshard`: budget_mb, kept_mb and growth go with keep=budget, which needs one"
            )

    @property
    def is_optional(self) -> bool:  # type: ignore[override]
        """Whether the limit is relative, so that leaving the pass out exceeds no budget."""
        return self.growth is not None

    def apply(self, program: Program) -> int:
        graph = program.graph
        if self.keep == "none":
            return _split(graph, [gap for gap in gaps_of(graph) if gap.kept])
        if self.keep == "all":
            count = 0
            while gaps := [gap for gap in gaps_of(graph) if not gap.kept]:
                count += _merge(graph, gaps)
            return count
        if self.growth is not None:
            return self._grown(program, self.growth)
        count = self._while_any(graph, _shrink, _split) + self._while_any(graph, _grow, _merge)
        over = _GapRoom(graph, self).over()
        if over:
            program.history = (*program.history, f"{self.name}: {over}")
        return count

    def _grown(self, program: Program, growth: float) -> int:
        """Keep what fits into `growth` times the peak that the program has as eager runs it."""
        gaps = [gap for gap in gaps_of(program.graph) if not gap.kept]
        if not gaps:
            return 0
        room = _GapRoom(program.graph, self, growth)
        fits = {gap.after[0].gather.start for gap in _grow(room)}
        kept = [gap for gap in gaps if gap.after[0].gather.start in fits]
        return _merge(program.graph, kept, program.fakes)

    def _while_any(self, graph: fx.Graph, choose: _Choose, change: _Change) -> int:
        """Choose and rewrite repeatedly, until no choice is left."""
        total = 0
        while count := change(graph, choose(_GapRoom(graph, self))):
            total += count
        return total


# -- what fits -------------------------------------------------------------------------------------


class _GapRoom:
    """The gaps of a graph, and the memory in use at each place.

    growth: the limit, as a multiple of the peak of the graph as eager runs it, whose places are meant then.
    """

    def __init__(self, graph: fx.Graph, options: Reshard, growth: float | None = None) -> None:
        self.live = Liveness(graph) if growth is None else live_as_eager(graph)
        self.gaps = gaps_of(graph, self.live.place)
        machine = machine_named(options.machine, graph)
        self.seconds = {
            gap: sum(seconds(n, machine) for n in chain_of(gap.after[0].gather))
            for gap in self.gaps
        }
        self.limits = [m and int(m * _MB) for m in (options.budget_mb, options.kept_mb)]
        self.last = {storage: storage.last for storage in self.live.storages}
        self.source: dict[fx.Node, Gather] = {}  # start of a gather -> the gather that replaces it
        # the memory in use in total, and by kept parameters
        self.used = torch.zeros(2, len(self.live.nodes), dtype=torch.int64)
        self.used[0] = torch.tensor(self.live.timeline, dtype=torch.int64)
        for gap in self.gaps:
            if gap.kept:
                self.used[1, self._inside(gap)] += self._nbytes(gap)
        if growth is not None:
            for nbytes, begin, end in _in_flight(self.live):
                self.used[0, begin:end] += nbytes
            self.limits = [int(growth * self.peaks()[0]), None]
        self.first_peaks = self.peaks()

    def over(self) -> str:
        """A sentence about the limit that the graph exceeds."""
        names = ("a peak", "parameters kept")
        for name, limit, used in zip(names, self.limits, self.peaks(), strict=True):
            if limit is not None and used > limit:
                return f"{name} of {used / _MB:.3f} MiB, above the budget of {limit / _MB:.3f} MiB"
        return ""

    def peaks(self) -> list[int]:
        return [int(row.max()) if row.numel() else 0 for row in self.used]

    def by_worth(self, kept: bool) -> list[Gap]:
        """The gaps that are (not) kept now, those first that save the most time per byte."""
        found = [gap for gap in self.gaps if gap.kept is kept]
        worth = {g: self.seconds[g] / max(self._nbytes(g), 1) for g in found}
        return sorted(found, key=lambda g: (-worth[g], g.after[0].first - g.before.last))

    def close(self, gap: Gap) -> bool:
        """Keep the parameters over a gap if they fit, or if that does not exceed a limit further."""
        later, chain = gap.after[0].gather, set(chain_of(gap.after[0].gather))
        kept = self.source.get(gap.before.gather.start, gap.before.gather)
        before, extended = self.used.clone(), dict[Storage, int]()
        for i in gap.parts:
            for its in self._storages(later, i):
                for mine in self._storages(kept, i):
                    extended.setdefault(mine, self.last[mine])
                    self._extend(mine, self.last[its])
        for storage in {s for n in chain for s in self.live.of[n]}:
            if self.live.nodes[storage.first] in chain:
                self.used[0, storage.first : self.last[storage] + 1] -= storage.nbytes
        self.used[1, self._inside(gap)] += self._nbytes(gap)
        limits = zip(self.limits, self.first_peaks, self.peaks(), strict=True)
        if any(limit is not None and used > max(limit, first) for limit, first, used in limits):
            self.used = before
            self.last.update(extended)
            return False
        for start, home in self.source.items():
            if home is later:
                self.source[start] = kept
        self.source[later.start] = kept
        return True

    def open(self, gap: Gap) -> None:
        """Stop keeping parameters over a gap; the memory that the repeated gather needs is not counted."""
        self.used[0, self._inside(gap)] -= self._nbytes(gap)
        self.used[1, self._inside(gap)] -= self._nbytes(gap)

    def covering(self, row: int, gaps: Sequence[Gap]) -> list[Gap]:
        """The gaps over which parameters are live at the peak."""
        at = int(self.used[row].argmax())
        return [g for g in gaps if g.before.last < at < g.after[0].first and self._nbytes(g)]

    def _inside(self, gap: Gap) -> slice:
        return slice(gap.before.last + 1, max(gap.after[0].first, gap.before.last + 1))

    def _nbytes(self, gap: Gap) -> int:
        gather = gap.after[0].gather
        return sum(s.nbytes for s in {s for i in gap.parts for s in self._storages(gather, i)})

    def _storages(self, gather: Gather, part: int) -> tuple[Storage, ...]:
        node, split = gather.parts[part], split_node(gather)
        if node is not None:
            return self.live.of[node]
        made = self.live.of[split] if split is not None else ()
        return made[part : part + 1] if len(made) == len(gather.parts) else made

    def _extend(self, storage: Storage, last: int) -> None:
        if last > self.last[storage]:
            self.used[0, self.last[storage] + 1 : last + 1] += storage.nbytes
            self.last[storage] = last


def _in_flight(live: Liveness) -> Iterator[tuple[int, int, int]]:
    """What gloo allocates for each collective: bytes, the place from which they are live, the first after that."""
    for at, (nbytes, waits) in scratch_in(live).items():
        yield nbytes, at, max(waits, default=at + 1)


def _grow(room: _GapRoom) -> list[Gap]:
    return [gap for gap in room.by_worth(kept=False) if room.close(gap)]


def _shrink(room: _GapRoom) -> list[Gap]:
    """The gaps after which to gather again so that the limits hold, those that save the least time first."""
    gaps, chosen = room.by_worth(kept=True), []
    for row, limit in enumerate(room.limits):
        while limit is not None and room.peaks()[row] > limit:
            found = room.covering(row, gaps)
            if not found:
                break
            room.open(found[-1])
            gaps.remove(found[-1])
            chosen.append(found[-1])
    return chosen


# -- rewriting -------------------------------------------------------------------------------------


def _merge(graph: fx.Graph, gaps: list[Gap], fakes: Fakes | None = None) -> int:
    """Replace the later gather of each gap by the earlier one, and erase it."""
    home: dict[fx.Node, Gather] = {}
    for gap in sorted(gaps, key=lambda g: g.after[0].first):
        kept, later = gap.before.gather, gap.after[0].gather
        kept = home[later.start] = home.get(kept.start, kept)
        for i in gap.parts:
            part = later.parts[i]
            if part is not None:
                part.replace_all_uses_with(_part(graph, kept, i))
        for node in reversed(chain_of(later)):
            if not node.users:
                graph.erase_node(node)
    if gaps:
        revalue(graph, fakes)
    return len(gaps)


def _part(graph: fx.Graph, gather: Gather, number: int) -> fx.Node:
    """A part of a gather; its `getitem` is made if it does not exist."""
    part, split = gather.parts[number], split_node(gather)
    if part is not None:
        return part
    assert split is not None
    for user in split.users:
        if user.args[1] == number:
            return user
    with graph.inserting_after(split):
        part = graph.call_function(operator.getitem, (split, number))
    part.meta = origin_meta(split)
    set_value(part)
    return part


def _split(graph: fx.Graph, gaps: list[Gap]) -> int:
    """Repeat the gather after each gap, for the readers up to the next gap."""
    for gap in sorted(
        gaps, key=lambda g: -g.after[0].first
    ):  # from the last gap on: each repetition serves all readers that follow
        _repeat(graph, gap.after)
    return len(gaps)


def _repeat(graph: fx.Graph, periods: list[Period]) -> None:
    """Repeat a gather, and the views of it that are read, before the first reader of the periods."""
    gather = periods[0].gather
    reads = [read for period in periods for read in period.reads]
    reads = [(reader, value) for reader, value in reads if value in reader.all_input_nodes]
    before, copies = reads[0][0], dict[fx.Node, fx.Node]()
    place = {k: before.meta[k] for k in ("phase", *AUTOGRAD) if k in before.meta}

    def copy(node: fx.Node) -> fx.Node:
        if node not in copies:
            with graph.inserting_before(before):
                copies[node] = graph.node_copy(node, lambda n: copies.get(n, n))
            copies[node].meta = {k: v for k, v in node.meta.items() if k not in AUTOGRAD} | place
            set_value(copies[node])
        return copies[node]

    for node in nodes_of(gather):
        if not is_view(node) or any(n in copies for n in node.all_input_nodes):
            copy(node)
    for reader, value in reads:
        for view in reversed(list(_up(value, copies))):
            copy(view)
        reader.replace_input_with(value, copies[value])
        _erase(graph, value)


def _up(value: fx.Node, until: dict[fx.Node, fx.Node]) -> Iterator[fx.Node]:
    """A view and the chain of views that it is made of, up to a node in `until`."""
    while value not in until:
        yield value
        value = value.all_input_nodes[0]


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    """Erase a view without readers, and the views that only it read."""
    while not node.users and is_view(node):
        above = node.all_input_nodes[0]
        graph.erase_node(node)
        node = above
