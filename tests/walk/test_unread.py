"""A number that the step does not read makes no program of its own; one that it reads in any way does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functionalize as fz

CALLS = 8


class Module:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def loss(self, batch: Tensor, scale: float = 1.0) -> Tensor:
        loss = self.model(batch).mean() * scale
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


class NotRead(Module):
    def step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        del dataloader_idx
        return self.loss(batch)


class InALine(Module):
    def step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch, 1.0 + batch_idx)


class InAClosure(Module):
    def step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch, (lambda: 1.0 + batch_idx)())


class InLocals(Module):
    def step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch, 1.0 + locals()["batch_idx"])


def _of_caller(name: str) -> Any:
    return sys._getframe(1).f_locals[name]


class InAHelper(Module):
    def step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch, 1.0 + _of_caller("batch_idx"))


class InRest(Module):
    def step(self, *rest: Any) -> Tensor:
        return self.loss(rest[0], 1.0 + rest[1])


class InKeywords(Module):
    def step(self, batch: Tensor, /, **batch_idx: Any) -> Tensor:
        return self.loss(batch, 1.0 + batch_idx["batch_idx"])


def same_as_eager(kind: type[Any], call: Callable[..., Any]) -> Any:
    eager, ours = kind(), kind()
    captured = fz.capture(ours.step, on_uncapturable="eager")
    for i in range(CALLS):
        batch = torch.randn(4, 3, generator=torch.Generator().manual_seed(i))
        results = [call(step, batch.clone(), i) for step in (eager.step, captured)]
        assert torch.equal(*results), (i, results, captured.explain())
        assert torch.equal(eager.model.weight, ours.model.weight)
    return captured


def positional(step: Any, batch: Tensor, i: int) -> Any:
    return step(batch, i)


def by_name(step: Any, batch: Tensor, i: int) -> Any:
    return step(batch, batch_idx=i)


@pytest.mark.parametrize("call", [positional, by_name])
def test_a_number_that_is_not_read_makes_no_program(call: Callable[..., Any]):
    captured = same_as_eager(NotRead, call)
    assert captured.stats.captures == 1 and captured.stats.replays >= CALLS - 3, captured.explain()


@pytest.mark.parametrize("kind", [InALine, InAClosure, InLocals, InAHelper, InRest])
def test_a_number_that_is_read_is_a_fact(kind: type[Any]):
    same_as_eager(kind, positional)


@pytest.mark.parametrize("kind", [InALine, InAClosure, InLocals, InAHelper, InKeywords])
def test_a_number_that_is_read_is_a_fact_by_name(kind: type[Any]):
    same_as_eager(kind, by_name)


def test_code_that_is_replaced_may_read_it():
    class Changing(NotRead):
        def step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.loss(batch)

    eager, ours = Changing(), Changing()
    captured = fz.capture(ours.step)
    for i in range(CALLS):
        if i == CALLS // 2:
            Changing.step.__code__ = InALine.step.__code__
        results = [step(torch.ones(4, 3), i) for step in (eager.step, captured)]
        assert torch.equal(*results), (i, captured.explain())


def test_a_tensor_that_is_not_read_is_no_number():
    """Whether it is there may be of interest to autograd: tensors are inputs as before."""
    step = fz.capture(NotRead().step)
    for i in range(4):
        step(torch.ones(4, 3), torch.tensor(i))
    assert step.stats.captures == 1, step.explain()
