"""The peak of a step of torchtitan's own Trainer, and that of the script of its configuration, in bytes.

    python -m tests.planner.configs.titan_memory ACCUMULATE

In a process of its own: torchtitan is imported as on a machine without an accelerator.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

import functionalize as fz
from functionalize.planner.cli.scripts import FunctionNames, opened
from tests.integrations.torchtitan_loop import imported
from tests.planner.configs.tiny import memory_of

BATCH, LENGTH, RANKS = 2, 64, 8


def small() -> Any:
    """The configuration that torchtitan imports by its name."""
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config = llama3_debugmodel()
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    config.training.local_batch_size, config.training.seq_len = BATCH, LENGTH
    config.training.disable_cuda_graphs = True
    config.metrics.log_freq = 100
    return config


def of_trainer(accumulate: int) -> int:
    """With what the script replaces, and without data and files."""
    from torchtitan.distributed import ParallelDims
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.trainer import Trainer

    config = small()
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.parallelism.spmd_backend = "partial_dtensor"
    config.training.global_batch_size = BATCH * RANKS * accumulate
    config.tokenizer = config.dataloader = SimpleNamespace(build=lambda **given: None)
    dims = ParallelDims.from_config(config.parallelism, RANKS)
    with patch.object(Trainer, "init_distributed", lambda self: dims):
        trainer = config.build()
    trainer.step, trainer.device = (
        2,
        torch.device("cpu"),
    )  # a step without logs; not the first of several CPUs

    def batches() -> Any:
        while True:
            tokens, labels = torch.randint(2048, (2, BATCH, LENGTH)).unbind()
            yield {"input": tokens, "positions": torch.arange(LENGTH).repeat(BATCH, 1)}, labels

    given = batches()
    return memory_of(lambda: trainer.train_step(given)).levels("eager").requested


def of_script(accumulate: int) -> int:
    with opened(f"titan:{small.__module__}.small", FunctionNames()) as made:
        objects = made.build()
        memory = memory_of(made.step, *objects, *made.inputs(accumulate=accumulate), accumulate)
        return memory.levels("eager").requested


def main() -> None:
    """Print both."""
    imported()
    for function in (of_trainer, of_script):
        with fz.world(RANKS, target="cpu"):
            print(function(int(sys.argv[1])))


if __name__ == "__main__":
    from tests.planner.configs import titan_memory  # torchtitan imports it by this name, too

    titan_memory.main()
