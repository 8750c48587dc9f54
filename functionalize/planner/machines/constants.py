"""Device memory outside of torch's allocator: declared, not computed. A table with the source of each figure.

    declared("h100", communicators=2)     CUDA context, NCCL twice, cuBLAS workspace, as `DeviceConstant`s of bytes
    declared(machine)                     those of your own `Machine`
    declared("cpu")                       ()

    what                    bytes               source
    CUDA context            500 MiB             not documented: what `nvidia-smi` shows of a process after
                                                `torch.cuda.init()` is 300 to 600 MiB, by device and driver
    NCCL, a communicator    10 MiB x channels   10,485,760 bytes per channel and connection, as NCCL_DEBUG_SUBSYS=ALLOC
                                                showed (github.com/NVIDIA/nccl, issue 1685); a ring needs one in each
                                                channel (issue 864); 32 channels on Hopper's NVLink, 24 on Ampere's,
                                                2 on PCIe; Blackwell and MI300X are assumed to equal Hopper
    cuBLAS workspace        32 MiB, 8.125 MiB   the cuBLAS reference's recommendation for Hopper (`cublasSetWorkspace`),
                                                its default :4096:2:16:8 for others; one for each stream with matrix
                                                products, which torch allocates by its own allocator

Where they decide whether a step fits, measure them on your machine: `replace(machine, outside=DeviceMemory(...))`.
"""

from __future__ import annotations

from typing import NamedTuple

from functionalize.cost.machines.machine import Machine
from functionalize.cost.machines.presets import MACHINES
from functionalize.errors import MemoryReportError


class DeviceConstant(NamedTuple):
    """Bytes of a device outside of torch's allocator."""

    name: str
    nbytes: int


def declared(machine: str | Machine, communicators: int = 1) -> tuple[DeviceConstant, ...]:
    """The constants of a machine, or of a preset's name. communicators: the number of process groups that a step uses.

    Raises `MemoryReportError` for a name that is no preset.
    """
    if isinstance(machine, str):
        if machine not in MACHINES:
            known = ", ".join(sorted(MACHINES))
            raise MemoryReportError(
                f"no constants are known for the device `{machine}`; there are {known}"
            )
        machine = MACHINES[machine]
    found = machine.outside
    if found is None:
        return ()
    nccl = "NCCL communicator" if communicators == 1 else f"{communicators} NCCL communicators"
    return (
        DeviceConstant("CUDA context", found.context),
        DeviceConstant(nccl, communicators * found.communicator),
        DeviceConstant("cuBLAS workspace", found.workspace),
    )
