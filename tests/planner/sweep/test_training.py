"""Days and cost of a training run, in the rows and the table of a sweep."""

from __future__ import annotations

import json
import math

import pytest
import torch

import functionalize as fz
from functionalize.cost.machines.presets import MACHINES
from functionalize.errors import PlanError, UsageError
from functionalize.planner.cli.scripts import training
from functionalize.planner.sweep.training import Training


def build():
    model = torch.nn.Linear(64, 64)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def inputs(batch=2):
    return (torch.ones(batch, 64),)


def step(model, optimizer, x):
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_days_and_cost() -> None:
    run = Training(86_400e3, price=2.0)
    assert run.days(1000.0, 1) == 1 and run.days(1000.0, 4) == 0.25
    assert run.cost(1000.0) == 48  # 24 hours of one GPU, or 6 of four
    assert (run.days(None, 4), run.cost(None), Training(1.0).cost(5.0)) == (None, None, None)
    for wrong in ((0, None), (-1, None), (math.nan, None), (1, 0), (1, math.inf)):
        with pytest.raises(PlanError, match="is a number above 0"):
            Training(*wrong)


def test_rows_have_them_when_asked() -> None:
    sweep = fz.plan(build, step, inputs=inputs, grid={"batch": [2, 4]}, world=4, machine="h100")
    assert "days" not in sweep.rows()[0] and "days" not in sweep.text()
    asked = sweep.over(Training(1e9, price=2.0))
    row = asked.rows()[0]
    assert math.isclose(row["days"], 1e9 / (4 * row["throughput"]) / 86_400)
    assert math.isclose(row["cost"], row["days"] * 24 * 4 * 2.0)
    heads = asked.text().splitlines()[1].split()
    assert "days" in heads and "cost" in heads and "samples/s/rank" in heads
    assert "cost" not in sweep.over(Training(1e9)).text()
    assert "modelled on h100 (published for H100)" in asked.text()
    found = json.loads(asked.to_json())[0]
    assert found["step fastest"] <= found["step"] <= found["step slowest"]
    assert found["efficiency"] == "h100 (published for H100)"


def test_an_a100_has_its_own_range_and_a_roofline_none() -> None:
    from dataclasses import replace

    from functionalize.cost.machines.efficiency import PEAK

    own = replace(MACHINES["a100"], efficiency=PEAK)
    sweep = fz.plan(build, step, inputs=inputs, machine=own)
    assert "modelled on a machine of your own (every kernel at its peak)" in sweep.notes()
    fast, slow = sweep.plans[0].figures.time_range
    assert fast == slow == sweep.plans[0].figures.time.seconds


def test_texts_of_the_command_line() -> None:
    assert training("15T", 2.5) == Training(15e12, 2.5)
    assert training("300b", None) == Training(300e9) and training("1.5e9", None) == Training(1.5e9)
    assert training(None, None) is None
    with pytest.raises(UsageError, match="--price needs --tokens"):
        training(None, 2.0)
    with pytest.raises(UsageError, match="cannot be read: write 15T"):
        training("15 trillion", None)
    with pytest.raises(UsageError, match="`price` is a number above 0"):
        training("15T", -1.0)
