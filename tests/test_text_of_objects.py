"""`repr` of what a user holds is one short line; `print` of a report is the report."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import functionalize as fz
from tests.steps import make_step


def held() -> Iterator[Any]:
    """Objects that the public functions return, and what they consist of."""
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(8)])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = fz.capture(make_step(model, optimizer), memory=True)
    recorded = fz.record_memory(make_step(model, optimizer))
    yield from (step, recorded)
    for _ in range(4):
        step(torch.ones(2, 8))
    recorded(torch.ones(2, 8))
    yield from (step, recorded)
    for memory in (step.memory, recorded.memory):
        assert memory is not None and str(memory) == memory.text()
        yield from (memory, memory.eager, memory.lifetimes, memory.simulated())
    program = step.program
    assert program is not None
    assert "backward at" in str(program.tape())
    yield from (program, program.tape(), fz.trace_backward(model(torch.ones(2, 8)).sum()))
    sweep = fz.plan(
        build, lambda run, x: run(x), {"rows": [2, 4]}, inputs=lambda rows: torch.ones(rows, 8)
    )
    assert str(sweep) == sweep.text()
    figures = sweep.plans[0].figures
    assert figures is not None and str(figures.time) == figures.time.text()
    yield from (sweep, *sweep.plans, figures, figures.time, figures.memory)


def build() -> Any:
    """A training step, for a plan."""
    model = nn.Linear(8, 8)
    return make_step(model, torch.optim.SGD(model.parameters()))


def test_the_repr_of_an_object_is_a_short_line() -> None:
    seen = 0
    for each in held():
        text = repr(each)
        assert len(text) < 250 and "\n" not in text and " at 0x" not in text, text
        assert text.startswith("<"), text
        seen += 1
    assert seen > 20


def test_what_it_says() -> None:
    def step(x: Tensor) -> Tensor:
        return x * 2

    captured = fz.capture(step, memory=True)
    for _ in range(3):
        captured(torch.ones(256))
    assert repr(captured) == "<captured step: 1 program, 2 replays>"
    assert repr(captured.memory) == "<StepMemory, peaks: eager 2.00 KiB, program 2.00 KiB>"
    assert captured.memory is not None
    assert repr(captured.memory.eager).startswith("<Timeline eager: ")
