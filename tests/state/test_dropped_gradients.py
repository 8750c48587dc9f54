"""A replay drops the last step's gradients if the step does; eager after a failed replay runs as if it had not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import functionalize as fz
from tests.faults import Tripwire, raising

Step = Callable[[Tensor], Any]
Make = Callable[[nn.Module, Optimizer], Step]


def zeros_first(model: nn.Module, optimizer: Optimizer) -> Step:
    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def zeros_after_forward(model: nn.Module, optimizer: Optimizer) -> Step:
    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def reads_first(model: nn.Module, optimizer: Optimizer) -> Step:
    def step(x: Tensor) -> Tensor:
        first = next(model.parameters()).grad
        norm = x.sum() if first is None else first.norm()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        return norm

    return step


def returns_old(model: nn.Module, optimizer: Optimizer) -> Step:
    def step(x: Tensor) -> Any:
        old = next(model.parameters()).grad
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        return old

    return step


def asks_first(model: nn.Module, optimizer: Optimizer) -> Step:
    """Whether there is a gradient decides the result."""

    def step(x: Tensor) -> Tensor:
        factor = 1.0 if next(model.parameters()).grad is None else 2.0
        optimizer.zero_grad()
        loss: Tensor = factor * model(x).square().mean()
        loss.backward()
        if loss.item() > 1e3:
            loss = loss + 1
        optimizer.step()
        return loss.detach()

    return step


class Pair:
    """A captured step, and the same one in eager, on equal models."""

    def __init__(self, make: Make) -> None:
        self.models, steps = [], []
        for _ in range(2):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
            steps.append(make(model, torch.optim.AdamW(model.parameters(), fused=True)))
            self.models.append(model)
        self.step, self.eager = fz.capture(steps[0], audit=False), steps[1]

    def call(self, x: Tensor) -> None:
        results = self.step(x), self.eager(x)
        assert torch.equal(*[torch.zeros(()) if r is None else r for r in results])
        for mine, its in zip(*(model.parameters() for model in self.models), strict=True):
            assert torch.equal(mine, its)
            assert mine.grad is not None and its.grad is not None
            assert torch.equal(mine.grad, its.grad)

    @property
    def dropped(self) -> int:
        return len(self.step.core.cache.latest.dropped)

    @contextmanager
    def watching(self) -> Iterator[list[bool]]:
        """Whether the captured model's first parameter has its gradient when the graph of a replay starts."""
        program, found = self.step.core.cache.latest.program, list[bool]()
        run = program._run

        def watched(*args: Any) -> Any:
            found.append(next(self.models[0].parameters()).grad is not None)
            return run(*args)

        program._run = watched
        yield found
        program._run = run


def trained(make: Make) -> Pair:
    pair = Pair(make)
    for i in range(5):
        pair.call(torch.full((2, 4), float(i)))
    assert pair.step.stats.replays
    return pair


@pytest.mark.parametrize(
    ("make", "kept"),
    [
        (zeros_first, False),
        (asks_first, False),
        (zeros_after_forward, True),
        (returns_old, True),
    ],
)
def test_a_replay_drops_what_the_step_drops_before_its_first_op(make: Make, kept: bool) -> None:
    """Not after an op in one process: an eager run in place of a replay might stop at that op."""
    pair = trained(make)
    with pair.watching() as found:
        pair.call(torch.ones(2, 4))
    assert found == [kept]


def test_a_step_that_reads_a_gradient_first_drops_none() -> None:
    pair = trained(reads_first)
    assert pair.dropped == 0


def test_eager_after_a_failed_op_finds_gradients() -> None:
    pair = trained(asks_first)
    assert pair.dropped == 4
    eager = pair.step.stats.eager
    with Tripwire(3, raising(torch.OutOfMemoryError("full"))):
        ours = pair.step(torch.ones(2, 4))
    assert pair.step.stats.eager == eager + 1
    assert torch.equal(ours, pair.eager(torch.ones(2, 4)))
    pair.call(torch.ones(2, 4))


def test_a_recording_after_a_failed_guard_finds_gradients() -> None:
    """Its program fits the next call, which has gradients too."""
    pair = trained(asks_first)
    captures = pair.step.stats.captures
    pair.call(torch.full((2, 4), 1e3))
    assert pair.step.stats.guard_failures
    for _ in range(4):
        pair.call(torch.full((2, 4), 1e3))
    assert pair.step.stats.captures == captures + 1
    replays = pair.step.stats.replays
    pair.call(torch.full((2, 4), 1e3))
    pair.call(torch.ones(2, 4))
    assert pair.step.stats.replays == replays + 2


def test_a_saved_program_drops_them_too(tmp_path: Path) -> None:
    pair = trained(zeros_first)
    pair.step.save(tmp_path / "step.fzp")
    pair.step.forget()
    pair.step.load(tmp_path / "step.fzp")
    pair.call(torch.ones(2, 4))  # its passes run
    assert pair.step.stats.replays
    with pair.watching() as found:
        pair.call(torch.ones(2, 4))
    assert found == [False]
