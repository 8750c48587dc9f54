"""What a user would choose instead: other ways to train the same model on two gloo ranks, beside eager FSDP2 and ours.

    python -m benchmarks.peers [--only NAME ...] [--ways WAY ...] [--runs 20] [--json]

    eager         FSDP2 as it is
    layers        FSDP2, each layer under torch.compile
    model         FSDP2, the whole model under torch.compile, with the graph breaks of FSDP2's hooks
    whole step    FSDP2, the training step under torch.compile, with graph breaks
    SimpleFSDP    torchtitan's `data_parallel` of its graph trainer, the model under torch.compile
    ZeRO-3        DeepSpeed, stage 3, torch's AdamW
    replay, default, fast, inductor     fz.capture(step), with passes, with Inductor

Every way has its own model with the same weights and fused AdamW, and the ways alternate step by step. Columns: median
milliseconds of a step and the ratio to eager's; seconds until the first step that takes at most 1.2 times that way's
median, from the first call on (building the model is not counted); the peak of bytes during a step
(`benchmarks/allocations.py`) and its ratio to eager's; and whether all weights are bit for bit those of eager. A way
that raises is a row with its error: a package that is not installed is such a way.

    pip install '.[peers]'
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
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import functionalize as fz
from benchmarks.allocations import count_everything, counted
from benchmarks.capture import VOCABULARY
from benchmarks.machine import machine
from benchmarks.step_time import SUBJECTS, Step, Subject

EAGER, _WARM_UPS, _SLACK = "eager", 8, 1.2


@dataclass
class Way:
    """A training step that was built, and its model. weights: every parameter, whole, by name."""

    step: Step
    weights: Callable[[], dict[str, Tensor]]


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter of a model, gathered from all ranks."""
    found = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        found[name] = value.full_tensor() if isinstance(value, DTensor) else value.clone()
    return found


def fsdp(subject: Subject, wrap: Callable[[Step], Step], compiled: str = "") -> Way:
    """FSDP2. compiled: what torch.compile compiles, "layers" or "model"; wrap: applied to the training step."""
    model, layers = subject.model()
    for layer in layers:
        if compiled == "layers":
            layer.compile()
        fully_shard(layer)
    fully_shard(model)
    if compiled == "model":
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return Way(wrap(subject.training(model, optimizer)), lambda: whole_weights(model))


def captured(subject: Subject, **options: Any) -> Way:
    """`fz.capture` of the eager step; the passes run at once."""
    return fsdp(subject, lambda step: fz.capture(step, audit=False, allowance=None, **options))


def simple_fsdp(subject: Subject) -> Way:
    """torchtitan's data parallelism by parametrizations, which torch.compile traces into one graph."""
    from torchtitan.experiments.graph_trainer.simple_fsdp import data_parallel

    model, _ = subject.model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sharded = data_parallel(model, mesh, mode="fully_shard")
    sharded.compile(fullgraph=True)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-3, fused=True)
    return Way(subject.training(sharded, optimizer), lambda: whole_weights(sharded))


def zero_3(subject: Subject) -> Way:
    """DeepSpeed's stage 3."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    model, _ = subject.model()
    settings = {
        "train_micro_batch_size_per_gpu": subject.batch,
        "zero_optimization": {"stage": 3},
        "zero_force_ds_cpu_optimizer": False,
    }
    made = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    engine = deepspeed.initialize(model=model, optimizer=made, config=settings)[0]

    def step(tokens: Tensor) -> Tensor:
        is_ours = subject.family == "transformer"
        loss = engine(tokens) if is_ours else engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        detached: Tensor = loss.detach()
        return detached

    def weights() -> dict[str, Tensor]:
        parameters = dict(engine.module.named_parameters())
        with deepspeed.zero.GatheredParameters(list(parameters.values())):
            return {name: p.detach().clone() for name, p in parameters.items()}

    return Way(step, weights)


WAYS: dict[str, Callable[[Subject], Way]] = {
    EAGER: lambda s: fsdp(s, lambda step: step),
    "layers": lambda s: fsdp(s, lambda step: step, "layers"),
    "model": lambda s: fsdp(s, lambda step: step, "model"),
    "whole step": lambda s: fsdp(s, torch.compile),
    "SimpleFSDP": simple_fsdp,
    "ZeRO-3": zero_3,
    "replay": captured,
    "default": lambda s: captured(s, passes="default"),
    "fast": lambda s: captured(s, passes="fast"),
    "inductor": lambda s: captured(s, passes="fast", compile="inductor"),
}


@dataclass
class Row:
    """What was measured of one way; error: the text of what it raised."""

    seconds: list[float] = field(default_factory=list)
    ready: float = 0.0
    peak: int = 0
    bitwise: bool = False
    error: str = ""

    @property
    def median(self) -> float:
        """Seconds of a step after the warm-up."""
        return statistics.median(self.seconds[_WARM_UPS:])

    def finish(self) -> None:
        """Find the first step that is as fast as the later ones."""
        most = _SLACK * self.median
        first = next(i for i, each in enumerate(self.seconds) if each <= most)
        self.ready = sum(self.seconds[: first + 1])


def agreed(error: str) -> str:
    """The error of the first rank that has one; a way that fails on one rank runs on none."""
    errors: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    return next((each for each in errors if each), "")


def attempt(work: Callable[[], Any]) -> tuple[Any, str]:
    """What `work` returns, and on any rank's failure the error as one line."""
    result, error = None, ""
    try:
        result = work()
    except Exception as raised:
        text = " ".join(str(raised).split()) or "no message"
        error = f"{type(raised).__name__}: {text[:300]}"
    return result, agreed(error)


def timed(step: Step, tokens: Tensor) -> float:
    """Seconds of a step, until its loss is known."""
    start = time.perf_counter()
    step(tokens).item()
    return time.perf_counter() - start


def measure(subject: Subject, names: list[str], runs: int) -> dict[str, Row]:
    """Every way, step by step in turn."""
    rows, ways = {name: Row() for name in names}, {}
    for name in names:
        way, rows[name].error = attempt(partial(WAYS[name], subject))
        if not rows[name].error:
            ways[name] = way
    generator = torch.Generator().manual_seed(dist.get_rank())

    def batch() -> Tensor:
        return torch.randint(VOCABULARY, (subject.batch, subject.sequence), generator=generator)

    for _ in range(_WARM_UPS + runs):
        tokens = batch()
        for name in list(ways):
            gc.collect()
            dist.barrier()
            seconds, rows[name].error = attempt(partial(timed, ways[name].step, tokens))
            rows[name].seconds.append(seconds)
            if rows[name].error:
                del ways[name]
    count_everything()
    tokens = batch()
    for name, way in ways.items():
        dist.barrier()
        with counted() as count:
            way.step(tokens)
        rows[name].peak = count.peak
        rows[name].finish()
        stats: Any = getattr(way.step, "stats", None)
        assert stats is None or stats.replays >= runs, f"{name} did not replay"
    count_everything(False)
    expected = ways[EAGER].weights()
    for name, way in ways.items():
        found = [each for _, each in sorted(way.weights().items())]
        pairs = zip(found, (each for _, each in sorted(expected.items())), strict=True)
        rows[name].bitwise = all(torch.equal(a, b) for a, b in pairs)
    return rows


def run(rank: int, folder: str, subjects: list[str], names: list[str], runs: int) -> None:
    """One rank; the first one writes what was measured."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for library in ("transformers", "DeepSpeed", "deepspeed", "torch"):
        logging.getLogger(library).setLevel(logging.ERROR)
    address = {"MASTER_ADDR": "127.0.0.1", "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ.update(address, WORLD_SIZE="2")
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=2)
    results = {}
    for name in subjects:
        results[name] = {
            way: asdict(row) for way, row in measure(SUBJECTS[name], names, runs).items()
        }
    if rank == 0:
        Path(folder, "results.json").write_text(json.dumps(results))
    dist.barrier()
    os._exit(0)  # DeepSpeed's threads and files outlive a destroyed group


def table(results: dict[str, dict[str, dict[str, Any]]]) -> str:
    """A block of rows for each model."""
    lines = []
    for name, found in results.items():
        rows = {way: Row(**row) for way, row in found.items()}
        eager = rows[EAGER]
        heads = (
            f"{'ms':>8}  {'x eager':>7}  {'ready s':>7}  {'peak MB':>7}  {'x eager':>7}  bitwise"
        )
        lines.append(f"{name:<20} {heads}")
        for way, row in rows.items():
            if row.error:
                lines.append(f"  {way:<18} does not run: {row.error}")
                continue
            times = f"{row.median * 1e3:8.1f}  {row.median / eager.median:7.2f}  {row.ready:7.1f}"
            peak = f"{row.peak / 1e6:7.2f}  {row.peak / eager.peak:7.2f}"
            lines.append(f"  {way:<18} {times}  {peak}  {'yes' if row.bitwise else 'no'}")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(SUBJECTS), default=list(SUBJECTS))
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    ways = [EAGER, *(way for way in args.ways if way != EAGER)]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (folder, args.only, ways, args.runs), nprocs=2)
        results = json.loads(Path(folder, "results.json").read_text())
    if args.json:
        print(json.dumps({"machine": machine(), "ways": results}))
        return
    print(machine())
    print("two gloo ranks, one thread each; ratios to eager FSDP2")
    print(table(results))


if __name__ == "__main__":
    main()
