"""What `fz.functions.trace_backward` costs against the backward of eager, which it runs once.

    python -m benchmarks.trace_backward [--layers 4 16] [--runs 15]

    eager     `loss.backward()`
    trace     `fz.functions.trace_backward(loss)`
    search    of it, the search of the process for tensors that may get a gradient: Python's objects are counted, too
    call      of the program, which is compiled in it
    replay    `backward(loss)` of `capture_backward()`, for a tape that it knows; of it, the listing of the tape

Layers of a linear map, a norm and GELU, of width 64. CPU time of the calling thread; eager and traced backwards
alternate in one process; medians.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from typing import Any

import torch
from torch import nn

import functionalize as fz
from benchmarks.machine import machine
from functionalize.step_backward import trace_backward as module
from functionalize.tape.listing import listed

WIDTH = 64


def measured(layers: int, runs: int) -> dict[str, float]:
    """Milliseconds of each part."""
    parts = [
        m for _ in range(layers) for m in (nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU())
    ]
    model, x = nn.Sequential(*parts), torch.randn(8, WIDTH)
    found: dict[str, list[float]] = {}

    def timed(name: str, call: Any, *args: Any) -> Any:
        began = time.thread_time()
        result = call(*args)
        found.setdefault(name, []).append(1e3 * (time.thread_time() - began))
        return result

    backward = fz.functions.capture_backward(audit=False)
    while backward.stats.replays < 2:
        backward(model(x).square().mean())
    for _ in range(runs):
        timed("eager", model(x).square().mean().backward)
        program = timed("trace", fz.functions.trace_backward, model(x).square().mean())
        timed("search", list, module._with_gradients())
        timed("call", program)
        timed("replay", backward, model(x).square().mean())
        timed("listing", listed, [model(x).square().mean()], [torch.ones(())])
    return {name: statistics.median(times) for name, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--runs", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(machine(), f"{len(gc.get_objects())} objects of Python", sep="; ")
    print("| layers | eager | trace | of it search | call | replay | of it listing |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for layers in options.layers:
        row = measured(layers, options.runs)
        print(
            f"| {layers} |",
            " | ".join(f"{row[k]:.1f} ms" for k in row),
            "|",
        )


if __name__ == "__main__":
    main()
