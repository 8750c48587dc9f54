"""Accumulation over several calls: one captured step per microbatch, gradients left unreduced between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.fsdp import steps
from tests.fsdp.sharded import build_mlp
from tests.fsdp.steps import pairs
from tests.fsdp.twins import Verdict, compare_twins
from tests.ranks import run_on_ranks

MICROBATCHES = 3
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def microbatch(set_flags: Callable[[nn.Module, bool], None]) -> Callable[..., Any]:
    """A step that is called once per microbatch and told which is the last."""

    def make_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., Tensor]:
        def step(x: Tensor, y: Tensor, last: bool) -> Tensor:
            set_flags(model, last)
            loss = steps.loss_of(model, x, y)
            loss.backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
            return loss.detach()

        return step

    return make_step


def sync_last(model: nn.Module, last: bool) -> None:
    model.set_requires_gradient_sync(last)


def unsharded_between(model: nn.Module, last: bool) -> None:
    model.set_requires_gradient_sync(last)
    model.set_reshard_after_backward(last)


def last_backward(model: nn.Module, last: bool) -> None:
    model.set_is_last_backward(last)
    model.set_requires_gradient_sync(last)


def always_reduced(model: nn.Module, last: bool) -> None:
    pass


WAYS: dict[str, tuple[Any, Callable[[nn.Module, bool], None]]] = {
    "`set_requires_gradient_sync`": ({}, sync_last),
    "the same in bf16, accumulated in fp32": ({"mp_policy": BF16}, sync_last),
    "`set_reshard_after_backward`": ({}, unsharded_between),
    "no resharding at all": ({"reshard_after_forward": False}, unsharded_between),
    "`set_is_last_backward`": ({}, last_backward),
    "reduced by every call": ({}, always_reduced),
}


def accumulated(way: str) -> Verdict:
    options, set_flags = WAYS[way]
    batches = [(x, y, i % MICROBATCHES == MICROBATCHES - 1) for i, (x, y) in enumerate(pairs(24))]
    return compare_twins(lambda: build_mlp(**options), microbatch(set_flags), batches, allowance=60)


@pytest.mark.parametrize("way", WAYS)
def test_one_captured_step_per_microbatch(way: str) -> None:
    for verdict in run_on_ranks(accumulated, way):
        assert verdict.differences == []
        assert verdict.captures == MICROBATCHES, verdict.guard_failures
        assert verdict.replays >= 12
