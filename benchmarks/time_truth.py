"""Seconds of eight real steps on two gloo ranks, against what a plan says from a calibration of this machine alone.

    python -m benchmarks.time_truth [--passes 7] [--each 0.1] [--runs 56] [--json]

The ranks calibrate and measure the steps in turn, in passes, since the speed of a machine varies from minute to minute;
medians of all passes are compared. Nothing of these steps is in the machine, and they are planned at the end. The parts
of a prediction: kernels, collectives, and the host (eager's dispatch and FSDP2's hooks, or a replay's nodes). Page
faults are not modelled: glibc returns freed memory to the system, and the next step gets it back as new pages. Here it
keeps it, as allocators for training do (jemalloc, tcmalloc), unless the environment says otherwise.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import statistics
import tempfile
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import functionalize as fz
from benchmarks.capture import VOCABULARY
from benchmarks.machine import machine as about
from benchmarks.step_time import WAYS, Subject
from functionalize.cost.machines.machine import Machine
from functionalize.planner.calibration.calibrate import Calibration
from functionalize.planner.machines.files import read_machine, write_machine
from functionalize.planner.time.step_time import step_time

SMALL, WIDE = Subject(4, 128, 2, 16), Subject(4, 512, 4, 64)
LLAMA, GPT2 = Subject(4, 128, 2, 32, "llama"), Subject(4, 256, 2, 64, "gpt2")
STEPS = (
    ("transformer, width 128", SMALL, "eager"),
    ("transformer, width 128", SMALL, "fast"),
    ("transformer, width 512", WIDE, "eager"),
    ("transformer, width 512", WIDE, "default"),
    ("transformer, width 512", WIDE, "fast"),
    ("Llama, width 128", LLAMA, "eager"),
    ("Llama, width 128", LLAMA, "default"),
    ("GPT-2, width 256", GPT2, "eager"),
)

# Of glibc: which free memory it returns, and how large requests are that it maps on their own (32 MiB at most).
_KEEP = {"MALLOC_TRIM_THRESHOLD_": 1 << 36, "MALLOC_MMAP_THRESHOLD_": 1 << 25}


def predicted(subject: Subject, way: str, machine: Machine) -> dict[str, float]:
    """Modelled seconds of a step, and their parts."""

    def build() -> Any:
        return subject.sharded("cpu")

    def inputs() -> Any:
        return (torch.randint(VOCABULARY, (subject.batch, subject.sequence)),)

    def step(model: Any, optimizer: Any, tokens: torch.Tensor) -> torch.Tensor:
        return subject.training(model, optimizer)(tokens)

    passes = None if way == "eager" else way
    fixed = {"world": 2, "target": "cpu", "machine": machine, "passes": passes}
    (found,) = fz.plan(build, step, inputs=inputs, **fixed).plans
    assert found.figures is not None, found.error
    figures = found.figures
    bare = step_time(figures.program, replace(machine, host=None), groups=figures.members)
    return {
        "seconds": figures.time.seconds,
        "kernels": bare.compute,
        "collectives": bare.exposed,
        "host": figures.time.seconds - bare.seconds,
    }


def measured(rank: int, folder: str, passes: int, each: float, runs: int) -> None:
    """One rank: calibrates and measures the steps in turn; the first writes the machine, and medians of the steps."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=2)
    steps = [WAYS[way](subject, "cpu") for _, subject, way in STEPS]
    tokens = [torch.randint(VOCABULARY, (s.batch, s.sequence)) for _, s, _ in STEPS]
    times: list[list[float]] = [[] for _ in STEPS]
    faults: list[list[float]] = [[] for _ in STEPS]
    calibration = Calibration("cpu", each, passes)
    for _ in range(passes):
        machine = calibration.measure()
        for step, batch, seconds, pages in zip(steps, tokens, times, faults, strict=True):
            for i in range(-6, max(runs // passes, 1)):
                dist.barrier()
                before, start = _page_faults(), time.perf_counter()
                step(batch).item()
                if i >= 0:
                    seconds.append(time.perf_counter() - start)
                    pages.append(_page_faults() - before)
    if rank == 0:
        write_machine(f"{folder}/machine.json", machine)
        both = zip(times, faults, strict=True)
        medians = [
            (statistics.median(seconds), statistics.median(pages)) for seconds, pages in both
        ]
        Path(folder, "measured.json").write_text(json.dumps(medians))
    dist.barrier()
    dist.destroy_process_group()


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def main() -> None:
    """Calibrate and measure in turn, plan, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--passes", type=int, default=7)
    parser.add_argument("--each", type=float, default=0.1)
    parser.add_argument("--runs", type=int, default=56)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    for name, nbytes in _KEEP.items():
        os.environ.setdefault(name, str(nbytes))  # read by the ranks, when they start
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measured, (folder, args.passes, args.each, args.runs), nprocs=2)
        machine = read_machine(f"{folder}/machine.json")
        found = json.loads(Path(folder, "measured.json").read_text())
    plans = [predicted(subject, way, machine) for _, subject, way in STEPS]
    rows = [
        {
            "step": name,
            "way": way,
            **plan,
            "measured": real,
            "error": plan["seconds"] / real - 1,
            "page faults": faults,
        }
        for (name, _, way), plan, (real, faults) in zip(STEPS, plans, found, strict=True)
    ]
    if args.json:
        assert machine.host is not None
        run = {"machine": about(), "passes": args.passes, "host": machine.host._asdict()}
        print(json.dumps({**run, "steps": rows}, indent=2))
        return
    print(f"{about()}; {args.passes} passes\n")
    parts = ("kernels", "collectives", "host", "measured")
    print(f"| step | way | modelled | {' | '.join(parts)} | error | page faults |")
    print("| --- " * (len(parts) + 5) + "|")
    for row in rows:
        cells = " | ".join(f"{1e3 * row[part]:.1f} ms" for part in ("seconds", *parts))
        ends = f"{row['error']:+.0%} | {row['page faults']:,.0f}"
        print(f"| {row['step']} | {row['way']} | {cells} | {ends} |")
    near = sum(abs(row["error"]) <= 0.15 for row in rows)
    print(f"\n{near} of {len(rows)} within 15 %")


if __name__ == "__main__":
    main()
