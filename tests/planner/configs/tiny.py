"""Tiny configs of transformers, and each model's sharded modules as one would write them by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import functionalize as fz

transformers = pytest.importorskip("transformers")

WORDS, LENGTH, BATCH = 64, 16, 2
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
TOKENS = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER = {**SMALL, **TOKENS, "num_key_value_heads": 2, "head_dim": 8, "dtype": "bfloat16"}
DEEPSEEK = {
    **SMALL,
    **TOKENS,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "dtype": "bfloat16",
}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
VIT = {**SMALL, "image_size": 16, "patch_size": 8, "num_labels": 3, "dtype": "float32"}


class Family(NamedTuple):
    """A model by hand. alone: the modules that are sharded one by one. last: those that stay gathered together."""

    config: str
    model: str
    sizes: dict[str, Any]
    alone: Callable[[Any], list[nn.Module]]
    last: Callable[[Any], list[nn.Module]]


def decoder(name: str, is_tied: bool = False, **sizes: Any) -> Family:
    config = f"{name}TextConfig" if name == "Gemma3" else f"{name}Config"
    return Family(
        config,
        f"{name}ForCausalLM",
        {**(sizes or DECODER), "tie_word_embeddings": is_tied},
        lambda m: [*m.model.layers, *([] if is_tied else [m.model.embed_tokens])],
        lambda m: [m.model.norm, *([m.model.embed_tokens] if is_tied else []), m.lm_head],
    )


FAMILIES = {
    "llama": decoder("Llama"),
    "qwen3": decoder("Qwen3", is_tied=True),
    "gemma3": decoder("Gemma3", is_tied=True),
    "mixtral": decoder("Mixtral", **DECODER, num_local_experts=4),
    "deepseek_v3": decoder("DeepseekV3", **DEEPSEEK),
    "t5": Family(
        "T5Config",
        "T5ForConditionalGeneration",
        {**T5, **TOKENS, "decoder_start_token_id": 0},
        lambda m: [*m.encoder.block, *m.decoder.block],
        lambda m: [],
    ),
    "vit": Family(
        "ViTConfig",
        "ViTForImageClassification",
        VIT,
        lambda m: [m.vit.embeddings, *m.vit.layers],
        lambda m: [m.vit.layernorm],
    ),
}


def config_of(family: Family) -> Any:
    return getattr(transformers, family.config)(**family.sizes, architectures=[family.model])


def saved(name: str, folder: Any) -> str:
    """The folder of a config that was written."""
    config_of(FAMILIES[name]).save_pretrained(folder / name)
    return f"{folder / name}"


def by_hand(family: Family) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """`build`, `step` and `inputs` of a family, as in a script that a user writes."""

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        config = config_of(family)
        config.use_cache = False
        model = getattr(transformers, family.model)(config)
        dtype = getattr(torch, family.sizes.get("dtype", "float32"))
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for module in family.alone(model):
            fully_shard(module, mp_policy=policy)
        if family.last(model):
            fully_shard(family.last(model), mp_policy=policy, reshard_after_forward=False)
        fully_shard(model, mp_policy=policy)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def inputs() -> tuple[Tensor, Tensor]:
        if family.model.startswith("ViT"):
            return torch.randn(BATCH, 3, 16, 16), torch.randint(3, (BATCH,))
        return torch.randint(WORDS, (BATCH, LENGTH)), torch.randint(WORDS, (BATCH, LENGTH))

    def step(model: nn.Module, optimizer: Any, first: Tensor, labels: Tensor) -> Tensor:
        out = model(first, labels=labels)
        loss = out.loss
        del out
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return build, step, inputs


def memory_of(step: Callable[..., Any], *args: Any) -> Any:
    """The memory of the third call."""
    noted = fz.record_memory(step)
    for _ in range(3):
        noted(*args)
    return noted.memory
