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


class _Late(nn.Module):
    """Two layers, of which lazy ones are made by the calls from which on they are used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LazyLinear(4), nn.LazyLinear(4)
        self.starts = (0, 0)

    def forward(self, x: Tensor, i: int) -> Tensor:
        for layer, start in zip((self.first, self.second), self.starts, strict=True):
            x = layer(x) if i >= start else x.new_ones(3, 4) * x.mean()
        return x


# For each rank: whether its layers are made before the first call, and the calls from which on they are used.
_MADE = {
    "one rank has made them": ((True, (0, 0)), (False, (0, 0))),
    "both make them at the first call": ((False, (0, 0)), (False, (0, 0))),
    "at other calls": ((False, (0, 5)), (False, (0, 0))),
    "at other calls, far apart": ((False, (9, 14)), (False, (0, 3))),
    "one rank never does": ((True, (0, 0)), (False, (0, 10**6))),
}


@ample_allowance()
def _made_at_other_calls(kind: str, reads: bool, options: dict[str, Any]) -> Any:
    """Gradients are averaged over the ranks. reads: whether the step relies on a number, so that ranks vote."""
    is_made, starts = _MADE[kind][dist.get_rank()]
    results, step_of_rank = [], None
    for captured in (False, True):
        torch.manual_seed(0)
        model = _Late()
        if is_made:
            torch.manual_seed(1)
            model(torch.ones(3, 5), 0)
        model.starts = starts

        def step(x: Tensor, i: int, model: _Late = model) -> Tensor:
            loss = model(x, min(i, 20)).square().mean()
            if loss.requires_grad:
                loss.backward()
            total = loss.detach().clone()
            dist.all_reduce(total)
            scale = total.item() if reads else 1.0
            with torch.no_grad():
                for layer in (model.first, model.second):
                    for name in ("weight", "bias"):
                        parameter = getattr(layer, name)
                        has = not isinstance(parameter, nn.UninitializedParameter)
                        has = has and parameter.grad is not None
                        mean = parameter.grad.mean() if has else torch.zeros(())
                        dist.all_reduce(mean)
                        if has:
                            parameter.sub_(parameter.grad + mean, alpha=0.01 / (1 + scale))
                            parameter.grad = None
            return total

        step_of_rank = fz.capture(step, **options) if captured else step
        losses = []
        for i in range(60):
            torch.manual_seed(100 + i)
            losses.append(step_of_rank(torch.randn(3, 5), min(i, 20)))
        results.append(losses)
    core = step_of_rank.core
    return *results, step_of_rank.stats.replays, [str(e) for e in core.refused.values()]


@pytest.mark.parametrize("options", [{}, {"passes": "fast"}], ids=["", "fast"])
@pytest.mark.parametrize("reads", [False, True], ids=["", "reads a number"])
@pytest.mark.parametrize("kind", _MADE)
def test_made_at_other_calls(kind: str, reads: bool, options: dict[str, Any]) -> None:
    found = run_on_ranks(_made_at_other_calls, kind, reads, options, world=2)
    for rank, (expected, ours, replays, refused) in enumerate(found):
        assert all(map(torch.equal, expected, ours)), rank
        assert not any("bug in functionalize" in error for error in refused), refused
        if kind != "one rank never does":
            assert replays > 8, (rank, refused)
