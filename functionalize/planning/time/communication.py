"""What a program sends: bytes and collectives by kind, process group, module and phase.

    for row in communication(program): ...
    summed(communication(program), "kind", "group")

    kind             in, out (n: bytes of one rank's part)     sent per rank, by a ring of g
    all-gather       n, g n                                     (g - 1) n
    reduce-scatter   g n, n                                     (g - 1) n
    all-reduce       n, n                                       2 n (g - 1) / g
    all-to-all       n, n                                       n (g - 1) / g
    broadcast        n, n                                       n
    barrier          0, 0                                       0

Bytes are those that the tensors have, padding of uneven shards included: FSDP2 sends it. A group is looked up in the
program (the ops that have its size), then among the process groups of this process, if there are any, or is
given. Of a group whose size nobody knows (0), an all-reduce is taken for that of very many ranks.
Invariant: rows are in the order of the graph, and their counts add up to its collectives. Linear in nodes and edges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.distributed as dist
from torch import fx

from functionalize._compat.distributed import group_of_name
from functionalize.ir.phases import phase_of
from functionalize.planning.time.costs import is_collective, nbytes_of
from functionalize.planning.timeline.sums import summed
from functionalize.program.metadata import tensors_of
from functionalize.program.program import Program

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all-gather", "reduce-scatter", "all-reduce"
ALL_TO_ALL, BROADCAST, BARRIER = "all-to-all", "broadcast", "barrier"
_KINDS = (
    ("all_gather", ALL_GATHER),
    ("reduce_scatter", REDUCE_SCATTER),
    ("all_reduce", ALL_REDUCE),
    ("all_to_all", ALL_TO_ALL),
    ("shard_dim_alltoall", ALL_TO_ALL),
    ("broadcast", BROADCAST),
    ("barrier", BARRIER),
)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Collectives of one kind in one process group, for one module in one phase.

    ranks: of the group, 0 if unknown. nbytes_in, nbytes_out: what each rank gives and gets; sent: what each
    sends to others, as a ring does it.
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
class Group:
    """A process group. members: its ranks among all, None if unknown: then they are taken to be neighbours."""

    name: str
    size: int
    members: tuple[int, ...] | None = None

    def on_a_node(self, ranks_per_node: int | None) -> int:
        """How many of its ranks share a node: on the node with the fewest."""
        if ranks_per_node is None:
            return self.size
        if self.members is None:
            return min(self.size, ranks_per_node)
        return min(Counter(rank // ranks_per_node for rank in self.members).values())


class Groups:
    """The process groups of a graph. given: the ranks of groups, by name, where they are known better."""

    def __init__(self, graph: fx.Graph, given: Mapping[str, Sequence[int]] | None = None) -> None:
        self._given = given or {}
        self._sizes: dict[str, int] = {}
        self._found: dict[str, Group] = {}
        for node in graph.nodes:
            if is_collective(node):
                arguments = _arguments(node)
                size = arguments.get("group_size") or len(arguments.get("input_split_sizes", ()))
                if size:
                    self._sizes[str(arguments.get("group_name"))] = int(size)

    def __getitem__(self, name: str) -> Group:
        if name not in self._found:
            self._found[name] = self._find(name)
        return self._found[name]

    def _find(self, name: str) -> Group:
        size = self._sizes.get(name, 0)
        members = self._given.get(name) or _members(name)
        if members is None or (size and len(members) != size):  # another group of that name
            return Group(name, size)
        return Group(name, len(members), tuple(members))


def communication(
    program: Program, groups: Mapping[str, Sequence[int]] | None = None
) -> list[Traffic]:
    """A row for everything that differs in kind, group, module or phase.

    groups: the ranks of process groups by name, for a program whose groups are not those of this process.
    """
    program.describe()
    known = Groups(program.graph, groups)
    each = (traffic_of(node, known) for node in program.graph.nodes if is_collective(node))
    return summed(each, *Traffic.KEYS)


def members_of(program: Program) -> dict[str, tuple[int, ...]]:
    """The ranks of the process groups that a program talks in, of those that this process has.

    What a plan asks for while its world is there, to give it to `communication` and `step_time` later.
    """
    known = Groups(program.graph)
    names = {group_name_of(node) for node in program.graph.nodes if is_collective(node)}
    return {name: found for name in sorted(names) if (found := known[name].members) is not None}


def traffic_of(node: fx.Node, groups: Groups) -> Traffic:
    """What one collective sends."""
    group = groups[group_name_of(node)]
    kind = kind_of(node)
    given = sum(nbytes_of(t) for n in node.all_input_nodes for t in tensors_of(n.meta["val"]))
    got = sum(map(nbytes_of, tensors_of(node.meta.get("val"))))
    return Traffic(
        kind=kind,
        group=group.name,
        ranks=group.size,
        module=node.meta.get("module", ""),
        phase=phase_of(node) or "",
        count=1,
        nbytes_in=given,
        nbytes_out=got,
        sent=_sent(kind, given, got, group.size),
    )


def kind_of(node: fx.Node) -> str:
    """What people call a collective; one that is not known here, by the name of its op."""
    name = str(node.target).split(".")[1]
    return next((kind for start, kind in _KINDS if name.startswith(start)), name)


def group_name_of(node: fx.Node) -> str:
    """The name of the process group that a collective talks in."""
    return str(_arguments(node).get("group_name", ""))


def _sent(kind: str, given: int, got: int, ranks: int) -> int:
    """Bytes that each rank of a ring sends."""
    if ranks == 1:
        return 0
    others = given - given // ranks if ranks else given
    if kind == ALL_REDUCE:
        return 2 * others
    if kind == ALL_TO_ALL:
        return others
    if kind == BROADCAST:
        return given
    return abs(got - given)


def _arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a collective by name."""
    schema = getattr(node.target, "_schema", None)
    names = [a.name for a in schema.arguments] if schema is not None else []
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _members(name: str) -> list[int] | None:
    """The ranks of a process group of this process, None if there is none of that name."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    try:
        return list(dist.get_process_group_ranks(group_of_name(name)))
    except (LookupError, RuntimeError, ValueError):
        return None
