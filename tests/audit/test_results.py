"""The results of an audited call are compared with those that the program computes, where its graph can run beside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import functionalize as fz
from functionalize.audit.results import is_comparable
from functionalize.program.program import Program
from tests.step.twins import batch, same_state, twins
from tests.steps import make_step

aten = torch.ops.aten


def falsified(program: Program, target: Any, replacement: Any) -> None:
    """Let the program compute something else, as a wrong rewrite would."""
    node = program.graph.find_nodes(op="call_function", target=target)[0]
    node.target = replacement
    program.graph_module = torch.fx.GraphModule(program.graph_module, program.graph)


def captured_step(audit: Any = 1) -> tuple[Any, Any]:
    model, optimizer = twins()[0]
    step = fz.capture(make_step(model, optimizer), audit=audit)
    for i in range(2):
        step(batch(i))
    assert step.stats.captures == 1
    return step, model


def test_a_wrong_result_is_found() -> None:
    step, _ = captured_step()
    falsified(step.program, aten.relu.default, aten.sigmoid.default)
    step(batch(2))
    assert step.stats.audit_failures == 1
    assert "leaf 0 of the result has other bits" in step.stats.differences[0]


@pytest.mark.parametrize(
    ("passes", "right", "wrong"),
    [("", aten.add.Tensor, aten.sub.Tensor), ("reinplace", aten.add_.Tensor, aten.sub_.Tensor)],
)
def test_a_wrong_write_of_an_input_is_found(passes: str, right: Any, wrong: Any) -> None:
    counter = torch.zeros(3)

    def step(x: Tensor) -> Tensor:
        counter.add_(x)
        return x.sin()

    captured = fz.capture(step, audit=1, passes=passes)
    for _ in range(3):
        captured(torch.ones(3))
    assert captured.stats.audit_failures == 0
    falsified(captured.program, right, wrong)
    captured(torch.ones(3))
    assert captured.stats.audit_failures == 1
    assert "`counter` holds other bits than the program writes" in captured.stats.differences[0]
    assert torch.equal(counter, torch.full((3,), 4.0))  # eager's


def test_the_graph_that_runs_beside_changes_nothing() -> None:
    """Dropout and batch norm: the generators and the buffers move once per call."""
    (a, opt_a), (b, opt_b) = twins()
    eager, step = make_step(a, opt_a), fz.capture(make_step(b, opt_b), audit=1)
    torch.manual_seed(5)
    expected = [eager(batch(i)) for i in range(6)]
    after = torch.get_rng_state()
    torch.manual_seed(5)
    assert all(torch.equal(step(batch(i)), expected[i]) for i in range(6))
    assert torch.equal(torch.get_rng_state(), after)
    assert same_state(a, b)
    assert (step.stats.audits, step.stats.audit_failures) == (4, 0)


def test_sums_in_any_order_and_other_libraries_are_not_run_beside() -> None:
    @torch.library.custom_op("audited::twice", mutates_args=())
    def twice(x: Tensor) -> Tensor:
        calls.append(1)
        return x * 2

    twice.register_fake(torch.empty_like)
    calls: list[int] = []
    at = torch.tensor([0, 0, 1])
    steps = {
        "sums": lambda x: x.index_put((at,), x[at], accumulate=True),
        "custom": lambda x: twice(x) + 1,
        "plain": lambda x: x + 1,
    }
    for name, step in steps.items():
        captured = fz.capture(step, audit=1, on_uncapturable="eager")
        for i in range(4):
            captured(batch(i))
        assert captured.stats.audits >= 2, captured.explain()
        assert is_comparable(captured.program) is (name == "plain")
    assert len(calls) == 4  # once per call
    torch.use_deterministic_algorithms(True)
    try:
        captured = fz.capture(steps["sums"], audit=1)
        for i in range(3):
            captured(batch(i))
        assert is_comparable(captured.program)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("options", "comparable"),
    [
        ({}, True),
        ({"passes": "cleanup"}, True),
        ({"passes": ""}, True),
        ({"passes": "reinplace"}, True),
    ],
)
def test_which_programs_run_beside(options: dict[str, Any], comparable: bool) -> None:
    model, optimizer = twins()[0]
    step = fz.capture(make_step(model, optimizer), audit=1, **options)
    for i in range(4):
        step(batch(i))
    assert is_comparable(step.program) is comparable
    assert (step.stats.audits, step.stats.audit_failures) == (2, 0)
