"""A profiler sees the parts of a step in its replay: the user's ranges, phases, modules, what FSDP2 does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import checkpoint

import functionalize as fz
from functionalize._compat.distributed import fake_process_group
from functionalize.run.ranges import in_ranges

CALLS = 5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with record_function("activation"):
            return torch.tanh(self.up(x))


class Checkpointed(Block):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False).sin()


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Checkpointed(), nn.Linear(4, 4))


def make(model: nn.Module, **options: Any) -> Callable[[Tensor], Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)

    def step(x: Tensor) -> Tensor:
        for part in x.split(2):
            with record_function("microbatch"):
                loss = model(part).square().mean()
                loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def profiled(call: Callable[[], Any]) -> tuple[Any, list[tuple[str, ...]]]:
    """What a call returns, and the path of each of its ranges."""
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        result = call()
    paths: list[tuple[str, ...]] = []

    def visit(event: Any, outer: tuple[str, ...]) -> None:
        if event.is_user_annotation:
            outer = (*outer, event.name)
            paths.append(outer)
        for child in event.cpu_children:
            visit(child, outer)

    for event in profiler.events():
        if event.cpu_parent is None:
            visit(event, ())
    return result, paths


def replayed(make: Callable[[], Callable[[Tensor], Tensor]], **options: Any) -> list[Any]:
    """The paths of a profiled replay, which returns what eager does."""
    eager, step = make(), fz.capture(make(), **options)
    for i in range(CALLS):
        assert torch.equal(eager(torch.full((4, 4), float(i))), step(torch.full((4, 4), float(i))))
    before, x = step.stats.replays, torch.ones(4, 4)
    found, paths = profiled(lambda: step(x))
    assert step.stats.replays == before + 1, step.explain()
    assert torch.equal(found, eager(x)) and torch.equal(step(x), eager(x))
    return paths


def text(paths: list[tuple[str, ...]]) -> str:
    """A line per range, inside those with less indentation above it."""
    return "".join(f"\n{'  ' * (len(path) - 1)}{path[-1]}" for path in paths)


MICROBATCH = """
microbatch
  forward
    model
      model.0
        activation
          model.0.up
      model.1
        activation
          model.1.up
      model.2
  backward
    model
      model.2
      model.1
    recompute
      model
        model.1
      activation
        model.1.up
        model
          model.1
      model
        model.1
    model
      model.1
        model.1.up
      model.0
        model.0.up"""
UPDATE = """
optimizer
  Optimizer.step#AdamW.step"""


@pytest.mark.parametrize("fused", [False, True])  # fused: a runner whose last op writes
def test_a_replay_has_the_ranges_of_its_step(fused: bool) -> None:
    paths = replayed(lambda: make(net(), fused=fused))
    assert text(paths) == 2 * MICROBATCH + UPDATE


def test_a_captured_forward_has_those_of_both_halves() -> None:
    def loss_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
        return lambda x: model(x).square().mean()

    model, twin = net(), net()
    step = fz.capture(loss_of(model), backward=True)
    for _ in range(CALLS):
        step(torch.ones(2, 4)).backward()
        loss_of(twin)(torch.ones(2, 4)).backward()
    _, paths = profiled(lambda: step(torch.ones(2, 4)).backward())
    loss_of(twin)(torch.ones(2, 4)).backward()
    assert text(paths) == MICROBATCH.replace("\n  ", "\n").removeprefix("\nmicrobatch")
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)


def test_what_fsdp_does_is_inside_the_modules() -> None:
    def sharded() -> Callable[[Tensor], Tensor]:
        model = net()
        for block in list(model)[:2]:
            fully_shard(block)
        return make(fully_shard(model))

    with fake_process_group(0, 2):
        paths = replayed(sharded)
    assert paths.count(("microbatch",)) == 2 and paths.count(("optimizer",)) == 1
    forward = ("microbatch", "forward", "model")
    for group in ("0", "1"):
        for role in ("pack", "unshard", "wait", "copy-out"):
            assert (*forward, f"model.{group}", f"FSDP::{role} ({group})") in paths
    assert (*forward, "FSDP::unshard") in paths  # the group of the root
    reduced = {path[-1] for path in paths if path[1:2] == ("backward",) and "reduce" in path[-1]}
    assert reduced == {"FSDP::reduce (0)", "FSDP::reduce (1)", "FSDP::reduce"}


def test_passes_keep_them() -> None:
    def of(pipeline: str) -> list[tuple[str, ...]]:
        return replayed(lambda: make(net(), fused=True), passes=pipeline)

    assert set(of("elide_copies,recompute_views,reinplace")) == set(of("elide_copies"))


def test_an_exception_leaves_none_entered() -> None:
    def run(move: Callable[[Any], None], fails: bool) -> None:
        move((("outer", 0), ("inner", 0)))
        if fails:
            raise ArithmeticError("no")

    def call() -> None:
        with pytest.raises(ArithmeticError):
            in_ranges(run)(True)
        in_ranges(run)(False)

    assert profiled(call)[1] == 2 * [("outer",), ("outer", "inner")]


def test_without_a_profiler_there_is_no_code_for_them() -> None:
    step = fz.capture(make(net()))
    for _ in range(CALLS):
        step(torch.ones(4, 4))
    assert step.stats.replays
    assert step.core.cache.latest.program._run.with_ranges.code is None
    profiled(lambda: step(torch.ones(4, 4)))
    assert step.core.cache.latest.program._run.with_ranges.code is not None
