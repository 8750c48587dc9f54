"""TRL's trainers on a small Llama, with and without adapters of PEFT: each loop is that of transformers' Trainer.

kind: "sft", "dpo" or "grpo"; with "-lora", adapters with dropout. "sft-lora" checkpoints activations, too: the other
trainers would add a hook to the embedding at every step then.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState
from datasets import Dataset
from datasets.utils.logging import disable_progress_bar
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    PrinterCallback,
    TrainerCallback,
)
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import functionalize as fz
from tests.integrations.loops import (
    LAYERS,
    TOKENS,
    WARM,
    WIDTH,
    Checkpoint,
    Training,
    tensors_of,
    world_size,
)
from tests.integrations.transformers_loop import shard

disable_progress_bar()

WORDS = [f"w{i}" for i in range(61)]
ROWS, EPOCHS = 24, 9  # rows of each rank: six microbatches, three steps of the optimizer
CLOCKS = ("runtime", "per_second", "time")  # what the names of numbers of a time contain


def tokenizer() -> PreTrainedTokenizerFast:
    special = ["<pad>", "<eos>", "<unk>"]
    vocabulary = {word: i for i, word in enumerate([*special, *WORDS])}
    by_word = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    by_word.pre_tokenizer = pre_tokenizers.Whitespace()
    names = dict(zip(("pad_token", "eos_token", "unk_token"), special, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=by_word, **names)


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS) + 3,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=4 * TOKENS,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    return LlamaForCausalLM(config)


def sentences(rows: int, seed: int, tokens: int = TOKENS) -> list[str]:
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(0, len(WORDS), (rows, tokens), generator=generator)
    return [" ".join(WORDS[i] for i in row) for row in found.tolist()]


def different_words(completions: list[str], **_: Any) -> list[float]:
    return [float(len({*text.split()})) for text in completions]


class Observer(TrainerCallback):
    """Notes what is logged; after the warm-up, counts microbatches and the backwards that replay."""

    def __init__(self, capture: Any) -> None:
        self.numbers: list[Any] = []
        self.capture, self.calls, self._before = capture, 0, 0

    @property
    def stats(self) -> Any:
        return self.capture.captured.calls[0].step.stats

    @property
    def replays(self) -> int:
        return self.stats.backwards - self._before

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if round(state.epoch or 0) <= WARM:
            self.calls = 0
            self._before = self.stats.backwards if self.capture is not None else 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.calls += 1

    on_substep_end = on_step_end

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> None:
        kept = [name for name in logs if not any(clock in name for clock in CLOCKS)]
        self.numbers.append({name: logs[name] for name in kept})


def trainer_of(kind: str, callbacks: list[Any]) -> Any:
    """A trainer of TRL, with FSDP2 if there are several ranks."""
    AcceleratorState._reset_state()
    GradientState._reset_state()
    method, _, adapted = kind.partition("-")
    rows = ROWS * world_size()
    options: dict[str, Any] = {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "gradient_checkpointing": kind == "sft-lora",
        "learning_rate": 1e-2,
        "num_train_epochs": EPOCHS,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
    }
    shared: dict[str, Any] = {
        "model": llama(),
        "processing_class": tokenizer(),
        "callbacks": callbacks,
    }
    if adapted:
        shared["peft_config"] = LoraConfig(
            r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
        )
    if method == "sft":
        data = Dataset.from_dict({"text": sentences(rows, 1)})
        trainer = SFTTrainer(args=SFTConfig(**options), train_dataset=data, **shared)
    elif method == "dpo":
        answers = {"chosen": sentences(rows, 2), "rejected": sentences(rows, 3)}
        data = Dataset.from_dict({"prompt": sentences(rows, 1, 4), **answers})
        reference = None if adapted else llama()
        trainer = DPOTrainer(
            args=DPOConfig(**options), train_dataset=data, ref_model=reference, **shared
        )
    else:
        data = Dataset.from_dict({"prompt": sentences(rows // 4, 1, 4)})
        arguments = GRPOConfig(num_generations=4, max_completion_length=6, **options)
        trainer = GRPOTrainer(
            reward_funcs=different_words, args=arguments, train_dataset=data, **shared
        )
    trainer.remove_callback(PrinterCallback)
    if world_size() > 1:
        shard(trainer)
    return trainer


def train(captured: bool, checkpoint: Checkpoint | None = None, kind: str = "sft") -> Training:
    callback = fz.integrations.transformers.CaptureModel() if captured else None
    observer = Observer(callback)
    trainer = trainer_of(kind, [observer] if callback is None else [callback, observer])
    trainer.train()
    stats = None if callback is None else observer.stats
    return Training(
        observer.numbers,
        tensors_of(trainer.model, trainer.optimizer.optimizer),
        observer.calls,
        0 if stats is None else observer.replays,
        "" if callback is None else callback.explain(),
        0 if stats is None else stats.audit_failures + stats.reruns,
    )
