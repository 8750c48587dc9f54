"""A loop with Lightning Fabric: accumulation, clipping, a scheduler, an evaluation per epoch."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from lightning.fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import functionalize as fz
from tests.integrations.loops import (
    BATCH,
    EPOCHS,
    Checkpoint,
    Counter,
    Net,
    Training,
    decay,
    loss_of,
    rows,
    tensors_of,
    world_size,
)


def sharded(model: nn.Module, mesh: Any) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def fabric_of() -> Any:
    """Fabric, with FSDP2 if there are several ranks."""
    strategy: Any = "auto"
    if world_size() > 1:
        strategy = ModelParallelStrategy(
            sharded, data_parallel_size=world_size(), tensor_parallel_size=1
        )
    fabric = lightning.Fabric(accelerator="cpu", devices=world_size(), strategy=strategy)
    fabric.launch()
    return fabric


def train(captured: bool, checkpoint: Checkpoint | None = None) -> Training:
    fabric, model = fabric_of(), Net()
    model = (
        fz.integrations.lightning.setup(fabric, model) if captured else fabric.setup_module(model)
    )
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer: Any = fabric.setup_optimizers(plain)
    scheduler = torch.optim.lr_scheduler.LambdaLR(plain, decay)
    generator = torch.Generator().manual_seed(1)
    loader: Any = fabric.setup_dataloaders(
        DataLoader(rows(), batch_size=BATCH, shuffle=True, generator=generator)
    )
    found = fz.integrations.lightning.captured(model.module)
    counter = Counter(found.calls[0].step if found is not None else None)
    numbers: list[Any] = []
    torch.manual_seed(5)
    first = checkpoint.first if checkpoint is not None else 0

    def state() -> dict[str, Any]:
        randomness = {"rng": torch.get_rng_state(), "order": generator.get_state()}
        schedule = scheduler.state_dict()
        return {"model": model, "optimizer": optimizer, "schedule": schedule, **randomness}

    if checkpoint is not None and checkpoint.resumes:
        for _ in range(2 * first):  # Fabric counts how often a loader is iterated, for its order
            next(iter(loader))
        saved = state()
        fabric.load(checkpoint.folder, saved)
        torch.set_rng_state(saved["rng"])
        generator.set_state(saved["order"])
        scheduler.load_state_dict(saved["schedule"])
    for epoch in range(first, EPOCHS):
        if checkpoint is not None and checkpoint.saves(epoch):
            fabric.save(checkpoint.folder, state())
        model.train()
        for i, (x, y) in enumerate(loader):
            counter.call(epoch)
            loss = loss_of(model, x, y)
            fabric.backward(loss / 2)
            if i % 2 or i == len(loader) - 1:
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                numbers.append(getattr(norm, "full_tensor", lambda norm=norm: norm)().item())
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
            numbers.append((loss.item(), scheduler.get_last_lr()))
        model.eval()
        with torch.no_grad():
            for x, y in loader:
                counter.call(epoch)
                numbers.append(loss_of(model, x, y).item())
    text = found.explain() if found is not None else ""
    return Training(
        numbers,
        tensors_of(model.module, plain),
        counter.calls,
        counter.replays,
        text,
        counter.differences,
    )
