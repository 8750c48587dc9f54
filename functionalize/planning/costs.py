"""What a node costs: a roofline. A stated model, to choose by and not to predict with.

    flops(node)                   floating-point operations, by the formulas of `torch.utils.flop_counter`
    moved(node)                   bytes read and written; for a collective, bytes that a ring sends per rank
    seconds(node, machine)        the time on a `Machine`

    kind of node                              seconds
    views, waits, numbers, inputs             0
    collectives                               latency + bytes sent / link_bandwidth
    copies from one device to another         overhead + bytes / host_bandwidth
    everything else                           overhead + max(flops / FLOP/s, bytes moved / memory_bandwidth)

What it leaves out: caches, kernels that reach less than the peak, transfers that overlap with others.
Sizes are those of the fake values in `node.meta["val"]`, which must be static.
Refuses (`PassError`): the name of a machine that is not known.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from functionalize._compat import pytree
from functionalize.core.aliases import storage_key
from functionalize.core.ops import geometry_of
from functionalize.errors import PassError

aten = torch.ops.aten


@dataclass(frozen=True)
class Machine:
    """One rank's device and links.

    flops: FLOP/s. memory_bandwidth, link_bandwidth (to other ranks), host_bandwidth (between device and
    host): bytes/s, one way. latency: seconds until a collective's first byte. overhead: seconds per op.
    matrix_flops: (dtype, FLOP/s) where the rate of a dtype is another one.
    """

    flops: float
    memory_bandwidth: float
    link_bandwidth: float
    latency: float
    overhead: float
    host_bandwidth: float = float("inf")
    matrix_flops: tuple[tuple[torch.dtype, float], ...] = ()

    def rate(self, dtype: torch.dtype | None) -> float:
        """FLOP/s at a dtype."""
        return dict(self.matrix_flops).get(dtype, self.flops)  # type: ignore[arg-type]


# cpu: two cores of a server CPU of the 2020s, ranks on one host over gloo; measured: `mm` of 1024 x 1024 floats,
#   `add` of 64 MiB, an all-gather of 16 MiB on two ranks, an op on four floats; rounded.
# h100: NVIDIA H100 SXM5, from its data sheet: dense rates, HBM3 3.35 TB/s, NVLink 450 GB/s each way, PCIe 5 x16;
#   latency and overhead are the usual ones of a small NCCL collective and of a kernel launch from Python.
# a100: NVIDIA A100 SXM4 80 GB, from its data sheet: HBM2e 2.04 TB/s, NVLink 300 GB/s each way, PCIe 4 x16.
MACHINES: Mapping[str, Machine] = types.MappingProxyType(
    {
        "cpu": Machine(150e9, 40e9, 0.5e9, 250e-6, 3e-6, 40e9, ((torch.bfloat16, 350e9),)),
        "h100": Machine(
            67e12,
            3.35e12,
            450e9,
            15e-6,
            5e-6,
            64e9,
            ((torch.bfloat16, 989e12), (torch.float16, 989e12)),
        ),
        "a100": Machine(
            19.5e12,
            2.04e12,
            300e9,
            15e-6,
            5e-6,
            32e9,
            ((torch.bfloat16, 312e12), (torch.float16, 312e12)),
        ),
    }
)


def machine_named(name: str, graph: fx.Graph | None = None) -> Machine:
    """A preset; `auto`: "h100" for a graph with a value on an accelerator, else "cpu"."""
    if name == "auto":
        nodes = graph.nodes if graph is not None else ()
        devices = {t.device.type for n in nodes for t in _tensors(n.meta.get("val"))}
        name = "h100" if devices - {"cpu", "meta"} else "cpu"
    if name not in MACHINES:
        raise PassError(f"no machine `{name}`; there are auto, {', '.join(sorted(MACHINES))}")
    return MACHINES[name]


# -- flops -----------------------------------------------------------------------------------------

# The attention of CPUs, which torch counts as nothing, by the formulas of its equals on CUDA.
_SAME_FORMULA: Mapping[str, str] = types.MappingProxyType(
    {
        "_scaled_dot_product_flash_attention_for_cpu": "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu_backward": "_scaled_dot_product_flash_attention_backward",
    }
)


def flops(node: fx.Node) -> int:
    """Floating-point operations of a node; 0 where torch has no formula (elementwise ops, reductions)."""
    formula = _formula(node.target)
    if node.op != "call_function" or formula is None:
        return 0
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return int(formula(*args, **kwargs, out_val=node.meta["val"]))


def _formula(target: Any) -> Callable[..., Any] | None:
    packet = getattr(target, "overloadpacket", None)
    formula = flop_registry.get(packet)
    if formula is None and packet is not None and packet.__name__ in _SAME_FORMULA:
        formula = flop_registry.get(getattr(aten, _SAME_FORMULA[packet.__name__]))
    return formula


# -- bytes and seconds -----------------------------------------------------------------------------

_REDUCES_AND_GATHERS = ("all_reduce", "all_reduce_coalesced")  # a ring goes round twice


def moved(node: fx.Node) -> int:
    """Bytes that a node reads and writes; for a collective, those that a ring of ranks sends per rank.

    A view moves nothing; an expanded tensor counts what it occupies.
    """
    if node.op != "call_function" or _is_free(node):
        return 0
    made = list(_tensors(node.meta.get("val")))
    read = [t for n in node.all_input_nodes for t in _tensors(n.meta.get("val"))]
    out, into = sum(map(_nbytes, made)), sum(map(_nbytes, read))
    if not is_collective(node):
        return out + into
    if _packet_name(node) in _REDUCES_AND_GATHERS:
        return 2 * into
    return abs(out - into) or into


def seconds(node: fx.Node, machine: Machine) -> float:
    """The time that a node takes on a machine, by the table above."""
    if node.op != "call_function" or _is_free(node):
        return 0.0
    nbytes = moved(node)
    if is_collective(node):
        return machine.latency + nbytes / machine.link_bandwidth
    made = next(_tensors(node.meta.get("val")), None)
    read = next((t for n in node.all_input_nodes for t in _tensors(n.meta.get("val"))), None)
    if made is not None and read is not None and made.device.type != read.device.type:
        return machine.overhead + nbytes / 2 / machine.host_bandwidth
    computing = flops(node) / machine.rate(made.dtype if made is not None else None)
    return machine.overhead + max(computing, nbytes / machine.memory_bandwidth)


def is_collective(node: fx.Node) -> bool:
    """Whether a node starts a collective (waiting for one starts none)."""
    namespace = getattr(node.target, "namespace", "")
    return namespace == "_c10d_functional" and _packet_name(node) != "wait_tensor"


def _packet_name(node: fx.Node) -> str:
    packet = getattr(node.target, "overloadpacket", None)
    return packet.__name__ if packet is not None else ""


def _is_free(node: fx.Node) -> bool:
    """Whether a node makes no tensor of its own: a view, a wait, a part of a tuple, a number."""
    if _packet_name(node) == "wait_tensor":
        return True
    made = [storage_key(t) for t in _tensors(node.meta.get("val"))]
    read = {storage_key(t) for n in node.all_input_nodes for t in _tensors(n.meta.get("val"))}
    return all(key in read for key in made)


def _nbytes(tensor: Tensor) -> int:
    """Bytes of data; of an expanded tensor, those that it lies on."""
    if tensor.layout != torch.strided:
        return tensor.numel() * tensor.element_size()
    return min(geometry_of(tensor).nbytes, int(tensor.untyped_storage().nbytes()))


def _tensors(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))
