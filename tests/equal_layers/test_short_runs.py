"""Plans of short runs are equal, event for event, to those that are recorded whole; what must be recorded whole is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.modules.module import register_module_forward_hook

import functionalize as fz
from examples import llama
from functionalize.equal_layers.planned_step import PlannedStep
from tests.equal_layers import models
from tests.equal_layers.both_ways import train, why_whole
from tests.equal_layers.models import Stack, batch, sharded
from tests.sweep import stacks

FIRST = "it is the first one"


@pytest.fixture(autouse=True)
def no_bugs(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A recording that cannot be expanded because of a bug is planned whole, with a warning."""
    yield
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


def stack(kind: Any = models.Layer, model: Any = Stack) -> Callable[[], models.Built]:
    return lambda: sharded(model(kind))


def test_equal_layers_are_put_back() -> None:
    assert why_whole(stack(), train, batch) == [FIRST, None, None]


def test_ops_between_layers_and_random_ones() -> None:
    found = why_whole(stack(models.Dropping, models.Watching), train, batch)
    assert found == [FIRST, None, None]


@pytest.mark.parametrize(
    ("kind", "model", "reason"),
    [
        (models.Scaled, Stack, "`model.layers.3` runs aten.mul.Tensor otherwise than the layers"),
        (models.Switched, Stack, "equal layers read FSDPSwitched.number"),
        (models.Counting, Stack, "the step leaves other state behind"),
        (models.Layer, models.Skipping, "`model.layers.7` has"),
        (lambda i: models.Layer(i) if i % 2 else models.Dropping(i), Stack, "no equal layers"),
    ],
)
def test_layers_that_differ_are_recorded_whole(kind: Any, model: Any, reason: str) -> None:
    first, *others = why_whole(stack(kind, model), train, batch)
    assert first == FIRST
    assert reason in str(others[-1]), others


@pytest.mark.parametrize(
    ("use", "reason"),
    [(lambda number: number + 1, None), (lambda number: number > 2, "relies on a number")],
)
def test_numbers_that_layers_read(use: Any, reason: str | None) -> None:
    class Reading(models.Layer):
        def forward(self, x: Any) -> Any:
            use(x.detach().mean().item() * 2)
            return super().forward(x)

    found = why_whole(stack(Reading), train, batch, (1, 2))
    assert found[1] is None if reason is None else reason in str(found[1])


def test_what_layers_read_is_compared_from_then_on() -> None:
    class Halved(models.Layer):
        def __init__(self, number: int) -> None:
            super().__init__(number)
            self.half = number // 10

        def forward(self, x: Any) -> Any:
            return super().forward(x) if self.half in (0, 1) else x

    def build() -> models.Built:
        return sharded(Stack(Halved, 20))

    found = why_whole(build, train, batch)
    assert "equal layers read FSDPHalved.half" in str(found[1])
    assert found[2] is None


def test_a_short_run_that_raises_is_planned_whole() -> None:
    found = why_whole(stack(model=models.Demanding), train, batch)
    assert found == [FIRST, "short runs are off", "short runs are off"]


def test_hooks_on_all_modules_see_every_layer() -> None:
    hook = register_module_forward_hook(lambda module, args, out: None)
    try:
        found = why_whole(stack(), train, batch, (1, 2))
    finally:
        hook.remove()
    assert "hooks on all modules" in str(found[1])


def test_other_ops_of_layers_for_other_arguments() -> None:
    class Sized(models.Layer):
        def forward(self, x: Any) -> Any:
            return super().forward(x) if x.shape[0] > 4 else super().forward(x).sin()

    found = why_whole(stack(Sized), train, batch, (1, 2, 4, 3))
    assert found[0] == FIRST
    assert "other arguments let layers run other ops" in str(found[2])
    assert found[1] is None
    assert found[3] is None  # compared with the one before


def test_modules_and_classes_are_as_before() -> None:
    with fz.world(4):
        model, optimizer = sharded(Stack())
        step = PlannedStep(train)
        before = [{**vars(m)} for m in model.modules()]
        for size in (1, 2):
            step.forget()
            while step.program is None:
                step(model, optimizer, batch(size))
        assert step.whole_because is None
        assert [vars(m).keys() for m in model.modules()] == [each.keys() for each in before]
        assert "number" not in vars(type(model.layers[4]))
        assert [layer.number for layer in model.layers] == list(range(models.LAYERS))


LLAMA = llama.Shape(10, 64, 128, 4, 2)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(llama.SHAPES, "small", LLAMA)


def tokens(batch: int = 1, accumulate: int = 1) -> tuple[torch.Tensor, ...]:
    return llama.inputs(batch, 64, accumulate)


def test_a_batch_of_two_takes_a_copy_where_one_takes_a_view(small: None) -> None:
    """In the loss of a Llama; before the layers and after them, other ops may run."""
    found = why_whole(llama.build, llama.step, tokens, (1, 2, 3), size="small")
    assert found == [FIRST, None, None]


def test_gradients_that_are_left_behind(small: None) -> None:
    def step(model: Any, optimizer: Any, *microbatches: Any) -> None:
        optimizer.zero_grad()
        for each in microbatches:
            model(each).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    assert why_whole(llama.build, step, tokens, size="small") == [FIRST, None, None]


@pytest.mark.long
@pytest.mark.parametrize(
    "keys",
    [
        {"checkpoint": True},
        {"reshard": False},
        {"offload": True},
        {"accumulate": 2},
        {"target": "cpu"},
        {"machine": "a100"},
    ],
    ids=str,
)
def test_plans_of_a_llama(small: None, keys: dict[str, Any]) -> None:
    found = why_whole(llama.build, llama.step, tokens, size="small", **keys)
    assert found == [FIRST, None, None]


@pytest.mark.long
def test_llama_8b() -> None:
    found = why_whole(llama.build, llama.step, llama.inputs, (1, 2), size="8B", world=64)
    assert found == [FIRST, None]


@pytest.mark.long
@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.AdamW,
        lambda p: torch.optim.AdamW(p, foreach=False),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=False),
        torch.optim.Adagrad,
        torch.optim.RMSprop,
    ],
    ids=["adamw", "adamw by parameter", "sgd", "sgd by parameter", "adagrad", "rmsprop"],
)
def test_optimizers(small: None, optimizer: Any) -> None:
    def build() -> Any:
        model, _ = llama.build("small")
        return model, optimizer(model.parameters())

    assert why_whole(build, llama.step, tokens) == [FIRST, None, None]


@pytest.mark.long
def test_replicas(small: None) -> None:
    def build() -> Any:
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
        return llama.build("small", mesh=mesh)

    assert why_whole(build, llama.step, tokens) == [FIRST, None, None]


@pytest.mark.long
def test_tensor_parallelism() -> None:
    def build() -> Any:
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("shard", "split"))
        built = stacks.split_llama(LLAMA, mesh)
        return built, torch.optim.AdamW(built.parameters(), fused=True)

    assert why_whole(build, llama.step, tokens) == [FIRST, None, None]


@pytest.mark.long
def test_gradients_over_several_microbatches(small: None) -> None:
    def step(model: Any, optimizer: Any, *microbatches: Any) -> float:
        loss = 0.0
        for i, each in enumerate(microbatches):
            model.set_requires_gradient_sync(i == len(microbatches) - 1)
            out = model(each)
            out.backward()
            loss += out.item()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    found = why_whole(llama.build, step, tokens, size="small", accumulate=2)
    assert found == [FIRST, None, None]


def _transformers(name: str, checkpointed: bool) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 128, "num_hidden_layers": 10, "hidden_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 128}
    if name == "GPT2":
        sizes, heads = {"vocab_size": 128, "n_layer": 10, "n_embd": 64}, {"n_head": 4}
    config = getattr(transformers, f"{name}Config")(**sizes, **heads, use_cache=False)
    model = getattr(transformers, "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")(
        config
    ).bfloat16()
    if checkpointed:
        newer = getattr(model, "activation_checkpointing_enable", None)
        (newer or model.gradient_checkpointing_enable)()
    for layer in model.transformer.h if name == "GPT2" else model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), fused=True)


@pytest.mark.long
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name", ["GPT2", "Llama", "Mistral"])
def test_models_of_transformers(name: str, checkpointed: bool) -> None:
    def step(model: Any, optimizer: Any, ids: Any) -> None:
        train(lambda ids: model(input_ids=ids, labels=ids).loss, optimizer, ids)

    def ids(batch: int = 1) -> torch.Tensor:
        return torch.randint(0, 100, (batch, 32))

    found = why_whole(lambda: _transformers(name, checkpointed), step, ids)
    assert found == [FIRST, None, None]


@pytest.mark.long
@settings(max_examples=4, phases=[Phase.explicit, Phase.generate])  # to shrink takes minutes
@example(["", "recomputed"], 8, [1, 2, 5], False)
@example(["", "dropout", "dropout", ""], 8, [5, 1, 2], False)
@given(
    st.lists(
        st.sampled_from(["", "", "wide", "dropout", "recomputed", "experts"]),
        min_size=1,
        max_size=4,
    ),
    st.integers(8, 10),
    st.permutations([1, 2, 5]),
    st.booleans(),
)
def test_stacks_at_random(kinds: list[str], count: int, batches: list[int], clips: bool) -> None:
    """One of the kinds repeats; the others stand before it and after it."""
    every = (*kinds[1:], *[kinds[0]] * count, *kinds[1:])

    def step(model: Any, optimizer: Any, x: Any) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def inputs(batch: int = 1) -> torch.Tensor:
        return stacks.inputs(8 * batch)

    found = why_whole(lambda: stacks.build(every), step, inputs, batches)
    assert found[0] == FIRST
    assert found[2] is None, found  # the second one may show that they read their kind
