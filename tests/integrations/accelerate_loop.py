"""accelerate's loop of its documentation, with accumulation, clipping, a scheduler and an evaluation per epoch."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DataLoaderConfiguration, FullyShardedDataParallelPlugin
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


def accelerator_of() -> Any:
    """An accelerator with FSDP2, which accelerate itself sets up on accelerators only: the shim for CPUs."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    order = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=1)  # saved with the state
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=order)
    if world_size() > 1:
        # A prepared optimizer copies that of `PartialState`.
        accelerator.state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Block"],
            cpu_ram_efficient_loading=False,
        )
    return accelerator


def train(captured: bool, checkpoint: Checkpoint | None = None) -> Training:
    accelerator, model = accelerator_of(), Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, decay)
    loader = DataLoader(rows(), batch_size=BATCH, shuffle=True)
    prepare = accelerator.prepare
    if captured:
        prepare = partial(fz.integrations.accelerate.prepare, accelerator)
    model, optimizer, loader, scheduler = prepare(model, optimizer, loader, scheduler)
    found = fz.integrations.accelerate.captured(model)
    counter = Counter(found.calls[0].step if found is not None else None)
    numbers: list[Any] = []
    torch.manual_seed(5)
    if checkpoint is not None and checkpoint.resumes:
        accelerator.load_state(str(checkpoint.folder))
    for epoch in range(checkpoint.first if checkpoint is not None else 0, EPOCHS):
        if checkpoint is not None and checkpoint.saves(epoch):
            accelerator.save_state(str(checkpoint.folder))
        loader.set_epoch(epoch)
        model.train()
        for x, y in loader:
            counter.call(epoch)
            with accelerator.accumulate(model):
                loss = loss_of(model, x, y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    numbers.append(accelerator.clip_grad_norm_(model.parameters(), 1.0).item())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            numbers.append((loss.item(), scheduler.get_last_lr()))
        model.eval()
        with torch.no_grad():
            for x, y in loader:
                counter.call(epoch)
                numbers.append(loss_of(model, x, y).item())
    text = found.explain() if found is not None else ""
    return Training(
        numbers,
        tensors_of(model, optimizer.optimizer),
        counter.calls,
        counter.replays,
        text,
        counter.differences,
    )
