"""Hugging Face models, wrapped layer by layer, on two gloo ranks: captured once, replayed equal to eager.

Random weights, the dropout that the default configuration has, a loss from the model's output. Experts run
in the default implementation, whose shapes do not depend on data, or in another such one; the one that loops
over the experts that were hit is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import functionalize as fz
from functionalize.errors import UncapturableError
from tests.fsdp.twins import Verdict, compare_twins, state_of
from tests.ranks import run_on_ranks

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


# -- steps -----------------------------------------------------------------------------------------


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


# -- batches ---------------------------------------------------------------------------------------


@dataclass
class Given:
    input_ids: Tensor
    labels: Tensor


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(dist.get_rank())


def text(mask: str = "", classes: bool = False, n: int = STEPS) -> list[dict[str, Tensor]]:
    g, batches = generator(), []
    for _ in range(n):
        ids = torch.randint(3, WORDS, (2, LENGTH), generator=g)
        labels = torch.randint(0, CLASSES, (2,), generator=g) if classes else ids.clone()
        batches.append({"input_ids": ids, "labels": labels})
        if mask:
            batches[-1]["attention_mask"] = torch.ones(2, LENGTH, dtype=torch.long)
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


# -- the table -------------------------------------------------------------------------------------

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


def case(name: str) -> Verdict:
    build, make_step, batches = CASES[name]
    return compare_twins(lambda: seeded(build), make_step, batches())


def seeded(build: Callable[[], Twin]) -> Twin:
    torch.manual_seed(0)
    return build()


@pytest.mark.parametrize("name", CASES)
def test_replays_like_eager(name: str) -> None:
    verdicts = run_on_ranks(case, name)
    # The first forward without a backward leaves the root unsharded: all others enter in that state.
    programs = 2 if name.startswith("evaluation") else 1
    for verdict in verdicts:
        assert verdict.differences == []
        assert verdict.captures <= programs
        assert len(verdict.guard_failures) == verdict.captures - 1
        assert verdict.replays >= 5
    assert verdicts[0].collectives == verdicts[1].collectives != {}


def masks_in_turn() -> Verdict:
    full, padded = text("full"), text("padded")
    batches = [(full, padded)[i % 2][i // 2] for i in range(12)]
    return compare_twins(lambda: seeded(build_llama), train, batches)


def experts_through_passes() -> Verdict:
    return compare_twins(lambda: seeded(build_mixtral), train, text(), passes="default")


def test_experts_through_the_default_pipeline() -> None:
    """Grouped products in float32, which torch's meta kernel refuses."""
    for verdict in run_on_ranks(experts_through_passes):
        assert verdict.differences == []
        assert verdict.replays >= 5


def test_masks_with_and_without_padding_have_a_program_each() -> None:
    """The model asks `mask.all()`: known from the argument alone, before anything runs."""
    for verdict in run_on_ranks(masks_in_turn):
        assert verdict.differences == []
        assert verdict.captures == 2
        assert verdict.replays >= 8


# -- results with objects in them ------------------------------------------------------------------


def caches() -> tuple[list[str], int]:
    """Evaluation that returns the keys and values of every layer."""
    (model, optimizer), (twin, twin_optimizer) = seeded(build_llama), seeded(build_llama)
    step = fz.capture(evaluate(model, optimizer))
    eager = evaluate(twin, twin_optimizer)
    found, seen = [], []
    for i, batch in enumerate(text()):
        mine, other = step(**batch, use_cache=True), eager(**batch, use_cache=True)
        a, b = mine.past_key_values, other.past_key_values
        if type(mine) is not type(other) or type(a) is not type(b) or mine.keys() != other.keys():
            found.append(f"step {i}: types")
        if a.get_seq_length() != b.get_seq_length() or len(a.layers) != len(b.layers):
            found.append(f"step {i}: lengths")
        pairs = [(mine.loss, other.loss), (mine.logits, other.logits)]
        for x, y in zip(a.layers, b.layers, strict=True):
            pairs += [(x.keys, y.keys), (x.values, y.values)]
        found += [f"step {i}: value {j}" for j, p in enumerate(pairs) if not torch.equal(*p)]
        seen.append(a)
    if len({id(c) for c in seen}) != len(seen):
        found.append("a cache was handed out twice")
    return found, step.stats.replays


def test_a_cache_is_a_new_object_at_every_replay() -> None:
    for found, replays in run_on_ranks(caches):
        assert found == []
        assert replays >= 5


# -- training and evaluation by turns --------------------------------------------------------------


def by_turns() -> tuple[list[str], int, int]:
    """Two steps on one model, each captured; dropout is on in one of them."""
    twins = [seeded(build_bert_classifier), seeded(build_bert_classifier)]
    steps = [(train(*twin), evaluate(*twin)) for twin in twins]
    learn, judge = (fz.capture(step) for step in steps[0])
    found = []
    for i, batch in enumerate(text("padded", classes=True, n=16)):
        results = []
        for (model, _), (first, second) in zip(twins, ((learn, judge), steps[1]), strict=True):
            torch.manual_seed(i)
            model.train()
            loss = first(**batch)
            model.eval()
            results.append([loss, second(**batch).logits])
            results[-1] += [torch.get_rng_state(), *state_of(*twins[len(results) - 1]).values()]
        found += [
            f"turn {i}: {j}"
            for j, p in enumerate(zip(*results, strict=True))
            if not torch.equal(*p)
        ]
    return found, learn.stats.replays, judge.stats.replays


def test_training_and_evaluation_by_turns() -> None:
    for found, trained, evaluated in run_on_ranks(by_turns):
        assert found == []
        assert trained >= 8 and evaluated >= 8


# -- numbers and shapes that depend on data --------------------------------------------------------


def masks_change() -> Verdict:
    """The model drops a mask without padding: it reads whether there is any, on each rank for itself."""
    masks = ["padded"] * 6 + ["full"] * 6
    if dist.get_rank() == 1:
        masks = ["full"] * 12
    batches = [text(mask, n=i + 1)[i] for i, mask in enumerate(masks)]
    return compare_twins(lambda: seeded(build_llama), train, batches)


def test_a_mask_that_starts_to_be_full_on_one_rank_is_noticed() -> None:
    first, second = run_on_ranks(masks_change)
    for verdict in (first, second):
        assert verdict.differences == []
        assert verdict.replays >= 5
    assert any("value" in f or "number" in f for f in first.guard_failures)
    assert second.replays >= first.replays  # its own mask is as it was


def looping_experts() -> str:
    model, optimizer = seeded(lambda: build_mixtral(experts_implementation="eager"))
    step = fz.capture(train(model, optimizer))
    try:
        for batch in text():
            step(**batch)
    except UncapturableError as error:
        return str(error)
    return "not refused"


def test_experts_with_shapes_that_depend_on_data_are_refused_by_name() -> None:
    for message in run_on_ranks(looping_experts):
        assert message.startswith("aten.nonzero.default gives a result whose size depends on data")
        assert "modeling_mixtral.py" in message and "in forward: " in message
