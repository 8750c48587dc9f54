"""The first call of a step with an optimizer runs in a fake world without a recorder, and the same program is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import functionalize as fz
from functionalize._compat.dispatch import current_modes
from functionalize.recorder.recorder import Recorder
from functionalize.step import stages

MASK = torch.ones(8)
Step = Callable[[Tensor], Any]


class Counting(nn.Linear):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def model(layer: nn.Module) -> nn.Module:
    net = nn.Sequential(layer, nn.ReLU(), nn.Linear(8, 8))
    for each in net:
        fully_shard(each)
    return fully_shard(net)


def plain(make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW) -> Step:
    net = model(nn.Linear(8, 8))
    optimizer = make(net.parameters())

    def step(x: Tensor) -> Tensor:
        loss = net(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def fused() -> Step:
    return plain(lambda parameters: torch.optim.AdamW(parameters, fused=True))


def with_numbers() -> Step:
    step, scale = plain(), 0.5
    return lambda x: step(x * torch.tensor(scale))


def with_a_mask() -> Step:
    """Reads a tensor that only a variable holds."""
    step, mask = plain(), MASK.clone()
    return lambda x: step(x * mask)


def scheduled() -> Step:
    net = model(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)

    def step(x: Tensor) -> None:
        net(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()

    return step


def counting() -> Step:
    net = model(Counting())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x: Tensor) -> None:
        net(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def captured(make: Callable[[], Step]) -> tuple[int, int, str, str]:
    """(the calls until there is a program, those that were recorded, the program, its memory)."""
    entered: dict[Recorder, None] = {}

    def entering(recorder: Recorder) -> Recorder:
        entered[recorder] = None
        return own(recorder)

    own = Recorder.__enter__
    with fz.world(4), pytest.MonkeyPatch.context() as patch:
        step = fz.capture(make(), memory=True)
        patch.setattr(Recorder, "__enter__", entering)
        calls = 0
        while step.program is None:
            calls += 1
            step(torch.ones(2, 8))
        text = step.program.print_readable(print_output=False)
        return calls, len(entered), text, str(step.memory.to_json(timelines=True))


@pytest.mark.parametrize("make", [plain, fused, with_numbers, with_a_mask, scheduled, counting])
def test_a_first_call_without_a_recorder_leads_to_the_same_program(make: Any) -> None:
    calls, entered, *found = captured(make)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "in_world", lambda: False)
        recorded = captured(make)
    assert recorded == (calls, calls, *found)
    assert entered == calls - 1


def test_a_first_call_that_raises_leaves_the_world_as_it_was() -> None:
    with fz.world(4):
        (mode,) = current_modes()
        step, fails = plain(), True

        def failing(x: Tensor) -> Tensor:
            loss = step(x * torch.tensor(2.0))
            if fails:
                raise KeyError("of the user")
            return loss

        both = fz.capture(failing)
        with pytest.raises(KeyError, match="of the user"):
            both(torch.ones(2, 8))
        assert mode.note_literal is None and current_modes() == [mode]
        fails = False
        for _ in range(3):
            both(torch.ones(2, 8))
        assert both.program is not None
