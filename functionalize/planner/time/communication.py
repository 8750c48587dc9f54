"""The traffic of a program: collectives and their bytes by kind, process group, module and phase.

    for row in communication(program): ...
    summed(communication(program), "kind", "group")

    kind             in, out (n: bytes of one rank's part)     sent per rank, by a ring of g
    all-gather       n, g n                                     (g - 1) n
    reduce-scatter   g n, n                                     (g - 1) n
    all-reduce       n, n                                       2 n (g - 1) / g
    all-to-all       n, n                                       n (g - 1) / g
    broadcast        n, n                                       n
    barrier          0, 0                                       0
    send             n, 0                                       n
    receive          0, n                                       0

Bytes are the sizes of the tensors, including the padding of uneven shards, which FSDP2 sends too. The ranks of a group
come from the `groups` argument, else from the process groups of this process. If an op of the program has the size as
an argument, ranks that disagree with it are ignored. An all-reduce of unknown size (0) counts as one of many ranks.
Invariant: rows are in the order of the graph, and their counts add up to its collectives. Linear in nodes and edges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch.distributed as dist
from torch import fx

from functionalize._compat.distributed import group_of_name
from functionalize.cost.calls import arguments_of
from functionalize.cost.costs import is_collective
from functionalize.cost.messages import RECEIVE, Message, group_name_of, sent
from functionalize.ir.phases import phase_of
from functionalize.ir.point_to_point import is_message
from functionalize.planner.time.compute import Costs, call_costs, summed
from functionalize.program.program import Program


@dataclass(frozen=True, slots=True)
class Traffic:
    """Collectives of one kind in one process group, for one module in one phase.

    ranks: the size of the group, 0 if unknown.
    nbytes_in, nbytes_out: bytes of the inputs and of the outputs of each rank.
    sent: bytes that each rank sends to others in a ring algorithm.
    """

    KEYS: ClassVar[tuple[str, ...]] = ("kind", "group", "ranks", "module", "phase")

    kind: str
    group: str
    ranks: int
    module: str
    phase: str
    count: int
    nbytes_in: int
    nbytes_out: int
    sent: int


@dataclass(frozen=True, slots=True)
class RankGroup:
    """A process group. members: its global ranks; None if unknown: consecutive ranks are assumed."""

    name: str
    size: int
    members: tuple[int, ...] | None = None

    def on_a_node(self, ranks_per_node: int | None) -> int:
        """The number of its ranks on the node that has fewest of them. ranks_per_node: None: all are on one node."""
        if ranks_per_node is None:
            return self.size
        if self.members is None:
            return min(self.size, ranks_per_node)
        return min(Counter(rank // ranks_per_node for rank in self.members).values())

    def across(self, ranks: int | None) -> bool:
        """Whether its ranks are in several blocks of `ranks` consecutive ranks. None: there is one block."""
        if ranks is None:
            return False
        if self.members is None:
            return self.size > ranks
        return len({rank // ranks for rank in self.members}) > 1


class Groups:
    """The process groups of a graph, by name. ranks: the global ranks of groups; wins over this process's groups.

    collectives: the nodes that communicate, in their order.
    """

    def __init__(self, graph: fx.Graph, ranks: Mapping[str, Sequence[int]] | None = None) -> None:
        self._ranks = ranks or {}
        self._sizes: dict[str, int] = {}
        self._found: dict[str, RankGroup] = {}
        self.collectives = [node for node in graph.nodes if is_collective(node)]
        for node in self.collectives:
            arguments = arguments_of(node)
            size = arguments.get("group_size") or len(arguments.get("input_split_sizes", ()))
            if size:
                self._sizes[str(arguments.get("group_name"))] = int(size)

    def __getitem__(self, name: str) -> RankGroup:
        if name not in self._found:
            self._found[name] = self._find(name)
        return self._found[name]

    def _find(self, name: str) -> RankGroup:
        size = self._sizes.get(name, 0)
        members = self._ranks.get(name) or _members(name)
        if members is None or (size and len(members) != size):  # a different group of that name
            return RankGroup(name, size)
        return RankGroup(name, len(members), tuple(members))


def communication(
    program: Program,
    groups: Mapping[str, Sequence[int]] | None = None,
    costs: Costs | None = None,
) -> list[Traffic]:
    """One row per kind, group, module and phase.

    groups: the ranks of process groups by name, for a program whose groups are not those of this process.
    costs: of the program, if they are known.
    """
    costs, known = costs or call_costs(program), Groups(program.graph, groups)
    found = (
        _traffic(node, cost.message, known[cost.message.group])
        for node, cost in costs.items()
        if cost.message is not None
    )
    return summed(found, *Traffic.KEYS)


def members_of(program: Program) -> dict[str, tuple[int, ...]]:
    """The ranks of the process groups that a program communicates in, if this process has these groups.

    A plan calls this while its fake world exists, and passes the result to `communication` and `step_time` later.
    """
    known = Groups(program.graph)
    names = set(map(group_name_of, known.collectives))
    return {name: found for name in sorted(names) if (found := known[name].members) is not None}


def partner_of(node: fx.Node, group: RankGroup) -> int:
    """The other rank of a message. Ranks of a group whose members are unknown are counted within it."""
    arguments = arguments_of(node)
    other = int(arguments["dst"] if "dst" in arguments else arguments["src"])
    return other if group.members is None else group.members[other]


def partners_of(program: Program, groups: Mapping[str, Sequence[int]]) -> set[int]:
    """The ranks that a step sends messages to, or receives them from. groups: the ranks of process groups by name."""
    known = Groups(program.graph, groups)
    messages = (node for node in known.collectives if is_message(node.target))
    return {partner_of(node, known[group_name_of(node)]) for node in messages}


def _traffic(node: fx.Node, message: Message, group: RankGroup) -> Traffic:
    return Traffic(
        kind=message.kind,
        group=group.name,
        ranks=group.size,
        module=node.meta.get("module", ""),
        phase=phase_of(node) or "",
        count=1,
        nbytes_in=message.nbytes_in,
        nbytes_out=message.nbytes_out,
        sent=0 if message.kind == RECEIVE else sent(message, group.size),
    )


def _members(name: str) -> list[int] | None:
    """The ranks of a process group of this process, None if there is none of that name."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    try:
        return list(dist.get_process_group_ranks(group_of_name(name)))
    except (LookupError, RuntimeError, ValueError):
        return None
