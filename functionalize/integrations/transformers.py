"""Hugging Face transformers: a callback of its `Trainer`.

    callback = fz.integrations.transformers.CaptureModel()
    Trainer(model, arguments, train_dataset=..., callbacks=[callback]).train()
    print(callback.explain())

The calls of the model are captured, which compute the loss as well, where the model has labels. `training_step`,
accumulation, clipping, optimizer, scheduler and logging are the Trainer's own and run eagerly.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import TrainerCallback

from functionalize.integrations.captured_calls import CapturedCalls, captured

__all__ = ["CaptureModel", "captured"]


class CaptureModel(TrainerCallback):
    """Captures the calls of the model while `train` runs. options: those of `fz.capture`."""

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.captured: CapturedCalls | None = None

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any
    ) -> None:
        """The model has been sharded by now."""
        if self.captured is not None:  # an exception has ended the training before
            self.captured.remove()
        self.captured = CapturedCalls([model], **self.options)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The model runs as before `train`."""
        if self.captured is not None:
            self.captured.remove()

    def explain(self) -> str:
        """What is captured, and what became of it."""
        return "`train` has not begun" if self.captured is None else self.captured.explain()
