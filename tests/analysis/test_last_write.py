"""Replays without passes run an optimizer's op last and in place; the graph stays pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import functionalize as fz
from functionalize.analysis.last_write import last_write

aten = torch.ops.aten
add_both = torch._foreach_add_


class Targets(TorchDispatchMode):
    """The ops that were called. fails: one that raises instead of running."""

    def __init__(self, fails: Any = None) -> None:
        super().__init__()
        self.found: list[Any] = []
        self._fails = fails

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.append(func)
        if func is self._fails:
            raise torch.OutOfMemoryError("the last op")
        return func(*args, **(kwargs or {}))


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    return torch.arange(4.0), torch.arange(4.0) + 10, torch.full((4,), 2.0)


def first(a: Tensor, b: Tensor, g: Tensor) -> Tensor:
    """The list op is not the step's last op, and what comes after reads an old value."""
    kept = a * 3
    add_both([a, b], [g, g * 2])
    return kept + g


def test_the_op_writes_inputs_in_place_after_all_others() -> None:
    program = fz.functions.trace(first, *inputs())
    (a, b, g), (x, y, h) = inputs(), inputs()
    expected = first(x, y, h)
    with Targets() as seen:
        found = program(a, b, g)
    assert torch.equal(found, expected)
    assert torch.equal(a, x) and torch.equal(b, y) and torch.equal(g, h)
    assert seen.found[-1] is aten._foreach_add_.List
    assert not any(f in seen.found for f in (aten._foreach_add.List, aten._foreach_copy_.default))
    assert program.stage == "FUNCTIONAL" and "_foreach_add_" not in str(program.graph)


def test_running_the_graph_alone_writes_nothing() -> None:
    program = fz.functions.trace(first, *inputs())
    a, b, g = inputs()
    results = program.run([a, b, g])
    assert all(map(torch.equal, (a, b, g), inputs()))
    assert not any(each is None for each in results)


def test_a_failure_of_the_op_itself_changes_nothing() -> None:
    program = fz.functions.trace(first, *inputs())
    a, b, g = inputs()
    with pytest.raises(torch.OutOfMemoryError), Targets(aten._foreach_add_.List):
        program(a, b, g)
    assert all(map(torch.equal, (a, b, g), inputs()))


def test_a_guard_on_a_value_is_checked_before_the_op() -> None:
    a, b, _ = inputs()

    def guarded(g: Tensor) -> Tensor:
        add_both([a, b], [g, g])
        return g + 1 if (g * 1.5).sum().item() > 0 else g - 1

    step = fz.capture(guarded, audit=False)
    for _ in range(4):
        step(torch.ones(4))
    assert step.program is not None and last_write(step.program) is not None
    assert step.stats.replays >= 1
    before = a.clone(), b.clone()
    with Targets() as seen:
        assert torch.equal(step(torch.full((4,), -1.0)), torch.full((4,), -2.0))
    assert torch.equal(a, before[0] - 1) and torch.equal(b, before[1] - 1)
    assert seen.found.count(aten._foreach_add_.List) == 1  # of the eager call


def returned(a: Tensor, b: Tensor, g: Tensor) -> Tensor:
    add_both([a, b], [g, g])
    return a * 2  # reads a new value


def other_argument(a: Tensor, b: Tensor, g: Tensor) -> None:
    new = torch._foreach_add(
        [a, b], [b.flip(0), a[:]]
    )  # in place, `a` would be new when `b` reads it
    torch._foreach_copy_([a, b], new)


def own_values(a: Tensor, b: Tensor, g: Tensor) -> None:
    new = torch._foreach_add([a, b], [g, g])
    a.copy_(new[0])
    b.copy_(new[0])  # the new value of `a`


def grows(a: Tensor, b: Tensor, g: Tensor) -> None:
    add_both([a, b], [g, g])
    g.untyped_storage().resize_(32)
    g.fill_(1)


@pytest.mark.parametrize("fn", [returned, other_argument, own_values, grows])
def test_refusals(fn: Callable[..., Any]) -> None:
    program = fz.functions.trace(fn, *inputs())
    assert last_write(program) is None
    ours, eager = inputs(), inputs()
    found, expected = program(*ours), fn(*eager)
    assert all(map(torch.equal, ours, eager))
    assert found is expected or torch.equal(found, expected)


def test_inputs_on_one_storage_are_copied() -> None:
    def step(whole: Tensor, g: Tensor) -> None:
        add_both([whole[:2], whole[2:]], [g, g])

    program = fz.functions.trace(step, torch.zeros(4), torch.ones(2))
    assert last_write(program) is None


def test_a_captured_step_needs_no_second_copy_of_its_optimizers_states() -> None:
    models, losses = [], []
    for captured in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        def step(x: Tensor) -> Tensor:
            loss = model(x).square().mean()  # noqa: B023
            loss.backward()
            optimizer.step()  # noqa: B023
            optimizer.zero_grad()  # noqa: B023
            return loss.detach()

        run = fz.capture(step) if captured else step
        found = []
        for i in range(12):  # an audited call, which compares results, among them
            torch.manual_seed(i)
            with Targets() as seen:
                found.append(run(torch.rand(4, 8)))
        models.append([*model.parameters()])
        losses.append(found)
    assert all(map(torch.equal, *losses)) and all(map(torch.equal, *models))
    assert [p._version for p in models[0]] == [p._version for p in models[1]]
    assert run.stats.replays >= 8 and run.stats.audits and not run.stats.audit_failures
    assert aten._fused_adamw_.default in seen.found
    assert aten._fused_adamw.default not in seen.found
