"""What a step does in Python beside its tensors: told by name, never dropped in silence."""

from __future__ import annotations

import io
import queue
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import functionalize as fz
from functionalize.errors import UncapturableError

X = torch.ones(3)


def refusal(step: Callable[[Tensor], Any], calls: int = 8) -> str:
    """The error of a step that is refused; no call of it may have been replayed."""
    captured = fz.capture(step, on_uncapturable="raise")
    with pytest.raises(UncapturableError) as raised:
        for _ in range(calls):
            captured(X)
    assert captured.stats.replays == 0
    return str(raised.value)


def fills_a_deque() -> Callable[[Tensor], Any]:
    last: deque[Tensor] = deque()

    def step(x: Tensor) -> Tensor:
        last.append(x.sum())
        return x + len(last)

    return step


def calls_back_into_a_queue() -> Callable[[Tensor], Any]:
    done: queue.Queue[Any] = queue.Queue()
    layer = nn.Linear(3, 3)
    layer.weight.register_hook(lambda grad: done.put(grad.sum()))

    def step(x: Tensor) -> Tensor:
        layer(x).sum().backward()
        return done.get() if done.qsize() > 50 else x + 1

    return step


def hooks_into_a_queue() -> Callable[[Tensor], Any]:
    done: queue.Queue[Any] = queue.Queue()
    layer = nn.Linear(3, 3)
    layer.register_forward_hook(lambda module, args, out: done.put(out))
    return lambda x: layer(x)


def puts_into_a_simple_queue() -> Callable[[Tensor], Any]:
    done: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def step(x: Tensor) -> Tensor:
        done.put(1)
        return x + 1

    return step


def writes_to_a_file() -> Callable[[Tensor], Any]:
    file = io.StringIO()

    def step(x: Tensor) -> Tensor:
        file.write("a step\n")
        return x + 1

    return step


def replaces_an_attribute() -> Callable[[Tensor], Any]:
    class Trainer:
        def __init__(self) -> None:
            self.metrics: dict[str, Any] = {}

        def step(self, x: Tensor) -> Tensor:
            self.metrics = {"n": self.metrics.get("n", 0) + 1, "by": object()}
            return x + 1

    return Trainer().step


def fills_a_list_of_a_module() -> Callable[[Tensor], Any]:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            self.seen = [*self.seen, x.sum()]
            return x + 1

    class Appending(Block):
        def forward(self, x: Tensor) -> Tensor:
            self.seen.append(x.sum())
            return x + 1

    block = Appending()
    return lambda x: block(x)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (fills_a_deque, "last"),
        (calls_back_into_a_queue, "done"),
        (hooks_into_a_queue, "done"),
        (puts_into_a_simple_queue, "done"),
        (writes_to_a_file, "file"),
        (replaces_an_attribute, "self.metrics"),
        (fills_a_list_of_a_module, "block.seen"),
    ],
)
def test_a_change_of_what_the_step_can_reach_is_told(make: Any, name: str) -> None:
    message = refusal(make())
    assert name.removeprefix("self") in message and "which a replay would not" in message


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_numbers_drawn_by_others_are_told(draw: Any) -> None:
    message = refusal(lambda x: x * float(draw()))
    assert (
        "draws from `" in message
        and "random`, reads or writes it, which a replay would not" in message
    )


def test_a_print_of_an_object_is_told_with_its_line(capsys: Any) -> None:
    def step(x: Tensor) -> Tensor:
        print(range(3))
        return x + 1

    message = refusal(step)
    assert message.startswith("prints a range at ")
    assert "test_side_effects.py" in message
    assert capsys.readouterr().out == "range(0, 3)\n"


def test_a_cache_that_fills_once_is_no_obstacle() -> None:
    cache: dict[int, Tensor] = {}

    def step(x: Tensor) -> Tensor:
        if len(x) not in cache:
            cache[len(x)] = torch.arange(len(x)) * 2.0
        return x + cache[len(x)]

    captured = fz.capture(step)
    for _ in range(6):
        assert torch.equal(captured(X), X + torch.tensor([0.0, 2.0, 4.0]))
    assert captured.stats.replays >= 3


def test_lists_that_are_only_read_are_no_obstacle() -> None:
    scales = [torch.ones(3), torch.ones(3) * 2]
    captured = fz.capture(lambda x: sum((x * s for s in scales), torch.zeros(3)))
    for _ in range(4):
        assert torch.equal(captured(X), X * 3)
    assert captured.stats.replays >= 2
