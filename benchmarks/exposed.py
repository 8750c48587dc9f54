"""Exposed communication with the pass `order`: modelled on H100s, and timed on two gloo ranks.

    python -m benchmarks.exposed [--runs 20] [--json]

A Mixtral-like model whose experts are spread over the ranks: tokens travel by `all_to_all_single`, attention is sharded
by FSDP2. Modelled: two layers of Mixtral 8x7B's sizes in bfloat16, eight ranks, 8,192 tokens a rank; a replay on a GPU
starts a collective after the ops before it and waits for it where the program does. The seconds of communication beside
which no op runs, and of the step, as a ratio to the program without this pass. Timed: width 256, one thread a rank;
the ways alternate step by step, medians.
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
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import functionalize as fz
from benchmarks.machine import machine
from functionalize import passes
from functionalize.cost.machines.presets import MACHINES
from functionalize.planner.time.step_time import step_time

FIRST = "order{first=all_to_all}"
WAYS = {
    "as recorded": "",
    "order": f",{FIRST}",
}
Step = Callable[[Tensor], Tensor]


class Attention(nn.Module):
    """Causal attention of `heads` heads after a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.RMSNorm(width)
        self.inward, self.outward = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.inward(self.norm(x)).chunk(3, -1)
        q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.outward(mixed.transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """An expert on each rank; every rank sends an equal part of its tokens to each, and gets the results back."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.router = nn.RMSNorm(width), nn.Linear(width, 1)
        self.gate, self.up = nn.Linear(width, hidden), nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        tokens = _exchanged(y.flatten(0, 1))
        out = self.down(F.silu(self.gate(tokens)) * self.up(tokens))
        return x + _exchanged(out).view_as(x) * self.router(y).sigmoid()


def _exchanged(x: Tensor) -> Tensor:
    world = dist.get_world_size()
    parts = [x.shape[0] // world] * world
    return funcol.all_to_all_single_autograd(x, parts, parts, dist.group.WORLD)


def training(layers: int, width: int, hidden: int, heads: int, dtype: torch.dtype) -> Step:
    """A training step of the model."""
    torch.manual_seed(0)
    blocks = [(Attention(width, heads), Experts(width, hidden)) for _ in range(layers)]
    model = nn.Sequential(*(part for block in blocks for part in block)).to(dtype)
    for attention, _ in blocks:
        fully_shard(attention)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def modelled() -> dict[str, dict[str, float]]:
    """Seconds by way: of the step, and of exposed communication."""
    with fz.world(8):
        step = fz.capture(training(2, 4096, 14336, 32, torch.bfloat16))
        while step.program is None:
            step(torch.empty(4, 2048, 4096, dtype=torch.bfloat16))
        found = {}
        for name, more in WAYS.items():
            program = passes.run(step.program, f"cleanup{more}")
            each = step_time(program, MACHINES["h100"], streams="replay")
            found[name] = {"seconds": each.seconds, "exposed": each.exposed}
    return found


def timed(runs: int) -> dict[str, float]:
    """On a rank: median seconds of a step by way; all have trained equally long."""
    sizes = 2, 256, 896, 4, torch.float32
    steps: dict[str, Any] = {"eager": training(*sizes)}
    for name, more in WAYS.items():
        pipeline = f"default{more}"
        steps[name] = fz.capture(training(*sizes), passes=pipeline, audit=False, allowance=None)
    generator = torch.Generator().manual_seed(dist.get_rank())
    times: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(-5, runs):
        x = torch.randn(4, 128, 256, generator=generator)
        gc.collect()
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step(x).item()
            if i >= 0:
                times[name].append(time.perf_counter() - start)
    for name, step in steps.items():
        assert name == "eager" or step.stats.replays >= runs, f"{name} did not replay"
    return {name: statistics.median(each) for name, each in times.items()}


def rank_of_two(rank: int, folder: str, runs: int) -> None:
    """One rank; the first one writes what was measured."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=2)
    found = timed(runs)
    if rank == 0:
        Path(folder, "results.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def table(model: dict[str, dict[str, float]], times: dict[str, float]) -> str:
    """A row for each way."""
    base = model["as recorded"]
    rows = [f"{'':<14}{'exposed':>10}{'step':>8}{'two ranks':>12}"]
    for name in times:
        cells = "".join(f"{'':>{10 if k == 'exposed' else 8}}" for k in ("exposed", "seconds"))
        if name in model:
            exposed, seconds = (model[name][k] / base[k] for k in ("exposed", "seconds"))
            cells = f"{exposed:10.2f}{seconds:8.2f}"
        rows.append(f"{name:<14}{cells}{times[name] / times['as recorded']:12.2f}")
    rows.append(f"1 is {base['exposed'] * 1e3:.2f} ms, {base['seconds'] * 1e3:.2f} ms (modelled)")
    return "\n".join(rows) + f", {times['as recorded'] * 1e3:.1f} ms"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    model = modelled()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_of_two, (folder, options.runs), nprocs=2)
        times = json.loads(Path(folder, "results.json").read_text())
    if options.json:
        print(json.dumps({"machine": machine(), "modelled": model, "seconds": times}))
        return
    print(machine())
    print(table(model, times))


if __name__ == "__main__":
    main()
