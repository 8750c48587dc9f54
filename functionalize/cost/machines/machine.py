"""`Machine`: the device of one rank, its links, its memory, and how much of its peaks kernels reach.

    machine = MACHINES["h100"]                             `presets.py`
    replace(machine, internode_bandwidth=25e9)             your own network; its memory and constants stay
    replace(machine, efficiency=PEAK)                      a roofline: every kernel at its peak
    machine.rate(torch.bfloat16), machine.ring_bandwidth(size=64, on_a_node=8)
    machine.collective_seconds("all-gather", sent, size=64, on_a_node=8)
    machine.at("low")                                      at the low end of every published range

The time of a collective is that of the fastest of the machine's algorithms, for g ranks on n nodes of r each:

    ring   base + (g - n) hop + (n - 1) network_hop, twice for an all-reduce, + bytes sent / (share * bandwidth)
    tree   base + 2 (r - 1) hop + 2 log2(n) network_hop + the same               an all-reduce only
    a machine without algorithms: latency + bytes sent / bandwidth

Bandwidth is the slowest link's: that of a node's links, or, if a group has ranks on several nodes, that of the adapters
of its ranks on one node; both times the efficiency of collectives. In an all-to-all each rank sends its own bytes.
Not modelled: traffic of several groups on one link, rails that an all-to-all crosses, reductions in switches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch

from functionalize.cost.machines.efficiency import NETWORK, PEAK, Efficiency, Host

MIB = 1 << 20


class DeviceMemory(NamedTuple):
    """Bytes of a device's memory outside of torch's allocator; sources in `constants.py`.

    context: of the process. communicator: of each process group that communicates. workspace: of cuBLAS.
    """

    context: int
    communicator: int
    workspace: int


class Algorithm(NamedTuple):
    """How a library runs a collective.

    base, hop, network_hop: seconds, of the start, of a step on a node, of a step between nodes. share: of the bandwidth
    that its protocol reaches. tree: whether it is a tree, for all-reduces alone.
    """

    base: float
    hop: float
    network_hop: float
    share: float = 1.0
    tree: bool = False


HOPPER = DeviceMemory(500 * MIB, 32 * 10 * MIB, 32 * MIB)


@dataclass(frozen=True)
class Machine:
    """One rank's device and links.

    flops: FLOP/s of dtypes that `matrix_flops` does not list.
    memory_bandwidth: bytes/s between the device and its own memory.
    link_bandwidth: bytes/s, one way, to other ranks on the same node.
    latency: seconds before a collective transfers its first byte.
    overhead: seconds per op, at least.
    host_bandwidth: bytes/s, one way, between the device and its host.
    host_memory_bandwidth: bytes/s between the host and its memory, for each rank of the host; None: not known.
    matrix_flops: (dtype, FLOP/s) pairs.
    ranks_per_node: the number of ranks that `link_bandwidth` connects; None: all.
    internode_bandwidth: bytes/s, one way, of each rank's own network adapter.
    streams: whether collectives run concurrently with compute, as on a GPU.
    memory: bytes of the device's memory, as torch's out-of-memory message names it; None: not known.
    capability: the compute capability, which decides the kernels that a plan assumes; None: that of the target.
    attention: the only attention kernel of the device; None: torch's choice by its capability.
    outside: what lies outside of torch's allocator; None: nothing, as on a CPU.
    efficiency: the share of these peaks that kernels reach. host: what the host adds; None: it is never late.
    algorithms: of the library of collectives.
    rails: the adapters of a node, of `internode_bandwidth` each; None: one for each rank.
    ranks_per_pod, oversubscription: the ranks that the network connects at full bandwidth, and the factor by which it
    is less beyond them; None: all.

        >>> from dataclasses import replace
        >>> slow = replace(fz.planner.MACHINES["h100"], internode_bandwidth=25e9)
        >>> slow.memory_bandwidth
        3350000000000.0
    """

    flops: float
    memory_bandwidth: float
    link_bandwidth: float
    latency: float
    overhead: float
    host_bandwidth: float = float("inf")
    matrix_flops: tuple[tuple[torch.dtype, float], ...] = ()
    ranks_per_node: int | None = None
    internode_bandwidth: float = float("inf")
    streams: bool = True
    memory: int | None = None
    capability: tuple[int, int] | None = None
    attention: str | None = None
    outside: DeviceMemory | None = HOPPER
    efficiency: Efficiency = PEAK
    host: Host | None = None
    algorithms: tuple[Algorithm, ...] = ()
    rails: int | None = None
    ranks_per_pod: int | None = None
    oversubscription: float = 1.0
    host_memory_bandwidth: float | None = None

    def __repr__(self) -> str:
        constants = ((f.name, getattr(self, f.name)) for f in fields(self))
        numbers = (
            f"{name} {value:g}"
            for name, value in constants
            if type(value) in (int, float) and value != 1 and name not in ("latency", "overhead")
        )
        return f"<Machine: {', '.join(numbers)}; {self.efficiency.origin}>"

    def rate(self, dtype: torch.dtype | None) -> float:
        """FLOP/s at a dtype."""
        return dict(self.matrix_flops).get(dtype, self.flops)  # type: ignore[arg-type]

    def at(self, end: str) -> Machine:
        """The machine at the `low` or the `high` end of every range of its efficiency."""
        return replace(self, efficiency=self.efficiency.at(end))

    def adapter_bandwidth(self, across_pods: bool = False) -> float:
        """Bytes/s, one way, to other nodes, of one rank: its share of the adapters of its node."""
        share = 1.0
        if self.rails is not None and self.ranks_per_node is not None:
            share = self.rails / self.ranks_per_node
        if across_pods:
            share /= self.oversubscription
        return share * self.internode_bandwidth

    def collective_seconds(
        self, kind: str, sent: float, size: int, on_a_node: int, across_pods: bool = False
    ) -> float:
        """The time of a collective in which every rank of a ring would send `sent` bytes.

        kind: as in `planner/time/communication.py`. size, on_a_node, across_pods: of its group (0: unknown).
        """
        nodes = math.ceil(size / on_a_node) if on_a_node else 1
        moving = sent / self._bandwidth(kind, sent, size, on_a_node, across_pods)
        if not self.algorithms or size < 2:
            return self.latency + moving
        twice = 2 if kind == "all-reduce" else 1
        times = []
        for each in self.algorithms:
            if each.tree and kind != "all-reduce":
                continue
            steps, hops = (size - nodes) * twice, (nodes - 1) * twice
            if each.tree:
                steps, hops = 2 * (on_a_node - 1), 2 * math.ceil(math.log2(nodes))
            starting = each.base + steps * each.hop + hops * each.network_hop
            times.append(starting + moving / each.share)
        return self.overhead + min(times)

    def _bandwidth(
        self, kind: str, sent: float, size: int, on_a_node: int, across_pods: bool
    ) -> float:
        """Bytes/s of a collective, after efficiency; `on_a_node` ranks of its group share a node.

        Libraries build one ring per adapter, so that all adapters of the group's ranks on a node carry its traffic.
        """
        near = self.link_bandwidth * self.efficiency.share(kind, sent)
        if size <= on_a_node:
            return near
        share = self.efficiency.share(NETWORK, sent)
        adapter = self.adapter_bandwidth(across_pods) * share
        if kind == "all-to-all":  # the part for other nodes, by each rank's own adapter
            return min(near, adapter * (size - 1) / (size - on_a_node))
        return min(near, on_a_node * adapter)
