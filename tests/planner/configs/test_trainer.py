"""TrainingArguments beside a config: the script made from them, and the memory of transformers' own Trainer."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import functionalize as fz
from functionalize.errors import UsageError
from functionalize.planner.cli.scripts import FunctionNames, opened
from functionalize.planner.configs.sources import script_of
from tests.planner.configs.tiny import LENGTH, WORDS, memory_of, saved

pytest.importorskip("accelerate")
BATCH, ACCUMULATE = 2, 4
ARGUMENTS = {
    "per_device_train_batch_size": BATCH,
    "gradient_accumulation_steps": ACCUMULATE,
    "bf16": True,
    "weight_decay": 0.1,
    "logging_steps": 10,
    "fsdp": True,
    "fsdp_config": {"activation_checkpointing": True, "reshard_after_forward": False},
}


def source(folder: Path, **changes: Any) -> str:
    """The source of the arguments, changed, beside the config of a Llama."""
    where = Path(saved("llama", folder)) / "args.json"
    where.write_text(json.dumps({**ARGUMENTS, **changes}))
    return f"trainer:{where}"


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_the_memory_is_that_of_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the number of items that the Trainer divides by, and the loss that it divides: 12 bytes."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import FullyShardedDataParallelPlugin
    from transformers import AutoConfig, LlamaForCausalLM, Trainer, TrainingArguments

    made_from = source(tmp_path)
    with opened(made_from, FunctionNames()) as made, fz.world(8, target="cpu"):
        planned = memory_of(made.step, *made.build(), *made.inputs(length=LENGTH))

    AcceleratorState._reset_state()
    GradientState._reset_state()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        cpu_ram_efficient_loading=False,
        reshard_after_forward=False,
        activation_checkpointing=True,
    )
    plugin.set_mixed_precision("bf16")
    arguments = {k: v for k, v in ARGUMENTS.items() if not k.startswith("fsdp")}
    with fz.world(8, target="cpu"):
        config = AutoConfig.from_pretrained(tmp_path / "llama", use_cache=False)
        settings = TrainingArguments(f"{tmp_path}", use_cpu=True, report_to=[], **arguments)
        trainer = Trainer(LlamaForCausalLM(config), settings)
        # The Trainer uses FSDP2 on accelerators only: the shim for CPUs.
        trainer.accelerator.state.fsdp_plugin = plugin
        monkeypatch.setattr(Accelerator, "is_fsdp2", True)
        trainer.create_optimizer()
        model, wrapped = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
        optimizer = wrapped.optimizer
        # accelerate finds sharded parameters by addresses, which fakes have not.
        optimizer.param_groups[0]["params"] = list(model.parameters())
        del optimizer.param_groups[1:]
        trainer.current_gradient_accumulation_steps = ACCUMULATE

        def step(tokens: torch.Tensor, labels: torch.Tensor) -> None:
            rows = zip(tokens.chunk(ACCUMULATE), labels.chunk(ACCUMULATE), strict=True)
            for i, (x, y) in enumerate(rows, 1):
                last = contextlib.nullcontext()
                with last if i == ACCUMULATE else trainer.accelerator.no_sync(model):
                    batch = {"input_ids": x, "labels": y}
                    trainer.training_step(model, batch, torch.tensor(BATCH * ACCUMULATE * LENGTH))
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
            optimizer.step()
            model.zero_grad()

        rows = BATCH * ACCUMULATE, LENGTH
        found = memory_of(step, torch.randint(WORDS, rows), torch.randint(WORDS, rows))
    AcceleratorState._reset_state()
    GradientState._reset_state()
    assert abs(planned.levels("eager").requested - found.levels("eager").requested) <= 12


def test_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expect: Any) -> None:
    source(tmp_path)
    monkeypatch.chdir(tmp_path)
    expect("bfloat16", script_of("trainer:llama/args.json"))


def test_what_is_read(tmp_path: Path) -> None:
    text = script_of(
        source(
            tmp_path,
            bf16=False,
            max_grad_norm=0.0,
            optim="adafactor",
            accelerator_config={"gradient_accumulation_kwargs": {"sync_each_batch": True}},
            fsdp="shard_grad_op offload",
            fsdp_config={"fsdp_transformer_layer_cls_to_wrap": "LlamaMLP"},
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": False, "every_n_layers": 2},
        )
    )
    for part in (
        'build(dtype="bfloat16", reshard=False, checkpoint=True, offload=True, mesh=None)',
        "LlamaForCausalLM._from_config(config, dtype=dtype)",
        'checkpointing_enable({"use_reentrant": False}, every_n_layers=2)',
        "isinstance(module, LlamaMLP)",
        "import transformers.optimization",
        "transformers.optimization.Adafactor(",
    ):
        assert part in text
    for part in ("clip_grad_norm_", "set_requires_gradient_sync", "MixedPrecisionPolicy"):
        assert part not in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bf17": True}, r"bf17: no argument of TrainingArguments has this name. Take it out, or"),
        ({"fp16": True}, r"fp16: True: it changes a step, and the script cannot follow"),
        ({"neftune_noise_alpha": 5}, r"neftune_noise_alpha: 5: it changes a step"),
        ({"bf16": False, "tf32": True}, r"tf32: its matrix products have no modelled time"),
        ({"fsdp": ""}, r"fsdp is not set, .*DistributedDataParallel, .*write \"fsdp\": true"),
        ({"fsdp": "hybrid_shard"}, r"fsdp: 'hybrid_shard' is not known for FSDP2"),
        ({"fsdp_config": {"version": 1}}, r"fsdp_config: version: 1: the script cannot follow"),
        ({"fsdp_config": {"offload_params": True}}, r"fsdp_config: offload_params: True: the scr"),
        ({"optim": "adamw_8bit"}, r"optim: adamw_8bit: You need to install `bitsandbytes`"),
        ({"optim": "flying"}, r"optim: flying: flying is not a valid OptimizerNames"),
        ({"gradient_checkpointing": True}, r"layers are computed again twice"),
        ({"fsdp_config": {"transformer_layer_cls_to_wrap": "Net"}}, r"has no layers of the class"),
        (
            {"activation_checkpointing_kwargs": {"offload": True}},
            r"offload: its copies to the host",
        ),
        ({"accelerator_config": {"split_batches": True}}, r"split_batches: the batch of a rank"),
    ],
)
def test_what_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        script_of(source(tmp_path, **changes))


def test_all_defaults_are_accepted(tmp_path: Path) -> None:
    from transformers import TrainingArguments

    every = TrainingArguments("out", use_cpu=True, report_to=[]).to_dict()
    script_of(source(tmp_path, **{**every, "use_cpu": False, **ARGUMENTS}))
