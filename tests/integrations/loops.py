"""Training by a framework's own loop, once by eager and once with its integration; run by `test_frameworks.py`.

    python -m tests.integrations.loops FOLDER accelerate.1 accelerate.2

writes FOLDER/accelerate.2.0 and so on: what rank 0 of two found, as JSON, or its traceback. Every rank is a process of
its own, since frameworks keep state of the process and end process groups: a fork of this one, which has imported
the frameworks, with the environment that torchrun makes.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import socket
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

ROWS, WIDTH, BATCH, EPOCHS = 44, 16, 8, 10  # the last batch is short
WARM = 4  # epochs


class Training(NamedTuple):
    """What one training gave: all numbers that it logged, its tensors, its calls and replays after the warm-up."""

    numbers: list[Any]
    tensors: dict[str, Tensor]
    calls: int = 0
    replays: int = 0
    text: str = ""


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
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def rows(number: int = ROWS) -> TensorDataset:
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
    def _done(self) -> int:
        stats = getattr(self._step, "stats", None)
        return 0 if stats is None else stats.replays + stats.audits  # audited calls could replay

    @property
    def replays(self) -> int:
        return self._done - self._before


def outcome(eager: Training, ours: Training) -> dict[str, Any]:
    """What the test asserts, of this rank."""
    names = eager.tensors.keys() | ours.tensors.keys()
    return {
        "numbers": len(eager.numbers),
        "same_numbers": [*map(repr, eager.numbers)] == [*map(repr, ours.numbers)],
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
    }


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def train_rank(case: str, folder: Path, port: int, rank: int) -> None:
    """What a process does: train twice, and write what it found. case: a framework and a number of ranks."""
    framework, world = case.split(".")
    if int(world) > 1:
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")
        values = map(str, (rank, rank, world, world, port))
        os.environ.update(zip(names, values, strict=True))
        os.environ.update(MASTER_ADDR="127.0.0.1", TORCHELASTIC_RUN_ID=case, GROUP_RANK="0")
    out = folder / f"{case}.{rank}"
    try:
        train = importlib.import_module(f"tests.integrations.{framework}_loop").train
        text = json.dumps(outcome(train(captured=False), train(captured=True)))
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
    for case in cases:
        importlib.import_module(f"tests.integrations.{case.split('.')[0]}_loop")
    fork = multiprocessing.get_context("fork")
    for case in cases:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        ranks = [
            fork.Process(target=train_rank, args=(case, Path(folder), port, rank))
            for rank in range(int(case.split(".")[1]))
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(120)
            process.kill()  # it waits for one that has failed


if __name__ == "__main__":
    main()
