"""Published efficiencies of GPUs: the defaults of the presets, each with its source, and the range if sources differ.

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
"""

from __future__ import annotations

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
from functionalize.cost.machines.machine import Algorithm

_BOOK = "github.com/stas00/ml-engineering"
_TORCHAO = "torchao, roofline_utils.py"
_FLASH3 = "arXiv:2407.08608, figures 5 and 6"
_FLASH2 = "arXiv:2307.08691"
_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)

# base, hop, network_hop, share, tree: LL and Simple of rings, LL of trees. LL sends a flag with every word, in a
# quarter of the bandwidth, and a tree of Simple is never faster than a ring in this model.
NCCL = (
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
_HOPPER = (
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
H100 = Efficiency(_HOPPER, "published for H100")
A100 = Efficiency(
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
B200 = Efficiency(
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
MI300X = Efficiency(
    (
        (MATMUL, _flat(0.514, 0.45, 0.514, f"{_BOOK}; aiweekly.co")),
        (MEMORY, _flat(0.81, 0.81, 0.81, "aiweekly.co")),
        (COLLECTIVE, _flat(0.698, 0.698, 0.698, f"{_BOOK}, network")),
        (NETWORK, _NETWORK),
        _ASSUMED,
    ),
    "published for MI300X",
)
PCIE = Efficiency(
    ((NETWORK, _NETWORK), _ASSUMED), "peaks, as nothing published was found, in training as of H100"
)
