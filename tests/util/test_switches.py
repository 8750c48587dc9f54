"""Switches of the environment: everything eager, every call audited, logs by name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import functionalize as fz
from functionalize.util import switches

ROOT = Path(__file__).parents[2]
STEP = """
import torch, functionalize as fz
weight = torch.ones(3, requires_grad=True)
optimizer = torch.optim.SGD([weight], 0.1)
@fz.capture
def step(x):
    loss = (weight * x).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()
for i in range(12):
    step(torch.ones(3))
print(step.stats.captures, step.stats.replays, step.stats.audits)
"""


def run(code: str, **switches: str) -> tuple[str, str]:
    """What a process with these switches prints, and what it says on standard error."""
    environment = {**os.environ, **switches}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    return done.stdout.strip(), done.stderr.strip()


def steps(monkeypatch: pytest.MonkeyPatch, value: str) -> Any:
    monkeypatch.setenv("FUNCTIONALIZE", value)
    return fz.capture(lambda x: x.sin())


def test_off_runs_everything_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    step = steps(monkeypatch, "off")
    for _ in range(6):
        assert torch.equal(step(torch.ones(3)), torch.ones(3).sin())
    assert (step.stats.eager, step.stats.captures, step.stats.warmups) == (6, 0, 0)
    assert step.explain().startswith("the next call runs eagerly: FUNCTIONALIZE=off")
    forward = fz.capture(torch.nn.Linear(2, 1), backward=True)
    for _ in range(4):
        forward(torch.ones(1, 2)).sum().backward()
    assert forward.stats.eager == 4 and forward.stats.replays == 0
    backward, weight = fz.functions.capture_backward(), torch.ones(2, requires_grad=True)
    backward((weight * 3).sum())
    assert weight.grad.tolist() == [3, 3] and not backward.stats.warmups
    with fz.lazy() as lazy:
        assert torch.ones(2).sin().sum() > 0
    assert "FUNCTIONALIZE=off" in lazy.explain()


def test_audit_compares_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    step = steps(monkeypatch, "audit")
    for _ in range(8):
        step(torch.ones(3))
    assert step.stats.replays == 0 and step.stats.audits >= 6


def test_another_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="FUNCTIONALIZE is 'off' or 'audit', not 'on'"):
        steps(monkeypatch, "on")
    with pytest.raises(
        ValueError, match="names 'plan', which is not one of plans, misses, refusals"
    ):
        switches.show_logs("misses, plan")


def test_logs_by_name() -> None:
    printed, said = run(STEP, FUNCTIONALIZE_LOGS="plans,misses", RANK="3")
    assert printed == "1 9 1"
    lines = said.splitlines()
    assert lines[0].startswith("[rank 3] functionalize.plans: step, call 1: record: ")
    assert "[rank 3] functionalize.misses: warming up step: " in said
    assert "call 12: replay: the program of " in lines[-1]
    assert sum(".plans: " in line for line in lines) == 12 and "audits" not in said
    printed, said = run(STEP, FUNCTIONALIZE_LOGS="audits")
    assert said == "functionalize.audits: step: a call was as its program is"
    assert run(STEP) == ("1 9 1", "")
    assert run(STEP, FUNCTIONALIZE="off") == ("0 0 0", "")
