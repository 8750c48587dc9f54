"""`calibrate`: measure this machine, write the file that `--machine` takes, and say what was measured."""

from __future__ import annotations

import time
from typing import Any

import torch
from rich.console import Console

from functionalize.cost.machines.machine import Machine
from functionalize.errors import PlanError, UsageError
from functionalize.planner.calibration.calibrate import calibrate as measure
from functionalize.planner.cli.console import Out, plain, table
from functionalize.planner.cli.scripts import as_usage, check_files
from functionalize.util.text import human_bytes, human_seconds


def calibrate(out: Out, file: str, device: str | None, ranks: int | None, each: float) -> None:
    """Measure, write and print. Raises `UsageError` for options that cannot be."""
    if not file.endswith(".json"):
        raise UsageError(
            f"{file}: the file of a machine ends in .json, by which --machine knows it"
        )
    check_files(file)
    if not 0 < each <= 60:
        raise UsageError(f"--each {each}: seconds of one measurement, above 0 and at most 60")
    start = time.perf_counter()
    with as_usage(PlanError), out.counting() as count:
        machine = measure(file, ranks=ranks, device=device, each=each, progress=count)
    seconds = time.perf_counter() - start

    def data() -> dict[str, Any]:
        curves = {kind: curve.points for kind, curve in machine.efficiency.curves}
        return {
            "file": file,
            "seconds": seconds,
            "flops": machine.flops,
            "memory_bandwidth": machine.memory_bandwidth,
            "link_bandwidth": machine.link_bandwidth,
            "latency": machine.latency,
            "overhead": machine.overhead,
            "host": None if machine.host is None else machine.host._asdict(),
            "curves": curves,
        }

    def show(console: Console) -> None:
        _show(console, machine)
        plain(console, f"wrote {file}, measured in {human_seconds(seconds)}")

    out.emit(data, show)


def _show(console: Console, machine: Machine) -> None:
    plain(console, machine.efficiency.about)
    sixteen = machine.rate(torch.bfloat16)
    plain(
        console,
        f"{machine.flops / 1e9:,.0f} GFLOP/s in float32, {sixteen / 1e9:,.0f} in bfloat16; memory "
        f"{human_bytes(machine.memory_bandwidth)}/s; between ranks {human_bytes(machine.link_bandwidth)}/s after "
        f"{human_seconds(machine.latency)}; an op takes at least {human_seconds(machine.overhead)}",
    )
    if machine.host is not None:
        parts = machine.host._asdict().items()
        plain(console, "the host: " + ", ".join(f"{k} {human_seconds(v)}" for k, v in parts))
    rows = []
    for kind, curve in machine.efficiency.curves:
        (small, first), (large, last) = curve.points[0], curve.points[-1]
        best = max(share for _, share in curve.points)
        rows.append(
            [kind, f"{small:.2g}", f"{first:.0%}", f"{large:.2g}", f"{last:.0%}", f"{best:.0%}"]
        )
    heads = ["kind", "smallest", "of its peak", "largest", "of its peak", "best"]
    table(console, heads, rows, left=(0,))
