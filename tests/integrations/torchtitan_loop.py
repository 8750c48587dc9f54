"""torchtitan's Trainer: a Llama of two layers, accumulation, clipping, its schedule, its validator and checkpoints.

torchtitan runs on accelerators only. The shim for CPUs: its device module has no device, triton is a stub while it is
imported, attention is SDPA (FlexAttention cannot be captured), FSDP2 sums before it divides (gloo has no PREMUL_SUM).
"""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import torch._inductor.compile_fx  # looks for triton, too
import torch.nn.attention.flex_attention

import functionalize as fz
from tests.integrations.loops import (
    EPOCHS,
    LAYERS,
    SAVED,
    TOKENS,
    WARM,
    Checkpoint,
    Counter,
    Training,
    tensors_of,
    world_size,
)

ROWS, BATCH, EPOCH_STEPS, VOCABULARY = 11, 2, 3, 2048  # of a rank; the sixth batch is short
VALIDATION_ROWS = 3  # a batch, and a short one
LENGTH = -(-TOKENS // 8) * 8  # of a sequence: torchtitan's loss takes it in eight chunks
CLOCKS = ("throughput", "tflops", "mfu", "time_metrics")  # what metrics of a time contain


def without_accelerator() -> Any:
    """torchtitan's modules that are needed here, for the CPU."""
    stubs = {name: MagicMock(__path__=[], __spec__=None) for name in ("triton", "triton.language")}
    stubs["triton"].language = stubs["triton.language"]
    sys.modules.update(stubs)
    try:
        import torchtitan.models.llama3.config_registry
        import torchtitan.trainer
        from torchtitan.distributed import utils
    finally:
        for name in stubs:
            del sys.modules[name]
    device = SimpleNamespace(
        set_device=lambda device: None,
        current_device=lambda: 0,
        synchronize=lambda: None,
        device_count=lambda: 1,
        get_device_name=lambda device=None: "cpu",
        get_device_properties=lambda device: SimpleNamespace(total_memory=1 << 30),
        reset_peak_memory_stats=lambda *args: None,
        empty_cache=lambda: None,
        memory_stats=lambda device=None: {},
        manual_seed_all=lambda seed: None,
    )
    for name, module in list(sys.modules.items()):
        if name.startswith("torchtitan") and hasattr(module, "device_module"):
            module.device_module = device
        if name.startswith("torchtitan") and hasattr(module, "device_type"):
            module.device_type = "cpu"
    torchtitan.trainer.time = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})
    utils.set_pg_timeouts = lambda **kwargs: None  # calls a function that torch 2.13 has not
    return torchtitan


def config_of(torchtitan: Any, checkpoint: Checkpoint | None) -> Any:
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.models.common.attention import ScaledDotProductAttention

    class Tokenizer(BaseTokenizer):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Any, **kwargs: Any) -> None:
            super().__init__()

        def encode(self, *args: Any, **kwargs: Any) -> list[int]:
            return []

        def decode(self, *args: Any, **kwargs: Any) -> str:
            return ""

        def get_vocab_size(self) -> int:
            return VOCABULARY

    class Tokens(BaseDataLoader):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            rows: int = ROWS
            infinite: bool = True  # the validator sets it

        def __init__(self, config: Any, *, dp_rank: int, seq_len: int, **kwargs: Any) -> None:
            self.rank, self.length, self.at = dp_rank, seq_len + 1, 0
            self.rows, self.infinite = config.rows, config.infinite

        def __iter__(self) -> Any:
            batches = -(-self.rows // BATCH)
            while self.infinite or self.at < batches:
                generator = torch.Generator().manual_seed(1000 * self.at + self.rank)
                shape = min(BATCH, self.rows - self.at % batches * BATCH), self.length
                self.at += 1
                tokens = torch.randint(0, VOCABULARY, shape, generator=generator)
                yield {"input": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()

        def state_dict(self) -> dict[str, Any]:
            return {"at": self.at}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.at = state["at"]

    config = torchtitan.models.llama3.config_registry.llama3_debugmodel()
    model = config.model_spec.model
    model.layers = model.layers[:LAYERS]
    for layer in model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.tokenizer, config.dataloader = Tokenizer.Config(), Tokens.Config()
    config.training.local_batch_size, config.training.global_batch_size = BATCH, 4 * world_size()
    config.training.seq_len, config.training.steps = LENGTH, EPOCHS * EPOCH_STEPS
    config.training.disable_cuda_graphs = True
    config.training.mixed_precision_param = "float32"
    config.validator.enable, config.validator.freq = True, EPOCH_STEPS
    config.validator.steps = -1
    config.validator.dataloader = Tokens.Config(rows=VALIDATION_ROWS)
    config.checkpoint.enable = checkpoint is not None
    config.checkpoint.interval = SAVED * EPOCH_STEPS
    folder = tempfile.mkdtemp()
    if checkpoint is not None:
        folder = str(checkpoint.folder)
        config.checkpoint.load_step = SAVED * EPOCH_STEPS if checkpoint.resumes else -1
    config.dump_folder, config.debug.seed = folder, 3
    config.parallelism.data_parallel_shard_degree = world_size()
    config.parallelism.spmd_backend = "partial_dtensor"
    return config


def imported() -> Any:
    """torchtitan, in the environment of a rank."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    return without_accelerator()


def sums(model: torch.nn.Module) -> None:
    """Let FSDP2 sum before it divides."""
    for module in model.modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)


def trainer_of(checkpoint: Checkpoint | None = None) -> tuple[Any, Any]:
    """torchtitan's trainer, and its model."""
    trainer = config_of(imported(), checkpoint).build()
    (model,) = trainer.model_parts
    sums(model)
    return trainer, model


def small() -> Any:
    """The configuration that `train_by_main` names."""
    return config_of(sys.modules["torchtitan"], None)


def train_by_main(captured: bool) -> Training:
    """The whole program, by torchtitan's entry or by the one that captures."""
    imported()
    from torchtitan.train import main
    from torchtitan.trainer import Trainer

    own_train, numbers, ended = Trainer.train, list[Any](), dict[str, Any]()

    def train(trainer: Any) -> None:
        def log(metrics: dict[str, Any], at: int) -> None:
            kept = {k: v for k, v in metrics.items() if not any(c in k for c in CLOCKS)}
            numbers.append((at, kept))

        (model,) = trainer.model_parts
        sums(model)
        trainer.metrics_processor.logger.log = log
        own_train(trainer)
        stats = getattr(trainer.fwd_bwd_fn, "stats", None)
        ended.update(tensors=tensors_of(model, *trainer.optimizers), stats=stats)
        ended["text"] = trainer.fwd_bwd_fn.explain() if captured else ""

    arguments = sys.argv
    sys.argv = ["main", "--module", __name__, "--config", small.__name__]
    Trainer.train = train
    try:
        (fz.integrations.torchtitan.main if captured else main)()
    finally:
        Trainer.train, sys.argv = own_train, arguments
    stats = ended["stats"]
    calls, replays, differences = 0, 0, 0
    if stats is not None:
        calls, replays = stats.calls, stats.replays + stats.audits
        differences = stats.audit_failures + stats.reruns
    return Training(numbers, ended["tensors"], calls, replays, ended["text"], differences)


def train(captured: bool, checkpoint: Checkpoint | None = None, kind: str = "") -> Training:
    """kind: "main" for the whole program, see `train_by_main`."""
    if kind == "main":
        return train_by_main(captured)
    trainer, model = trainer_of(checkpoint)
    step = fz.integrations.torchtitan.capture(trainer) if captured else None
    counter, numbers = Counter(step), list[Any]()

    def log(metrics: dict[str, Any], at: int) -> None:
        is_validation = "validation_metrics/loss" in metrics
        numbers.append((at, {k: v for k, v in metrics.items() if not any(c in k for c in CLOCKS)}))
        if not is_validation and at >= WARM * EPOCH_STEPS:  # it logs after its calls
            first = at == WARM * EPOCH_STEPS
            counter.call(at // EPOCH_STEPS, 0 if first else trainer.gradient_accumulation_steps)

    trainer.metrics_processor.logger.log = log
    trainer.train()
    return Training(
        numbers,
        tensors_of(model, *trainer.optimizers),
        counter.calls,
        counter.replays,
        step.explain() if step is not None else "",
        counter.differences,
    )
