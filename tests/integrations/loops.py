"""Training by a framework's own loop, once by eager and once with its integration; run by `test_frameworks.py`.

    python -m torch.distributed.run --nproc-per-node 2 -m tests.integrations.loops accelerate out.json

A process of its own: frameworks keep state of the process, and end process groups.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
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


def main() -> None:
    import importlib

    framework, path = sys.argv[1:]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of the frameworks
    train = importlib.import_module(f"tests.integrations.{framework}_loop").train
    found = outcome(train(captured=False), train(captured=True))
    rank = dist.get_rank() if dist.is_initialized() else 0
    with open(f"{path}.{rank}", "w") as file:
        json.dump(found, file)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
