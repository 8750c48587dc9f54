"""Work of the host in a planned step: ops on what FSDP2's `CPUOffloadPolicy` keeps in host memory.

    on_host(node)                                  whether all its tensors are there: the optimizer, sums of gradients
    host_seconds(node, machine, flops, nbytes)     overhead + bytes read and written / host_memory_bandwidth

The bandwidth is a rank's part of the host's memory channels at their peak, while all ranks of the host are busy.
Refuses (`PlanError`): a machine without that bandwidth; ops with FLOPs (a matmul on the host, as of Muon); collectives
of more than a few numbers, which NCCL does not have for host tensors.
"""

from __future__ import annotations

from torch import fx

from functionalize._compat.fakes import HOST
from functionalize.cost.machines.machine import Machine
from functionalize.errors import PlanError
from functionalize.program.metadata import read_provenance, tensors_of
from functionalize.util.text import human_bytes
from functionalize.util.user_stack import user_line

_FEW = 1024  # bytes of a collective that costs its latency alone, as that of a gradient's norm


def on_host(node: fx.Node) -> bool:
    """Whether a node computes in host memory: neither an argument nor a result is on the device.

    Numbers in tensors of no dimension may be on either; an in-place op may have no result.
    """
    values = (t for n in (node, *node.all_input_nodes) for t in tensors_of(n.meta.get("val")))
    return {t.device.type for t in values if t.dim()} == {HOST.type}


def host_seconds(node: fx.Node, machine: Machine, flops: int, nbytes: int) -> float:
    """The modelled time of an op on the host; flops, nbytes: of that op."""
    if flops:
        raise _error(
            node,
            "computes on offloaded tensors, and the FLOP/s of the host are not modelled: move its arguments to the "
            "device, or plan without CPUOffloadPolicy",
        )
    if machine.host_memory_bandwidth is None:
        raise _error(
            node,
            "computes on offloaded tensors, and the machine has no `host_memory_bandwidth`: set it, in bytes/s for "
            "each rank",
        )
    return machine.overhead + nbytes / machine.host_memory_bandwidth


def check_collective(node: fx.Node, nbytes: int) -> None:
    """Raises `PlanError` if a collective of offloaded tensors takes more than its latency. nbytes: sent."""
    if nbytes > _FEW:
        raise _error(
            node,
            f"sends {human_bytes(nbytes)} of offloaded tensors, and collectives of host memory (gloo's) are not "
            "modelled: move them to the device first, or plan without CPUOffloadPolicy",
        )


def _error(node: fx.Node, why: str) -> PlanError:
    """The error that names the op and the user's line. The program is of no further use to the plan."""
    read_provenance(node.graph)  # figures do without stacks
    line = user_line(node.meta.get("stack_trace") or "")
    return PlanError(f"{node.target} ({line}) {why}" if line else f"{node.target} {why}")
