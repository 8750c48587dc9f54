"""The cost of planning: from nothing to the figures of a Llama step, and again with another batch.

    python -m benchmarks.plan [--sizes 8B 70B 405B] [--world 16384] [--json]

Each size in a process of its own: CPU seconds to import torch and this package, to build and wrap the model in a fake
world, to the first program (forward, backward, optimizer: two or three calls until the step has settled), to all
figures (two timelines, reserved memory, traffic, work, modelled time), and the same after another batch, in the same
world with the same model; then, of that batch, what is found when it is asked for: the purpose of every storage of the
program, the stacks, modules and autograd's nodes of its ops. The most memory that the process had after the first plan,
and after both. The bytecode of this package is compiled first, as in an installed package.
Last line: forward and backward of ViT-B/16 on a batch of ten billion images.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import resource
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

import functionalize as fz
from benchmarks.machine import machine
from examples import llama
from functionalize.util.gc_pause import only_young_collections

Row = dict[str, Any]


def measured(size: str, world: int) -> Row:
    """CPU seconds and MiB of one size."""
    start = time.process_time()
    row: Row = {"size": size, "world": world, "import": start}

    def lap(name: str) -> None:
        nonlocal start
        now = time.process_time()
        row[name], start = now - start, now

    with fz.world(world), only_young_collections():  # as `fz.plan` does
        built = llama.build(size)
        lap("build")
        step = fz.capture(llama.step, memory=True)
        batch = llama.inputs(1)
        while step.program is None:
            step(*built, *batch)
        lap("program")
        figures(step)
        lap("figures")
        row["MiB first"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        other = llama.inputs(2)
        step.forget()  # as `fz.plan` does: the next call is recorded
        while step.program is None:
            step(*built, *other)
        lap("program again")
        found = figures(step)
        lap("figures again")
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        assert all(each.name for each in found.memory.program.allocations)
        step.program.describe()
        lap("asked later")
        row["nodes"] = step.program.nodes()
    row["MiB"] = memory
    return row


def figures(step: Any) -> Any:
    """Compute all figures of a plan."""
    from functionalize.cost.machines.presets import MACHINES
    from functionalize.planner.sweep.figures import Figures

    found = Figures.of(step.program, step.memory, MACHINES["h100"])
    assert found.row
    return found


def images(batch: int) -> Row:
    """Milliseconds of a forward and backward of ViT-B/16, the first and a warm one."""
    from transformers import ViTConfig, ViTForImageClassification

    times = []
    with fz.world(1):
        model = ViTForImageClassification(ViTConfig(attn_implementation="sdpa"))
        x = torch.empty(batch, 3, 224, 224)
        for _ in range(2):
            start = time.perf_counter()
            model(x).logits.sum().backward()
            times.append((time.perf_counter() - start) * 1e3)
    return {"first ms": times[0], "warm ms": times[1]}


def table(rows: list[Row]) -> str:
    """A line per size."""
    names = [
        "import",
        "build",
        "program",
        "figures",
        "program again",
        "figures again",
        "asked later",
    ]
    lines = [
        f"{'':<6}{'world':>7}{'nodes':>8}"
        + "".join(f"{n + ' s':>17}" for n in names)
        + f"{'MiB first':>11}{'MiB':>7}"
    ]
    for row in rows:
        cells = "".join(f"{row[n]:17.2f}" for n in names)
        memory = f"{row['MiB first']:11.0f}{row['MiB']:7.0f}"
        lines.append(f"{row['size']:<6}{row['world']:>7}{row['nodes']:>8}{cells}{memory}")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", default=["8B", "70B", "405B"])
    parser.add_argument("--world", type=int, default=16_384)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if options.one:
        one = images(10**10) if options.one == "images" else measured(options.one, options.world)
        print(json.dumps(one))
        return
    for folder in ("functionalize", "passes", "examples", "benchmarks"):
        compileall.compile_dir(Path(__file__).resolve().parents[1] / folder, quiet=1)
    rows = [_in_a_process(size, options.world) for size in [*options.sizes, "images"]]
    if options.json:
        print(json.dumps({"machine": machine(), "rows": rows}))
        return
    print(machine())
    print(table(rows[:-1]))
    first, warm = rows[-1]["first ms"], rows[-1]["warm ms"]
    print(f"ViT-B/16, 10,000,000,000 images: {first:.0f} ms, then {warm:.0f} ms")


def _in_a_process(size: str, world: int) -> Row:
    command = [sys.executable, "-m", "benchmarks.plan", "--one", size, "--world", str(world)]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    row: Row = json.loads(done.stdout)
    return row


if __name__ == "__main__":
    main()
