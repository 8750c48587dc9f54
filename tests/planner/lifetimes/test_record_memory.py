"""`fz.record_memory`: the lean recorder tells of eager's memory what a capture tells, and leaves the step as it is."""

from __future__ import annotations

import gc
import logging
import sys
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import optimizer as optimizers

import functionalize as fz
from functionalize._compat.distributed import fake_process_group
from functionalize._compat.modules import own_call
from functionalize.cost.categories import Category
from functionalize.errors import MemoryReportError, UnsupportedTensorError
from functionalize.planner.timeline.timeline import BEFORE, Timeline
from functionalize.util.user_stack import UserLine, line_or_empty
from tests.planner.lifetimes.lifetimes import (
    CASES,
    SCALARS,
    Model,
    Step,
    allocated,
    batch,
    changes,
    is_within,
    peak,
    sums,
    training,
)


def recorded(step: Step) -> Timeline:
    """Eager's lifetimes of the fourth call, with what ops allocate inside themselves."""
    noted = fz.record_memory(step)
    assert noted.memory is None
    for _ in range(4):
        noted(batch())
    assert noted.memory is not None
    return noted.memory.eager


def captured(step: Step) -> Timeline:
    kept = fz.capture(step, memory=True)
    for _ in range(4):
        kept(batch())
    timeline: Timeline = kept.memory.eager
    return timeline


def said(timeline: Timeline) -> Counter[Any]:
    """What is said of allocations, but for their last uses, which may be views, and the shapes of views."""

    def told(at: int | None) -> Any:
        op = None if at is None or at == BEFORE else timeline.ops[at]
        return op and (op.phase, op.module, op.line)

    return Counter(
        (a.nbytes, a.category, a.name, a.padding, told(a.made)) for a in timeline.allocations
    )


def bf16() -> Step:
    """Casts, and ops that take scratch for their dtype."""
    torch.manual_seed(0)
    model, policy = Model(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)

    def step(x: Tensor) -> Tensor:
        loss = model(x)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


# -- what it tells ---------------------------------------------------------------------------------

STEPS: dict[str, Any] = {
    **{name: lambda of=of: training(**of) for name, of in CASES.items()},
    "bf16": bf16,
    "whole sums": lambda: sums("whole"),
    "sums of views": lambda: sums("views"),
}


@pytest.mark.parametrize("name", STEPS)
def test_it_tells_what_a_capture_tells(name: str) -> None:
    with fake_process_group(0, 2):
        lean, full = recorded(STEPS[name]()), captured(STEPS[name]())
    assert changes(lean) == changes(full)
    assert lean.bytes == full.bytes
    assert said(lean) == said(full)
    assert len(lean.ops) < len(full.ops)


@pytest.mark.parametrize("name", CASES)
def test_every_change_is_one_of_the_allocators(name: str) -> None:
    with fake_process_group(0, 2):
        truth = allocated(training(**CASES[name]))
        noted = fz.record_memory(training(**CASES[name]))
        for _ in range(3):
            noted(batch())
    assert noted.memory is not None
    ours = changes(noted.memory.lifetimes.timeline())
    assert is_within(ours, truth)
    assert abs(peak(ours) - peak(truth)) <= SCALARS


def test_in_a_world_as_on_real_tensors() -> None:
    with fake_process_group(0, 2):
        real = recorded(training(checkpointed=True, drop=0.1))
    with fz.world(size=2, target="cpu"):
        fake = recorded(training(checkpointed=True, drop=0.1))
    assert changes(fake) == changes(real)
    assert said(fake) == said(real)


def test_a_first_step_makes_the_states_of_the_optimizer() -> None:
    noted = fz.record_memory(training(shard=False))
    noted(batch())
    assert noted.memory is not None
    kinds = {a.category for a in noted.memory.eager.allocations if a.made == BEFORE}
    assert kinds == {Category.SHARDED_PARAMETERS, Category.INPUTS}


def test_there_is_no_program() -> None:
    noted = fz.record_memory(training(shard=False))
    noted(batch())
    assert noted.memory is not None
    assert list(noted.memory.timelines) == ["eager"]
    assert "sharded parameters" in noted.memory.text()
    with pytest.raises(MemoryReportError, match=r"no timeline `program` .*fz\.capture"):
        noted.memory.timeline("program")


def test_a_captured_step_replays_as_before() -> None:
    step = fz.capture(training(shard=False))
    for _ in range(4):
        step(batch())
    replays, noted = step.stats.replays, fz.record_memory(step)
    noted(batch())
    assert step.stats.replays == replays + 1
    assert noted.memory is not None and noted.memory.peak > 0


def test_a_line_is_found_by_the_instruction() -> None:
    def here() -> UserLine:
        frame = sys._getframe()
        at = frame.f_lasti
        assert at >= 0
        return UserLine(frame.f_code, at)

    found = line_or_empty(here())  # type: ignore[arg-type]
    assert "test_record_memory.py" in found and found.endswith("in here: at = frame.f_lasti")


# -- what it leaves --------------------------------------------------------------------------------


def test_the_step_gives_what_it_gives() -> None:
    eager, noted = training(shard=False), fz.record_memory(training(shard=False))
    assert noted.__name__ == "step"
    torch.manual_seed(1)
    batches = [batch() for _ in range(3)]
    for x in batches:
        assert torch.equal(eager(x), noted(x))


def test_no_tensor_of_the_step_is_held() -> None:
    noted = fz.record_memory(training(shard=False))
    x = batch()
    loss = noted(x)
    gone = weakref.ref(x), weakref.ref(loss)
    del x, loss
    gc.collect()
    assert [each() for each in gone] == [None, None]
    assert noted.memory is not None and noted.memory.peak > 0


def test_a_step_that_raises_has_a_memory_until_then() -> None:
    model = Model()
    resize, hooks = torch.UntypedStorage.resize_, dict(optimizers._global_optimizer_pre_hooks)

    def step(x: Tensor) -> Tensor:
        model(x)
        raise KeyError("on purpose")

    noted = fz.record_memory(step)
    with pytest.raises(KeyError, match="on purpose"):
        noted(batch())
    assert noted.memory is not None
    assert noted.memory.eager.ops[-1].name.startswith("aten.mean")
    assert torch.UntypedStorage.resize_ is resize
    assert dict(optimizers._global_optimizer_pre_hooks) == hooks
    assert all(own_call(module) is None for module in model.modules())


def test_one_recording_inside_another() -> None:
    model = Model()
    inner = fz.record_memory(lambda x: model(x).detach())
    outer = fz.record_memory(lambda x: inner(x) + 1)
    outer(batch())
    assert inner.memory is not None and outer.memory is not None
    assert (
        changes(inner.memory.eager)[:-2]
        == changes(outer.memory.eager)[: len(changes(inner.memory.eager)) - 2]
    )
    assert all(own_call(module) is None for module in model.modules())


def test_what_a_module_runs_instead_of_its_call_is_run_and_put_back() -> None:
    model, ran = Model(), []

    def compiled(*args: Any) -> Any:
        ran.append(len(args))
        return model.head._call_impl(*args)

    model.head._compiled_call_impl = compiled  # as `Module.compile` does
    noted = fz.record_memory(lambda x: model(x).detach())
    noted(batch())
    assert ran == [1] and own_call(model.head) is compiled
    assert noted.memory is not None
    assert "model.head" in {op.module for op in noted.memory.eager.ops}


# -- what has no storage ---------------------------------------------------------------------------


def test_tensors_without_a_storage_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    table = nn.Embedding(10, 4, sparse=True)

    def step(index: Tensor) -> Tensor:
        loss = table(index).sum()
        loss.backward()
        return loss.detach()

    noted = fz.record_memory(step)
    with caplog.at_level(logging.WARNING, logger="functionalize"):
        noted(torch.tensor([1, 2]))
    assert (
        "the memory of step leaves out tensors without a storage of their own: torch.sparse_coo"
        in caplog.text
    )
    assert noted.memory is not None and noted.memory.peak > 0
    with pytest.raises(UnsupportedTensorError, match="has no storage of its own"):
        noted(torch.tensor([1, 2]))  # its gradient is sparse, and there before the step


def test_gradients_that_are_multiplied_and_summed_at_once() -> None:
    """`PREMUL_SUM`, by which FSDP2 divides gradients on NCCL: its factor is in no record here."""

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()

    with fz.world(2):
        model = fully_shard(nn.Linear(8, 8))
        model.set_gradient_divide_factor(4.0)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        noted = fz.record_memory(step)
        noted()
        noted()
    assert noted.memory is not None and noted.memory.eager.peak
