"""`Machine`: the device of one rank, its links, its memory.

machine = MACHINES["h100"]                             `presets.py`
replace(machine, internode_bandwidth=25e9)             your own network; its memory and constants stay
machine.rate(torch.bfloat16), machine.ring_bandwidth(size=64, on_a_node=8)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

MIB = 1 << 20


class DeviceMemory(NamedTuple):
    """Bytes of a device's memory outside of torch's allocator; sources in `constants.py`.

    context: of the process. communicator: of each process group that communicates. workspace: of cuBLAS.
    """

    context: int
    communicator: int
    workspace: int


HOPPER = DeviceMemory(500 * MIB, 32 * 10 * MIB, 32 * MIB)


@dataclass(frozen=True)
class Machine:
    """One rank's device and links.

    flops: FLOP/s of dtypes that `matrix_flops` does not list.
    memory_bandwidth: bytes/s between the device and its own memory.
    link_bandwidth: bytes/s, one way, to other ranks on the same node.
    latency: seconds before a collective transfers its first byte.
    overhead: seconds per op.
    host_bandwidth: bytes/s, one way, between the device and its host.
    matrix_flops: (dtype, FLOP/s) pairs.
    ranks_per_node: the number of ranks that `link_bandwidth` connects; None: all.
    internode_bandwidth: bytes/s, one way, of each rank's own network adapter.
    streams: whether collectives run concurrently with compute, as on a GPU.
    memory: bytes of the device's memory, as torch's out-of-memory message names it; None: not known.
    capability: the compute capability, which decides the kernels that a plan assumes; None: that of the target.
    attention: the only attention kernel of the device; None: torch's choice by its capability.
    outside: what lies outside of torch's allocator; None: nothing, as on a CPU.
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

    def rate(self, dtype: torch.dtype | None) -> float:
        """FLOP/s at a dtype."""
        return dict(self.matrix_flops).get(dtype, self.flops)  # type: ignore[arg-type]

    def ring_bandwidth(self, size: int, on_a_node: int) -> float:
        """Bytes/s at which every rank of a ring of `size` ranks sends; `on_a_node` of them share a node.

        Libraries build one ring per adapter, so that all adapters of the group's ranks on a node carry its traffic.
        """
        if size <= on_a_node:
            return self.link_bandwidth
        return min(self.link_bandwidth, on_a_node * self.internode_bandwidth)
