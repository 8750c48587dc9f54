"""What a plan cannot know is named in its report: the scratch of some kernels, the time of a step without a program."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import functionalize as fz
from functionalize.planner.scratch.scratch import _ANYWHERE, _ON_A_GPU, uncounted

aten = torch.ops.aten
CONVOLUTIONS = "convolution (1 call), convolution_backward (1 call)"


def build() -> Any:
    return nn.Conv2d(3, 8, 3)


def step(model: nn.Module, images: torch.Tensor) -> None:
    model(images).pow(2).sum().backward()


def inputs(batch: int = 2) -> torch.Tensor:
    return torch.empty(batch, 3, 8, 8)


def test_kernels_of_unknown_scratch_are_named_where_their_device_has_them():
    backward = aten._scaled_dot_product_cudnn_attention_backward.default
    targets = [aten.convolution.default, aten.mm.default, backward, backward, len]
    assert uncounted(targets, "cpu") == {"convolution": 1}
    both = {"convolution": 1, "_scaled_dot_product_cudnn_attention_backward": 2}
    assert uncounted(targets, "cuda") == both


def test_their_names_are_ops():
    assert {name for name in _ANYWHERE | _ON_A_GPU if not hasattr(aten, name)} == set()


@pytest.mark.parametrize("target", ["cuda", "cpu"])
def test_a_report_names_them_with_both_lifetimes(target: str):
    with fz.world(1, target=target):
        model, captured = build(), fz.capture(step, memory=True)
        while captured.program is None:
            captured(model, inputs())
    memory = captured.memory
    assert memory is not None and memory.program is not None
    wanted = {"convolution": 1, "convolution_backward": 1}
    assert memory.eager.uncounted == memory.program.uncounted == wanted
    line = f"scratch not known, and not counted: {CONVOLUTIONS}"
    assert memory.uncounted == line and line in memory.text().splitlines()
    for timeline in memory.to_json()["timelines"].values():
        assert timeline["uncounted"] == wanted


def test_a_report_without_such_a_kernel_says_nothing():
    recorded = fz.record_memory(lambda x: (x @ x).sum())
    recorded(torch.ones(2, 2))
    assert recorded.memory is not None and recorded.memory.uncounted is None
    assert "not known" not in recorded.memory.text()


def test_attention_of_cudnn_on_an_h100_is_marked_in_a_plan():
    def attend(x: torch.Tensor) -> None:
        q, k, v = x.unbind()
        F.scaled_dot_product_attention(q, k, v).sum().backward()

    def three(batch: int = 1) -> torch.Tensor:
        return torch.empty(3, batch, 2, 128, 64, dtype=torch.bfloat16, requires_grad=True)

    sweep = fz.plan(tuple, attend, {"batch": [1, 2]}, inputs=three, world=1)
    line = (
        "scratch not known, and not counted: _scaled_dot_product_cudnn_attention_backward (1 call)"
    )
    assert sweep.notes().count(line) == 1
    assert [line in row["remarks"] for row in json.loads(sweep.to_json())] == [True, True]


LOG: dict[int, float] = {}


def logging_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    loss = model(x).pow(2).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    LOG[len(LOG)] = loss.item()


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    loss = model(x).pow(2).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def trained() -> Any:
    model = nn.Linear(8, 8)
    return model, torch.optim.AdamW(model.parameters())


def rows_of_eight(batch: int = 4) -> torch.Tensor:
    return torch.empty(batch, 8)


def test_a_step_that_cannot_be_captured_is_planned_by_its_recorded_memory():
    LOG.clear()
    grid, world = {"batch": [4, 64]}, {"world": 1, "machine": "h100"}
    sweep = fz.plan(trained, logging_step, grid, inputs=rows_of_eight, **world)
    for found, row, batch in zip(sweep.plans, sweep.rows(), grid["batch"], strict=True):
        with fz.world(1):
            alone, args = fz.record_memory(plain_step), trained()
            for _ in range(3):
                alone(*args, rows_of_eight(batch))
        assert alone.memory is not None
        assert found.figures is None and found.error is None and found.memory is not None
        assert {"step", "sent", "program"}.isdisjoint(row) and "error" not in row
        wanted = alone.memory.levels()
        assert [row["peak"], row["allocated"], row["reserved"]] == list(wanted[:3])
        assert (
            row["device"] == row["reserved"] + 532 * 2**20
        )  # a context, a workspace, no communicator
    (note,) = [note for note in sweep.notes() if "no program was made" in note]
    assert "`LOG` is a dict of" in note and "time and traffic are not known" in note
    assert "nan" not in sweep.text() and str(sweep.plans[0]).startswith("<Plan world 1")
    assert math.isfinite(sweep.within(80e9).rows()[0]["device"])
    assert sweep.largest("batch", limit=2**30, most=64) == 64


def test_a_step_that_raises_has_its_own_error():
    def broken(model: nn.Module, x: torch.Tensor) -> None:
        raise ValueError("my mistake")

    with pytest.raises(ValueError, match="my mistake"):
        fz.plan(nn.Identity, broken, inputs=rows_of_eight, world=1)
