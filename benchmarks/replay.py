"""A replay against the eager FSDP2 step, on two gloo ranks: the same model, twice, interleaved.

    python -m benchmarks.replay [--layers 2] [--hidden 32] [--runs 30] [--json]

A Hugging Face Llama, wrapped layer by layer, with common optimizers: AdamW with its defaults (Python
reads its step count), fused, and SGD with momentum. Medians; ratios to eager.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
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

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
}
Result = tuple[str, float, float]


def measure(name: str, options: demo.Options, runs: int) -> Result:
    """Median seconds of an eager step and of a replay, with one optimizer."""
    steps = []
    for _ in range(2):
        model, _ = demo.build(options)
        steps.append(demo.training_step(model, OPTIMIZERS[name](model.parameters())))
    eager, captured = steps[0], fz.capture(steps[1], passes="default", audit=False, allowance=None)
    generator = torch.Generator().manual_seed(dist.get_rank())

    def batch() -> torch.Tensor:
        return torch.randint(0, 256, (options.batch, options.sequence), generator=generator)

    while captured.stats.replays < 3:
        tokens = batch()
        eager(tokens), captured(tokens)
    before = captured.stats.replays
    times = demo.timing(eager, captured, batch, runs)
    assert captured.stats.replays == before + runs
    return name, *times


def run(rank: int, folder: str, options: demo.Options, runs: int) -> None:
    """One rank; the first one writes what was measured."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=2)
    results = [measure(name, options, runs) for name in OPTIMIZERS]
    if rank == 0:
        Path(folder, "results.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    options = demo.Options(layers=args.layers, hidden=args.hidden, sequence=16)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (folder, options, args.runs), nprocs=2)
        results = json.loads(Path(folder, "results.json").read_text())
    if args.json:
        print(json.dumps({"machine": machine(), "seconds": results}))
        return
    print(machine())
    print(f"Llama, {args.layers} layers, hidden size {args.hidden}, two gloo ranks")
    print(f"{'optimizer':<16} {'eager ms':>9} {'replay ms':>10} {'ratio':>6}")
    for name, eager, replay in results:
        print(f"{name:<16} {eager * 1e3:9.1f} {replay * 1e3:10.1f} {replay / eager:6.2f}")


if __name__ == "__main__":
    main()
