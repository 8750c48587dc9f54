"""Steps whose storages are followed, and what the allocator itself does in them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._profiler import _EventType
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from functionalize.planner.timeline.timeline import BEFORE, Timeline

Step = Callable[[Tensor], Tensor]
_MARK = 12345  # bytes of a tensor that tells where the step begins
SCALARS = 64  # bytes: an op may wrap a number in a tensor for itself


class Block(nn.Module):
    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(24), nn.Linear(24, 48), nn.Linear(48, 24)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.relu(self.up(self.norm(x)))))


class Model(nn.Module):
    def __init__(self, checkpointed: bool = False, drop: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(drop) for _ in range(2))
        self.head, self.checkpointed = nn.Linear(24, 8), checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x).square().mean()


def training(
    checkpointed: bool = False,
    drop: float = 0.0,
    shard: bool = True,
    zero_first: bool = False,
    foreach: bool = False,
) -> Step:
    torch.manual_seed(0)
    model = Model(checkpointed, drop)
    if shard:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    form = {"foreach": True} if foreach else {"fused": True}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **form)

    def step(x: Tensor) -> Tensor:
        if zero_first:
            optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        optimizer.step()
        if not zero_first:
            optimizer.zero_grad()
        return loss.detach()

    return step


def batch() -> Tensor:
    return torch.randn(16, 24)


def changes(timeline: Timeline) -> list[int]:
    return [event.nbytes for event in timeline.events if event.op != BEFORE]


def allocated(step: Step) -> list[int]:
    """What the allocator does in the third step, in signed bytes."""
    step(batch())
    gc.collect()
    with profile(  # torch 2.11 and 2.12 warn of what an unaccumulated profile would forget
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiler:
        step(
            batch()
        )  # what it leaves is freed by the next one: a free is told of what was seen made
        x, mark = batch(), torch.empty(_MARK, dtype=torch.uint8)
        loss = step(x)
    del loss, mark
    results: Any = profiler.profiler
    found, todo = [], list(results.kineto_results.experimental_event_tree())
    while todo:
        event = todo.pop()
        if event.typed[0] == _EventType.Allocation:
            found.append((event.start_time_ns, event.typed[1].alloc_size))
        todo += event.children
    signed = [nbytes for _, nbytes in sorted(found)]
    return signed[signed.index(_MARK) + 1 :]


def peak(signed: list[int]) -> int:
    return max(accumulate(signed))


def is_within(few: list[int], many: list[int]) -> bool:
    """Whether `few` is what is left of `many` if some are left out."""
    rest = iter(many)
    return all(any(a == b for b in rest) for a in few)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointed": {"checkpointed": True, "drop": 0.1},
    "gradients freed first": {"zero_first": True},
    "foreach": {"foreach": True},
    "one process": {"shard": False},
}


def sums(kind: str) -> Step:
    """Two gradients meet at `x * 2`: the sum takes over one that no view is on."""
    weight = nn.Parameter(torch.ones(16, 24))
    part = {
        "whole": lambda x: x * 3,
        "views": lambda x: x.view(8, 48).view(16, 24),
    }[kind]

    def step(x: Tensor) -> Tensor:
        y = weight * 2
        (part(y) * x + part(y).relu()).sum().backward()
        weight.grad = None
        return x.sum()

    return step
