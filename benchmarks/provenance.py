"""What it adds to a capture to note where every op comes from: autograd's nodes, modules, hooks, FSDP2's roles.

    python -m benchmarks.provenance [--layers 4 16] [--pairs 60]

The step of `benchmarks.capture` is captured with these notes and without them, in turn, in one process; which of a pair
comes first alternates. CPU time of the recording thread, median of the ratios of the pairs, with its 95 % interval by
bootstrap; the lower quartile of each is printed, too. Without them means: the recorder notes neither the nodes that ops
make or run in, nor the graph of a backward, nor hooks, labels or ranges, and modules are not observed. The library has
no such option: this script replaces the function that decides it for recordings of which no program is made.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

import functionalize as fz
from benchmarks.capture import Subject
from benchmarks.machine import machine
from functionalize.step import stages


@contextmanager
def without_notes() -> Iterator[None]:
    """Recordings note nothing about autograd's nodes and modules."""
    original = stages.awaits_live_numbers
    stages.awaits_live_numbers = lambda recorder, entry: True
    try:
        yield
    finally:
        stages.awaits_live_numbers = original


def captured(subject: Subject) -> float:
    """Seconds of one capture, its first call apart."""
    step = fz.capture(subject.step, audit=False)
    step(subject.tokens)
    gc.collect()
    gc.disable()
    began = time.thread_time()
    step(subject.tokens)
    seconds = time.thread_time() - began
    gc.enable()
    assert step.stats.captures == 1
    return seconds


def measured(layers: int, pairs: int) -> tuple[list[float], list[float]]:
    """Seconds with and without the notes, by pair."""
    subject = Subject(layers)
    found: tuple[list[float], list[float]] = ([], [])
    for pair in range(pairs + 2):
        for is_off in (False, True) if pair % 2 else (True, False):
            if is_off:
                with without_notes():
                    found[1].append(captured(subject))
            else:
                found[0].append(captured(subject))
    return found[0][2:], found[1][2:]


def interval(ratios: list[float]) -> tuple[float, float]:
    """95 % of the medians of samples drawn from these, with replacement."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return medians[50], medians[-51]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--pairs", type=int, default=60)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(machine())
    print("| layers | with the notes | without | ratio, median of pairs | its 95 % interval |")
    print("| --- | --- | --- | --- | --- |")
    for layers in options.layers:
        on, off = measured(layers, options.pairs)
        ratios = [a / b for a, b in zip(on, off, strict=True)]
        low, high = interval(ratios)
        quartiles = [1e3 * statistics.quantiles(each, n=4)[0] for each in (on, off)]
        print(
            f"| {layers} | {quartiles[0]:.1f} ms | {quartiles[1]:.1f} ms "
            f"| {statistics.median(ratios):.3f} | {low:.3f} to {high:.3f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
