"""The cost of recording a step with its memory: the FSDP2 Llama of `benchmarks.memory_truth`, bound by dispatch.

    python -m benchmarks.memory_overhead [--layers 3 12] [--json]

    eager       the step
    empty       the same under a `TorchDispatchMode` that does nothing
    noted       `fz.record_memory(step)`: eager's lifetimes alone
    recorded    the same, recorded: with the search for inputs and guards, without building a program
    memory      the same, with lifetimes and modules
    capture     all of `fz.capture(step, memory=True)`, the program included

One process on a fake group of two, whose collectives cost nothing. CPU time of the step's thread, medians; the ways
alternate step by step, and each has its own model. Ratios to eager.
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
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import functionalize as fz
from benchmarks.capture import Empty
from benchmarks.machine import machine
from benchmarks.memory_truth import Case, Subject
from functionalize.planner.lifetimes.step_memory import LifetimeObserver
from functionalize.recorder.recorder import Recorder
from functionalize.step.step_state import EntryState
from functionalize.util.gc_pause import only_young_collections

WAYS = ("eager", "empty", "noted", "recorded", "memory", "capture")


def overhead(layers: int, runs: int = 9) -> dict[str, float]:
    """Median CPU seconds of the step's thread in every way."""
    subjects = {way: Case(layers=layers).build() for way in WAYS}
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for i in range(-3, runs):
        for way, subject in subjects.items():
            x, step = subject.batch(), step_of(way, subject)
            gc.collect()
            start = time.thread_time()
            step(x)
            if i >= 0:
                times[way].append(time.thread_time() - start)
            del step  # with what it has recorded
    return {way: statistics.median(found) for way, found in times.items()}


def step_of(way: str, subject: Subject) -> Callable[[Tensor], Any]:
    """A step, taken in one of the ways."""
    if way == "noted":
        return fz.record_memory(subject.step)
    if way == "empty":

        def under_a_mode(x: Tensor) -> Any:
            with Empty():
                return subject.step(x)

        return under_a_mode
    if way in ("recorded", "memory"):
        return lambda x: recorded(LifetimeObserver() if way == "memory" else None, subject.step, x)
    if way == "capture":
        step = fz.capture(subject.step, memory=True)
        step(subject.batch())
        return step  # type: ignore[no-any-return]
    return subject.step


def recorded(
    observer: LifetimeObserver | None, step: Callable[[Tensor], Tensor], x: Tensor
) -> None:
    """A step, recorded as `capture` does it."""
    recorder = Recorder(ignore_fake=True, live=True, observer=observer)
    with only_young_collections():
        entry = EntryState.now(step, [x], recorder)
        if observer is not None:
            observer.notes.calls.register(entry.roots)
        with recorder:
            step(x)


def table(times: dict[int, dict[str, float]]) -> str:
    """One row for each depth: eager's milliseconds and the ratios to it."""
    lines = [f"{'layers':<8}{'eager ms':>10}" + "".join(f"{way:>10}" for way in WAYS[1:])]
    for layers, found in times.items():
        ratios = "".join(f"{found[way] / found['eager']:>10.2f}" for way in WAYS[1:])
        lines.append(f"{layers:<8}{found['eager'] * 1e3:>10.1f}{ratios}")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--layers", nargs="+", type=int, default=[3, 12])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in ("transformers", "functionalize"):
        logging.getLogger(name).setLevel(logging.ERROR)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    times = {layers: overhead(layers) for layers in args.layers}
    dist.destroy_process_group()
    if args.json:
        print(json.dumps({"machine": machine(), "seconds": times}))
        return
    print(machine())
    print(table(times))


if __name__ == "__main__":
    main()
