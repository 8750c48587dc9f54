"""Hugging Face models, wrapped layer by layer, on two gloo ranks: captured once, replayed equal to eager.

Random weights, the dropout that the default configuration has, a loss from the model's output. Experts run
in the default implementation, whose shapes do not depend on data, in another such one, and in the one that loops
over the experts that were hit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist

import functionalize as fz
from functionalize.errors import UncapturableError
from tests.allowance import ample_allowance
from tests.fsdp.huggingface import (
    CASES,
    Twin,
    build_bert_classifier,
    build_llama,
    build_mixtral,
    build_qwen3_moe,
    build_wav2vec2,
    evaluate,
    spoken,
    text,
    train,
)
from tests.fsdp.twins import Verdict, compare_twins, state_of
from tests.ranks import run_on_ranks


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
    return compare_twins(
        lambda: seeded(build_mixtral), train, text(), passes="default", allowance=None
    )


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
        assert verdict.replays >= 5


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


@ample_allowance()
def looping_experts(build: Callable[..., Twin]) -> Verdict:
    """How many tokens each expert gets varies from call to call, and on each rank."""
    make = partial(build, experts_implementation="eager")
    return compare_twins(lambda: seeded(make), train, text(n=20, rows=12))


@pytest.mark.long
@pytest.mark.parametrize("build", [build_mixtral, build_qwen3_moe])
def test_experts_that_loop_over_those_that_were_hit(build: Callable[..., Twin]) -> None:
    for verdict in run_on_ranks(looping_experts, build):
        assert verdict.differences == []
        assert verdict.replays >= 5


def refused_experts() -> str:
    model, optimizer = seeded(lambda: build_mixtral(experts_implementation="eager"))
    step = fz.capture(train(model, optimizer), dynamic=False, on_uncapturable="raise")
    try:
        for batch in text():
            step(**batch)
    except UncapturableError as error:
        return str(error)
    return "not refused"


def test_such_experts_are_refused_by_name_where_sizes_must_not_vary() -> None:
    for message in run_on_ranks(refused_experts):
        assert message.startswith("aten.nonzero.default gives a result whose size depends on data")
        assert "modeling_mixtral.py" in message and "in forward: " in message


def counts_that_vary(name: str) -> Verdict:
    """How many are selected varies from call to call, and on each rank."""
    build, make_step, batches = CASES[name]
    given = batches(16, 3)  # type: ignore[call-arg]
    return compare_twins(lambda: seeded(build), make_step, given, dynamic=True)


@pytest.mark.parametrize("name", ["electra"])
def test_how_many_elements_a_mask_selects_may_vary(name: str) -> None:
    for verdict in run_on_ranks(counts_that_vary, name):
        assert verdict.differences == []
        assert verdict.mispredictions == 0
        assert verdict.replays >= 2


def masks_of_the_model() -> str:
    """SpecAugment draws arrays from numpy's generator."""
    model, optimizer = seeded(lambda: build_wav2vec2("ForCTC", mask_time_length=2))
    step = fz.capture(train(model, optimizer), on_uncapturable="raise")
    try:
        for batch in spoken():
            step(**batch)
    except UncapturableError as error:
        return str(error)
    return "not refused"


def test_time_masks_that_the_model_draws_are_refused_by_name() -> None:
    for message in run_on_ranks(masks_of_the_model):
        assert message.startswith("draws from `numpy.random`, reads or writes it, which a replay")
