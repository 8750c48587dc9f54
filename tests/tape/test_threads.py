"""A backward in another thread than the step's is refused at the first call, and says so; other threads are let be."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import functionalize as fz
from functionalize.errors import UncapturableError


class Worker:
    """A thread from before the step that runs the backward of what it is sent."""

    def __init__(self) -> None:
        self.asked: queue.Queue[Tensor | None] = queue.Queue()
        self.done: queue.Queue[bool] = queue.Queue()
        self.thread = threading.Thread(target=self.work, name="worker")
        self.thread.start()

    def work(self) -> None:
        while (loss := self.asked.get()) is not None:
            loss.backward()
            self.done.put(True)


@pytest.fixture
def worker() -> Iterator[Worker]:
    found = Worker()
    yield found
    found.asked.put(None)
    found.thread.join()


def training(backward: Callable[[Tensor], None]) -> Callable[[Tensor], Tensor]:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return train


@pytest.mark.filterwarnings("ignore:train cannot be captured")
def test_a_backward_in_another_thread_is_refused_at_the_first_call(worker: Worker) -> None:
    def elsewhere(loss: Tensor) -> None:
        worker.asked.put(loss)
        worker.done.get()

    step = fz.capture(training(elsewhere), on_uncapturable="raise")
    step(torch.ones(2, 3))
    said = r"backward runs in another thread \(worker\) at .*loss.backward\(\).*call backward\(\) in that thread"
    with pytest.raises(UncapturableError, match=said):
        step(torch.ones(2, 3))


def test_a_backward_of_something_else_is_no_concern_of_the_step(worker: Worker) -> None:
    other = nn.Linear(3, 3)
    step = fz.capture(training(lambda loss: loss.backward()))
    for _ in range(3):
        worker.asked.put(other(torch.ones(2, 3)).sum())
        step(torch.ones(2, 3))
        worker.done.get()
    while not _waits(worker):
        time.sleep(0.001)
    step(torch.ones(2, 3))
    assert not step.core.refused
    assert step.stats.captures == 1


def _waits(worker: Worker) -> bool:
    """Whether the thread waits for a loss, so that it reads nothing of the step."""
    ident = worker.thread.ident
    assert ident is not None
    frames = sys._current_frames()
    return frames[ident].f_code is threading.Condition.wait.__code__
