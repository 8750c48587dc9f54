"""The machines that have a name: eight GPUs of a kind in each node, and a CPU; their peaks, and how much is reached.

    MACHINES["h100"], machine_named("auto", graph)

GPUs: from the data sheets of the GPU (SXM where there is one) and of the system that has eight of them; dense rates,
half of those with sparsity, sums in float32; fp32 without TF32, as torch's default is; links one way, half of the data
sheet's figure; latency and overhead are typical of a small NCCL collective and of a kernel launch from Python. Memory:
the capacity that torch's out-of-memory messages name. A network connects all nodes at full bandwidth: set
`ranks_per_pod` and `oversubscription` where it does not.

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

The published efficiencies of GPUs, each with its source, and the range if sources differ:

    what                          share                    source
    H100, H200 matmul, 16-bit     0.70 (0.60 to 0.80)      the middle of torchao's `pct_achievable_gemm_tops` of 2024
                                                           (0.6, torchao/testing/float8/roofline_utils.py; later 0.78)
                                                           and of the best shape, 794.5 of 989 TFLOP/s (ml-engineering)
    B200 matmul, by size          0.45, 0.68, 0.72         cuBLAS at 2048^3, 4096^3, 8192^3: 1,006, 1,532, 1,610 of
                                  (to 0.78)                2,250 TFLOP/s (pyptx.dev/performance); best 1,745
    A100 matmul                   0.84 (0.81 to 0.87)      best shapes: PCIe 252.9, SXM 271.2 of 312 (ml-engineering)
    MI300X matmul                 0.51 (from 0.45)         668.4 of 1,300 (ml-engineering); 45 %
                                                           (aiweekly.co/alerts/amd-mi300x-hits-only-45-of-peak-flops)
    H100 flash attention          0.19 to 0.34, backward   FlashAttention-3 (arXiv:2407.08608, figures 5 and 6),
                                  0.22 to 0.33             FlashAttention-2 on H100, head dimension 128, causal; the
                                                           backward as published, without a mask
    H100 cuDNN attention          0.32 to 0.55, backward   the same figures
                                  0.31 to 0.52
    A100 flash attention          0.62 (0.50 to 0.73),     FlashAttention-2 (arXiv:2307.08691): 50 to 73 % of the peak
                                  backward 0.57 (to 0.63)  forward, up to 63 % backward
    device memory                 0.92; H100 SXM 0.90      2.2 of 2.4 TB/s (torchao, as above); 3.0 of 3.35
                                                           (pyptx.dev/performance). A100, B200: torchao's, assumed
    MI300X memory                 0.81                     as its 45 %
    NVLink of H100, H200          0.81 (0.80 to 0.82)      nccl-tests issues 326 and 212: 360, 370 of 450 GB/s.
                                                           B200: assumed
    NVLink of A100                0.78                     235 of 300 GB/s, NCCL's own model (src/graph/tuning.cc)
    Infinity Fabric of MI300X     0.70                     all-reduce 312.9 of 448 GB/s (ml-engineering, network)
    adapters                      0.85 (0.50 to 0.94)      46 to 48 of 50 GB/s each (nccl-tests issue 290); 340, and
                                                           with 256 GPUs 200, of 400 GB/s (NVIDIA/nccl issue 1218)
    sustained of H100             0.75 (0.73 to 0.79)      published by modelled rate without it, of MPT at length 2048
    sustained of A100             0.81 (0.79 to 0.83)      (llm-foundry, scripts/train/benchmarking), 1B to 13B, 8 to 64
                                                           GPUs: `python -m benchmarks.published_times --alone`. Others:
                                                           that of H100, assumed
    algorithms of NCCL            seconds of steps         src/graph/tuning.cc: rings and trees, LL and Simple

ml-engineering: github.com/stas00/ml-engineering, compute/accelerator, the table of maximum achievable matmul FLOPS.
Where nothing was found (matmuls of L40S and 4090, attention of B200 and MI300X, small matmuls of H100, kernels on
strided tensors) a kernel has the share of its family, and without one it runs at its peak.

Refuses (`PassError`): an unknown name.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import fx

from functionalize._compat.fakes import accelerators
from functionalize.cost.machines.efficiency import (
    ATTENTION,
    ATTENTION_BACKWARD,
    COLLECTIVE,
    CUDNN,
    CUDNN_BACKWARD,
    MATMUL,
    MEMORY,
    NETWORK,
    SUSTAINED,
    Curve,
    Efficiency,
)
from functionalize.cost.machines.machine import HOPPER, MIB, Algorithm, DeviceMemory, Machine
from functionalize.errors import PassError
from functionalize.program.metadata import tensors_of

# -- published efficiencies ------------------------------------------------------------------------

_BOOK = "github.com/stas00/ml-engineering"
_TORCHAO = "torchao, roofline_utils.py"
_FLASH3 = "arXiv:2407.08608, figures 5 and 6"
_FLASH2 = "arXiv:2307.08691"
_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)

# base, hop, network_hop, share, tree: LL and Simple of rings, LL of trees. LL sends a flag with every word, in a
# quarter of the bandwidth, and a tree of Simple is never faster than a ring in this model.
_NCCL = (
    Algorithm(3.6e-6, 0.47e-6, 2.7e-6, 0.25),
    Algorithm(8.4e-6, 3.4e-6, 9.6e-6),
    Algorithm(4.4e-6, 0.52e-6, 5.0e-6, 0.9 / 3.8, tree=True),
    Algorithm(4.4e-6, 1.2e-6, 8.5e-6, 0.9 * 0.915, tree=True),
)


def _flat(share: float, low: float, high: float, source: str) -> Curve:
    """The same share at all sizes; low, high: shares."""
    return Curve(((1.0, share),), low / share, high / share, source)


def _by_length(rates: tuple[int, ...], source: str) -> Curve:
    """An attention kernel of H100, by the length of its keys. rates: TFLOP/s."""
    points = tuple((float(n), rate / 989) for n, rate in zip(_LENGTHS, rates, strict=True))
    return Curve(points, source=source)


_RUNS = "runs of MPT in github.com/mosaicml/llm-foundry"
_SUSTAINED = (SUSTAINED, _flat(0.753, 0.733, 0.789, _RUNS))
_ASSUMED = (SUSTAINED, _flat(0.753, 0.733, 0.789, f"{_RUNS}, of H100"))
_NETWORK = _flat(0.85, 0.5, 0.94, "nccl-tests issue 290, NVIDIA/nccl issue 1218")
_NVLINK = _flat(0.81, 0.8, 0.82, "nccl-tests issues 212 and 326")
_HOPPER_SHARES = (
    (MATMUL, _flat(0.7, 0.6, 0.803, f"{_TORCHAO}; {_BOOK}")),
    (ATTENTION, _by_length((191, 260, 298, 319, 333, 335), _FLASH3)),
    (ATTENTION_BACKWARD, _by_length((214, 260, 291, 310, 318, 322), _FLASH3)),
    (CUDNN, _by_length((315, 410, 484, 518, 529, 539), _FLASH3)),
    (CUDNN_BACKWARD, _by_length((305, 408, 465, 499, 518, 516), _FLASH3)),
    (MEMORY, _flat(0.9, 0.9, 0.92, f"pyptx.dev/performance; {_TORCHAO}")),
    (COLLECTIVE, _NVLINK),
    (NETWORK, _NETWORK),
    _SUSTAINED,
)
_H100_SHARES = Efficiency(_HOPPER_SHARES, "published for H100")
_A100_SHARES = Efficiency(
    (
        (MATMUL, _flat(0.84, 0.811, 0.869, _BOOK)),
        (ATTENTION, _flat(0.615, 0.5, 0.73, _FLASH2)),
        (ATTENTION_BACKWARD, _flat(0.565, 0.5, 0.63, _FLASH2)),
        (MEMORY, _flat(0.92, 0.92, 0.92, f"{_TORCHAO}, of H100")),
        (COLLECTIVE, _flat(0.783, 0.783, 0.783, "NVIDIA/nccl, src/graph/tuning.cc")),
        (NETWORK, _NETWORK),
        (SUSTAINED, _flat(0.813, 0.79, 0.829, _RUNS)),
    ),
    "published for A100",
)
_B200_MATMULS = ((2 * 2048.0**3, 1006 / 2250), (2 * 4096.0**3, 1532 / 2250))
_B200_SHARES = Efficiency(
    (
        (
            MATMUL,
            Curve(
                (*_B200_MATMULS, (2 * 8192.0**3, 1610 / 2250)),
                high=1745 / 1610,
                source=f"pyptx.dev/performance; {_BOOK}",
            ),
        ),
        (MEMORY, _flat(0.92, 0.92, 0.92, f"{_TORCHAO}, of H100")),
        (COLLECTIVE, _NVLINK),
        (NETWORK, _NETWORK),
        _ASSUMED,
    ),
    "published for B200, in part for H100",
)
_MI300X_SHARES = Efficiency(
    (
        (MATMUL, _flat(0.514, 0.45, 0.514, f"{_BOOK}; aiweekly.co")),
        (MEMORY, _flat(0.81, 0.81, 0.81, "aiweekly.co")),
        (COLLECTIVE, _flat(0.698, 0.698, 0.698, f"{_BOOK}, network")),
        (NETWORK, _NETWORK),
        _ASSUMED,
    ),
    "published for MI300X",
)
_PCIE_SHARES = Efficiency(
    ((NETWORK, _NETWORK), _ASSUMED), "peaks, as nothing published was found, in training as of H100"
)


# -- machines ---------------------------------------------------------------------------------------

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
    efficiency: Efficiency = _PCIE_SHARES,
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
        algorithms=_NCCL,
        rails=rails,
        host_memory_bandwidth=socket / 4,
    )


# fmt: off
_H100 = _gpu(
    67e12, 989e12, 3.35e12, 450e9, 64e9, 50e9, 79.11, (9, 0), HOPPER, 1979e12, None, _H100_SHARES, None, 307.2e9
)
MACHINES: Mapping[str, Machine] = types.MappingProxyType(
    {
        "cpu": Machine(
            150e9, 40e9, 0.5e9, 250e-6, 3e-6, 40e9, ((torch.bfloat16, 350e9),), streams=False, outside=None,
            host_memory_bandwidth=40e9,
        ),
        "a100": _gpu(19.5e12, 312e12, 2.04e12, 300e9, 32e9, 25e9, 79.14, (8, 0), _AMPERE, None, None, _A100_SHARES),
        "h100": _H100,
        "h200": replace(_H100, memory_bandwidth=4.8e12, memory=int(139.7 * _GIB)),
        "b200": _gpu(
            80e12, 2250e12, 8e12, 900e9, 64e9, 50e9, 178.3, (10, 0), HOPPER, 4500e12, None, _B200_SHARES, None,
            358.4e9
        ),
        "mi300x": _gpu(
            163.4e12, 1307e12, 5.3e12, 448e9, 64e9, 50e9, 191.9, (9, 4), _AMD, 2615e12, "flash", _MI300X_SHARES, None,
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
