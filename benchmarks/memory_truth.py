"""The accuracy of `step.memory.eager`: against the allocator's own events, and against torch's `FSDPMemTracker`.

    python -m benchmarks.memory_truth [--only NAME ...] [--json]

Training steps of a small Hugging Face Llama under FSDP2 on two gloo ranks, the third step, on rank 0; and of a ResNet,
a U-Net and an LSTM on one rank. Three equal models take the same step: one under `torch.profiler`, one captured with
`memory=True`, one under `FSDPMemTracker`. Then the last two again, on fake tensors of two fake ranks.

The truth is every allocation and free of CPU memory on the thread that runs the step (autograd's is the same on the
CPU), in order, in bytes, as c10 reports them, except gloo's: allocations of its threads are not reported, and its
allocations on the step's thread, inside a collective or its wait, are counted separately (`gloo`: the most at one
moment). Other backends have other buffers: they are not part of a step. gloo's threads also release a collective's
tensors shortly after it completes, sometimes after Python released them: so the truth is the step with the lowest peak
of five, and the recording that of three.

    peak        the most bytes of the truth beyond those that were live when the step began
    eager       difference of the timeline's peak from it: what kernels allocate inside themselves, see docs/plan.md
    anywhere    the two sequences of signed bytes, aligned as a diff does it: the greatest difference between the
                running totals after any event that both have
    extra       events of the timeline that the allocator does not have
    inside      the most scratch bytes of ops at any moment of the truth
    tracker     difference of `FSDPMemTracker`'s peak, minus its bytes when the step began; `fails` if it raises
    fake        the same on fake tensors
"""

from __future__ import annotations

import argparse
import difflib
import json
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import record_function
from torch.testing._internal.distributed.fake_pg import FakeStore

import functionalize as fz
from benchmarks.allocations import allocations, count_everything, counted
from benchmarks.machine import machine
from benchmarks.models import Recurrent, ResNet, UNet
from functionalize.planner.lifetimes.lifetimes import Lifetimes
from functionalize.planner.timeline.timeline import BEFORE, Timeline

VOCABULARY = 257
_STEPS, _CAPTURES = 5, 3
WAIT = "a wait for a collective"
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@dataclass
class Subject:
    """A model, its optimizer, a step of both, a batch for it, the loss of the step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[Tensor], Tensor]
    batch: Callable[[], Tensor]
    loss: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """A training step. model: None: Llama. width: its hidden size; its sequence grows with it."""

    model: type[ResNet | UNet | Recurrent] | None = None
    layers: int = 3
    width: int = 64
    bf16: bool = False
    reshard: bool = True
    checkpoint: bool = False
    optimizer: str = "fused"
    clip: bool = False

    def build(self, mesh: Any = None) -> Subject:
        torch.manual_seed(0)
        if self.model is not None:
            model, shape = self.model(), self.model.batch
            return self._subject(model, lambda: torch.randn(shape), model)
        model, length = llama(self.layers, self.width), self.width // 2
        policy = BF16 if self.bf16 else MixedPrecisionPolicy()
        for i, layer in enumerate(model.model.layers):
            if self.checkpoint:
                model.model.layers[i] = layer = checkpoint_wrapper(layer)
            fully_shard(layer, mesh=mesh, reshard_after_forward=self.reshard, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)

        # Without a mask the model looks at data to find out that it needs none, and cannot on fakes.
        mask = torch.ones(1, 1, length, length, dtype=torch.bool).tril()

        def loss(tokens: Tensor) -> Tensor:
            given = {"input_ids": tokens, "labels": tokens, "attention_mask": mask}
            return model(**given, use_cache=False).loss

        return self._subject(model, lambda: torch.randint(VOCABULARY, (2, length)), loss)

    def _subject(self, model: nn.Module, batch: Any, loss: Callable[[Tensor], Tensor]) -> Subject:
        form = {"foreach": False} if self.optimizer == "for-loop" else {self.optimizer: True}
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **form)  # type: ignore[arg-type]

        def step(x: Tensor) -> Tensor:
            value = loss(x)
            value.backward()
            if self.clip:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return value.detach()

        return Subject(model, optimizer, step, batch, loss)


def llama(layers: int, width: int = 64) -> Any:
    """Hugging Face's, with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=172 * width // 64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=width,
    )
    return LlamaForCausalLM(config)


CASES = {
    "Llama": Case(),
    "Llama, bf16": Case(bf16=True),
    "Llama, not resharded": Case(reshard=False),
    "Llama, checkpointed": Case(checkpoint=True),
    "Llama, checkpointed, bf16": Case(checkpoint=True, bf16=True),
    "Llama, foreach AdamW": Case(optimizer="foreach"),
    "Llama, for-loop AdamW": Case(optimizer="for-loop"),
    "Llama, clipped": Case(clip=True),
    "Llama, wide": Case(width=512),
    "Llama, wide, bf16": Case(width=512, bf16=True),
    "ResNet": Case(ResNet),
    "U-Net": Case(UNet),
    "LSTM": Case(Recurrent),
}
ALONE = [name for name, case in CASES.items() if case.model is not None]

# -- the truth -------------------------------------------------------------------------------------


@dataclass
class Truth:
    """Signed bytes, event by event. gloo: the allocations inside a collective or its wait."""

    events: list[int]
    gloo: list[int]

    @property
    def peak(self) -> int:
        return max(_totals(self.events))


def _totals(events: list[int]) -> list[int]:
    total, found = 0, [0]
    for nbytes in events:
        total += nbytes
        found.append(total)
    return found


def truth_of(case: Case) -> Truth:
    """The third step, by the allocator, or one of the four after it: whichever has the lowest peak."""
    subject = case.build()
    for _ in range(2):
        subject.step(subject.batch())
    return min((_watched(subject) for _ in range(_STEPS)), key=lambda truth: truth.peak)


def _watched(subject: Subject) -> Truth:
    x = subject.batch()
    _together()
    with marked_waits(), counted() as count:
        loss = subject.step(x)
    del loss
    truth = Truth([], [])
    made: dict[int, list[int]] = {}
    for event, above in allocations(count.tree)[1:]:
        nbytes, at = event.typed[1].alloc_size, event.typed[1].ptr
        if nbytes > 0:
            inside = any(name.startswith((WAIT, "c10d::", "gloo:")) for name in above)
            made[at] = truth.gloo if inside else truth.events
        made.get(at, truth.events).append(nbytes)
    return truth


@contextmanager
def marked_waits() -> Iterator[None]:
    """What happens while a collective is waited for has that above it."""
    original = dist.Work.wait

    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        with record_function(WAIT):
            return original(self, *args, **kwargs)

    dist.Work.wait = wait  # type: ignore[method-assign]
    try:
        yield
    finally:
        dist.Work.wait = original  # type: ignore[method-assign]


def _together() -> None:
    if dist.is_initialized() and dist.get_world_size() > 1 and dist.get_backend() == "gloo":
        dist.barrier()


# -- what is compared with it ----------------------------------------------------------------------


def lifetimes_of(case: Case) -> Lifetimes:
    """What a capture notes; of several captures, the one with the lowest peak."""
    found = []
    for _ in range(_CAPTURES if dist.is_initialized() else 1):
        subject = case.build()
        step = fz.capture(subject.step, memory=True)
        for _ in range(4):
            _together()
            step(subject.batch())
        assert step.memory is not None, step.explain()
        found.append(step.memory)
    return min(found, key=lambda memory: memory.eager.peak).lifetimes


def events_of(timeline: Timeline) -> list[int]:
    """The signed bytes of the step itself."""
    return [event.nbytes for event in timeline.events if event.op != BEFORE]


def aligned(truth: list[int], ours: list[int]) -> tuple[int, int]:
    """(the greatest difference after an event that both have, how many only `ours` has)."""
    matcher = difflib.SequenceMatcher(None, truth, ours, autojunk=False)
    a, b = _totals(truth), _totals(ours)
    greatest, both = 0, 0
    for i, j, size in matcher.get_matching_blocks():
        both += size
        for k in range(1, size + 1):
            greatest = max(greatest, abs(a[i + k] - b[j + k]))
    return greatest, len(ours) - both


def inside(truth: list[int], ours: list[int]) -> int:
    """The most bytes at one moment that only the truth has."""
    matcher = difflib.SequenceMatcher(None, truth, ours, autojunk=False)
    alone, at = [], 0
    for i, _, size in matcher.get_matching_blocks():
        alone += truth[at:i]
        at = i + size
    return max(_totals(alone))


def tracked(case: Case, mesh: Any = None) -> int | None:
    """The peak of `FSDPMemTracker` minus its bytes on entry; None if it fails."""
    try:
        subject = case.build(mesh)
        for _ in range(2):
            subject.step(subject.batch())
        tracker, x = FSDPMemTracker(subject.model, subject.optimizer), subject.batch()
        tracker.track_inputs((x,))
        with tracker:
            before = _total(tracker.get_tracker_snapshot("current"))
            subject.step(x)
        return _total(tracker.get_tracker_snapshot("peak")) - before
    except Exception:
        return None


def _total(snapshot: dict[torch.device, dict[str, int]]) -> int:
    return sum(by_kind["Total"] for by_kind in snapshot.values())


def measure(case: Case) -> dict[str, Any]:
    """One case on real tensors."""
    truth = truth_of(case)
    lifetimes = lifetimes_of(case)
    timeline = lifetimes.timeline()
    ours = events_of(timeline)
    greatest, extra = aligned(truth.events, ours)
    return {
        "peak": truth.peak,
        "gloo": max(_totals(truth.gloo)),
        "eager": max(_totals(ours)) - truth.peak,
        "anywhere": greatest,
        "extra": extra,
        "inside": inside(truth.events, ours),
        "unknown": timeline.categories_at(timeline.peak_at).get("unknown", 0),
        "tracker": _less(tracked(case) if case.model is None else None, truth.peak),
    }


def _less(value: int | None, by: int) -> int | None:
    return None if value is None else value - by


def measure_fake(case: Case) -> dict[str, Any]:
    """The same case on fake tensors, in worlds of two."""
    with fz.world(size=2, target="cpu"):
        timeline = lifetimes_of(case).timeline()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        with FakeTensorMode():
            other = tracked(case, mesh) if case.model is None else None
    finally:
        dist.destroy_process_group()
    return {"fake": max(_totals(events_of(timeline))), "fake tracker": other}


# -- main ------------------------------------------------------------------------------------------


def run(rank: int, folder: str, names: list[str], world: int) -> None:
    """One rank; the first one writes what was measured."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    logging.getLogger("functionalize").setLevel(logging.ERROR)
    count_everything()
    if world > 1:
        dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=world)
    results = {name: measure(CASES[name]) for name in names}
    if rank == 0:
        Path(folder, f"results{world}.json").write_text(json.dumps(results))
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


def run_fake(rank: int, folder: str, names: list[str]) -> None:
    """The fake worlds."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    llama(1)  # what transformers imports must not be imported inside a world
    results = {name: measure_fake(CASES[name]) for name in names}
    Path(folder, "fake.json").write_text(json.dumps(results))


def measured(names: list[str]) -> dict[str, dict[str, Any]]:
    """Every case, in processes of their own."""
    together = [name for name in names if name not in ALONE]
    alone = [name for name in names if name in ALONE]
    with tempfile.TemporaryDirectory() as folder:
        results: dict[str, dict[str, Any]] = {}
        for world, own in ((2, together), (1, alone)):
            if own:
                mp.spawn(run, (folder, own, world), nprocs=world)
                results |= json.loads(Path(folder, f"results{world}.json").read_text())
        mp.spawn(run_fake, (folder, names), nprocs=1)
        fakes = json.loads(Path(folder, "fake.json").read_text())
    for name, found in fakes.items():
        peak = results[name]["peak"]
        results[name] |= {key: _less(value, peak) for key, value in found.items()}
    return {name: results[name] for name in names}


COLUMNS = ("peak", "gloo", "eager", "anywhere", "extra", "inside", "tracker", "fake")


def table(results: dict[str, dict[str, Any]]) -> str:
    """One row for each case, in bytes."""
    wide = max(map(len, results))
    heads = (*COLUMNS, "fake tracker")
    lines = [f"{'bytes':<{wide}}" + "".join(f" {head:>12}" for head in heads)]
    for name, found in results.items():
        cells = ("" if found[h] is None else f"{found[h]:,}" for h in heads)
        lines.append(f"{name:<{wide}}" + "".join(f" {cell:>12}" for cell in cells))
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results = measured(args.only)
    if args.json:
        print(json.dumps({"machine": machine(), "bytes": results}))
        return
    print(machine())
    print(table(results))


if __name__ == "__main__":
    main()
