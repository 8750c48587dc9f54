"""A whole `training_step` of Lightning (manual optimization), captured, that logs metrics as objects."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

import functionalize as fz
from tests.integrations.lightning_loop import Module, trainer_of
from tests.integrations.loops import (
    BATCH,
    EPOCHS,
    Checkpoint,
    Counter,
    Training,
    rows,
    tensors_of,
)


class Metrics(Module):
    """accuracy: updated by a call of the metric, whose value Lightning keeps as well; mean: by `update`."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        found = self.net(x)
        loss = torch.nn.functional.cross_entropy(found, y)
        self.accuracy(found, y)
        self.mean.update(loss)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log_dict({"mean": self.mean, "loss": loss}, on_epoch=True)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss.detach()


class Observer(lightning.Callback):
    def __init__(self, captures: bool) -> None:
        self.numbers: list[Any] = []
        self.captures, self.counter = captures, Counter(None)
        self.step: Any = None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if self.captures:
            self.step = pl_module.training_step = fz.capture(
                pl_module.training_step, on_uncapturable="eager"
            )
        self.counter = Counter(self.step)

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        self.counter.call(trainer.current_epoch)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        logged = {name: value.item() for name, value in trainer.callback_metrics.items()}
        self.numbers.append((logged, pl_module.accuracy.update_count))

    on_train_epoch_end = on_train_batch_end


def train(captured: bool, checkpoint: Checkpoint | None = None) -> Training:
    torch.manual_seed(0)
    module, observer = Metrics(), Observer(captured)
    trainer = trainer_of(EPOCHS, 1, [observer])
    trainer.fit(module, DataLoader(rows(), batch_size=BATCH))
    return Training(
        observer.numbers,
        tensors_of(module, *trainer.optimizers),
        observer.counter.calls,
        observer.counter.replays if captured else 0,
        observer.step.explain() if captured else "",
        observer.counter.differences,
    )
