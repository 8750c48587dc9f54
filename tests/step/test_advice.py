"""A refusal names what the step does, its line, and an edit; the step with that edit is captured and replays.

Each row: a step that is refused, what the message says, the words of the edit, and the edited step.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import functionalize as fz
from functionalize.errors import FunctionalizeError
from tests.ranks import run_on_ranks
from tests.scalars.bits import bits


@dataclass
class Counted:
    """What a step leaves for the next one, with a number."""

    a: Tensor
    n: int


class Owner:
    """What a trainer holds beside its model."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 2)
        self.it: Iterator[float] = iter([0.5 + i for i in range(100)])
        self.array = np.zeros(4)
        self.tensor = torch.from_numpy(np.zeros(4))
        self.rng = np.random.RandomState(0)
        self.carried = [torch.ones(()), torch.ones(())]
        self.counted, self.n = Counted(torch.ones(()), 0), 0

    def loss(self, x: Tensor) -> Tensor:
        return self.model(x).square().sum()


Step = Callable[[Owner, Tensor, Tensor], Any]


class Row(NamedTuple):
    """refused, edited: the step. says, advises: patterns of the message."""

    refused: Step
    says: str
    advises: str
    edited: Step
    between: Callable[[Owner], float] = lambda owner: 0.5


def _next(o: Owner, x: Tensor, given: Tensor) -> Any:
    return o.loss(x) * next(o.it)


def _next_outside(o: Owner, x: Tensor, given: Tensor) -> Any:
    return o.loss(x) * given


def _array(o: Owner, x: Tensor, given: Tensor) -> Any:
    loss = o.loss(x)
    o.array[0] = loss.item()
    return loss


def _tensor(o: Owner, x: Tensor, given: Tensor) -> Any:
    loss = o.loss(x)
    o.tensor[0] = loss.item()
    return loss, o.tensor.clone()


def _read(o: Owner, x: Tensor, given: Tensor) -> Any:
    loss = o.loss(x)
    return loss * float(loss.detach().numpy())


def _item(o: Owner, x: Tensor, given: Tensor) -> Any:
    loss = o.loss(x)
    return loss * loss.detach().item()


def _listed(o: Owner, x: Tensor, given: Tensor) -> Any:
    return o.loss(x) * sum(x[0].tolist())


def _items(o: Owner, x: Tensor, given: Tensor) -> Any:
    return o.loss(x) * sum([each.item() for each in x[0].unbind()])


def _shuffled(o: Owner, x: Tensor, given: Tensor) -> Any:
    return o.loss(x) * float(o.rng.permutation(4)[0])


def _counted(o: Owner, x: Tensor, given: Tensor) -> Any:
    loss = o.loss(x) * o.counted.a
    o.counted = Counted(loss.detach().sigmoid(), o.counted.n + 1)
    return loss


def _counted_apart(o: Owner, x: Tensor, given: Tensor) -> Any:
    loss = o.loss(x) * o.counted.a
    o.counted = Counted(loss.detach().sigmoid(), 0)
    o.n += 1
    return loss


def _kept_twice(o: Owner, x: Tensor, given: Tensor) -> Any:
    loss = o.loss(x) * o.carried[0]
    o.carried = [loss.detach().sigmoid(), o.carried[0] + 1]
    return loss, o.carried


def _kept_apart(o: Owner, x: Tensor, given: Tensor) -> Any:
    loss = o.loss(x) * o.carried[0]
    o.carried = [loss.detach().sigmoid(), o.carried[0] + 1]
    return loss, [*o.carried]


def _time(o: Owner, x: Tensor, given: Tensor) -> Any:
    return o.loss(x) * (1 + time.time() % 7)


ROWS = (
    Row(
        _next,
        r"draws from `o\.it`.*\n.*\n  used at .*test_advice\.py:\d+, in _next",
        r"call `next\(\)` outside the step, and pass the step what it gives as an argument",
        _next_outside,
        lambda owner: next(owner.it),
    ),
    Row(
        _array,
        r"`o\.array` \(ndarray float64\) has other contents.*\n.*\n  changed at .*test_advice\.py:\d+",
        r"keep it as a tensor \(`torch\.from_numpy\(array\)`\)",
        _tensor,
    ),
    Row(
        _read,
        r"Python reads a tensor by \.numpy\(\) at .*test_advice\.py:\d+, in _read",
        r"call \.item\(\) for a number",
        _item,
    ),
    Row(
        _listed,
        r"Python reads a tensor by \.tolist\(\) at .*test_advice\.py:\d+, in _listed",
        r"use \.item\(\)",
        _items,
    ),
    Row(
        _shuffled,
        r"draws from `o\.rng`.*\n.*\n  used at .*test_advice\.py:\d+, in _shuffled",
        r"draw outside the step, and pass the step what it gives as an argument",
        _next_outside,
        lambda owner: float(owner.rng.permutation(4)[0]),
    ),
    Row(
        _counted,
        r"`o\.counted\.n` is \d, was \d",
        r"keep other things that change in attributes of their own",
        _counted_apart,
    ),
    Row(
        _kept_twice,
        r"leaves in `o\.carried` a list that something else holds, too",
        r"put a copy there \(`\[\*items\]`\), or a tuple",
        _kept_apart,
    ),
)


def _runs(step: Callable[..., Any], row: Row, owner: Owner, calls: int = 9) -> list[Any]:
    results = []
    for i in range(calls):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(i))
        results.append(bits(step(owner, x, torch.tensor(row.between(owner)))))
    return results


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.refused.__name__)
def test_a_refusal_proposes_an_edit_that_works(row):
    o = Owner()

    def refused(x: Tensor, given: Tensor) -> Any:
        return row.refused(o, x, given)

    step = fz.capture(refused, audit=False, on_uncapturable="raise")
    with pytest.raises(FunctionalizeError) as found:
        _runs(lambda owner, *args: step(*args), row, o)
    message = str(found.value)
    assert re.search(row.says, message), message
    assert re.search(row.advises, message), message

    o = Owner()

    def edited(x: Tensor, given: Tensor) -> Any:
        return row.edited(o, x, given)

    step = fz.capture(edited, audit=False, on_uncapturable="raise")
    found = _runs(lambda owner, *args: step(*args), row, o)
    assert found == _runs(row.edited, row, Owner())
    assert step.stats.replays >= 5


def test_an_argument_that_became_none_is_named():
    model = nn.Linear(4, 2)

    def fn(x: Tensor, hidden: Tensor | None = None) -> Tensor:
        return model(x).sum() + (0 if hidden is None else hidden.sum())

    step = fz.capture(fn, audit=False)
    for i in range(8):
        step(torch.randn(3, 4), torch.ones(2) if i < 4 else None)
    assert "`hidden` is None, was a tensor" in step.stats.guard_failures
    assert not any("NoneType" in each for each in step.stats.guard_failures)


def _gathers_objects(x: Tensor) -> Tensor:
    loss, found = x.sum(), [None] * dist.get_world_size()
    dist.all_gather_object(found, loss.item())
    return loss * sum(found)  # type: ignore[arg-type]


def _broadcasts_objects(x: Tensor) -> Tensor:
    found = [x.sum().item() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found, 0)
    return x.sum() * found[0]


def _gathers_tensors(x: Tensor) -> Tensor:
    loss = x.sum()
    found = [torch.empty(()) for _ in range(dist.get_world_size())]
    dist.all_gather(found, loss)
    return loss * sum(found)  # type: ignore[arg-type]


def _exchanges(name: str) -> Any:
    step = fz.capture(globals()[name], audit=False, on_uncapturable="raise")
    for _ in range(6):
        try:
            result = step(torch.randn(3) + dist.get_rank())
        except FunctionalizeError as error:
            return str(error)
    return step.stats.replays, result.isfinite().item()


@pytest.mark.parametrize("name", ["all_gather_object", "broadcast_object_list"])
def test_an_exchange_of_objects_is_refused_by_its_name(name):
    step = {"all_gather_object": "_gathers_objects"}.get(name, "_broadcasts_objects")
    for message in run_on_ranks(_exchanges, step):
        assert message.startswith(f"exchanges Python objects by {name}() at "), message
        assert re.search(r"test_advice\.py:\d+, in _", message)
        assert "torch.distributed.all_reduce() or all_gather()" in message
        assert ".item()" not in message.split(": put numbers")[1]
    for replays, is_finite in run_on_ranks(_exchanges, "_gathers_tensors"):
        assert replays >= 3 and is_finite
