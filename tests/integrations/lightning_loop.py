"""Lightning's Trainer, with accumulation, a scheduler, logging and an evaluation per epoch."""

from __future__ import annotations

import logging
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import functionalize as fz
from tests.integrations.loops import (
    BATCH,
    EPOCHS,
    WARM,
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

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net: Any = None
        self.numbers: list[Any] = []
        self.counter = Counter(None)

    def configure_model(self) -> None:
        if self.net is not None:
            return
        self.net = Net()
        if world_size() > 1:
            mesh = self.device_mesh["data_parallel"]
            for block in self.net.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(self.net, mesh=mesh)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, decay)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.counter.call(self.current_epoch)
        loss = loss_of(self.net, *batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.counter.call(self.current_epoch)
        self.log("val_loss", loss_of(self.net, *batch), sync_dist=world_size() > 1)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        self.numbers.append(getattr(norm, "full_tensor", lambda: norm)().item())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.numbers.append(outputs["loss"].item())


class AfterWarmUp(lightning.Callback):
    """Finds the captured step once it is there."""

    def __init__(self, callback: Any) -> None:
        self.callback = callback

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch >= WARM and pl_module.counter.is_idle:
            pl_module.counter = Counter(self.callback.captured.calls[0].step)


class Saver(lightning.Callback):
    """Saves a checkpoint, and the random numbers that Lightning leaves to its users, or restores these."""

    def __init__(self, checkpoint: Checkpoint, order: torch.Generator) -> None:
        self.checkpoint, self.order = checkpoint, order
        self.rng: Tensor | None = None

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self.checkpoint.saves(trainer.current_epoch + 1):
            trainer.save_checkpoint(self.checkpoint.folder)

    def state_dict(self) -> dict[str, Any]:
        return {"rng": torch.get_rng_state(), "order": self.order.get_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.order.set_state(state_dict["order"])  # the loader is iterated before `on_train_start`
        self.rng = state_dict["rng"]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if self.rng is not None:
            torch.set_rng_state(self.rng)


def trainer_of(epochs: int, accumulated: int, callbacks: list[Any]) -> Any:
    """Lightning's Trainer, with FSDP2 if there are several ranks."""
    strategy = (
        ModelParallelStrategy(data_parallel_size=world_size(), tensor_parallel_size=1)
        if world_size() > 1
        else "auto"
    )
    return lightning.Trainer(
        accelerator="cpu",
        devices=world_size(),
        strategy=strategy,
        max_epochs=epochs,
        accumulate_grad_batches=accumulated,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=callbacks,
    )


def train(captured: bool, checkpoint: Checkpoint | None = None) -> Training:
    torch.manual_seed(0)
    module = Module()
    generator = torch.Generator().manual_seed(1)
    saver = [Saver(checkpoint, generator)] if checkpoint is not None else []
    callback = fz.integrations.lightning.CaptureModules()
    trainer = trainer_of(EPOCHS, 2, [callback, AfterWarmUp(callback), *saver] if captured else [])
    loader = DataLoader(rows(), batch_size=BATCH, shuffle=True, generator=generator)
    resumed = str(checkpoint.folder) if checkpoint is not None and checkpoint.resumes else None
    evaluation = DataLoader(rows(20), batch_size=BATCH)
    trainer.fit(module, loader, evaluation, ckpt_path=resumed, weights_only=False)
    logged = {name: value.item() for name, value in trainer.callback_metrics.items()}
    counter = module.counter
    return Training(
        [*module.numbers, logged],
        tensors_of(module, *trainer.optimizers),
        counter.calls,
        counter.replays if captured else 0,
        callback.explain(),
    )
