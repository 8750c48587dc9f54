"""Deques that a step fills and reads: histories of hidden states, of losses; also lists that it changes in place."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import functionalize as fz
from functionalize.errors import UncapturableError
from tests.allowance import ample_allowance
from tests.ranks import run_on_ranks

pytestmark = pytest.mark.usefixtures("ample_allowance")

MOST = 4


class Recurrent(nn.Module):
    """A layer that adds the mean of what it has computed before."""

    def __init__(self, change: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.linear, self.change = nn.Linear(3, 3), change

    def forward(self, x: Tensor, past: Any) -> Tensor:
        y: Tensor = self.linear(x)
        result = y + torch.stack(list(past)).mean(0) if len(past) else y
        self.change(past, y.detach())
        return result


def _append(past: Any, y: Tensor) -> None:
    past.append(y)


def _append_left(past: Any, y: Tensor) -> None:
    past.appendleft(y)


def _rotate(past: Any, y: Tensor) -> None:
    past.append(y)
    past.rotate(1)


def _first_out(past: Any, y: Tensor) -> None:
    past.append(y)
    if len(past) > MOST:
        past.popleft() if type(past) is deque else past.pop(0)


def _sums(past: Any, y: Tensor) -> None:
    past.append(y + past[-1] if past else y)


def _zeros() -> list[Tensor]:
    return [torch.zeros(2, 3) for _ in range(MOST)]


HISTORIES: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], None]]] = {
    "empty": (lambda: deque(maxlen=MOST), _append),
    "empty, from the left": (lambda: deque(maxlen=MOST), _append_left),
    "empty, of sums": (lambda: deque(maxlen=MOST), _sums),
    "full": (lambda: deque(_zeros(), maxlen=MOST), _append),
    "rotated": (lambda: deque(_zeros(), maxlen=MOST), _rotate),
    "without a bound": (lambda: deque(_zeros()), _first_out),
    "list": (_zeros, _first_out),
}
HOLDERS: dict[str, Callable[[Any], Any]] = {
    "module": lambda model: model,
    "namespace": lambda model: types.SimpleNamespace(),
    "parameter": lambda model: model.linear.weight,
}


def run(history: str, holder: str, capture: Callable[[Any], Any], calls: int = 48) -> Any:
    """Losses and histories. Another deque stands there from one call on, and the caller clears it later."""
    torch.manual_seed(0)
    make, change = HISTORIES[history]
    model = Recurrent(change)
    held = HOLDERS[holder](model)
    held.history = make()
    optimizer = torch.optim.SGD(model.linear.parameters(), 0.1)

    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x, held.history).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    captured, found = capture(step), []
    for i in range(calls):
        if i == 20:
            held.history = held.history.copy()
        if i == 34 and history.startswith("empty"):
            held.history.clear()
        found += [captured(torch.randn(2, 3)), model.linear.weight.detach().clone()]
        found += held.history
    return found, captured


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("history", HISTORIES)
def test_as_eager(history: str, holder: str) -> None:
    (expected, _), (found, step) = (run(history, holder, c) for c in (lambda s: s, fz.capture))
    assert len(expected) == len(found) and all(map(torch.equal, expected, found))
    assert step.stats.replays > 20, step.explain()
    assert step.stats.audits and not step.stats.audit_failures


def test_no_call_that_fills_a_deque_is_recorded_but_the_first() -> None:
    """With forty elements to come, forty recordings would be of no use."""
    past: deque[float] = deque(maxlen=40)

    def step(x: Tensor) -> Tensor:
        past.append(x.sum().item())
        return x * (sum(past) / len(past))

    captured, twin = fz.capture(step, on_uncapturable="raise"), deque[float](maxlen=40)
    for i in range(60):
        x = torch.full((2,), float(i % 7))
        twin.append(x.sum().item())
        assert torch.equal(captured(x), x * (sum(twin) / len(twin))), i
        assert list(past) == list(twin)
        if i == 20:
            assert "fills `past`, which holds 20 of 40 elements" in captured.explain()
    assert captured.stats.warmups <= 5 and captured.stats.replays > 12, captured.explain()


def test_bound_of_a_deque_is_guarded() -> None:
    """Full and of four elements, or of eight with room for more: an append does not do the same."""
    space = types.SimpleNamespace(past=deque(_zeros(), maxlen=MOST))

    def step(x: Tensor) -> Tensor:
        space.past.append(x * 2)
        return sum(space.past, torch.zeros(2, 3))

    captured, found, expected = fz.capture(step, audit=False), [], []
    for steps, each in ((captured, found), (step, expected)):
        space.past = deque(_zeros(), maxlen=MOST)
        for i in range(30):
            if i == 16:
                space.past = deque(space.past, maxlen=2 * MOST)
            each += [steps(torch.full((2, 3), float(i))), *space.past]
    assert len(expected) == len(found) and all(map(torch.equal, expected, found))
    assert captured.stats.replays > 8


def test_deque_that_is_only_read_is_read_by_replays() -> None:
    past, at = deque(_zeros(), maxlen=MOST), 0

    def step(x: Tensor) -> Tensor:
        return x + torch.stack(list(past)).sum(0)

    captured = fz.capture(step)
    for at in range(16):
        if at in (6, 11):
            past.append(torch.full((2, 3), float(at)))
        assert torch.equal(captured(torch.ones(2, 3)), step(torch.ones(2, 3))), at
    assert captured.stats.replays > 6


def test_deque_that_the_step_makes_anew() -> None:
    """As a list of tensors that the step replaces as a whole, with the bound that the step gives it."""

    def runs(capture: Callable[[Any], Any]) -> Any:
        space: Any = types.SimpleNamespace(past=deque(_zeros(), maxlen=MOST), n=0)

        def step(x: Tensor) -> Any:
            space.past = deque([*space.past, x * 2], maxlen=MOST)
            return {"loss": sum(space.past, torch.zeros(2, 3)), "past": space.past}

        captured, found = capture(step), []
        for i in range(20):
            result = captured(torch.full((2, 3), float(i)))
            assert result["past"] is space.past and space.past.maxlen == MOST
            assert type(space.past) is deque
            found += [result["loss"], *space.past]
            if i == 12:
                space.past = deque(space.past)
        return found, captured

    (expected, _), (found, step) = runs(lambda s: s), runs(fz.capture)
    assert len(expected) == len(found) and all(map(torch.equal, expected, found))
    assert step.stats.replays > 8, step.explain()


def test_other_bound_of_a_deque_made_anew_is_refused() -> None:
    space: Any = types.SimpleNamespace(past=deque(_zeros(), maxlen=MOST), n=0)

    def step(x: Tensor) -> Tensor:
        space.past = deque([*space.past, x][-MOST:], maxlen=space.past.maxlen + 1)
        return sum(space.past, torch.zeros(2, 3))

    captured = fz.capture(step, on_uncapturable="raise")
    with pytest.raises(UncapturableError, match=r"`space\.past.*` is (\d|another|a deque)"):
        for _ in range(8):
            captured(torch.ones(2, 3))


@ample_allowance()
def _meters(most: tuple[int, int], reads: bool) -> Any:
    """Ranks with deques of other lengths. reads: whether the step relies on a number that its graph computes."""
    size, results = most[dist.get_rank()], []
    captured: Any = None
    for capture in (lambda step: step, fz.capture):
        torch.manual_seed(0)
        model, past = nn.Linear(3, 3), deque[Any](maxlen=size)

        def step(x: Tensor, model: nn.Module = model, past: deque[Any] = past) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            total = loss.detach().clone()
            dist.all_reduce(total)
            past.append(total.item() if reads else total)
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    dist.all_reduce(parameter.grad)
                    parameter.sub_(parameter.grad * (0.01 * sum(past) / len(past)))
                    parameter.grad = None
            return total

        captured = capture(step)
        found: list[Any] = []
        for i in range(48):
            torch.manual_seed(i)
            found += [captured(torch.randn(2, 3)), list(past), model.weight.detach().clone()]
        results.append(found)
    refused = [str(error) for error in captured.core.refused.values()]
    return *results, captured.stats.replays, captured.stats.warmups, refused


@pytest.mark.parametrize("reads", [False, True], ids=["", "reads a number"])
@pytest.mark.parametrize("most", [(6, 6), (4, 14)], ids=["equal", "others"])
def test_ranks_fill_deques(most: tuple[int, int], reads: bool) -> None:
    for expected, found, replays, warmups, refused in run_on_ranks(_meters, most, reads, world=2):
        assert len(expected) == len(found)
        for a, b in zip(expected, found, strict=True):
            assert torch.equal(a, b) if isinstance(a, Tensor) else a == b
        assert replays > 12 and warmups < 16 and not refused, (replays, warmups, refused)


def test_deque_of_tuples_with_numbers() -> None:
    """Also of the first call that is recorded with live numbers, when no place in the deque is known yet."""

    def runs(capture: Callable[[Any], Any]) -> Any:
        past: deque[Any] = deque(maxlen=3)

        def step(x: Tensor) -> Tensor:
            before = sum((h * n for h, (n, _) in past), torch.zeros(2))
            past.append((x + before, (x.sum().item(), len(past))))
            return before

        captured, found = capture(step), []
        for i in range(24):
            found.append(captured(torch.full((2,), i % 5 / 8)).tolist())
            found.append([(h.tolist(), type(n), n, size) for h, (n, size) in past])
        return found, captured

    (expected, _), (found, step) = runs(lambda s: s), runs(fz.capture)
    assert found == expected
    assert step.stats.replays > 8, step.explain()
