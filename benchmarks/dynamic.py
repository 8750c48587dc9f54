"""Lengths that change from call to call, on two gloo ranks: eager, every kind recorded at once, the defaults, and
predicted programs (`dynamic=True`).

    python -m benchmarks.dynamic [--calls 60] [--layers 2] [--hidden 32] [--passes default] [--stream new] [--json]

A Hugging Face Llama under FSDP2, built once for each way; the ways take turns at each call, on the same tokens.
Each rank draws its own lengths. The streams: `new` (no length returns), `long` (drawn from 96), `few` (drawn from 4).
Total seconds of all calls, first ones included, and of the last third; ratios to eager.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import functionalize as fz
from benchmarks.machine import machine
from examples import demo

LONGEST = 128
STREAMS: dict[str, Callable[[int, torch.Generator], int]] = {
    "new": lambda i, _: 4 + i,
    "long": lambda _, g: 4 + int(torch.randint(96, (1,), generator=g)),
    "few": lambda _, g: 8 * (1 + int(torch.randint(4, (1,), generator=g))),
}
Row = dict[str, Any]


def measure(stream: str, options: demo.Options, calls: int, passes: str) -> list[Row]:
    """The seconds of each way on one stream."""
    ways: dict[str, Callable[[Any], Any]] = {
        "eager": lambda step: step,
        "recorded at once": lambda step: fz.capture(
            step, passes=passes, record_after=1, on_uncapturable="eager"
        ),
        "defaults": lambda step: fz.capture(step, passes=passes),
        "dynamic": lambda step: fz.capture(step, passes=passes, dynamic=True, max_programs=128),
    }
    steps = {}
    for name, way in ways.items():
        steps[name] = way(demo.training_step(*demo.build(options)))
    generator = torch.Generator().manual_seed(dist.get_rank())
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(calls):
        length = STREAMS[stream](i, generator)
        tokens = torch.randint(0, 256, (options.batch, length), generator=generator)
        losses = []
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            losses.append(step(tokens))
            dist.barrier()
            seconds[name].append(time.perf_counter() - start)
        assert all(torch.equal(loss, losses[0]) for loss in losses)
    rows = []
    for name, step in steps.items():
        stats = getattr(step, "stats", None)
        rows.append(
            {
                "stream": stream,
                "way": name,
                "seconds": sum(seconds[name]),
                "ratio": sum(seconds[name]) / sum(seconds["eager"]),
                "last third": sum(seconds[name][-calls // 3 :])
                / sum(seconds["eager"][-calls // 3 :]),
                "recorded": stats.warmups + stats.captures if stats else 0,
                "predicted": stats.predictions if stats else 0,
                "replayed": stats.replays if stats else 0,
            }
        )
    return rows


def run(
    rank: int, folder: str, options: demo.Options, calls: int, passes: str, streams: list[str]
) -> None:
    """One rank; the first one writes what was measured."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    logging.getLogger("functionalize").setLevel(logging.ERROR)
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=2)
    rows = [row for stream in streams for row in measure(stream, options, calls, passes)]
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--calls", type=int, default=60)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--passes", default="default")
    parser.add_argument("--stream", nargs="+", choices=list(STREAMS), default=list(STREAMS))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    options = demo.Options(layers=args.layers, hidden=args.hidden, sequence=LONGEST)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (folder, options, args.calls, args.passes, args.stream), nprocs=2)
        rows = json.loads(Path(folder, "rows.json").read_text())
    if args.json:
        print(json.dumps({"machine": machine(), "rows": rows}))
        return
    print(machine())
    print(
        f"Llama, {args.layers} layers, two gloo ranks, {args.calls} calls, passes={args.passes!r}"
    )
    print(
        f"{'stream':<7} {'way':<17} {'seconds':>8} {'to eager':>9} {'last third':>11} {'recorded':>9} "
        f"{'predicted':>10} {'replayed':>9}"
    )
    for row in rows:
        print(
            f"{row['stream']:<7} {row['way']:<17} {row['seconds']:8.2f} {row['ratio']:9.2f} "
            f"{row['last third']:11.2f} {row['recorded']:9} {row['predicted']:10} {row['replayed']:9}"
        )


if __name__ == "__main__":
    main()
