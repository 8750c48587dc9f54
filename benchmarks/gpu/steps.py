"""FSDP2 steps on one GPU: eager against replay, memory against the plan, bit for bit or not.

    1 rank: overhead, 4 layers, default: requested peak       5,242,880 bytes       5,242,880 bytes

The models and the ways are those of `benchmarks.step_time`. Memory: each way alone, after five steps, beyond what was
live before it was built; the plan is of the same step in a fake world. Time: all ways alternate, medians; `thread CPU
time` is of the thread that calls the step, without autograd's thread, which runs eager's backward on a GPU: `process
CPU time` has both. The modelled time is a roofline, which no eager step is faster than. Bits: every loss, against
eager's; where the row of a second eager model (`eager again`) differs, nothing follows from the others.
"""

from __future__ import annotations

import gc
import os
import statistics
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import functionalize as fz
from benchmarks.capture import VOCABULARY
from benchmarks.gpu.device import Device, Times
from benchmarks.gpu.options import Options
from benchmarks.gpu.rows import Prediction, Rows, words
from benchmarks.step_time import SUBJECTS, WAYS, Step, Subject
from functionalize.errors import TargetError
from functionalize.planner.fake_world.target import Target

EAGER, AGAIN = "eager", "eager again"
LEVELS = ("requested", "allocated", "reserved")
COMPILED = ("layers", "inductor")
PIPELINES = {"boxed": "", "default": "default", "fast": "fast"}  # way -> passes of its program
_SETTLING = 5
_TINY = {"overhead, 1 layer": Subject(1, 32, 2, 8)}


def subject_of(options: Options, at: int) -> tuple[str, Subject]:
    """The model of that index, and its name; there is one small model."""
    return list((_TINY if options.small else SUBJECTS).items())[at]


def ways(options: Options, ranks: int) -> list[str]:
    """The ways to run a step: those of `benchmarks.step_time` that the device has, without those that are compiled."""
    graphs = options.device == "cuda" and not options.small and ranks == 1
    return [EAGER, *PIPELINES, *["cudagraphs"] * graphs]


def _prefix(name: str, ranks: int) -> str:
    return f"{ranks} rank{'s' * (ranks > 1)}: {name}"


# -- predicted ---------------------------------------------------------------------------------------


def figures(subject: Subject, options: Options, ranks: int) -> dict[str, Any]:
    """The planned figures of each pipeline. Raises the error of the first that failed.

    Where no fused attention accepts the model (grouped heads in float32) the plan is of math attention.
    """
    try:
        return _figures(subject, options, ranks, options.target)
    except TargetError:
        return _figures(subject, options, ranks, replace(options.target, attention="math"))


def _figures(subject: Subject, options: Options, ranks: int, target: Target) -> dict[str, Any]:

    def step(model: Any, optimizer: Any, tokens: Tensor) -> Tensor:
        return subject.training(model, optimizer)(tokens)

    found = fz.plan(
        lambda: subject.sharded(options.device),
        step,
        inputs=lambda: (torch.randint(VOCABULARY, (subject.batch, subject.sequence)),),
        world=ranks,
        target=target,
        machine=options.machine,
        grid={"passes": list(PIPELINES.values())},
    )
    for plan in found.plans:
        if plan.cause is not None:
            raise plan.cause
    return {way: plan.figures for way, plan in zip(PIPELINES, found.plans, strict=True)}


def predict(options: Options, ranks: int = 1, at: int = 0) -> dict[str, Prediction]:
    """Memory and time of every step of one model, and which of them are bit for bit eager's."""
    name, subject = subject_of(options, at)
    start = _prefix(name, ranks)
    bitwise = [way for way in (*ways(options, ranks), AGAIN) if way != EAGER]
    found = {f"{start}, {way}: losses equal eager's": Prediction(True) for way in bitwise}
    try:
        planned = figures(subject, options, ranks)
    except Exception as error:
        lost = Prediction(None, "bytes", error=words(error))
        return found | {f"{start}, {EAGER}: requested peak": lost}
    return found | _claims(start, planned, options.device == "cuda")


def _claims(start: str, planned: dict[str, Any], on_gpu: bool) -> dict[str, Prediction]:
    found = {}
    for way in (EAGER, *PIPELINES):
        each = planned["boxed" if way == EAGER else way]
        levels = each.memory.levels("eager" if way == EAGER else "program")
        for level in LEVELS if on_gpu else LEVELS[:1]:
            found[f"{start}, {way}: {level} peak"] = Prediction(getattr(levels, level), "bytes")
    seconds = planned["boxed"].time.seconds
    found[f"{start}, {EAGER}: device time"] = Prediction(seconds, "s", "at least")
    return found


# -- measured ----------------------------------------------------------------------------------------


def measure(
    options: Options, rows: Rows, ranks: int = 1, at: int = 0, backend: str | None = None
) -> None:
    """Every step of one model. backend: of the process group; None: that of the device."""
    backend = backend or ("nccl" if options.device == "cuda" else "gloo")
    with tempfile.TemporaryDirectory() as folder:
        args = (folder, options, rows, ranks, at, backend)
        if ranks == 1:
            _rank(0, *args)
        else:
            with rows.guarded(f"{ranks} ranks on {backend}"):
                mp.spawn(_rank, args, nprocs=ranks)


def _rank(
    rank: int, folder: str, options: Options, rows: Rows, ranks: int, at: int, backend: str
) -> None:
    """One rank; the first one writes rows."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if rank:
        rows = Rows(rows.part, {}, Path(os.devnull))
    name, subject = subject_of(options, at)
    run = Run(options, rows, Device(options.device), subject, _prefix(name, ranks))
    dist.init_process_group(
        backend,
        f"file://{folder}/rendezvous",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
    )
    try:
        with rows.guarded(f"{ranks} ranks on {backend}"):
            warm_up(options.device)
            run.memory(ways(options, ranks))
            run.times_and_bits(run.start, [*ways(options, ranks), AGAIN])
            if ranks == 1 and not options.small:  # last, as compilers may take all the time left
                run.times_and_bits(f"{run.start}, compiled", [EAGER, *COMPILED])
                run.memory(COMPILED)
            dist.barrier()
    finally:
        dist.destroy_process_group()


def warm_up(device: str) -> None:
    """Communicate and multiply once, forward and backward: workspaces and communicators exist from here on."""
    x = torch.randn(64, 64, device=device, requires_grad=True)
    torch.nn.functional.linear(x, x, x[0]).sum().backward()
    dist.all_reduce(x.grad)


def _batches(subject: Subject, device: str) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = subject.batch, subject.sequence
    while True:
        yield torch.randint(VOCABULARY, shape, generator=generator).to(device)


@dataclass(frozen=True)
class Run:
    """The measurements of one model. start: of its facts."""

    options: Options
    rows: Rows
    device: Device
    subject: Subject
    start: str

    def memory(self, names: Sequence[str]) -> None:
        """The peak of each way, alone."""
        for way in names:
            with self.rows.guarded(f"{self.start}, {way}: memory"):
                self._memory(way)
            self.device.release()

    def _memory(self, way: str) -> None:
        self.device.release()
        before = self.device.live()
        step = WAYS[way](self.subject, self.options.device)
        tokens = next(_batches(self.subject, self.options.device))
        for _ in range(_SETTLING):
            step(tokens)
        self.device.release()
        with self.device.peak() as peak:
            step(tokens)
        for level in LEVELS:
            most, base = getattr(peak, level), getattr(before, level)
            if most is not None:
                self.rows.add(f"{self.start}, {way}: {level} peak", most - base, "bytes")

    def times_and_bits(self, start: str, names: Sequence[str]) -> None:
        """The times and the losses of all ways, which alternate. start: of the facts."""
        runs = 3 if self.options.small else 20
        steps: dict[str, Step] = {}
        for way in names:
            with self.rows.guarded(f"{start}, {way}: time"):
                build = WAYS[EAGER if way == AGAIN else way]
                steps[way] = build(self.subject, self.options.device)
        times: dict[str, list[Times]] = {way: [] for way in steps}
        losses: dict[str, list[Tensor]] = {way: [] for way in steps}
        batches = _batches(self.subject, self.options.device)
        for i in range(-_SETTLING, runs):
            tokens = next(batches)
            gc.collect()
            for way, step in list(steps.items()):
                try:
                    taken = self.device.times(partial(_append, losses[way], step, tokens))
                except Exception as error:
                    self.rows.failed(f"{start}, {way}: time", words(error))
                    del steps[way]
                    continue
                if i >= 0:
                    times[way].append(taken)
        for way, step in steps.items():
            self._add(f"{start}, {way}", step, times[way])
            if way != EAGER:
                equal = _equal(losses[way], losses[EAGER])
                fact = f"{start}, {way}: losses equal eager's"
                self.rows.add(fact, equal, note=_first(losses[way], losses[EAGER]))

    def _add(self, start: str, step: Step, times: list[Times]) -> None:
        names = (
            "thread CPU time",
            "process CPU time",
            "time until the call returns",
            "device time",
        )
        for name, column in zip(names, zip(*times, strict=True), strict=True):
            self.rows.add(f"{start}: {name}", statistics.median(column), "s")
        stats: Any = getattr(step, "stats", None)
        if stats is not None:
            self.rows.add(f"{start}: replays", stats.replays, note=f"of {len(times)} steps or more")


def _append(losses: list[Tensor], step: Step, tokens: Tensor) -> None:
    losses.append(step(tokens).clone())


def _equal(ours: list[Tensor], eager: list[Tensor]) -> bool:
    return len(ours) == len(eager) and all(map(torch.equal, ours, eager))


def _first(ours: list[Tensor], eager: list[Tensor]) -> str:
    """The first step whose loss differs from eager's, and by how much."""
    for i, (a, b) in enumerate(zip(ours, eager, strict=False)):
        if not torch.equal(a, b):
            return f"step {i}: {a.item()!r} for {b.item()!r}"
    return f"{len(ours)} steps"
