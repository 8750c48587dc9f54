"""The cost of audited calls: the FSDP2 Llama of `benchmarks.memory_truth`, at width 64 bound by dispatch alone.

    python -m benchmarks.audit [--layers 3 12] [--widths 64 256] [--steps 100000] [--forward] [--json]

    eager       the step
    replay      `fz.capture(step, audit=False)`
    late        every call runs for real and is compared, as every 4,001st is by default
    audited     `fz.capture(step, audit=1)`: also what it changes in Python, and all its effects, as in the early audits
    amortised   what the default schedule adds to a run of so many replays, in percent: the audited calls of the
                schedule, each by as much as it is slower than a replay

One process on a fake group of one or two ranks, whose collectives cost nothing. On two ranks the op stream is compared,
on one the results are, too. CPU time of the step's thread, medians; the ways alternate step by step, and each has its
own model.
`--forward`: `capture(loss, backward=True)` and its backward in place of the step, whose optimizer runs outside.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import functionalize as fz
from benchmarks.machine import machine
from benchmarks.memory_truth import Case
from functionalize.audit.schedule import AuditSchedule


class Late(AuditSchedule):
    """Every call is audited as late ones are."""

    def is_thorough(self, call: int) -> bool:
        """Never."""
        return False


def audited_late(step: Any, **options: Any) -> Any:
    """A captured step whose calls are all audited as late ones are."""
    captured = fz.capture(step, audit=1, **options)
    captured.core.options = replace(captured.core.options, audit=Late(1))
    return captured


WAYS: dict[str, Callable[..., Any]] = {
    "eager": lambda step, **options: step,
    "replay": lambda step, **options: fz.capture(step, audit=False, **options),
    "late": audited_late,
    "audited": lambda step, **options: fz.capture(step, audit=1, **options),
}


def seconds(layers: int, width: int, forward: bool, runs: int = 9) -> dict[str, float]:
    """Median CPU seconds of the step's thread in every way. forward: of a forward and its backward."""
    subjects = {way: Case(layers=layers, width=width).build() for way in WAYS}
    if forward:
        steps = {way: make(subjects[way].loss, backward=True) for way, make in WAYS.items()}
    else:
        steps = {way: make(subjects[way].step) for way, make in WAYS.items()}
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for i in range(-4, runs):
        for way, step in steps.items():
            x = subjects[way].batch()
            gc.collect()
            start = time.thread_time()
            result = step(x)
            if forward:
                result.backward()
            if i >= 0:
                times[way].append(time.thread_time() - start)
            subjects[way].optimizer.zero_grad()
    stats = steps["audited"].stats
    assert (stats.audit_failures, steps["replay"].stats.replays) == (0, stats.audits), stats
    return {way: statistics.median(found) for way, found in times.items()}


def amortised(found: dict[str, float], steps: int, forward: bool) -> float:
    """Percent that the default schedule adds to `steps` replays."""
    schedule = AuditSchedule.of("auto")
    calls = [call for call in range(1, steps + 1) if schedule.is_due(call, forward)]
    thorough = sum(map(schedule.is_thorough, calls))
    seconds = thorough * found["audited"] + (len(calls) - thorough) * found["late"]
    return 100 * (seconds / found["replay"] - len(calls)) / steps


def table(rows: dict[tuple[int, int, int], dict[str, float]], steps: int, forward: bool) -> str:
    """One row for each depth, width and number of ranks."""
    lines = [
        "layers  width  ranks  eager ms  replay ms  late ms  audited ms  audited/eager  amortised %"
    ]
    for (layers, width, ranks), found in rows.items():
        eager, replay, late, audited = (1e3 * found[way] for way in WAYS)
        lines.append(
            f"{layers:<8}{width:<7}{ranks:<7}{eager:>8.1f}{replay:>11.1f}{late:>9.1f}{audited:>12.1f}"
            f"{audited / eager:>15.2f}{amortised(found, steps, forward):>13.2f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--layers", nargs="+", type=int, default=[3, 12])
    parser.add_argument("--widths", nargs="+", type=int, default=[64, 256])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--forward", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in ("transformers", "functionalize"):
        logging.getLogger(name).setLevel(logging.ERROR)
    rows = {}
    for ranks in (2, 1):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        for width in args.widths:
            for layers in args.layers:
                rows[layers, width, ranks] = seconds(layers, width, args.forward)
        dist.destroy_process_group()
    if args.json:
        found = {" ".join(map(str, key)): row for key, row in rows.items()}
        print(json.dumps({"machine": machine(), "seconds": found}))
        return
    print(machine())
    print(table(rows, args.steps, args.forward))


if __name__ == "__main__":
    main()
