"""`repr` of what a user holds is one short line; `print` of a report is the report."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import functionalize as fz
from functionalize.cost.machines.presets import MACHINES
from functionalize.planner.report.text import Parting
from functionalize.planner.tuning.policy import EagerPolicy, LayerPolicy
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
        yield from (memory.peak_of("eager"), *memory.top(1, "eager"))
    partings = step.memory.against(fz.record_memory(lambda: None).memory or step.memory)
    yield from (step.memory.difference(), partings, Parting([], []))
    program = step.program
    assert program is not None
    assert "backward at" in str(program.tape())
    yield from (program, program.tape(), fz.functions.trace_backward(model(torch.ones(2, 8)).sum()))
    sweep = fz.plan(
        build, lambda run, x: run(x), {"rows": [2, 4]}, inputs=lambda rows: torch.ones(rows, 8)
    )
    assert str(sweep) == sweep.text()
    figures = sweep.plans[0].figures
    assert figures is not None and str(figures.time) == figures.time.text()
    yield from (sweep, *sweep.plans, figures, figures.time, figures.memory)
    for machine in MACHINES.values():
        yield from (machine, machine.efficiency, *(curve for _, curve in machine.efficiency.curves))
    with fz.world(8, (2, 4)) as world:
        yield from (world, world.choices)
    inputs = lambda batch: torch.ones(batch, 8)  # noqa: E731
    tuned = fz.tune(
        build, lambda run, x: run(x), inputs=inputs, world=1, limit=1e6, batches=[2], target="cpu"
    )
    assert str(tuned.policy).startswith("batch 2 x 1, all ranks shard")
    layers = {f"layers.{i}": LayerPolicy((("aten.mm.default", (i,)),)) for i in range(126)}
    yield from (tuned, tuned.best, tuned.facts, tuned.policy, EagerPolicy(layers=layers))


def build() -> Any:
    """A training step, for a plan."""
    model = nn.Linear(8, 8)
    return make_step(model, torch.optim.SGD(model.parameters()))


def test_the_repr_of_an_object_is_a_short_line() -> None:
    seen = 0
    for each in held():
        text = repr(each)
        assert len(text) < 280 and "\n" not in text and " at 0x" not in text, text
        assert text.startswith("<"), text
        seen += 1
    assert seen > 80


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
