"""Peak live bytes of a training step, on two gloo ranks: eager FSDP2, and its captured step.

    python -m benchmarks.memory [--only NAME ...] [--passes PIPELINE ...] [--where] [--json]

Every model with `optimizer.zero_grad()` at the end of the step, and at its beginning.

Counted by c10's own allocator count on rank 0, the same for every way (`benchmarks/allocations.py`): every CPU tensor
byte of the process, gloo's buffers included; medians of seven steps. Megabytes of 10**6 bytes:

    state   live when the step begins: shards, optimizer state, the batch
    peak    the most that is live at one moment of the step, minus `state`: the need of the step itself

The columns after are `peak` as a ratio to eager's, and after the bar `state + peak` as a ratio to eager's. AdamW.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.fsdp import fully_shard

import functionalize as fz
from benchmarks.allocations import count_everything, counted
from benchmarks.capture import VOCABULARY
from benchmarks.machine import machine
from benchmarks.step_time import SUBJECTS, Step, Subject
from functionalize.errors import PassError

EAGER, _STEPS = "eager", 7
SMALL, DEEP, WIDE, LLAMA = SUBJECTS.values()
OTHERS = {  # no pass was tuned on these
    "Llama, width 256, 8 layers": Subject(8, 256, 2, 32, "llama"),
    "Llama, width 192, 6 layers": Subject(6, 192, 4, 48, "llama"),
    "GPT-2, width 128, 6 layers": Subject(6, 128, 2, 32, "gpt2"),
    "GPT-2, width 384, 3 layers": Subject(3, 384, 4, 64, "gpt2"),
}


@dataclass(frozen=True)
class Case:
    """A model and its batch, how it is sharded, the form of AdamW, and where the step calls `zero_grad`.

    forward: the loss is captured with its backward, the optimizer runs eagerly.
    """

    subject: Subject
    optimizer: str = "fused"
    reshard: bool = True
    zeros_first: bool = False
    forward: bool = False

    def step(self, pipeline: str = EAGER) -> Step:
        """The training step as it is measured, one FSDP2 unit for each layer and one for the rest.

        pipeline: `EAGER`, or the passes with which it is captured.
        """
        model, layers = self.subject.model()
        for layer in layers:
            fully_shard(layer, reshard_after_forward=self.reshard)
        fully_shard(model)
        form = {} if self.optimizer == "default" else {self.optimizer: True}
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **form)  # type: ignore[arg-type]
        if pipeline == EAGER:
            return self.subject.training(model, optimizer, self.zeros_first)
        # allowance: every recording is kept at once.
        options: dict[str, Any] = {"passes": pipeline, "audit": False, "allowance": None}
        if not self.forward:
            return fz.capture(self.subject.training(model, optimizer, self.zeros_first), **options)
        loss_of = fz.capture(self.subject.loss(model), backward=True, **options)
        step: Any = self.subject.training(model, optimizer, self.zeros_first, loss_of)
        step.stats, step.explain = loss_of.stats, loss_of.explain
        return step

    def batch(self) -> Tensor:
        """Random tokens."""
        return torch.randint(VOCABULARY, (self.subject.batch, self.subject.sequence))


def cases() -> dict[str, Case]:
    """The subjects, with `zero_grad` last and first, the forms of AdamW, resharded after forward or not."""
    found = {name: Case(subject) for name, subject in (SUBJECTS | OTHERS).items()}
    found |= {
        f"{name}, zero_grad first": replace(each, zeros_first=True) for name, each in found.items()
    }
    for name, subject in (("4 layers", SMALL), ("width 512", WIDE)):
        found[f"{name}, AdamW default"] = Case(subject, "default")
        found[f"{name}, AdamW foreach"] = Case(subject, "foreach")
        found[f"{name}, not resharded"] = Case(subject, reshard=False)
        found[f"{name}, a captured forward"] = Case(subject, forward=True)
    return found


@dataclass(frozen=True)
class Peak:
    """Bytes. where: the ops at the moment of the peak, outermost first."""

    state: int
    peak: int
    where: tuple[str, ...]


def settle(step: Step, batch: Callable[[], Tensor]) -> None:
    """Run until a captured step replays, an eager one as often."""
    for _ in range(5):
        step(batch())
    stats: Any = getattr(step, "stats", None)
    assert stats is None or stats.replays >= 2, step.explain()  # type: ignore[attr-defined]


def measure(case: Case, pipeline: str) -> Peak:
    """The count of the step with the median peak of several: gloo's threads free at varying times."""
    with counted() as others:  # bytes left over from the ways measured before
        pass
    step = case.step(pipeline)
    settle(step, case.batch)
    found = []
    for _ in range(_STEPS):
        batch = case.batch()
        with counted() as count:
            step(batch)
        found.append(Peak(count.before - others.before, count.peak, count.where))
    return sorted(found, key=lambda each: each.peak)[_STEPS // 2]


def run(rank: int, folder: str, names: list[str], pipelines: list[str]) -> None:
    """One rank; the first one writes what was measured."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    count_everything()
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=2)
    results: dict[str, dict[str, Any]] = {}
    for name in names:
        results[name] = {}
        for pipeline in (EAGER, *pipelines):
            try:
                results[name][pipeline] = vars(measure(cases()[name], pipeline))
            except PassError:  # of a captured forward, whose collectives no pass may change
                results[name][pipeline] = {}
    if rank == 0:
        Path(folder, "results.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def table(results: dict[str, dict[str, Any]], pipelines: list[str], where: bool) -> str:
    """One row for each case."""
    wide = max(map(len, results))
    heads = "".join(f"  {p or 'no passes':>13}" for p in pipelines)
    lines = [f"{'':<{wide}}  {'state MB':>9}  {'eager MB':>9}{heads}"]
    for name, found in results.items():
        eager = found[EAGER]
        line = f"{name:<{wide}}  {eager['state'] / 1e6:9.2f}  {eager['peak'] / 1e6:9.2f}"
        whole = eager["state"] + eager["peak"]
        for p in pipelines:
            if not found[p]:
                line += f"{'refused':>15}"
                continue
            own, all_of_it = found[p]["peak"], found[p]["state"] + found[p]["peak"]
            line += f"  {own / eager['peak']:6.2f} | {all_of_it / whole:4.2f}"
        lines.append(line)
        if where:
            lines += [f"    {p}: {' > '.join(e['where'])}" for p, e in found.items() if e]
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=list(cases()), choices=list(cases()))
    parser.add_argument("--passes", nargs="+", default=["", "default", "fast"], metavar="PIPELINE")
    parser.add_argument("--where", action="store_true", help="which op runs at the peak")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (folder, args.only, args.passes), nprocs=2)
        results = json.loads(Path(folder, "results.json").read_text())
    if args.json:
        print(json.dumps({"machine": machine(), "bytes": results}))
        return
    print(machine())
    print("two gloo ranks, bytes of rank 0")
    print(table(results, args.passes, args.where))


if __name__ == "__main__":
    main()
