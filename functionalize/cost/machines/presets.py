"""The machines that have a name: nodes with eight GPUs of a kind, and a CPU.

    MACHINES["h100"], machine_named("auto", graph)

GPUs: from the data sheets of the GPU (SXM where there is one) and of the system that has eight of them; dense rates,
half of those with sparsity, sums in float32; fp32 without TF32, as torch's default is; links one way, half of the data
sheet's figure; latency and overhead are typical of a small NCCL collective and of a kernel launch from Python. Memory:
the capacity that torch's out-of-memory messages name. How much of these peaks kernels reach: `published.py`. A network
connects all nodes at full bandwidth: set `ranks_per_pod` and `oversubscription` where it does not.

    name    fp32, 16-bit, 8-bit TFLOP/s   memory               links               system
    a100    19.5, 312                     80 GB HBM2e          NVLink, PCIe 4      DGX A100: 8 adapters of 200 Gb/s
    h100    67, 989, 1979                 80 GB HBM3           NVLink, PCIe 5      DGX H100: 8 ConnectX-7 of 400 Gb/s
    h200    as h100                       141 GB HBM3e         as h100             as h100
    b200    80, 2250, 4500                180 GB HBM3e         NVLink, PCIe 5      DGX B200: 8 ConnectX-7 of 400 Gb/s
    mi300x  163.4, 1307, 2615             192 GB HBM3          Infinity Fabric     8 adapters of 400 Gb/s
    l40s    91.6, 362, 733                48 GB GDDR6, ECC     PCIe 4              4 adapters of 400 Gb/s
    4090    82.6, 165, 330                24 GB GDDR6X         PCIe 4              one adapter of 100 Gb/s

Host memory, for each of eight ranks: a quarter of a socket's channels at their peak (no share was found). DGX A100:
EPYC 7742, 8 x DDR4-3200, 204.8 GB/s; DGX H100: Xeon 8480C, 8 x DDR5-4800, 307.2 GB/s; DGX B200: Xeon 8570, 8 x
DDR5-5600, 358.4 GB/s (data sheets of the CPUs). Assumed: two EPYC 9004 (12 x DDR5-4800, 460.8 GB/s) for MI300X, the
host of DGX A100 for L40S and 4090.

cpu: two cores of a server CPU of the 2020s, ranks on one host over gloo; measured: `mm` of 1024 x 1024 floats,
`add` of 64 MiB, an all-gather of 16 MiB on two ranks, an op on four floats; rounded.
Refuses (`PassError`): an unknown name.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import fx

from functionalize._compat.fakes import accelerators
from functionalize.cost.machines import published
from functionalize.cost.machines.efficiency import Efficiency
from functionalize.cost.machines.machine import HOPPER, MIB, DeviceMemory, Machine
from functionalize.errors import PassError
from functionalize.program.metadata import tensors_of

_GIB = 1 << 30
_CUBLAS = 8320 << 10  # bytes: cuBLAS's default workspace, :4096:2:16:8
_AMPERE = DeviceMemory(500 * MIB, 24 * 10 * MIB, _CUBLAS)
# Ranks that are connected by PCIe alone have two channels. A GPU of AMD: rocBLAS and RCCL, assumed as cuBLAS and NCCL.
_PCIE = DeviceMemory(500 * MIB, 2 * 10 * MIB, _CUBLAS)
_AMD = DeviceMemory(500 * MIB, 32 * 10 * MIB, 32 * MIB)


def _gpu(
    flops: float,
    half: float,
    bandwidth: float,
    link: float,
    host: float,
    adapter: float,
    memory: float,
    capability: tuple[int, int],
    outside: DeviceMemory,
    eighth: float | None = None,
    attention: str | None = None,
    efficiency: Efficiency = published.PCIE,
    rails: int | None = None,
    socket: float = 204.8e9,
) -> Machine:
    """A GPU of a node with eight.

    half: FLOP/s of 16-bit matmuls; eighth: of 8-bit ones, None: not supported. bandwidth, link, host, adapter: bytes/s
    of the device's memory, to other GPUs, to the host, of an adapter to other nodes. memory: GiB. rails: the adapters
    of a node; None: one for each GPU. socket: bytes/s of the memory of one of the host's two CPUs.
    """
    rates = [(torch.bfloat16, half), (torch.float16, half)]
    if eighth is not None:
        rates += [(torch.float8_e4m3fn, eighth), (torch.float8_e5m2, eighth)]
    return Machine(
        flops,
        bandwidth,
        link,
        15e-6,
        5e-6,
        host,
        tuple(rates),
        8,
        internode_bandwidth=adapter,
        memory=int(memory * _GIB),
        capability=capability,
        attention=attention,
        outside=outside,
        efficiency=efficiency,
        algorithms=published.NCCL,
        rails=rails,
        host_memory_bandwidth=socket / 4,
    )


# fmt: off
_H100 = _gpu(
    67e12, 989e12, 3.35e12, 450e9, 64e9, 50e9, 79.11, (9, 0), HOPPER, 1979e12, None, published.H100, None, 307.2e9
)
MACHINES: Mapping[str, Machine] = types.MappingProxyType(
    {
        "cpu": Machine(
            150e9, 40e9, 0.5e9, 250e-6, 3e-6, 40e9, ((torch.bfloat16, 350e9),), streams=False, outside=None,
            host_memory_bandwidth=40e9,
        ),
        "a100": _gpu(19.5e12, 312e12, 2.04e12, 300e9, 32e9, 25e9, 79.14, (8, 0), _AMPERE, None, None, published.A100),
        "h100": _H100,
        "h200": replace(_H100, memory_bandwidth=4.8e12, memory=int(139.7 * _GIB)),
        "b200": _gpu(
            80e12, 2250e12, 8e12, 900e9, 64e9, 50e9, 178.3, (10, 0), HOPPER, 4500e12, None, published.B200, None,
            358.4e9
        ),
        "mi300x": _gpu(
            163.4e12, 1307e12, 5.3e12, 448e9, 64e9, 50e9, 191.9, (9, 4), _AMD, 2615e12, "flash", published.MI300X, None,
            460.8e9
        ),
        "l40s": _gpu(91.6e12, 362e12, 0.864e12, 32e9, 32e9, 50e9, 44.4, (8, 9), _PCIE, 733e12, rails=4),
        "4090": _gpu(82.6e12, 165e12, 1.008e12, 32e9, 32e9, 12.5e9, 23.64, (8, 9), _PCIE, 330e12, rails=1),
    }
)
# fmt: on
# Target -> the machine to model if none is named.
MACHINE_OF: Mapping[str, str] = types.MappingProxyType({"cuda": "h100", "cpu": "cpu"})


def machine_named(name: str, graph: fx.Graph | None = None) -> Machine:
    """The preset of a name; `auto`: "h100" for a graph with a value on an accelerator, else "cpu"."""
    if name == "auto":
        nodes = graph.nodes if graph is not None else ()
        devices = {t.device.type for n in nodes for t in tensors_of(n.meta.get("val"))}
        name = MACHINE_OF["cuda" if accelerators(devices) else "cpu"]
    if name not in MACHINES:
        raise PassError(f"no machine `{name}`; there are auto, {', '.join(sorted(MACHINES))}")
    return MACHINES[name]
