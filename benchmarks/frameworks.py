"""The loop of each framework by eager and with its integration: CPU time of a step of the optimizer, and the ratio.

    python -m benchmarks.frameworks [--loops accelerate ...] [--worlds 1 2] [--runs 3]
    python -m benchmarks.frameworks --width 256 --layers 4 --batch 32 --tokens 64 --epochs 12
    python -m benchmarks.frameworks --equal --epochs 25

The loops are those of `tests/integrations`: two microbatches per step, by default of small models, so that dispatch is
all. `--width` (torchtitan's model has 256) and `--tokens` (of the Trainer and torchtitan, in batches of 4 and 2) make
them larger. Every training is a process of its own per rank, eager and captured in turn. A time is the CPU time of
rank 0 from one step of the optimizer to the next: the median of a training after its first 60 %, of which few contain
an evaluation, then the median of the runs.

`--equal` compares instead, as `tests/integrations` does in shorter trainings: 25 epochs are 50 steps of the optimizer
or more. Losses, norms, logged metrics, shards and optimizer states of all ranks must be bit for bit those of eager,
also when a new process resumes from a checkpoint. Replays are those of the captured calls after four epochs.

    pip install '.[accelerate,lightning,transformers,torchtitan]'
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import machine
from tests.integrations import loops

LOOPS = ("accelerate", "fabric", "lightning", "transformers", "torchtitan")
_SKIPPED = 0.6  # a program is audited often in its first calls


def train_rank(loop: str, captured: bool, out: Path, world: int, port: int, rank: int) -> None:
    """What a process does: train, and write the median in milliseconds."""
    loops.join(loop, world, port, rank)
    ends: list[float] = []
    step = torch.optim.AdamW.step

    def timed_step(self: Any, closure: Any = None) -> Any:  # a hook of torch's would be guarded
        result = step(self, closure)
        ends.append(time.process_time())
        return result

    torch.optim.AdamW.step = timed_step  # type: ignore[method-assign]
    importlib.import_module(f"tests.integrations.{loop}_loop").train(captured)
    times = [after - before for before, after in itertools.pairwise(ends)]
    times = times[int(_SKIPPED * len(times)) :]
    if rank == 0:
        out.write_text(json.dumps(1e3 * statistics.median(times)))


def measured(loop: str, world: int, runs: int) -> tuple[float, float]:
    """Milliseconds of a step by eager and captured."""
    found: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        for i in range(2 * runs):
            captured, out = bool(i % 2), Path(folder) / str(i)
            loops.forked(world, train_rank, loop, captured, out)
            found[captured].append(json.loads(out.read_text()))
    return statistics.median(found[False]), statistics.median(found[True])


def steps_of(loop: str, world: int, folder: Path) -> int:
    """The steps of the optimizer: the most that it counted for a parameter."""
    tensors = torch.load(folder / f"{loop}.{world}.0.pt", weights_only=False)[1]
    return int(max(value.item() for name, value in tensors.items() if name.endswith(".step")))


def equal(loop: str, world: int) -> str:
    """A row of the table of `--equal`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found = {}
        for case in (f"{loop}.{world}", f"{loop}.{world}.resumed"):
            loops.forked(world, loops.train_rank, case, folder)
            texts = [(folder / f"{case}.{rank}").read_text() for rank in range(world)]
            found[case] = [json.loads(text) for text in texts]
        steps = steps_of(loop, world, folder)
    verdicts = [
        "yes" if all(each["same_numbers"] and not each["differ"] for each in ranks) else "no"
        for ranks in found.values()
    ]
    first = found[f"{loop}.{world}"][0]
    share = f"{first['replays']} of {first['calls']}"
    numbers, tensors = first["numbers"], first["tensors"]
    return (
        f"| {loop} | {world} | {steps} | {numbers} | {tensors} | {' | '.join(verdicts)} | {share} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--loops", nargs="+", default=LOOPS, choices=LOOPS)
    parser.add_argument("--worlds", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--equal", action="store_true", help="compare with eager")
    for name in ("width", "layers", "batch", "tokens"):
        parser.add_argument(f"--{name}", type=int, default=getattr(loops, name.upper()))
    arguments: Any = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of the frameworks
    for name in ("epochs", "width", "layers", "batch", "tokens"):  # before the loops import them
        setattr(loops, name.upper(), getattr(arguments, name))
    loops.SECONDS = 600
    loops.ROWS = 11 * arguments.batch // 2
    print(machine())
    if arguments.equal:
        print("| loop | ranks | steps | numbers | tensors | equal | resumed: equal | replays |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- |")
        for loop in arguments.loops:
            importlib.import_module(f"tests.integrations.{loop}_loop")
            for world in arguments.worlds:
                print(equal(loop, world), flush=True)
        return
    print("| loop | ranks | eager | captured | captured / eager |\n| --- | --- | --- | --- | --- |")
    for loop in arguments.loops:
        importlib.import_module(f"tests.integrations.{loop}_loop")
        for world in arguments.worlds:
            eager, ours = measured(loop, world, arguments.runs)
            print(
                f"| {loop} | {world} | {eager:.2f} ms | {ours:.2f} ms | {ours / eager:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
