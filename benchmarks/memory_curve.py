"""What memory costs in time: a step's peak bytes against its seconds, for pipelines on two gloo ranks, as a plot.

    python -m benchmarks.memory_curve --plot curve.png [--case NAME] [--passes PIPELINE ...] [--runs 9] [--json]

Each pipeline is a point: up is slower, right is larger; both as ratios to the eager FSDP2 step. Bytes as in
`benchmarks/memory.py`, medians of interleaved steps. A pipeline that cannot run is left out, with its reason.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.allocations import count_everything, counted
from benchmarks.machine import machine
from benchmarks.memory import EAGER, cases, settle

LESS = "reinplace,schedule_memory"
PIPELINES = {
    "no passes": "",
    "reinplace": "elide_copies,reinplace",
    "schedule_memory": f"elide_copies,{LESS}",
    "schedule_memory, overlap": "elide_copies,reinplace,schedule_memory{overlap=true}",
    "reshard: keep all": f"elide_copies,reshard{{keep=all}},{LESS}",
    "reshard: keep half": f"elide_copies,reshard{{keep=budget,kept_mb=25}},{LESS}",
    "remat: all": f"elide_copies,remat,{LESS}",
    "remat: half": f"elide_copies,remat{{select=layer,layers=0-1}},{LESS}",
    "reshard: keep all, remat: all": f"elide_copies,reshard{{keep=all}},remat,{LESS}",
}


def measure(name: str, pipelines: dict[str, str], runs: int) -> dict[str, Any]:
    """Peak bytes and median seconds of a step in every way, or the error of one that cannot run."""
    case = cases()[name]
    found: dict[str, Any] = {}
    steps = {}
    for label, pipeline in {EAGER: EAGER, **pipelines}.items():
        try:
            step = case.step(pipeline)
            settle(step, case.batch)
        except Exception as error:
            found[label] = {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}
            continue
        batch = case.batch()
        with counted() as count:
            step(batch)
        found[label] = {"peak": count.peak}
        steps[label] = step
    times: dict[str, list[float]] = {label: [] for label in steps}
    for _ in range(runs):
        batch = case.batch()
        gc.collect()
        for label, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step(batch).item()
            times[label].append(time.perf_counter() - start)
    for label, each in times.items():
        found[label]["seconds"] = statistics.median(each)
    return found


def run(rank: int, folder: str, name: str, pipelines: dict[str, str], runs: int) -> None:
    """One rank; the first one writes what was measured."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    count_everything()
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=2)
    found = measure(name, pipelines, runs)
    if rank == 0:
        Path(folder, "results.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def points(found: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """(bytes, seconds) of each way that ran, as ratios to eager."""
    eager = found[EAGER]
    return {
        label: (each["peak"] / eager["peak"], each["seconds"] / eager["seconds"])
        for label, each in found.items()
        if "seconds" in each
    }


def frontier(found: dict[str, tuple[float, float]]) -> list[tuple[float, float]]:
    """The Pareto frontier of the points, from the smallest."""
    best: list[tuple[float, float]] = []
    for point in sorted(found.values()):
        if not best or point[1] < best[-1][1]:
            best.append(point)
    return best


def draw(found: dict[str, tuple[float, float]], title: str, path: str) -> None:
    """Write the plot."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    line = frontier(found)
    axes.plot(*zip(*line, strict=True), color="tab:blue", linewidth=1, zorder=1)
    for i, (label, (size, seconds)) in enumerate(found.items()):
        axes.scatter(
            size, seconds, color="tab:blue" if (size, seconds) in line else "grey", zorder=2
        )
        place = (5, 4 if i % 2 else -11)  # points close by keep their labels apart
        axes.annotate(label, (size, seconds), xytext=place, textcoords="offset points", fontsize=8)
    axes.axvline(0.95, color="tab:green", linewidth=0.8, linestyle="--")
    axes.set_xlabel("peak bytes of a step, eager FSDP2 = 1 (dashed: the goal)")
    axes.set_ylabel("time of a step, eager FSDP2 = 1")
    axes.set_title(title, fontsize=9)
    axes.margins(x=0.18, y=0.1)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--case", default="compute, width 512", choices=list(cases()))
    parser.add_argument("--passes", nargs="+", metavar="PIPELINE")
    parser.add_argument("--plot", metavar="PATH")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    pipelines = {text or "no passes": text for text in args.passes} if args.passes else PIPELINES
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (folder, args.case, pipelines, args.runs), nprocs=2)
        found = json.loads(Path(folder, "results.json").read_text())
    ratios = points(found)
    if args.plot:
        draw(ratios, f"{args.case}, two gloo ranks\n{machine()}", args.plot)
    if args.json:
        print(json.dumps({"machine": machine(), "case": args.case, "ways": found}))
        return
    print(f"{machine()}\n{args.case}, two gloo ranks, ratios to eager FSDP2")
    print(f"{'':<30} {'bytes':>6} {'time':>6}")
    for label, each in found.items():
        if label in ratios:
            print(f"{label:<30} {ratios[label][0]:6.2f} {ratios[label][1]:6.2f}")
        else:
            print(f"{label:<30} {each['failed']}")


if __name__ == "__main__":
    main()
