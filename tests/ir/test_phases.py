"""Phases: which part of a training step a node belongs to, told while recording."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import functionalize as fz
from functionalize._compat.autograd import BACKWARD, RECOMPUTE
from functionalize.ir.phases import FORWARD, OPTIMIZER, first_of, in_backward, phase_of
from functionalize.program.program import Program


def captured(step: Callable[..., Any], *args: Any) -> Program:
    """The program of a step that was captured and replayed."""
    replayed = fz.capture(step)
    for _ in range(4):
        replayed(*args)
    assert replayed.program is not None and replayed.stats.replays
    replayed.program.describe()
    return replayed.program


def ops_of(graph: fx.Graph, phase: str) -> set[str]:
    """The names of the ops of a phase."""
    packets = [
        getattr(n.target, "overloadpacket", None) for n in graph.nodes if phase_of(n) == phase
    ]
    return {p.__name__ for p in packets if p is not None}


def order(graph: fx.Graph) -> list[str]:
    """The phases as they follow each other."""
    phases = [phase_of(n) for n in graph.nodes if n.op == "call_function"]
    assert set(phases) <= {FORWARD, BACKWARD, RECOMPUTE, OPTIMIZER}
    return [str(phase) for phase, _ in groupby(phases)]


def layer(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    return model, torch.optim.AdamW(model.parameters(), fused=True, **options)


def test_a_step_with_microbatches() -> None:
    model, optimizer = layer()

    def step(x: Tensor) -> None:
        for part in x.chunk(2):
            model(part).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    graph = captured(step, torch.ones(4, 3)).graph
    assert order(graph) == ["forward", "backward", "forward", "backward", "optimizer"]
    assert {"addmm", "tanh"} <= ops_of(graph, "forward")
    assert {"mm", "tanh_backward", "add"} <= ops_of(graph, "backward")
    assert {"_foreach_norm", "_fused_adamw"} <= ops_of(graph, "optimizer")
    first = first_of("backward", graph)
    assert first is not None and in_backward(first) and first_of("recompute", graph) is None


def test_an_optimizer_between_microbatches() -> None:
    model, optimizer = layer()

    def step(x: Tensor) -> None:
        for part in x.chunk(2):
            model(part).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    phases = order(captured(step, torch.ones(4, 3)).graph)
    assert phases == ["forward", "backward", "optimizer"] * 2


def test_a_closure_is_no_update() -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)

    def step(x: Tensor) -> Any:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        return optimizer.step(closure)

    phases = order(captured(step, torch.ones(4, 3)).graph)
    assert phases == ["forward", "backward", "optimizer"]


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation(reentrant: bool) -> None:
    model, optimizer = layer()

    def step(x: Tensor) -> None:
        y = checkpoint(model, x.requires_grad_(), use_reentrant=reentrant)
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    graph = captured(step, torch.ones(4, 3)).graph
    assert "recompute" in order(graph)
    assert {"addmm", "tanh"} <= ops_of(graph, "recompute")
    assert not {"addmm", "tanh"} & ops_of(graph, "backward")


def test_a_callback_is_of_the_backward() -> None:
    weight = nn.Parameter(torch.ones(3))
    engine = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]

    def at_the_end() -> None:
        assert weight.grad is not None
        weight.grad = weight.grad.sin()

    def step(x: Tensor) -> Tensor:
        y = (x * weight).sum()
        y.register_hook(lambda grad: engine.queue_callback(at_the_end))
        y.backward()
        found = weight.grad
        weight.grad = None
        assert found is not None
        return found.cos()

    graph = captured(step, torch.ones(3)).graph
    assert "sin" in ops_of(graph, "backward")
    assert ops_of(graph, "optimizer") == {"cos"}


def test_a_program_without_a_backward() -> None:
    assert order(fz.functions.trace(lambda x: x.sin() + 1, torch.ones(2)).graph_module.graph) == [
        "forward"
    ]


def test_a_graph_that_nobody_recorded_has_none() -> None:
    graph = fx.symbolic_trace(lambda x: x + 1).graph
    assert {phase_of(node) for node in graph.nodes} == {None}
    assert first_of("forward", graph) is None


def test_a_saved_program_keeps_them(tmp_path: Any) -> None:
    program = fz.functions.trace(lambda x: x.sin() + 1, torch.ones(2))
    program.save(tmp_path / "program")
    assert order(fz.load(tmp_path / "program").graph_module.graph) == ["forward"]
