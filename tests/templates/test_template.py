"""Programs of several lengths as one: what was predicted for a length equals what is recorded there, leaf for leaf."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import functionalize as fz
from functionalize.program.program import Program
from functionalize.templates.leaves import constant_token, leaves_of
from functionalize.templates.template import Mismatch, Template
from tests.ranks import run_on_ranks
from tests.steps import make_loss_step, make_step

aten = torch.ops.aten


def program_at(step: Any, make: Callable[..., Tensor], sizes: tuple[int, ...]) -> Program:
    """The program that is recorded for these sizes, or was."""
    calls = step.stats.captures + step.stats.replays
    while step.stats.captures + step.stats.replays == calls:
        step(make(*sizes))
    return step.program


def captured(fn: Any, **options: Any) -> Any:
    return fz.capture(fn, allowance=None, audit=False, dynamic=False, **options)


def check_sweep(
    step: Any,
    make: Callable[..., Tensor],
    learned: Sequence[tuple[int, ...]],
    others: Sequence[tuple[int, ...]],
) -> Template:
    """The template of some sizes predicts the programs at all others."""
    template = Template.of([program_at(step, make, sizes) for sizes in learned])
    assert isinstance(template, Template), template
    tokens = leaves_of(template.reference).tokens
    assert template.varying > 0
    for sizes in others:
        recorded = leaves_of(program_at(step, make, sizes))
        made = leaves_of(template.at(sizes))
        assert recorded.tokens == made.tokens == tokens
        assert tuple(recorded.integers) == template.predicted(sizes), sizes
        assert recorded.integers == made.integers, sizes
    return template


def transformer(width: int = 16) -> Any:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(width, 2, 32, batch_first=True, dropout=0.0)
    return make_step(model, torch.optim.AdamW(model.parameters(), fused=True))


@pytest.mark.parametrize("passes", ["", "elide_copies,reinplace"])
def test_lengths_of_a_transformer(passes: str) -> None:
    def make(s: int) -> Tensor:
        return torch.randn(2, s, 16)

    others = [(s,) for s in (7, 9, 16, 31, 32, 33)]  # 16 and 32 are widths, too
    template = check_sweep(
        captured(transformer(), passes=passes), make, [(8,), (12,), (20,)], others
    )
    assert template.symbols.names == ("size 1 of `x`",)
    assert "[2, s0, 16]" in template.text()


def test_batches_and_lengths_of_a_transformer() -> None:
    def make(b: int, s: int) -> Tensor:
        return torch.randn(b, s, 16)

    learned = [(2, 8), (3, 8), (2, 12), (5, 20), (7, 9)]
    others = [(b, s) for b in (2, 4, 6) for s in (5, 16, 30)]
    template = check_sweep(captured(transformer()), make, learned, others)
    assert template.symbols.names == ("size 0 of `x`", "size 1 of `x`")


def test_images_with_strides() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 3))
    step = captured(make_step(model, torch.optim.SGD(model.parameters(), lr=0.1)))

    def make(height: int) -> Tensor:
        return torch.randn(2, 3, height, 10)

    check_sweep(step, make, [(h,) for h in (8, 9, 12, 13, 18, 21)], [(11,), (14,), (25,)])


@pytest.mark.long
@pytest.mark.parametrize("every", [12, pytest.param(1, marks=pytest.mark.fuzz)])
def test_a_sweep_of_lengths_and_batches(every: int) -> None:
    """Lengths from 1 to 96, batches from 1 to 4. Sizes of one are classes of their own; 1 by 1 is one size."""
    step = captured(transformer(8))

    def make(b: int, s: int) -> Tensor:
        return torch.randn(b, s, 8)

    def sizes_of(kind: tuple[bool, bool], sizes: tuple[int, int]) -> tuple[int, ...]:
        return tuple(size for size, is_one in zip(sizes, kind, strict=True) if not is_one)

    for kind, learned in {
        (False, False): [(2, 8), (3, 8), (2, 12), (4, 20), (3, 9)],
        (True, False): [(1, 8), (1, 12), (1, 20)],
        (False, True): [(2, 1), (3, 1), (4, 1)],
    }.items():
        template = Template.of([program_at(step, make, sizes) for sizes in learned])
        assert isinstance(template, Template), template
        batches, lengths = [1] if kind[0] else range(2, 5), [1] if kind[1] else range(2, 97, every)
        for sizes in product(batches, lengths):
            recorded = leaves_of(program_at(step, make, sizes))
            made = leaves_of(template.at(sizes_of(kind, sizes)))
            assert (made.tokens, made.integers) == (recorded.tokens, recorded.integers), sizes


def huggingface(kind: str) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if kind == "llama":
        config = LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        model: Any = LlamaForCausalLM(config)
    else:
        gpt = GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=1, n_head=4)
        model = GPT2LMHeadModel(gpt)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return make_loss_step(lambda ids: model(input_ids=ids, labels=ids).loss, optimizer)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_lengths_of_language_models(kind: str) -> None:
    step = captured(huggingface(kind))
    check_sweep(
        step,
        lambda s: torch.randint(0, 64, (2, s)),
        [(8,), (12,), (20,), (27,)],
        [(s,) for s in (5, 16, 32, 33)],
    )


def sharded_lengths() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.1), nn.Linear(8, 4)
    )
    for part in (*model, model):
        fully_shard(part)
    step = captured(make_step(model, torch.optim.AdamW(model.parameters())))
    template = Template.of([program_at(step, torch.randn, (2, s, 8)) for s in (8, 12, 20)])
    assert isinstance(template, Template), template
    return [
        (s, leaves_of(template.at((s,))).integers == leaves_of(recorded).integers)
        for s in (2, 3, 16, 33, 64)
        if (recorded := program_at(step, torch.randn, (2, s, 8)))
    ]


@pytest.mark.long
def test_lengths_under_fsdp_and_dropout() -> None:
    (found,) = run_on_ranks(sharded_lengths, world=1)
    assert found == [(s, True) for s in (2, 3, 16, 33, 64)]


@pytest.mark.parametrize("described", [False, True])
def test_elements_picked_by_number(described: bool) -> None:
    """`x[indices]` has a size that depends on data only if an index is a mask."""
    step = captured(lambda x: x[torch.arange(len(x)) // 2] * 2)
    programs = [program_at(step, torch.randn, (rows,)) for rows in (8, 12, 20)]
    if described:
        for program in programs:
            program.describe()
    template = Template.of(programs)
    assert isinstance(template, Template), template
    made = template.at((37,))
    made.describe()
    shapes = [n.meta["val"].shape for n in made.graph.nodes if n.target is aten.index.Tensor]
    assert shapes == [(37,)]


# -- what parts ------------------------------------------------------------------------------------


def template_of(fn: Any, *lengths: int) -> Any:
    step = captured(fn)
    return Template.of([program_at(step, torch.randn, (s,)) for s in lengths])


def branching(x: Tensor) -> Tensor:
    return x.sin() if x.shape[0] > 15 else x.cos()


def looping(x: Tensor) -> Tensor:
    for part in x.split(5):
        x = x + part.sum()
    return x


def test_a_branch_on_the_length() -> None:
    found = template_of(branching, 8, 12, 20)
    assert isinstance(found, Mismatch) and found.program == 2
    assert str(found) == (
        "`cos = aten.cos.default(x)`: the other program has `sin = aten.sin.default(x)`"
    )


def test_a_number_of_parts() -> None:
    assert isinstance(template_of(looping, 8, 9, 17), Mismatch)


def test_a_limit() -> None:
    found = template_of(lambda x: x[:20] * 2, 8, 12, 20, 37)
    assert isinstance(found, Mismatch)
    assert "the other program has `slice_1 = " in found.why
    found = template_of(lambda x: x + x.new_zeros(min(len(x), 20)).sum(), 8, 12, 20, 37)
    assert isinstance(found, Mismatch)
    assert found.place == "`full = aten.full.default([8], 0, dtype=float32)`"
    assert found.why.startswith(
        "no one function of the sizes [(8,), (12,), (20,), (37,)] gives (8,"
    )


def test_elements_picked_by_a_mask() -> None:
    table, mask = torch.randn(3), torch.tensor([True, False, True])
    found = template_of(lambda x: x * table[mask].sum(), 8, 12, 20)
    assert isinstance(found, Template), found
    assert found.symbols.places[-1] == ("size 0 of `results of ops`", -1, 2)


def test_a_constant_that_depends_on_the_length() -> None:
    found = template_of(lambda x: x * (1 / x.shape[0]), 8, 12, 20)
    assert isinstance(found, Mismatch) and found.why == "the other program has `mul = aten." + (
        "mul.Tensor(x, 0.08333333333333333)`"
    )


def test_large_integers_are_equal_by_their_values() -> None:
    """Facts on sizes are compared as these tokens: of objects that are gone, ids return."""
    assert constant_token(int("600")) == constant_token(int("600")) != constant_token(601)
    assert len({constant_token(one) for one in (1, 1.0, True)}) == 3


def test_sizes_of_one_are_a_class_of_their_own() -> None:
    found = template_of(lambda x: x * 2, 8, 1, 12)
    why = "size 0 of `x` is 1, which torch treats in its own way"
    assert found == Mismatch(1, "the arguments", why)


def test_few_programs_are_no_template() -> None:
    assert template_of(torch.sin, 8, 12) == Mismatch(0, "the programs", "2 of at least 3")


def test_explain_says_which_programs_are_one_graph() -> None:
    step = captured(lambda x: x.reshape(-1, 2).sum(0) if len(x) < 30 else x.sin())
    for rows in (8, 12, 20):
        program_at(step, torch.randn, (rows,))
    assert "programs 1, 2, 3 are one graph: " in step.explain()
    assert "integers are functions of s0 = size 0 of `x`" in step.explain()
    program_at(step, torch.randn, (30,))
    assert "programs 1 and 4 are not one graph: `" in step.explain()
