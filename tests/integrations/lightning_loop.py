"""Lightning's Trainer, with accumulation, a scheduler, logging and an evaluation per epoch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

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
        self.accuracy = MulticlassAccuracy(4)

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
        loss = loss_of(self.net, *batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=world_size() > 1)
        self.log_dict({"worst": loss, "three": 3.0}, prog_bar=True, reduce_fx="max", batch_size=7)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        found = self.net(batch[0])
        self.accuracy(found, batch[1])
        self.log("val_accuracy", self.accuracy)
        loss = torch.nn.functional.cross_entropy(found, batch[1])
        self.log("val_loss", loss, sync_dist=world_size() > 1)


class Observer(lightning.Callback):
    """Clips, notes numbers and counts calls: in the module this would be code that a captured `training_step` may call.

    find: returns the captured step, once it is there. evaluates: whether the evaluation calls it, too.
    """

    def __init__(self, find: Callable[[], Any], evaluates: bool) -> None:
        self.numbers: list[Any] = []
        self.find, self.evaluates, self.counter = find, evaluates, Counter(None)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch >= WARM and self.counter.is_idle:
            self.counter = Counter(self.find())

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        self.counter.call(trainer.current_epoch)

    def on_validation_batch_start(self, trainer: Any, *args: Any) -> None:
        self.counter.call(trainer.current_epoch, int(self.evaluates))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        norm = torch.nn.utils.clip_grad_norm_(pl_module.parameters(), 1.0)
        self.numbers.append(getattr(norm, "full_tensor", lambda: norm)().item())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
        logged = trainer.callback_metrics  # those of epochs are not there right after a resume
        names = ("train_loss", "train_loss_step", "worst", "three")
        self.numbers.append((outputs["loss"].item(), [logged[name].item() for name in names]))


class CaptureStep(lightning.Callback):
    """Captures `training_step` alone, which logs."""

    step: Any = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.step = fz.capture(pl_module.training_step, on_uncapturable="eager", backward=True)
        pl_module.training_step = self.step


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
    alone = CaptureStep()
    by_step = checkpoint is not None and checkpoint.resumes and world_size() == 1

    def find() -> Any:
        return alone.step if by_step or not captured else callback.captured.calls[0].step

    observer = Observer(find, not by_step)
    ours = [alone if by_step else callback, *saver] if captured else []
    trainer = trainer_of(EPOCHS, 2, [observer, *ours])
    loader = DataLoader(rows(), batch_size=BATCH, shuffle=True, generator=generator)
    resumed = str(checkpoint.folder) if checkpoint is not None and checkpoint.resumes else None
    evaluation = DataLoader(rows(20), batch_size=BATCH)
    trainer.fit(module, loader, evaluation, ckpt_path=resumed, weights_only=False)
    logged = {name: value.item() for name, value in trainer.callback_metrics.items()}
    counter = observer.counter
    return Training(
        [*observer.numbers, logged],
        tensors_of(module, *trainer.optimizers),
        counter.calls,
        counter.replays if captured else 0,
        alone.step.explain() if by_step else callback.explain(),
        counter.differences,
    )
