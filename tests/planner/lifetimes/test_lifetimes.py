"""Lifetimes of storages as a capture notes them: equal to the allocator's own events, on real tensors and on fakes."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import optimizer as optimizers

import functionalize as fz
from functionalize._compat.distributed import fake_process_group
from functionalize.cost.categories import Category
from functionalize.ir.generators import GET_STATE
from functionalize.planner.lifetimes import lifetimes
from functionalize.planner.timeline.timeline import BEFORE, Timeline
from functionalize.util import user_stack as where
from tests.fsdp.features import FEATURES
from tests.planner.lifetimes.lifetimes import (
    CASES,
    SCALARS,
    Model,
    allocated,
    batch,
    changes,
    is_within,
    peak,
    sums,
    training,
)
from tests.ranks import run_on_ranks


def timeline_of(step: Any) -> Timeline:
    captured = fz.capture(step, memory=True)
    assert captured.memory is None
    for _ in range(4):
        captured(batch())
    assert captured.memory is not None, captured.explain()
    timeline: Timeline = captured.memory.lifetimes.timeline()
    return timeline


# -- true to the allocator -------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_every_change_is_one_of_the_allocators(name: str) -> None:
    with fake_process_group(0, 2):
        truth = allocated(training(**CASES[name]))
        ours = changes(timeline_of(training(**CASES[name])))
    assert is_within(ours, truth)
    assert abs(peak(ours) - peak(truth)) <= SCALARS


@pytest.mark.parametrize("name", ["plain", "checkpointed", "foreach"])
def test_fakes_live_as_long_as_real_tensors(name: str) -> None:
    with fake_process_group(0, 2):
        real = timeline_of(training(**CASES[name]))
    with fz.world(size=2, target="cpu"):
        fake = timeline_of(training(**CASES[name]))
    assert changes(fake) == changes(real)
    assert fake.peak == real.peak


def test_the_target_of_a_world_tells_whose_scratch_is_counted() -> None:
    with fz.world(size=2, target="cuda"):
        step = fz.capture(training(), memory=True)
        for _ in range(4):
            step(batch())
        assert step.memory.lifetimes.target == "cuda"


@pytest.mark.parametrize("kind", ["whole", "views"])
def test_a_sum_of_gradients_is_in_place_where_autograd_makes_it_so(kind: str) -> None:
    truth, ours = allocated(sums(kind)), changes(timeline_of(sums(kind)))
    large = [nbytes for nbytes in truth if abs(nbytes) > SCALARS]
    assert [nbytes for nbytes in ours if abs(nbytes) > SCALARS] == large


# -- what a timeline says --------------------------------------------------------------------------


def test_without_memory_nothing_is_noted() -> None:
    step = fz.capture(training(shard=False))
    for _ in range(4):
        step(batch())
    assert step.program is not None
    assert step.memory is None


def test_a_forward_alone_has_no_timeline() -> None:
    with pytest.raises(ValueError, match="memory=True records whole steps"):
        fz.capture(Model(), backward=True, memory=True)


def test_a_storage_is_one_allocation_for_each_size() -> None:
    weight = torch.empty(100)
    weight.untyped_storage().resize_(0)

    def step(x: Tensor) -> Tensor:
        fz.functions.resize_storage_bytes_(weight, 400)
        weight.fill_(1)
        out = x.sum() * weight.sum()
        fz.functions.resize_storage_bytes_(weight, 0)
        return out

    timeline = timeline_of(step)
    (grown,) = [a for a in timeline.allocations if a.name == "weight"]
    made, freed = timeline.ops[grown.made], timeline.ops[grown.freed or 0]
    assert (grown.nbytes, made.name, freed.name) == (400, freed.name, made.name)
    assert timeline.ops[grown.last_use].name == "aten.sum.default"
    assert grown.made < grown.last_use < (grown.freed or 0)


def test_states_of_generators_are_counted() -> None:
    with fake_process_group(0, 2):
        timeline = timeline_of(training(checkpointed=True, drop=0.1))
    states = [a for a in timeline.allocations if a.category == Category.RNG_STATE]
    assert [a.nbytes for a in states] == [5056] * len(states)
    assert sum(timeline.ops[a.made].phase == "forward" for a in states) == 2
    assert all(timeline.ops[a.made].name == str(GET_STATE) for a in states)


def test_gradients_that_existed_before_are_freed_when_the_step_frees_them() -> None:
    timeline = timeline_of(training(shard=False, zero_first=True))
    gradients = [
        a
        for a in timeline.allocations
        if a.category == Category.SHARDED_GRADIENTS and a.made == BEFORE
    ]
    assert len(gradients) == 14
    assert all(a.freed == 0 for a in gradients)


def test_categories_of_a_step() -> None:
    with fake_process_group(0, 2):
        timeline = timeline_of(training(checkpointed=True))
    found = {category for event in timeline.stacked() for category in [event]}
    assert found == {
        Category.SHARDED_PARAMETERS,
        Category.OPTIMIZER_STATE,
        Category.SHARDED_GRADIENTS,
        Category.INPUTS,
        Category.UNSHARDED_PARAMETERS,
        Category.ALL_GATHER_BUFFERS,
        Category.UNSHARDED_GRADIENTS,
        Category.REDUCE_SCATTER_BUFFERS,
        Category.SAVED_ACTIVATIONS,
        Category.RECOMPUTED,
        Category.TEMPORARIES,
        Category.RNG_STATE,
    }
    stacked = timeline.stacked()
    totals = [sum(column) for column in zip(*stacked.values(), strict=True)]
    assert totals == timeline.bytes


def test_phases_are_those_of_the_program() -> None:
    step = fz.capture(training(shard=False), memory=True)
    for _ in range(4):
        step(batch())
    assert step.program is not None and step.memory is not None
    step.program.describe()
    nodes = [n for n in step.program.graph.nodes if n.meta.get("phase")]
    of_ops = {(op.name, op.phase) for op in step.memory.eager.ops}
    of_nodes = {(str(n.meta["original_aten"]), n.meta["phase"]) for n in nodes}
    assert of_nodes <= of_ops
    assert {"forward", "backward", "optimizer"} == {phase for _, phase in of_ops}


def test_stacks_are_symbolised_when_an_op_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def counting(traceback: Any) -> str:
        asked.append(traceback)
        return where.line_or_empty(traceback)

    monkeypatch.setattr(lifetimes, "line_or_empty", counting)
    timeline = timeline_of(training(shard=False))
    assert timeline.peak and not asked
    op = timeline.ops[5]
    assert timeline.ops[5] is op and len(asked) == 1
    assert inspect.getfile(Model) in op.line
    assert [each.name for each in timeline.ops[5:7]] == [op.name, timeline.ops[6].name]


def test_a_step_that_raises_leaves_nothing_behind() -> None:
    call, hooks = nn.Module.__call__, dict(optimizers._global_optimizer_pre_hooks)
    model = Model()

    def step(x: Tensor) -> Tensor:
        model(x)
        raise KeyError("on purpose")

    captured = fz.capture(step, memory=True)
    with pytest.raises(KeyError, match="on purpose"):
        captured(batch())
    assert nn.Module.__call__ is call
    assert dict(optimizers._global_optimizer_pre_hooks) == hooks


# -- on real ranks ---------------------------------------------------------------------------------

_FEATURES = (
    "blocks_and_root",
    "nested",
    "keep_unsharded",
    "bf16",
    "bf16_reduced",
    "cpu_offload",
    "unshard_async",
    "no_sync",
    "no_sync_bf16",
    "hsdp_replicas",
    "tied_in_the_root",
    "batch_norm",
    "kept_gradients",
    "clip_grad_norm",
    "gathered_in_int8",
    "persistent_all_gather",
    "reduce_by_all_to_all",
    "optimizer_in_backward",
)


def feature(name: str) -> tuple[int, int, set[str]]:
    """(bytes of unknown purpose, the greatest imbalance of categories and bytes, categories)."""
    row = FEATURES[name]
    step = fz.capture(row.make_step(*row.build()), memory=True)
    for given in row.batches():
        step(*given)
    timeline = step.memory.eager
    stacked = timeline.stacked()
    unknown = max(stacked.get(Category.UNKNOWN, [0]))
    totals = [sum(column) for column in zip(*stacked.values(), strict=True)]
    off = max(abs(a - b) for a, b in zip(totals, timeline.bytes, strict=True))
    return unknown, off, {str(category) for category in stacked}


@pytest.mark.parametrize("name", _FEATURES)
def test_nothing_is_unknown(name: str) -> None:
    for unknown, off, categories in run_on_ranks(feature, name):
        assert (unknown, off) == (0, 0)
        assert {"sharded parameters", "inputs"} <= categories


def test_a_tensor_that_is_found_when_the_step_has_ended_is_held() -> None:
    """Only what a search of places finds before the step begins is let go."""

    @cache
    def unreachable() -> Tensor:
        return torch.arange(3.0)

    step = fz.capture(lambda x: (x * 2, unreachable()), memory=True)
    unreachable()
    for _ in range(3):
        assert torch.equal(step(torch.ones(3))[1], torch.arange(3.0))
    assert (step.stats.captures, step.stats.replays) == (1, 1)
