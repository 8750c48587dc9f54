"""The time of a training loop without a step function in `fz.lazy`, beside eager, an empty mode and the declared step.

    python -m benchmarks.lazy [--ranks 2] [--runs 5] [--layers 4] [--json]

    eager       FSDP2 (on one rank: the plain model) as it is
    empty       the same under a dispatch mode that does nothing
    lazy        the same in `fz.lazy()`
    passes      the same in `fz.lazy(passes="default")`
    calls       lazy.module(model) and lazy.optimizer(optimizer) in `fz.lazy(passes="default")`
    declared    fz.capture(step, passes="default")

The transformer of `benchmarks.step_time`; every way has its own model with the same weights and fused AdamW, and the
ways alternate in groups of 12 steps, as a loop has one block around it. Each reads the loss after its step. Medians,
and ratios to eager.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import functionalize as fz
from benchmarks.capture import VOCABULARY
from benchmarks.machine import machine
from benchmarks.step_time import Subject

WARM_UP, GROUP = 2, 12  # groups; steps of a group, which one block is around


class Empty(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def training(subject: Subject, by_calls: Any = None) -> Callable[[Tensor], Tensor]:
    """A step of the subject: under FSDP2 if there is more than one rank. by_calls: the `fz.lazy` of its calls."""
    if dist.get_world_size() > 1:
        model, optimizer = subject.sharded("cpu")
    else:
        model, _ = subject.model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    if by_calls is None:
        return subject.training(model, optimizer)
    loss_of = by_calls.module(subject.loss(model))
    return subject.training(model, by_calls.optimizer(optimizer), loss_of=loss_of)


def measure(subject: Subject, runs: int) -> dict[str, Any]:
    """Median seconds of a step in every way; what lazy says; whether the losses of all ways are equal."""
    lazy, rewritten, calls = fz.lazy(), fz.lazy(passes="default"), fz.lazy(passes="default")
    contexts: dict[str, AbstractContextManager[Any]] = {
        "eager": nullcontext(),
        "empty": Empty(),
        "lazy": lazy,
        "passes": rewritten,
        "calls": calls,
        "declared": nullcontext(),
    }
    steps = {name: training(subject, calls if name == "calls" else None) for name in contexts}
    steps["declared"] = fz.capture(steps["declared"], passes="default", audit=False, allowance=None)
    generator = torch.Generator().manual_seed(dist.get_rank())
    times: dict[str, list[float]] = {name: [] for name in contexts}
    losses: dict[str, list[float]] = {name: [] for name in contexts}
    for group in range(-WARM_UP, runs):
        size = (subject.batch, subject.sequence)
        batches = [torch.randint(VOCABULARY, size, generator=generator) for _ in range(GROUP)]
        gc.collect()
        for name, context in contexts.items():
            with context:
                for tokens in batches:
                    dist.barrier()
                    start = time.perf_counter()
                    losses[name].append(steps[name](tokens).item())
                    if group >= 0:
                        times[name].append(time.perf_counter() - start)
    equal = all(each == losses["eager"] for each in losses.values())
    medians = {name: statistics.median(each) for name, each in times.items()}
    texts = {"lazy": lazy.explain(), "calls": calls.explain()}
    return {"seconds": medians, "losses are equal": equal, **texts}


def run(rank: int, folder: str, subject: Subject, world: int, runs: int) -> None:
    """One rank; the first one writes what was measured."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=world)
    result = measure(subject, runs)
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    subject = Subject(args.layers, args.width, 2, 16)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (folder, subject, args.ranks, args.runs), nprocs=args.ranks)
        result = json.loads(Path(folder, "result.json").read_text())
    if args.json:
        print(json.dumps({"machine": machine(), "ranks": args.ranks, **result}))
        return
    times = result["seconds"]
    print(machine())
    print(f"{args.ranks} ranks, {args.layers} layers of width {args.width}; one thread each")
    print(f"eager {times['eager'] * 1e3:.1f} ms; losses are equal: {result['losses are equal']}")
    for name, seconds in times.items():
        print(f"{name:<10} {seconds / times['eager']:6.2f}")
    print(f"calls: {times['calls'] / times['declared']:.2f} times the declared step")
    print(result["lazy"], result["calls"], sep="\n\n")


if __name__ == "__main__":
    main()
