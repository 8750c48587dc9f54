"""What existed before a step: a category for every storage and every input of the program; FSDP2's padding."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import functionalize as fz
from functionalize._compat.distributed import fake_process_group
from functionalize.cost.categories import Category, category_of
from functionalize.fsdp.objects import FSDPTensor
from functionalize.ir.inputs import Argument, Captured
from functionalize.planner.timeline.timeline import BEFORE, Allocation, Timeline
from functionalize.state.sources import (
    Gradient,
    GroupTensor,
    Inner,
    ModuleTensor,
    OptimizerParameter,
    OptimizerState,
)
from functionalize.walk.parts import Held


class Model(nn.Module):
    """5 rows on 2 ranks: the shard of the second rank is a row short; a buffer; batch norm's state."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)
        self.register_buffer("scale", torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.relu(self.norm(self.a(x))) * self.scale).square().mean()


def captured(rank: int = 0, keep: bool = False) -> Any:
    """A captured step of the sharded model on fake collectives; `keep`: its gradients outlive it."""
    with fake_process_group(rank, 2):
        model = fully_shard(Model())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

        def train(x: Tensor) -> Tensor:
            if keep:
                optimizer.zero_grad(set_to_none=False)
            loss = model(x)
            loss.backward()
            optimizer.step()
            if not keep:
                optimizer.zero_grad()
            return loss.detach()

        step = fz.capture(train, memory=True)
        for _ in range(5):
            step(torch.randn(3, 4))
        assert step.memory is not None, step.explain()
        return step


def before(timeline: Timeline, category: Category) -> list[Allocation]:
    return [a for a in timeline.allocations if a.made == BEFORE and a.category == category]


def named(timeline: Timeline, name: str) -> list[Allocation]:
    return [a for a in timeline.allocations if a.name == name]


def test_what_existed_before() -> None:
    timeline = captured().memory.eager
    assert not before(timeline, Category.UNKNOWN)
    (x,) = before(timeline, Category.INPUTS)
    assert (x.name, x.nbytes, x.shape) == ("x", 48, "float32[3, 4]")
    assert {a.name for a in before(timeline, Category.BUFFERS)} == {
        "model.scale",
        "model.norm.running_mean",
        "model.norm.running_var",
        "model.norm.num_batches_tracked",
    }
    # 2 moments and a count for each of 6 parameters
    states = {a.name for a in before(timeline, Category.OPTIMIZER_STATE)}
    assert len(states) == 18
    assert {"model.a.weight: exp_avg", "model.b.bias: step"} <= states
    assert len(before(timeline, Category.SHARDED_PARAMETERS)) == 6


def test_the_padding_of_uneven_shards() -> None:
    for rank, rows in ((0, 3), (1, 2)):
        timeline = captured(rank).memory.eager
        (shard,) = named(timeline, "model.a.weight")
        assert (shard.nbytes, shard.padding) == (3 * 16, (3 - rows) * 16)
        grown = [a for a in named(timeline, "model.a.weight.unsharded_0") if a.nbytes]
        assert {(a.nbytes, a.padding) for a in grown} == {(6 * 16, 16)}
        assert {a.category for a in grown} == {Category.UNSHARDED_PARAMETERS}
        assert Category.PADDING in timeline.categories_at(timeline.peak_at)


def test_buffers_of_collectives_are_padded_as_what_is_in_them() -> None:
    timeline = captured().memory.eager
    held = 4 * sum(p.numel() for p in Model().parameters())
    gathered = [
        a
        for a in timeline.allocations
        if a.category == Category.ALL_GATHER_BUFFERS and timeline.ops[a.made].name.count("empty")
    ]
    reduced = [a for a in timeline.allocations if a.category == Category.REDUCE_SCATTER_BUFFERS]
    assert [(a.nbytes - a.padding) for a in gathered] == [held] * len(gathered) != []
    assert [(a.nbytes - a.padding) for a in reduced] == [held] * len(reduced) != []


def test_gradients_that_are_kept_are_sharded_gradients() -> None:
    timeline = captured(keep=True).memory.eager
    assert len(before(timeline, Category.SHARDED_GRADIENTS)) >= 1
    assert not before(timeline, Category.UNKNOWN)


def test_every_input_of_the_program_has_a_category() -> None:
    step = captured()
    given = step.memory.input_categories
    assert set(given) == {spec.name for spec in step.program.inputs}
    assert set(given.values()) == {
        Category.SHARDED_PARAMETERS,
        Category.OPTIMIZER_STATE,
        Category.BUFFERS,
        Category.INPUTS,
    }
    assert given["x"] == Category.INPUTS


def test_the_report_has_both_lifetimes() -> None:
    memory = captured().memory
    assert set(memory.timelines) == {"eager", "program"}
    assert memory.difference().eager == memory.eager.peak
    assert "model.a" in memory.text()


def test_categories_of_sources() -> None:
    model, optimizer = nn.Linear(2, 2), torch.optim.SGD([torch.ones(1)], lr=0.1)
    weight = ModuleTensor(model, "_parameters", "weight")
    expected: list[tuple[Any, Category]] = [
        (weight, Category.SHARDED_PARAMETERS),
        (ModuleTensor(model, "_buffers", "mean"), Category.BUFFERS),
        (Inner(weight, "_local_tensor"), Category.SHARDED_PARAMETERS),
        (Gradient(weight), Category.SHARDED_GRADIENTS),
        (Gradient(FSDPTensor(None, "_unsharded_param")), Category.UNSHARDED_GRADIENTS),
        (FSDPTensor(None, "unsharded_accumulated_grad"), Category.UNSHARDED_GRADIENTS),
        (FSDPTensor(None, "_partial_reduce_output"), Category.SHARDED_GRADIENTS),
        (FSDPTensor(None, "all_gather_outputs", 0), Category.UNSHARDED_PARAMETERS),
        (OptimizerState(optimizer, 0, 0, "exp_avg"), Category.OPTIMIZER_STATE),
        (GroupTensor(optimizer, 0, "lr"), Category.OPTIMIZER_STATE),
        (OptimizerParameter(optimizer, 0, 0), Category.SHARDED_PARAMETERS),
        (Argument(0), Category.INPUTS),
        (Held({}, "mask"), Category.BUFFERS),
        (Captured(None), Category.BUFFERS),
    ]
    for source, category in expected:
        assert category_of(source) == category, source
