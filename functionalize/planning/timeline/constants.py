"""Device memory outside of torch's allocator: declared, not computed. A table with the source of each figure.

    declared("h100", communicators=2)     CUDA context, NCCL twice, cuBLAS workspace, as `DeviceConstant`s of bytes
    declared("cpu")                       ()

    what                    bytes               source
    CUDA context            500 MiB             not documented: what `nvidia-smi` shows of a process after
                                                `torch.cuda.init()` is 300 to 600 MiB, by device and driver
    NCCL, a communicator    10 MiB x channels   10,485,760 bytes per channel and connection, as NCCL_DEBUG_SUBSYS=ALLOC
                                                showed (github.com/NVIDIA/nccl, issue 1685); a ring needs one in each
                                                channel (issue 864); 32 channels on Hopper's NVLink, 24 on Ampere's;
                                                Blackwell is assumed to equal Hopper
    cuBLAS workspace        32 MiB, 8.125 MiB   the cuBLAS reference's recommendation for Hopper (`cublasSetWorkspace`),
                                                its default :4096:2:16:8 for others; one for each stream with matrix
                                                products, which torch allocates by its own allocator

Where they decide whether a step fits, measure them on your machine and pass them as `Memory(constants=...)`.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import NamedTuple

from functionalize.errors import MemoryReportError

MIB = 1 << 20


class DeviceConstant(NamedTuple):
    """Bytes of a device outside of torch's allocator."""

    name: str
    nbytes: int


class _Device(NamedTuple):
    context: int
    communicator: int
    workspace: int


_DEVICES: Mapping[str, _Device | None] = types.MappingProxyType(
    {
        "cpu": None,
        "h100": _Device(500 * MIB, 32 * 10 * MIB, 32 * MIB),
        "h200": _Device(500 * MIB, 32 * 10 * MIB, 32 * MIB),
        "b200": _Device(500 * MIB, 32 * 10 * MIB, 32 * MIB),
        "a100": _Device(500 * MIB, 24 * 10 * MIB, 8320 << 10),
    }
)


def declared(device: str, communicators: int = 1) -> tuple[DeviceConstant, ...]:
    """The constants of a device, by its name. communicators: the number of process groups that the step uses.

    Raises `MemoryReportError` for a device that is not in the table.
    """
    if device not in _DEVICES:
        known = ", ".join(sorted(_DEVICES))
        raise MemoryReportError(
            f"no constants are known for the device `{device}`; there are {known}"
        )
    found = _DEVICES[device]
    if found is None:
        return ()
    nccl = "NCCL communicator" if communicators == 1 else f"{communicators} NCCL communicators"
    return (
        DeviceConstant("CUDA context", found.context),
        DeviceConstant(nccl, communicators * found.communicator),
        DeviceConstant("cuBLAS workspace", found.workspace),
    )
