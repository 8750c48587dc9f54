"""A refused step beside the same step with the edit that the message of its refusal proposes; see `test_advice.py`."""

from __future__ import annotations

import collections
import queue
import random
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import functionalize as fz
from functionalize.errors import FunctionalizeError
from tests.allowance import ample_allowance
from tests.scalars.bits import bits


@dataclass
class Counted:
    """What a step leaves for the next one, with a number."""

    a: Tensor
    n: int


@dataclass
class Note:
    """An object that a step makes anew."""

    n: float = 0.0


def _batches() -> Iterator[Tensor]:
    while True:
        yield torch.ones(3, 4)


class Kept:
    """No record: its attributes are whatever its methods make them."""

    def __init__(self, n: float) -> None:
        self.n = n


class Owner:
    """What a trainer holds beside its model."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        self.model, self.other = nn.Linear(4, 2), nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.by_tensors = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda epoch: torch.tensor(0.5).item() ** epoch
        )
        self.lbfgs = torch.optim.LBFGS(self.model.parameters(), max_iter=2)
        self.it: Iterator[float] = iter([0.5 + i for i in range(100)])
        self.loader = torch.utils.data.DataLoader(torch.arange(400.0).view(100, 4), batch_size=2)
        self.batches = iter(self.loader)
        self.shuffled = torch.utils.data.DataLoader(torch.ones(4, 4), batch_size=2, shuffle=True)
        self.array = np.zeros(4)
        self.tensor = torch.from_numpy(np.zeros(4))
        self.rng = np.random.RandomState(0)
        self.generator = torch.Generator()
        self.carried = [torch.ones(()), torch.ones(())]
        self.counted, self.n = Counted(torch.ones(()), 0), 0
        self.mixed: dict[str, Any] = {"loss": torch.ones(()), "number": 0}
        self.last: Any = None
        self.losses: list[Any] = []
        self.todo = [0.5 + i for i in range(100)]
        self.table: dict[Any, Any] = {}
        self.names: set[float] = set()
        self.queue: queue.Queue[float] = queue.Queue()
        self.recent: collections.deque[float] = collections.deque()
        self.bounded: collections.deque[float] = collections.deque([0.0] * 3, maxlen=3)
        self.kept = Kept(0.0)
        self.text = ""
        self.note, self.mask = Note(), torch.ones(3, 4)
        self.first, self.second = [torch.ones(())], [torch.ones(())]
        self.local = threading.local()
        self.local.scale = 2.0
        self.backend = torch.compile  # of torch, never called
        self.settled = 0.0

    def loss(self, x: Tensor) -> Tensor:
        """The loss of one batch."""
        return self.model(x).square().sum()


OUTSIDE = "do so outside the step"
Step = Callable[[Owner, Tensor, Any], Any]


def _half(owner: Owner) -> Any:
    return torch.tensor(0.5)


def plain(o: Owner, x: Tensor, given: Any) -> Any:
    """An edited step: the loss alone."""
    return o.loss(x)


def times_given(o: Owner, x: Tensor, given: Any) -> Any:
    """An edited step: it computes with what it is passed."""
    return o.loss(x) * given


def detached(o: Owner, x: Tensor, given: Any) -> Any:
    """An edited step: it returns a tensor, from which the loop reads."""
    return o.loss(x).detach()


@dataclass(frozen=True)
class Row:
    """refused, edited: the step. says, advises: patterns of the message about the object, and about the edit.

    before: makes what the step is passed beside its batch. passes: the same for the refused step, if that is passed
    something else. after: what the loop around the edited step does with its
    result, if it does something. has_line: whether there is a line to name. is_same: whether both steps compute the
    same in eager. first: the number of calls before the first replay of the edited step, at most.
    """

    refused: Step
    says: str
    advises: str
    edited: Step
    before: Callable[[Owner], Any] = _half
    passes: Callable[[Owner], Any] | None = None
    after: Callable[[Owner, Any], object] | None = None
    is_same: bool = True
    has_line: bool = True
    first: int = 4
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """For the test's id."""
        return self.refused.__name__.lstrip("_")


def results(step: Callable[..., Any], row: Row, owner: Owner, is_edited: bool, calls: int) -> Any:
    """The results of as many calls, as bits."""
    found = []
    before = row.before if is_edited else row.passes or row.before
    for i in range(calls):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(i))
        result = step(owner, x, before(owner))
        found.append(bits(result))
        if is_edited and row.after is not None:
            row.after(owner, result)
    return found


def refusal_of(row: Row, calls: int = 40) -> str:
    """What the refused step raises."""
    o = Owner()

    def step(x: Tensor, given: Any) -> Any:
        return row.refused(o, x, given)

    with ample_allowance():
        captured = fz.capture(step, audit=False, on_uncapturable="raise", **row.options)
    with pytest.raises(FunctionalizeError) as found:
        for i in range(calls):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(i))
            captured(x, (row.passes or row.before)(o))
    return str(found.value)


def check(row: Row, calls: int = 9) -> None:
    """The message names the object, the line and the edit; the edited step is captured and computes what eager does."""
    message = refusal_of(row)
    assert re.search(row.says, message), message
    assert re.search(row.advises, message), message
    file = re.escape(row.refused.__code__.co_filename)
    if row.has_line:
        assert re.search(rf"{file}:\d+, in {row.refused.__name__}\b", message), message
    o = Owner()

    def edited(x: Tensor, given: Any) -> Any:
        return row.edited(o, x, given)

    with ample_allowance():
        step = fz.capture(edited, audit=False, on_uncapturable="raise")
    found = results(lambda owner, *args: step(*args), row, o, True, calls)
    expected = results(row.edited, row, Owner(), True, calls)
    assert found == expected
    assert step.stats.replays >= calls - row.first, step.explain()
    if row.is_same:
        assert results(row.refused, row, Owner(), False, calls) == expected
