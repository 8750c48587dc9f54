"""Hugging Face models with random weights, sharded layer by layer, their steps and batches, and a table of cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

transformers = pytest.importorskip("transformers")

STEPS = 8
WORDS, LENGTH, CLASSES = 64, 8, 3
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
DECODER = {
    **SMALL,
    "num_key_value_heads": 2,
    "vocab_size": WORDS,
    "max_position_embeddings": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ENCODER = {**SMALL, "vocab_size": WORDS, "max_position_embeddings": 16, "num_labels": CLASSES}
Twin = tuple[nn.Module, torch.optim.Optimizer]


def sharded(model: Any, layers: Any) -> Twin:
    for layer in layers:
        fully_shard(layer)
    fully_shard(model)
    model.train()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def build_llama(**options: Any) -> Twin:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER, **options))
    return sharded(model, model.model.layers)


def build_gpt2(**options: Any) -> Twin:
    config = transformers.GPT2Config(
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=16,
        vocab_size=WORDS,
        bos_token_id=1,
        eos_token_id=2,
        **options,
    )
    model = transformers.GPT2LMHeadModel(config)
    return sharded(model, model.transformer.h)


def build_bert_classifier(**options: Any) -> Twin:
    config = transformers.BertConfig(**ENCODER, **options)
    model = transformers.BertForSequenceClassification(config)
    return sharded(model, model.bert.encoder.layer)


def build_bert_masked_lm() -> Twin:
    model = transformers.BertForMaskedLM(transformers.BertConfig(**ENCODER))
    return sharded(model, model.bert.encoder.layer)


def build_vit() -> Twin:
    config = transformers.ViTConfig(
        **SMALL,
        image_size=8,
        patch_size=4,
        num_labels=CLASSES,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
    )
    model = transformers.ViTForImageClassification(config)
    blocks = [m for m in model.modules() if type(m).__name__ == "ViTLayer"]
    return sharded(model, blocks)


def build_electra() -> Twin:
    config = transformers.ElectraConfig(**ENCODER, embedding_size=16)
    model = transformers.ElectraForPreTraining(config)
    return sharded(model, model.electra.encoder.layer)


WAVE = {
    **SMALL,
    "vocab_size": WORDS,
    "conv_dim": (16, 16),
    "conv_kernel": (4, 3),
    "conv_stride": (3, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "feat_extract_norm": "layer",
    "layerdrop": 0.0,
}


def build_wav2vec2(kind: str = "ForPreTraining", **options: Any) -> Twin:
    config = transformers.Wav2Vec2Config(
        **WAVE,
        codevector_dim=16,
        proj_codevector_dim=16,
        num_codevectors_per_group=4,
        num_negatives=3,
        ctc_zero_infinity=True,
        **options,
    )
    model = getattr(transformers, f"Wav2Vec2{kind}")(config)
    return sharded(model, model.wav2vec2.encoder.layers)


def build_t5() -> Twin:
    config = transformers.T5Config(
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        vocab_size=WORDS,
        decoder_start_token_id=0,
    )
    model = transformers.T5ForConditionalGeneration(config)
    return sharded(model, [*model.encoder.block, *model.decoder.block])


def build_mixtral(**options: Any) -> Twin:
    config = transformers.MixtralConfig(**DECODER, num_local_experts=4, **options)
    model = transformers.MixtralForCausalLM(config)
    return sharded(model, model.model.layers)


def build_qwen3_moe(**options: Any) -> Twin:
    config = transformers.Qwen3MoeConfig(
        **DECODER,
        moe_intermediate_size=32,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
        **options,
    )
    model = transformers.Qwen3MoeForCausalLM(config)
    return sharded(model, model.model.layers)


def train(model: Any, optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    def step(**batch: Tensor) -> Tensor:
        loss: Tensor = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def train_on_a_batch(model: Any, optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """The batch is one argument of whatever type; the model's own output is returned."""

    def step(batch: Any) -> Any:
        given = vars(batch) if isinstance(batch, Given) else batch
        out = model(**given)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return out

    return step


def train_on_tuples(model: Any, optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    def step(**batch: Tensor) -> Any:
        loss, *rest = model(**batch, return_dict=False, use_cache=False)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), tuple(rest)

    return step


def evaluate(model: Any, optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    model.eval()

    @torch.no_grad()
    def step(**batch: Tensor) -> Any:
        return model(**batch)

    return step


@dataclass
class Given:
    input_ids: Tensor
    labels: Tensor


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(dist.get_rank())


def text(
    mask: str = "", classes: bool = False, n: int = STEPS, rows: int = 2
) -> list[dict[str, Tensor]]:
    g, batches = generator(), []
    for _ in range(n):
        ids = torch.randint(3, WORDS, (rows, LENGTH), generator=g)
        labels = torch.randint(0, CLASSES, (rows,), generator=g) if classes else ids.clone()
        batches.append({"input_ids": ids, "labels": labels})
        if mask:
            batches[-1]["attention_mask"] = torch.ones(rows, LENGTH, dtype=torch.long)
        if mask == "padded":
            batches[-1]["attention_mask"][0, -3:] = 0
    return batches


def images() -> list[dict[str, Tensor]]:
    g = generator()
    return [
        {
            "pixel_values": torch.randn(2, 3, 8, 8, generator=g),
            "labels": torch.randint(0, CLASSES, (2,), generator=g),
        }
        for _ in range(STEPS)
    ]


def waves(n: int = STEPS) -> Iterator[tuple[Tensor, int]]:
    """Sounds, and how many frames the model makes of them."""
    g = generator()
    for _ in range(n):
        yield torch.randn(2, 100, generator=g), 16


def spoken(n: int = STEPS, fewest: int = 4) -> list[dict[str, Tensor]]:
    """Sounds with labels; the last ones of a row, up to as many as `fewest` leaves, are -100: none at all."""
    g, batches = generator(), []
    for wave, _ in waves(n):
        labels = torch.randint(1, WORDS, (2, 5), generator=g)
        labels[1, int(torch.randint(fewest, 5, (1,), generator=g)) :] = -100
        batches.append({"input_values": wave, "labels": labels})
    return batches


def masked(n: int = STEPS, fewest: int = 6) -> list[dict[str, Tensor]]:
    """Sounds with masks of frames that are drawn beside the step, as in pretraining."""
    g, batches = generator(), []
    for wave, frames in waves(n):
        mask = torch.zeros(2, frames, dtype=torch.bool)
        mask[0, 2:6] = True
        mask[1, 3 : 3 + int(torch.randint(fewest, 7, (1,), generator=g))] = True
        negatives = torch.randint(0, 2 * frames, (2, frames, 3), generator=g)
        batches.append(
            {
                "input_values": wave,
                "mask_time_indices": mask,
                "sampled_negative_indices": negatives,
            }
        )
    return batches


def replaced_tokens(n: int = STEPS, fewest: int = 5) -> list[dict[str, Tensor]]:
    """Text with padding of which the loss takes no notice, and for each word whether it was replaced."""
    g, batches = generator(), text("full", n=n)
    for batch in batches:
        batch["labels"] = torch.randint(0, 2, (2, LENGTH), generator=g)
        batch["attention_mask"][0, int(torch.randint(fewest, 6, (1,), generator=g)) :] = 0
    return batches


def encodings() -> list[Any]:
    """What a fast tokenizer returns: a `BatchEncoding` with objects of its own beside the tensors."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({str(i): i for i in range(WORDS)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    batches = []
    for batch in text():
        lines = [" ".join(map(str, row.tolist())) for row in batch["input_ids"]]
        encoded = fast(lines, return_tensors="pt")
        assert torch.equal(encoded["input_ids"], batch["input_ids"]) and encoded.encodings
        encoded["labels"] = batch["labels"]
        encoded.pop("token_type_ids", None)
        batches.append((encoded,))
    return batches


def one_by_one(kind: Callable[..., Any]) -> list[Any]:
    return [(kind(batch),) for batch in text()]


CASES: dict[str, tuple[Callable[[], Twin], Any, Callable[[], list[Any]]]] = {
    "llama": (build_llama, train, text),
    "llama_padded": (build_llama, train, lambda: text("padded")),
    "llama_eager_attention": (
        lambda: build_llama(attn_implementation="eager", attention_dropout=0.1),
        train,
        lambda: text("padded"),
    ),
    "gpt2": (build_gpt2, train, text),
    "gpt2_full_mask": (build_gpt2, train, lambda: text("full")),
    "bert_classifier": (build_bert_classifier, train, lambda: text(classes=True)),
    "bert_classifier_padded": (
        build_bert_classifier,
        train,
        lambda: text("padded", classes=True),
    ),
    "bert_masked_lm": (build_bert_masked_lm, train, lambda: text("padded")),
    "vit": (build_vit, train, images),
    "electra": (build_electra, train, replaced_tokens),
    "wav2vec2_masked": (build_wav2vec2, train, masked),
    "wav2vec2_ctc": (
        lambda: build_wav2vec2("ForCTC", apply_spec_augment=False),
        train,
        spoken,
    ),
    "t5": (build_t5, train, text),
    "t5_padded": (build_t5, train, lambda: text("padded")),
    "mixtral": (build_mixtral, train, text),
    "mixtral_batched": (
        lambda: build_mixtral(experts_implementation="batched_mm"),
        train,
        text,
    ),
    "qwen3_moe": (
        lambda: build_qwen3_moe(experts_implementation="grouped_mm"),
        train,
        lambda: text("padded"),
    ),
    "dict_in_and_output_out": (build_gpt2, train_on_a_batch, lambda: one_by_one(dict)),
    "encoding_in": (build_gpt2, train_on_a_batch, encodings),
    "dataclass_in": (
        build_bert_masked_lm,
        train_on_a_batch,
        lambda: one_by_one(lambda b: Given(**b)),
    ),
    "tuples": (build_gpt2, train_on_tuples, text),
    "evaluation": (build_gpt2, evaluate, text),
    "evaluation_padded": (build_bert_masked_lm, evaluate, lambda: text("padded")),
    "evaluation_of_experts": (build_mixtral, evaluate, text),
}
