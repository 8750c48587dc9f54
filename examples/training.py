"""A plain training script under FSDP2: the captured step is one line, everything else is as without it.

    torchrun --nproc-per-node 2 examples/training.py --steps 20 --folder /tmp/run
    torchrun --nnodes 2 --node-rank 0 --rdzv-backend c10d --rdzv-endpoint localhost:29400 --nproc-per-node 1 \\
        examples/training.py --folder /tmp/run          (and the same with --node-rank 1)
    torchrun ... examples/training.py --eager           without capture: the same losses, bit for bit

DataLoader with a DistributedSampler, four microbatches per step, clipping, LambdaLR, an evaluation every five steps,
and a checkpoint (DCP) from which the next run, or a worker that torchrun restarts, resumes. There are programs for the
first microbatch of a step, for the others and the last, for the update and the evaluation, and for short batches.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.rendezvous import rendezvous
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import functionalize as fz

WIDTH, CLASSES, BATCH, MICROBATCHES = 32, 8, 8, 4
EVALUATE_EVERY = 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


def build() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)), nn.Linear(WIDTH, CLASSES))
    for block in model:
        fully_shard(block)
    return fully_shard(model)


def rows(number: int, seed: int) -> TensorDataset:
    """Points around one centre per class."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(0, CLASSES, (number,), generator=generator)
    return TensorDataset(centres[labels] + torch.randn(number, WIDTH, generator=generator), labels)


def decay(step: int) -> float:
    return min(1.0, (step + 1) / 5) / (1 + step / 50)


class Training:
    """A model with its optimizer and schedule, which are saved and loaded together."""

    def __init__(self, folder: Path, eager: bool) -> None:
        self.folder, self.done = folder, 0  # steps
        self.model = build()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, decay)
        capture: Callable[[Any], Any] = (lambda step: step) if eager else fz.capture
        self.microbatch = capture(self.microbatch)
        self.update = capture(self.update)
        self.loss_of = capture(self.loss_of)

    def microbatch(self, x: Tensor, y: Tensor, is_last: bool) -> Tensor:
        self.model.set_requires_gradient_sync(is_last)
        loss = nn.functional.cross_entropy(self.model(x), y) / MICROBATCHES
        loss.backward()
        return loss.detach()

    def update(self) -> Tensor:
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm.full_tensor()

    def loss_of(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            return nn.functional.cross_entropy(self.model(x), y)

    def evaluate(self, loader: DataLoader[Any]) -> float:
        self.model.eval()
        losses = torch.stack([self.loss_of(x, y) for x, y in loader])
        self.model.train()
        total = losses.mean()
        dist.all_reduce(total)
        return (total / dist.get_world_size()).item()

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        generator = {f"generator{dist.get_rank()}": torch.get_rng_state()}
        schedule = self.schedule.state_dict()
        step = {"step": self.done, "schedule": schedule}
        return {"model": model, "optimizer": optimizer, **generator, **step}

    def save(self) -> None:
        dcp.save(self.state(), checkpoint_id=str(self.folder / f"step{self.done}"))
        dist.barrier()
        if dist.get_rank() == 0:
            (self.folder / "latest").write_text(str(self.done))

    def resume(self) -> None:
        """Load the last checkpoint, if there is one."""
        latest = self.folder / "latest"
        if not latest.exists():
            return
        state = self.state()
        dcp.load(state, checkpoint_id=str(self.folder / f"step{latest.read_text()}"))
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.schedule.load_state_dict(state["schedule"])
        torch.set_rng_state(state[f"generator{dist.get_rank()}"])
        self.done = state["step"]


def batches(loader: DataLoader[Any], sampler: DistributedSampler[Any], skip: int) -> Iterator[Any]:
    """The microbatches of all epochs, from the one after `skip` on."""
    epoch, skip = divmod(skip, len(loader))
    while True:
        sampler.set_epoch(epoch)
        for i, batch in enumerate(loader):
            if i >= skip:
                yield batch
        epoch, skip = epoch + 1, 0


def train(training: Training, steps: int, fail_at: int | None = None) -> list[Any]:
    """Train up to `steps`; returns (step, loss, norm, learning rate, evaluation or None) of each."""
    generator = torch.Generator()  # the order of the loader is the sampler's
    data = rows(264, seed=1)
    sampler: DistributedSampler[Any] = DistributedSampler(data)
    loader = DataLoader(data, BATCH, sampler=sampler, generator=generator)
    held_out = DataLoader(rows(20, seed=2 + dist.get_rank()), BATCH, generator=generator)
    found, source = [], batches(loader, sampler, training.done * MICROBATCHES)
    while training.done < steps:
        loss = torch.zeros(())
        for i in range(MICROBATCHES):
            loss += training.microbatch(*next(source), i == MICROBATCHES - 1)
        norm = training.update()
        training.schedule.step()
        training.done += 1
        evaluation = None
        if training.done % EVALUATE_EVERY == 0:
            evaluation = training.evaluate(held_out)
            training.save()
        rate = training.schedule.get_last_lr()[0]
        found.append((training.done, loss.item(), norm.item(), rate, evaluation))
        if training.done == fail_at and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
            raise RuntimeError("this worker fails once, as --fail-at says")
    return found


def run(folder: Path, steps: int, eager: bool = False, fail_at: int | None = None) -> list[str]:
    """Train in the process group that there is, from the last checkpoint on; returns a line for each step.

    fail_at: a step after which this rank fails, once.
    """
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(dist.get_rank())
    training = Training(folder, eager)
    torch.manual_seed(dist.get_rank())
    training.resume()
    line = "step {}: loss {!r}, norm {!r}, rate {!r}, evaluation {!r}"
    lines = [line.format(*each) for each in train(training, steps, fail_at)]
    return lines if eager else [*lines, repr(training.microbatch)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", type=Path, required=True, help="of the checkpoints")
    parser.add_argument("--eager", action="store_true", help="do not capture")
    parser.add_argument("--fail-at", type=int, help="a step after which rank 0 fails, once")
    given = parser.parse_args()
    # Workers that torchrun starts again meet the store of the first ones (torch 2.13): without a prefix they would find
    # gloo's old addresses there.
    store, rank, size = next(rendezvous("env://"))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"attempt {attempt}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    lines = run(given.folder, given.steps, given.eager, given.fail_at if rank == 0 else None)
    if rank == 0:
        print(*lines, sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
