"""`fz.calibrate`: a `Machine` with the rates that are measured on this machine, with every rank busy.

    machine = fz.calibrate("here.json")            two processes over gloo, one thread each: 60 to 90 s
    fz.plan(build, step, inputs=inputs, machine="here.json", target="cpu", world=2)

On a machine with CUDA: one process for each GPU, over NCCL (`device="cuda"`).

    overhead                     an op on four floats, called from Python as a method
    curves, peaks                `probes.py`: each kind at several sizes; the peak is the largest rate of a kind
    host_memory_bandwidth        a sum of two tensors of the host, of the size of the largest probe
    link_bandwidth, latency      all-gather, reduce-scatter, all-reduce of several sizes, of buffers that take turns
    host                         `tiny_steps.py`; on a GPU the host is taken as never late

The measured link is that between these ranks: on several nodes add what connects them by `dataclasses.replace`. Memory,
capability and constants of a GPU are those of the device; a preset of the same name gives its other numbers.
Refuses (`PlanError`): a device that is not there, no pass, fewer than two ranks, a process that has a process group.
"""

from __future__ import annotations

import contextlib
import os
import platform
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from functionalize.cost.machines.efficiency import (
    ATTENTION,
    ATTENTION_BACKWARD,
    COLLECTIVE,
    MATMUL,
    MEMORY,
    POINTWISE,
    Curve,
    Efficiency,
)
from functionalize.cost.machines.machine import HOPPER, Machine
from functionalize.ctrl_c import held_back, let_through
from functionalize.errors import PlanError
from functionalize.planner.calibration.curves import Sample, curve_of, rates
from functionalize.planner.calibration.probes import aten, matmuls, probes, sets_of
from functionalize.planner.calibration.timing import Clock
from functionalize.planner.calibration.tiny_steps import DEPTHS, STEPS, TinySteps, host_of
from functionalize.planner.machines.files import read_machine, write_machine

_BY_FLOPS = (MATMUL, ATTENTION, ATTENTION_BACKWARD)
_LARGEST = {"cpu": 1 << 25, "cuda": 1 << 30}  # bytes of the tensors of a probe
Say = Callable[[str], None]


def calibrate(
    path: str | Path | None = None,
    *,
    ranks: int | None = None,
    device: str | None = None,
    each: float = 0.1,
    passes: int = 3,
    largest: int | None = None,
    say: Say = lambda text: None,
) -> Machine:
    """Measure this machine; write the result to a file for `machine=` and `--machine`.

    ranks: processes that measure together; None: two on a CPU, one for each GPU. device: "cpu" or "cuda"; None: CUDA
    where there is one. each: seconds of one measurement, of some 100, in all passes. passes: over all measurements,
    of which the medians count, as the speed of a machine varies from minute to minute. largest: bytes of the largest
    probe. say: reports progress. Raises `PlanError`; `SaveError` if the file cannot be written.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in _LARGEST:
        raise PlanError(f"`device` is cpu or cuda, not {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise PlanError("there is no CUDA device here: calibrate with device cpu")
    count = ranks if ranks is not None else torch.cuda.device_count() if device == "cuda" else 2
    if passes < 1:
        raise PlanError(f"`passes` is 1 or more, not {passes}")
    if count < 2:
        raise PlanError(f"a calibration needs two ranks to measure their link, not {count}")
    if dist.is_available() and dist.is_initialized():
        raise PlanError("this process has a process group: calibrate in a process of its own")
    say(f"measuring with {count} ranks on {device}")
    with tempfile.TemporaryDirectory() as folder:
        result = f"{folder}/machine.json"
        options = (count, folder, device, each, passes, largest, result)
        _run(options, count)
        machine = read_machine(result)
    if path is not None:
        write_machine(path, machine)
    return machine


def _run(options: tuple[Any, ...], count: int) -> None:
    """Run the ranks to their end; if one fails, or at Ctrl-C, none is left."""
    with held_back():
        ranks = mp.spawn(_rank, options, nprocs=count, join=False, daemon=True)
    assert ranks is not None
    try:
        while not ranks.join():
            pass
    finally:
        for process in ranks.processes:
            process.kill()
        for process in ranks.processes:
            process.join()


def _rank(
    rank: int,
    ranks: int,
    folder: str,
    device: str,
    each: float,
    passes: int,
    largest: int | None,
    result: str,
) -> None:
    """One rank of the calibration; the first writes the result."""
    let_through()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if device == "cuda":
        torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", store=store, rank=rank, world_size=ranks
    )
    try:
        calibration = Calibration(device, each, passes, largest)
        for _ in range(passes):
            machine = calibration.measure()
        if rank == 0:
            write_machine(result, machine)
        dist.barrier()
    finally:
        dist.destroy_process_group()


class Calibration:
    """The measurements of a machine by all ranks of the process group, in passes over all of them.

    each: seconds of one measurement in all passes. passes: how many there will be. largest: bytes of the largest probe;
    None: those of the device. depths: of the tiny steps.
    """

    def __init__(
        self,
        device: str,
        each: float,
        passes: int,
        largest: int | None = None,
        depths: tuple[int, int] = DEPTHS,
    ) -> None:
        self._clock, self._largest = Clock(device, each / passes), largest or _LARGEST[device]
        self._tiny = TinySteps.made(device, depths) if device == "cpu" else None
        self._steps = max(STEPS // passes, 1)

    def measure(self) -> Machine:
        """Make one more pass: the machine by the medians of all passes so far."""
        clock = self._clock
        clock.begin()
        with torch.no_grad():
            machine = self._kernels_and_links()
        if self._tiny is not None:
            machine = replace(machine, host=host_of(clock, machine, self._tiny, self._steps))
        return machine

    def _kernels_and_links(self) -> Machine:
        clock, device, largest = self._clock, self._clock.device, self._largest
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        few = torch.ones(4, device=device)
        overhead = clock.seconds([lambda: few + few])
        call = clock.seconds([lambda: aten.add(few, few)])  # as the probes call their ops
        by_kind: dict[str, list[Sample]] = {}
        for probe in probes(device, dtype, largest):
            seconds = clock.seconds(probe.calls) / len(probe.calls)
            sample = Sample(probe.size, probe.work / len(probe.calls), seconds)
            by_kind.setdefault(probe.kind, []).append(sample)
        other = torch.bfloat16 if device == "cpu" else torch.float32
        matrices = max(
            rate
            for probe in matmuls(device, other, largest, most=2)
            for _, rate in rates(
                [Sample(probe.size, probe.size, clock.seconds(probe.calls) / len(probe.calls))],
                overhead,
            )
        )
        buffers = [torch.ones(largest // 4) for _ in range(2)]
        host_memory = 3.0 * largest / clock.seconds([partial(aten.add, *buffers)])
        del buffers
        with warnings.catch_warnings():
            # deprecations of c10d's functions, which FSDP2 calls too
            warnings.simplefilter("ignore")
            latency, link, sending = _collectives(clock, largest)
        found = {kind: rates(samples, call) for kind, samples in by_kind.items()}
        machine = _machine(found, sending, overhead, latency, link, device)
        return replace(
            machine,
            host_memory_bandwidth=host_memory,
            **_rates(machine.flops, matrices, dtype, other),
        )


def _rates(own: float, others: float, dtype: torch.dtype, other: torch.dtype) -> dict[str, Any]:
    """`flops` is the rate of float32; 16-bit types have one of their own."""
    by = {dtype: own, other: others}
    half = by[torch.bfloat16]
    return {
        "flops": by[torch.float32],
        "matrix_flops": ((torch.bfloat16, half), (torch.float16, half)),
    }


def _collectives(
    clock: Clock, largest: int
) -> tuple[float, float, dict[str, list[tuple[float, float]]]]:
    """The latency, and the rates of each collective by the bytes that a rank sends, with the largest of them."""
    ranks, device = dist.get_world_size(), clock.device
    samples: dict[str, list[Sample]] = {}
    count = 256
    while 4 * count * ranks <= largest // 2:
        buffers = [
            (torch.zeros(count, device=device), torch.zeros(count * ranks, device=device))
            for _ in range(sets_of(largest, 4 * count * ranks, most=16))
        ]
        sent = 4.0 * count * (ranks - 1)
        calls: dict[str, tuple[float, list[Callable[[], Any]]]] = {
            "all-gather": (
                sent,
                [partial(dist.all_gather_into_tensor, whole, part) for part, whole in buffers],
            ),
            "reduce-scatter": (
                sent,
                [partial(dist.reduce_scatter_tensor, part, whole) for part, whole in buffers],
            ),
            "all-reduce": (
                2 * sent / ranks,
                [partial(dist.all_reduce, part) for part, _ in buffers],
            ),
        }
        for kind, (nbytes, each) in calls.items():
            seconds = clock.seconds(each, most=400 // len(each)) / len(each)
            samples.setdefault(kind, []).append(Sample(nbytes, nbytes, seconds))
        count *= 4
    latency = min(each.seconds for found in samples.values() for each in found)
    found = {kind: rates(each, latency) for kind, each in samples.items()}
    return latency, max(rate for each in found.values() for _, rate in each), found


def _machine(
    found: dict[str, list[tuple[float, float]]],
    sending: dict[str, list[tuple[float, float]]],
    overhead: float,
    latency: float,
    link: float,
    device: str,
) -> Machine:
    peaks = {
        True: max(rate for kind in _BY_FLOPS for _, rate in found[kind]),
        False: max(
            rate for kind, each in found.items() if kind not in _BY_FLOPS for _, rate in each
        ),
    }
    today = datetime.now(UTC).date()
    about = f"measured on {_name(device)} on {today}, {dist.get_world_size()} ranks"
    curves: list[tuple[str, Curve]] = [
        (kind, curve_of(each, peaks[kind in _BY_FLOPS], about)) for kind, each in found.items()
    ]
    curves.append((MEMORY, curve_of(found[POINTWISE], peaks[False], about)))
    curves += [(kind, curve_of(each, link, about)) for kind, each in sending.items()]
    curves.append((COLLECTIVE, dict(curves)["all-gather"]))
    gpu = device == "cuda"
    return Machine(
        peaks[True],
        peaks[False],
        link,
        latency,
        overhead,
        host_bandwidth=25e9 if gpu else peaks[False],
        streams=gpu,
        memory=torch.cuda.get_device_properties(0).total_memory if gpu else None,
        capability=torch.cuda.get_device_capability() if gpu else None,
        outside=HOPPER if gpu else None,
        efficiency=Efficiency(tuple(curves), about),
    )


def _name(device: str) -> str:
    if device == "cuda":
        return str(torch.cuda.get_device_name())
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
