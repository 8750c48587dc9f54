"""`finalize_backward()` (torch 2.15) outside of a captured step, which leaves FSDP2 in the middle of a backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

import functionalize as fz
from functionalize.errors import UncapturableError
from tests.allowance import ample_allowance
from tests.fsdp import newer, steps
from tests.fsdp.feature import needs
from tests.fsdp.models import grouped, wrapped
from tests.fsdp.twins import Verdict, compare_twins, models_differ
from tests.ranks import run_on_ranks

pytestmark = needs("2.15")


def until_backward(model: Any, optimizer: Optimizer) -> steps.Step:
    def step(x: Tensor, y: Tensor, *last: bool) -> Tensor:
        for each in last:
            model.set_requires_gradient_sync(each)
        loss = steps.loss_of(model, x, y)
        loss.backward()
        return loss.detach()

    return step


def finalized(async_op: bool = False) -> Callable[[Any, Optimizer], steps.Step]:
    """What runs outside: `finalize_backward` (after the last microbatch), then the optimizer."""

    def make(model: Any, optimizer: Optimizer) -> steps.Step:
        def after(x: Tensor, y: Tensor, *last: bool) -> None:
            if all(last):
                handle = model.finalize_backward(async_op=async_op)
                if handle is not None:
                    handle.wait()
                steps.finish(optimizer)

        return after

    return make


def microbatches() -> list[Any]:
    return [(*pair, i % 3 == 2) for i, pair in enumerate(steps.pairs(24))]


def by_hand_grouped() -> Any:
    model, optimizer = grouped()
    newer.by_hand(model)
    return model, optimizer


BF16 = newer.Policy(param_dtype=torch.bfloat16)
WAYS: dict[str, tuple[Any, Any, Any, int]] = {
    "after every step": (wrapped(then=newer.by_hand), finalized(), steps.pairs, 2),
    "asynchronous": (wrapped(then=newer.by_hand), finalized(True), steps.pairs, 2),
    "after microbatches": (wrapped(then=newer.by_hand), finalized(), microbatches, 2),
    "mixed precision": (wrapped(then=newer.by_hand, mp_policy=BF16), finalized(), steps.pairs, 2),
    "microbatches, mixed precision": (
        wrapped(then=newer.by_hand, mp_policy=BF16),
        finalized(),
        microbatches,
        2,
    ),
    "not resharded": (
        wrapped(then=newer.by_hand, reshard_after_forward=False),
        finalized(),
        steps.pairs,
        2,
    ),
    "grouped modules": (by_hand_grouped, finalized(), steps.pairs, 2),
    "HSDP": (wrapped(2, 2, then=newer.by_hand), finalized(), steps.pairs, 4),
}


def outside(way: str) -> Verdict:
    build, after, batches, _ = WAYS[way]
    return compare_twins(build, until_backward, batches(), after=after)


@pytest.mark.parametrize("way", WAYS)
def test_finalized_outside(way: str) -> None:
    for verdict in run_on_ranks(outside, way, world=WAYS[way][3]):
        assert verdict.differences == []
        assert verdict.replays >= 4, verdict.guard_failures


def forward_alone(async_op: bool) -> tuple[list[Any], int, int]:
    """A captured forward, its backward and `finalize_backward` outside, beside an eager twin."""
    twins = [wrapped(then=newer.by_hand)() for _ in range(2)]
    captured = fz.capture(twins[0][0], backward=True)
    found: list[Any] = []
    for x, y in steps.pairs():
        losses = []
        for (model, optimizer), forward in zip(twins, (captured, twins[1][0]), strict=True):
            loss = torch.nn.functional.mse_loss(forward(x), y)
            loss.backward()
            handle = model.finalize_backward(async_op=async_op)
            if handle is not None:
                handle.wait()
            steps.finish(optimizer)
            losses.append(loss.item())
        found += [losses] if losses[0] != losses[1] else []
        found += models_differ("", *twins[0], *twins[1])
    return found, captured.stats.replays, captured.stats.backwards


@pytest.mark.parametrize("async_op", [False, True])
def test_a_forward_alone(async_op: bool) -> None:
    for differences, replays, backwards in run_on_ranks(forward_alone, async_op):
        assert differences == []
        assert replays >= 4
        assert backwards >= 4


@ample_allowance()
def ends_outside(mode: str) -> tuple[str, list[tuple[float, float]]]:
    """A step that leaves an asynchronous finalization to its caller; what is said of it, and both twins' losses."""
    (model, optimizer), (twin, twin_optimizer) = [wrapped(then=newer.by_hand)() for _ in range(2)]

    def make(m: Any) -> steps.Step:
        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = steps.loss_of(m, x, y)
            loss.backward()
            m.finalize_backward(async_op=True)
            return loss.detach()

        return step

    def wait(m: Any, o: Optimizer) -> None:
        state = m._get_fsdp_state()
        state.wait_for_gradient_reduction(state._comm_ctx.active_gradient_reduction)
        steps.finish(o)

    captured, eager, losses = fz.capture(make(model), on_uncapturable=mode), make(twin), []
    try:
        for batch in steps.pairs(8):
            losses.append((captured(*batch).item(), eager(*batch).item()))
            wait(model, optimizer)
            wait(twin, twin_optimizer)
    except UncapturableError as error:
        return str(error), losses
    return captured.explain(), losses


@pytest.mark.parametrize("mode", ["raise", "eager"])
def test_a_reduction_that_ends_outside_is_refused_by_name(mode: str) -> None:
    for said, losses in run_on_ranks(ends_outside, mode):
        assert "an asynchronous finalize_backward begins in one call and is waited for in" in said
        assert "call wait() on its handle inside the step" in said
        assert all(mine == theirs for mine, theirs in losses)
        assert len(losses) == (8 if mode == "eager" else 6)
