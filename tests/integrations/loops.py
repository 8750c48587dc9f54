"""Training by a framework's own loop, once by eager and once with its integration; run by `test_frameworks.py`.

    python -m tests.integrations.loops FOLDER accelerate.1 accelerate.2 accelerate.2.resumed

writes FOLDER/accelerate.2.0 and so on: what rank 0 of two found, as JSON, or its traceback. The training with the
integration saves a checkpoint of the framework, from which the resumed one continues. Every rank is a process of
its own, since frameworks keep state of the process and end process groups: a fork of this one, which has imported
the frameworks, with the environment that torchrun makes.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import multiprocessing
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import TensorDataset

from tests.ports import free_port

ROWS, BATCH = 44, 8  # the last batch is short
EPOCHS = int(os.environ.get("LOOP_EPOCHS", "10"))
WIDTH, LAYERS, TOKENS = 16, 2, 12  # of the models; a sequence of a language model
WARM, SAVED = 4, 5  # epochs; the checkpoint is between two
SECONDS = 80 + 6 * EPOCHS  # of a training, which may hang


class Training(NamedTuple):
    """What one training gave: all numbers that it logged, its tensors, its calls and replays after the warm-up.

    differences: that audits found, and forwards that ran again for a backward without a program.
    """

    numbers: list[Any]
    tensors: dict[str, Tensor]
    calls: int = 0
    replays: int = 0
    text: str = ""
    differences: int = 0


class Checkpoint(NamedTuple):
    """Where a framework saves its checkpoint, or resumes from it."""

    folder: Path
    resumes: bool

    @property
    def first(self) -> int:
        """The first epoch of a training."""
        return SAVED if self.resumes else 0

    def saves(self, epoch: int) -> bool:
        """Whether it is saved before an epoch."""
        return not self.resumes and epoch == SAVED


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down, self.dropout = nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def rows(number: int | None = None) -> TensorDataset:
    number = ROWS if number is None else number
    generator = torch.Generator().manual_seed(7)
    labels = torch.randint(0, 4, (number,), generator=generator)
    return TensorDataset(torch.randn(number, WIDTH, generator=generator), labels)


def loss_of(model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


def decay(step: int) -> float:
    return 1 / (1 + step / 10)


def tensors_of(model: nn.Module, *optimizers: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Copies of this rank's parameters, buffers and optimizer states."""
    found = dict(model.state_dict())
    for i, optimizer in enumerate(optimizers):
        for j, state in enumerate(optimizer.state.values()):
            found |= {f"{i}.{j}.{key}": value for key, value in state.items()}
    return {
        name: (value.to_local() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in found.items()
        if isinstance(value, Tensor)
    }


class Counter:
    """Counts calls and replays after the warm-up. step: a captured step, or None."""

    def __init__(self, step: Any) -> None:
        self._step, self.calls, self._before = step, 0, -1

    def call(self, epoch: int, times: int = 1) -> None:
        """The model is about to be called."""
        if epoch >= WARM and self._before < 0:
            self._before = self._done
        self.calls += times * (epoch >= WARM)

    @property
    def is_idle(self) -> bool:
        """Whether it counts for no captured step."""
        return self._step is None

    @property
    def _done(self) -> int:
        stats = getattr(self._step, "stats", None)
        if stats is None:
            return 0
        passed = stats.audits - stats.audit_failures  # calls that could replay
        return stats.replays + passed - stats.reruns

    @property
    def replays(self) -> int:
        return self._done - self._before

    @property
    def differences(self) -> int:
        """The audits that have failed, and the forwards that ran again, since the first call."""
        stats = getattr(self._step, "stats", None)
        return 0 if stats is None else stats.audit_failures + stats.reruns


def outcome(eager: Training, ours: Training, resumed: bool = False) -> dict[str, Any]:
    """What the test asserts, of this rank. resumed: whether `ours` has the last numbers only."""
    expected = eager.numbers[-len(ours.numbers) :] if resumed else eager.numbers
    names = eager.tensors.keys() | ours.tensors.keys()
    return {
        "numbers": len(ours.numbers),
        "same_numbers": [*map(repr, expected)] == [*map(repr, ours.numbers)],
        "differ": sorted(
            n
            for n in names
            if n not in eager.tensors
            or n not in ours.tensors
            or not torch.equal(eager.tensors[n], ours.tensors[n])
        ),
        "tensors": len(names),
        "calls": ours.calls,
        "replays": ours.replays,
        "text": ours.text,
        "differences": ours.differences,
    }


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def join(name: str, world: int, port: int, rank: int) -> None:
    """Set the environment of a rank, as torchrun does."""
    if world > 1:
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")
        os.environ.update(zip(names, map(str, (rank, rank, world, world, port)), strict=True))
        os.environ.update(MASTER_ADDR="127.0.0.1", TORCHELASTIC_RUN_ID=name, GROUP_RANK="0")


def forked(world: int, target: Callable[..., None], *args: Any) -> None:
    """Call `target(*args, world, port, rank)` in a process per rank."""
    port = free_port()
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=target, args=(*args, world, port, r)) for r in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(SECONDS)
        process.kill()  # it waits for one that has failed


def train_of(framework: str) -> Callable[..., Training]:
    """Its `train`. framework: may name a kind of training, `trl-sft`."""
    name, _, kind = framework.partition("-")
    train = importlib.import_module(f"tests.integrations.{name}_loop").train
    return functools.partial(train, kind=kind) if kind else train


def train_rank(case: str, folder: Path, world: int, port: int, rank: int) -> None:
    """What a process does: train twice, or resume, and write what it found.

    case: a framework, with a kind of training if it has several, ranks, "resumed": `trl-sft.2`.
    """
    framework, _, *resumed = case.split(".")
    join(case, world, port, rank)
    out = folder / f"{case}.{rank}"
    before = folder / f"{framework}.{world}.{rank}.pt"
    checkpoint = Checkpoint(folder / f"{framework}.{world}.saved", bool(resumed))
    try:
        train = train_of(framework)
        if resumed:
            eager = Training(*torch.load(before, weights_only=False))
        else:
            eager = train(captured=False)
            torch.save(tuple(eager), before)
        text = json.dumps(
            outcome(eager, train(captured=True, checkpoint=checkpoint), bool(resumed))
        )
    except BaseException:
        out.write_text(traceback.format_exc())
        os._exit(1)  # without a word to ranks that wait
    out.write_text(text)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def main() -> None:
    folder, *cases = sys.argv[1:]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of the frameworks
    for case in cases:  # and what they import at the first call
        train_of(case.split(".")[0])
    for name in ("passes", "torch.distributed.checkpoint.state_dict", "functionalize.integrations"):
        importlib.import_module(name)
    gc.freeze()  # a full collection, of which the Trainer asks for one, would visit the objects of the packages
    for case in cases:
        forked(int(case.split(".")[1]), train_rank, case, Path(folder))


if __name__ == "__main__":
    main()
