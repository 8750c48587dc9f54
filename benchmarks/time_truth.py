"""Seconds of eight real steps on two gloo ranks, against what a plan says from a calibration of this machine alone.

    python -m benchmarks.time_truth [--each 0.1] [--runs 12] [--file machine.json] [--json]

The calibration comes first, then the plans, then the measurements: nothing of these steps is in the machine. Both ranks
are busy in all three. `--file` takes an earlier calibration. The parts of a prediction: kernels, collectives, and the
host (eager's dispatch and FSDP2's hooks, or a replay's nodes). Page faults are not modelled: the C library returns
freed memory to the system, and the next step gets it back as new pages.
"""

from __future__ import annotations

import argparse
import json
import logging
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
from functionalize.planning.machines.files import read_machine
from functionalize.planning.machines.machine import Machine
from functionalize.planning.time.step_time import step_time

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


def measured(rank: int, folder: str, runs: int) -> None:
    """One rank: median seconds and page faults of each step; the first rank writes them."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=2)
    found = []
    for _, subject, way in STEPS:
        step = WAYS[way](subject, "cpu")
        tokens = torch.randint(VOCABULARY, (subject.batch, subject.sequence))
        times: list[float] = []
        faults: list[int] = []
        for i in range(-6, runs):
            dist.barrier()
            before, start = _page_faults(), time.perf_counter()
            step(tokens).item()
            if i >= 0:
                times.append(time.perf_counter() - start)
                faults.append(_page_faults() - before)
        found.append((statistics.median(times), statistics.median(faults)))
    if rank == 0:
        Path(folder, "measured.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def main() -> None:
    """Calibrate, plan, measure, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--each", type=float, default=0.1)
    parser.add_argument("--runs", type=int, default=12)
    parser.add_argument("--file")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    start = time.perf_counter()
    machine = read_machine(args.file) if args.file else fz.calibrate(each=args.each)
    taken = time.perf_counter() - start
    plans = [predicted(subject, way, machine) for _, subject, way in STEPS]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measured, (folder, args.runs), nprocs=2)
        found = json.loads(Path(folder, "measured.json").read_text())
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
        print(json.dumps({"machine": about(), "calibrated in": taken, "steps": rows}, indent=2))
        return
    print(f"{about()}; calibrated in {taken:.0f} s\n")
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
