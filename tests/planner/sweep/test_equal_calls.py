"""Equal layers, and calls that are alike, are done once: a plan is equal, event for event, to that of the long way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx
from torch.distributed.device_mesh import init_device_mesh

import functionalize as fz
from examples import llama
from functionalize import repeats
from functionalize.cost.machines.presets import MACHINES
from functionalize.ir import fakes
from functionalize.planner.sweep.figures import Figures
from functionalize.program.metadata import propagate
from functionalize.util import user_stack
from tests.planner.sweep.comparing import assert_equal, everything
from tests.planner.sweep.stacks import KINDS, build, inputs, split_llama
from tests.steps import train

pytestmark = pytest.mark.long


def layers_that_differ() -> list[Any]:
    given = {"world": 4, "kinds": KINDS["of all kinds"], "machine": "h100"}
    return fz.plan(build, train, grid={"batch": [8, 12]}, inputs=inputs, **given).plans


def _no_key(*given: Any) -> Any:
    raise fakes._Uncacheable


def layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Find no block of a graph that repeats."""
    monkeypatch.setattr(repeats, "runs", lambda keys: iter(()))


def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no two layers, no two calls, and no two stacks, be alike."""
    layer_by_layer(monkeypatch)
    monkeypatch.setattr(fakes, "_key", _no_key)

    def read(self: user_stack.StackTexts, stack: Any) -> user_stack._Read:
        return user_stack._read(user_stack.symbolized([stack])[0], stack)

    monkeypatch.setattr(user_stack.StackTexts, "_of", read)


def test_a_plan_is_equal_to_the_long_way() -> None:
    found = []
    for patches in (lambda patch: None, one_by_one):
        with pytest.MonkeyPatch.context() as patch:
            patches(patch)
            found.append([everything(plan.figures) for plan in layers_that_differ()])
    for at_once, alone in zip(*found, strict=True):
        assert_equal(at_once, alone)


def check(model: Callable[[], Any], function: Any, *batch: Any, world: int = 4) -> float:
    """Compare the figures of a step with those of the long way; the share of its nodes that are like others."""
    with fz.world(world):
        built = model()
        step = fz.capture(function, memory=True)
        while step.program is None:
            step(*built, *batch)
        h100 = MACHINES["h100"]
        spliced = Figures.of(step.program, step.memory, h100)
        found = everything(spliced)
        with pytest.MonkeyPatch.context() as patch:
            layer_by_layer(patch)
            copy = step.program.copy()
            propagate(copy)
            assert_equal(found, everything(Figures.of(copy, step.memory, h100)))
        assert copy.repeats.blocks == (repeats.Section(0, len(copy.graph.nodes)),)
    alike = [s.end - s.start for s, like in spliced.program.repeats.likes() if like is not None]
    return sum(alike) / len(spliced.program.graph.nodes)


@pytest.mark.parametrize("kinds", [name for name in KINDS if name != "of all kinds"])
def test_equal_layers_are_spliced_exactly(kinds: str) -> None:
    assert check(lambda: build(KINDS[kinds]), train, inputs()) > 0.2


def test_a_llama_with_replicas_is_spliced_exactly() -> None:
    def model() -> Any:
        mesh = init_device_mesh("cpu", (8, 8), mesh_dim_names=("replicate", "shard"))
        return llama.build("8B", layers=8, mesh=mesh)

    assert check(model, llama.step, *llama.inputs(1, 256, accumulate=2), world=64) > 0.3


def test_a_llama_on_a_mesh_with_tensor_parallelism_is_spliced_exactly() -> None:
    def model() -> Any:
        mesh = init_device_mesh("cpu", (8, 8), mesh_dim_names=("shard", "split"))
        built = split_llama(replace(llama.SHAPES["8B"], layers=6), mesh)
        return built, torch.optim.AdamW(built.parameters())

    assert check(model, llama.step, *llama.inputs(1, 256), world=64) > 0.3


@settings(max_examples=3)
@given(st.lists(st.sampled_from(["", "wide", "experts"]), min_size=5, max_size=8))
def test_stacks_at_random_are_spliced_exactly(kinds: list[str]) -> None:
    check(lambda: build(kinds), train, inputs())


def stacked(backs: Sequence[int]) -> fx.Graph:
    """A layer of 30 additions for each number; the eighth of a layer adds the value so many additions before it."""
    graph = fx.Graph()
    values = [graph.placeholder("x"), graph.placeholder("y")]
    for back in backs:
        for i in range(30):
            pair = values[-1], values[-back if i == 7 else -2]
            values.append(graph.call_function(torch.ops.aten.add.Tensor, pair, {"alpha": i}))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(4)
    return graph


@pytest.mark.parametrize(
    ("backs", "first"),
    [
        ((3, 3, 3, 3), [None, 0, 0, 0]),
        ((3, 4, 3, 4), [None, None, 0, 1]),
        ((3, 3, 4, 3), [None, 0, None, 0]),
    ],
)
def test_layers_that_read_other_values_are_not_alike(backs: Any, first: list[int | None]) -> None:
    layers = [(s, like) for s, like in repeats.Repeats(stacked(backs)).likes() if s.end > 2]
    starts = [span.start for span, _ in layers]
    assert [like and starts.index(like.start) for _, like in layers] == first


def test_values_on_one_storage_do_not_look_like_values_on_two() -> None:
    graph, x, y = fx.Graph(), torch.empty(4), torch.empty(4)
    nodes = [graph.placeholder(name) for name in "abcd"]
    for node, value in zip(nodes, (x, y, y, y.view(4)), strict=True):
        node.meta["val"] = value
    looks = repeats.BorderValues()
    assert looks.of(nodes[:2]) == looks.of([nodes[0], nodes[3]]) != looks.of(nodes[2:])


def test_the_blocks_of_a_graph_that_changes_are_found_again() -> None:
    program = fz.functions.trace(lambda x: x + 1 + 2, torch.ones(3))
    found = program.repeats
    assert program.repeats is found
    node = program.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)[-1]
    for change in ({"args": (node.args[0], 3)}, {"target": torch.ops.aten.mul.Tensor}):
        for name, value in change.items():
            setattr(node, name, value)
        assert program.repeats is not found
        found = program.repeats
    assert program.repeats is found


def test_equal_layers_are_costed_once() -> None:
    (four,) = fz.plan(build, train, inputs=inputs, world=4, kinds=("",) * 4).plans
    (eight,) = fz.plan(build, train, inputs=inputs, world=4, kinds=("",) * 8).plans
    costed = [len(set(map(id, p.figures._costs.values()))) for p in (four, eight)]
    assert costed[0] == costed[1] < len(four.figures._costs) / 2
