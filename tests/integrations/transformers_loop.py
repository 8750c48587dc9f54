"""The Trainer of transformers: a Llama, accumulation, clipping, a cosine schedule, an evaluation per epoch."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from accelerate import DistributedType
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import FullyShardedDataParallelPlugin
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import functionalize as fz
from tests.integrations.loops import (
    EPOCHS,
    LAYERS,
    SAVED,
    TOKENS,
    WARM,
    WIDTH,
    Checkpoint,
    Counter,
    Training,
    tensors_of,
    world_size,
)

STEPS = 3  # of the optimizer, per epoch


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, number: int) -> None:
        self.rows = torch.randint(
            0, 64, (number, TOKENS), generator=torch.Generator().manual_seed(3)
        )

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[at], "labels": self.rows[at]}


def shard(trainer: Any) -> None:
    """Let the Trainer use FSDP2, which it does itself on accelerators only: the shim for CPUs."""
    state = trainer.accelerator.state
    state.distributed_type = DistributedType.FSDP
    state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
    )
    trainer.is_fsdp_enabled = True


class Observer(TrainerCallback):
    """Notes what is logged, and counts the calls of the model after the warm-up."""

    def __init__(self, capture: Any) -> None:
        self.numbers: list[Any] = []
        self.capture, self.counter = capture, Counter(None)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.capture is not None and round(state.epoch or 0) >= WARM and self.counter.is_idle:
            self.counter = Counter(self.capture.captured.calls[0].step)
            self.counter.call(WARM, 0)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> None:
        kept = ("loss", "grad_norm", "learning_rate", "eval_loss")
        self.numbers.append({name: logs[name] for name in kept if name in logs})


def trainer_of(kind: Any, folder: str, rows: int, callbacks: list[Any], **options: Any) -> Any:
    """A Trainer of that class, with FSDP2 if there are several ranks. rows: of each rank."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    torch.manual_seed(0)
    world = world_size()
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=2 * TOKENS,
    )
    model = LlamaForCausalLM(config)
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=2,
        max_grad_norm=1.0,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    trainer = kind(
        model,
        arguments,
        train_dataset=Tokens(rows * world),
        eval_dataset=Tokens(12 * world),
        callbacks=callbacks,
    )
    trainer.remove_callback(PrinterCallback)
    if world > 1:
        shard(trainer)
    return trainer


def train(captured: bool, checkpoint: Checkpoint | None = None) -> Training:
    callback = fz.integrations.transformers.CaptureModel() if captured else None
    observer = Observer(callback)
    folder = str(checkpoint.folder) if checkpoint is not None else tempfile.mkdtemp()
    trainer = trainer_of(
        Trainer,
        folder,
        22,  # five batches and a short one
        [callback, observer] if callback is not None else [observer],
        num_train_epochs=EPOCHS,
        eval_strategy="epoch",
        save_strategy="steps" if checkpoint is not None else "no",
        save_steps=STEPS * SAVED,
    )
    resumes = checkpoint is not None and checkpoint.resumes
    saved = f"{folder}/checkpoint-{STEPS * SAVED}" if resumes else None
    trainer.train(resume_from_checkpoint=saved)
    calls = (EPOCHS - max(WARM, SAVED if resumes else 0)) * (6 + 3)
    return Training(
        observer.numbers,
        tensors_of(trainer.model, trainer.optimizer.optimizer),
        calls,
        observer.counter.replays if captured else 0,
        callback.explain() if callback is not None else "",
        observer.counter.differences,
    )
