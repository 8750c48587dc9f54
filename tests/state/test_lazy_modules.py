"""Lazy modules, whose parameters the first call of a captured step makes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import functionalize as fz
from tests.allowance import ample_allowance
from tests.ranks import run_on_ranks

pytestmark = pytest.mark.usefixtures("ample_allowance")

MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(2)),
    "conv": lambda: nn.Sequential(nn.LazyConv1d(3, 2), nn.LazyBatchNorm1d(), nn.Flatten()),
}


def step_of(model: nn.Module) -> Callable[[Tensor], Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def batch(i: int) -> Tensor:
    return torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(i))


def run(step: Callable[[Tensor], Tensor], model: nn.Module, calls: int) -> list[Any]:
    """Results and states of some calls."""
    found: list[Any] = []
    for i in range(calls):
        torch.manual_seed(i)
        found.append(step(batch(i)))
        found += [value.clone() for value in model.state_dict().values()]
    return found


@pytest.mark.parametrize("kind", MODELS)
def test_first_call_makes_parameters(kind: str) -> None:
    twin, model = MODELS[kind](), MODELS[kind]()
    step = fz.capture(step_of(model))
    expected, found = run(step_of(twin), twin, 20), run(step, model, 20)
    assert all(map(torch.equal, expected, found)) and len(expected) == len(found)
    assert step.stats.eager == 1  # nothing of the first call is recorded
    assert step.stats.replays > 10


def test_optimizer_made_by_first_call() -> None:
    def made() -> tuple[Callable[[Tensor], Tensor], nn.Module]:
        model, made = MODELS["linear"](), []

        def step(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            if not made:
                made.append(torch.optim.Adam(model.parameters(), lr=0.01))
            loss.backward()
            made[0].step()
            made[0].zero_grad()
            return loss.detach()

        return step, model

    (eager, twin), (fn, model) = made(), made()
    step = fz.capture(fn)
    expected, found = run(eager, twin, 20), run(step, model, 20)
    assert all(map(torch.equal, expected, found)) and len(expected) == len(found)
    assert step.stats.replays > 10


def test_lazy_module_takes_place_of_another_one() -> None:
    twin, model = MODELS["linear"](), MODELS["linear"]()
    eager, step = step_of(twin), fz.capture(step_of(model))
    assert all(map(torch.equal, run(eager, twin, 8), run(step, model, 8)))
    replays = step.stats.replays
    assert isinstance(twin, nn.Sequential) and isinstance(model, nn.Sequential)
    twin[1] = nn.LazyLinear(3)
    model[1] = nn.LazyLinear(3)
    assert all(map(torch.equal, run(eager, twin, 12), run(step, model, 12)))
    assert step.stats.eager == 2 and step.stats.replays > replays + 6


def test_first_call_fails_in_its_forward() -> None:
    twin, model = MODELS["conv"](), MODELS["conv"]()
    eager, step = step_of(twin), fz.capture(step_of(model))
    for each in (eager, step):
        torch.manual_seed(0)
        with pytest.raises(RuntimeError, match="Kernel size"):
            each(torch.ones(1, 2, 1))
    assert all(map(torch.equal, run(eager, twin, 12), run(step, model, 12)))
    assert step.stats.replays > 5


def test_forward_with_its_backward_outside() -> None:
    losses = []
    for captured in (False, True):
        model = MODELS["linear"]()
        forward: Any = fz.capture(model.forward, backward=True) if captured else model.forward
        found = []
        for i in range(12):
            torch.manual_seed(i)
            loss = forward(batch(i)).square().mean()
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(parameter.grad, alpha=0.1)
                    parameter.grad = None
            found.append(loss.detach())
        losses.append(found)
    assert all(map(torch.equal, *losses))
    assert forward.stats.replays > 5


def test_module_that_no_call_makes(caplog: pytest.LogCaptureFixture) -> None:
    """The step runs eagerly, looks less and less often, says why, and is captured once the module is made."""
    model = nn.ModuleList([nn.Linear(5, 2), nn.LazyLinear(3)])

    def step(x: Tensor) -> Tensor:
        y: Tensor = model[0](x)
        return y.sum() if x.shape[0] > 1 else model[1](y).sum()

    captured = fz.capture(step)
    with caplog.at_level(logging.WARNING, "functionalize"):
        for i in range(40):
            assert torch.equal(captured(batch(i)), step(batch(i)))
    assert captured.stats.eager == 40
    assert "model.1.weight`, a lazy parameter or buffer" in caplog.text
    assert "call the module once before the step" in caplog.text
    model[1](torch.ones(1, 2))
    for i in range(40):
        assert torch.equal(captured(batch(i)), step(batch(i)))
    assert captured.stats.replays > 10


@ample_allowance()
def _lazy_on_one_rank() -> tuple[list[Tensor], list[Tensor], int, int]:
    """Ranks vote, as the step relies on a number; then one of them gets a lazy module, and the other does not."""
    results, stats = [], None
    for captured in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2))

        def step(x: Tensor, model: nn.Module = model) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            found = loss.detach().clone()
            dist.all_reduce(found)
            size = found.item()
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    dist.all_reduce(parameter.grad)
                    parameter.sub_(parameter.grad, alpha=0.1 / (1 + size))
                    parameter.grad = None
            return found

        run_step: Any = fz.capture(step) if captured else step
        losses = []
        for i in range(24):
            if i == 10:
                torch.manual_seed(1)
                model[1] = nn.LazyLinear(2) if dist.get_rank() else nn.Linear(4, 2)
            torch.manual_seed(100 + i)
            losses.append(run_step(batch(i)[0]))
        results.append(losses)
        stats = run_step.stats if captured else None
    assert stats is not None
    return results[0], results[1], stats.replays, stats.eager


def test_lazy_on_one_rank_of_a_vote() -> None:
    for rank, (expected, found, replays, eager) in enumerate(
        run_on_ranks(_lazy_on_one_rank, world=2)
    ):
        assert all(map(torch.equal, expected, found))
        assert replays > 12 and eager == rank
