"""A captured FSDP2 step is saved on both ranks and replays from its first call in processes that never ran it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import functionalize as fz
from functionalize.errors import LoadError
from tests import ranks
from tests.fsdp.twins import differences, flat, grown_storages, state_of
from tests.ranks import run_on_ranks

Twin = tuple[nn.Module, torch.optim.Optimizer, Callable[..., Any]]
BEFORE, AFTER = 4, 4  # steps in the process that saves, and in the one that loads


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.relu(self.up(x))))


def twin(kind: str, layers: int = 2) -> Twin:
    """A sharded model, its optimizer, and a step that leaves no gradient."""
    torch.manual_seed(3)
    model = nn.Sequential(*(Block(6) for _ in range(layers)), nn.Linear(6, 3))
    options: dict[str, Any] = {}
    if kind == "mixed precision":
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if kind == "hybrid":
        options["mesh"] = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    if kind == "own mesh":
        options["mesh"] = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    if kind == "kept unsharded":
        options["reshard_after_forward"] = False
    for layer in model:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def train_step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = model(x)
        loss = nn.functional.cross_entropy(logits.float(), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss, norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    def microbatches(x: Tensor, y: Tensor, last: bool) -> Tensor:
        model.set_requires_gradient_sync(last)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return model, optimizer, microbatches if kind == "microbatches" else train_step


def batch(step: int, kind: str) -> tuple[Any, ...]:
    made = torch.Generator().manual_seed(100 * step + dist.get_rank())
    x = torch.randn(5, 6, generator=made)
    y = torch.randint(3, (5,), generator=made)
    return (x, y, step % 2 == 1) if kind == "microbatches" else (x, y)


def checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return model.state_dict(), optimizer.state_dict()


def save(kind: str, folder: str) -> dict[str, Any]:
    """Train, save the programs and a checkpoint of this rank."""
    model, optimizer, fn = twin(kind)
    step = fz.capture(fn)
    for i in range(BEFORE):
        step(*batch(i, kind))
    if kind == "microbatches":  # once more, as the first pair of calls were warm-ups
        for i in range(2 * BEFORE):
            step(*batch(i, kind))
    path = os.path.join(folder, "step.fzp")
    step.save(path)
    torch.save(checkpoint(model, optimizer), f"{path}.checkpoint{dist.get_rank()}")
    return {"captures": step.stats.captures, "files": sorted(os.listdir(folder))}


def restored(kind: str, folder: str) -> Twin:
    model, optimizer, fn = twin(kind)
    path = os.path.join(folder, f"step.fzp.checkpoint{dist.get_rank()}")
    of_model, of_optimizer = torch.load(path, weights_only=False)
    model.load_state_dict(of_model)
    optimizer.load_state_dict(of_optimizer)
    return model, optimizer, fn


def load(kind: str, folder: str) -> dict[str, Any]:
    """Go on from the checkpoint twice, eagerly and by the loaded programs, in a model that never ran."""
    eager_model, eager_optimizer, eager = restored(kind, folder)
    model, optimizer, fn = restored(kind, folder)
    step = fz.capture(fn)
    step.load(os.path.join(folder, "step.fzp"))
    grown = grown_storages(model)
    found: list[str] = []
    for i in range(BEFORE, BEFORE + AFTER):
        torch.manual_seed(i)
        expected = eager(*batch(i, kind))
        torch.manual_seed(i)
        actual = step(*batch(i, kind))
        found += differences(i, flat(actual), flat(expected))
        found += differences(i, state_of(model, optimizer), state_of(eager_model, eager_optimizer))
        if grown_storages(model) != grown_storages(eager_model):
            found.append(f"step {i}: left grown {grown_storages(model)}")
    stats = step.stats
    calls = (stats.warmups, stats.captures, stats.replays)
    return {"grown": grown, "different": found, "calls": calls, "missed": stats.guard_failures}


KINDS = (
    "plain",
    "mixed precision",
    "hybrid",
    "own mesh",
    "kept unsharded",
    "microbatches",
)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_never_ran_replays_bitwise_from_the_first_call(
    kind: str, tmp_path: Path
) -> None:
    for saved in run_on_ranks(save, kind, str(tmp_path)):
        assert saved["captures"] == (2 if kind == "microbatches" else 1)
        assert {"step.rank0.fzp", "step.rank1.fzp"} & set(saved["files"])
    ranks.close_pools()  # the processes that load are not those that saved
    for loaded in run_on_ranks(load, kind, str(tmp_path)):
        assert loaded == {
            "grown": [],
            "different": [],
            "calls": (0, 0, AFTER),
            "missed": [],
        }
