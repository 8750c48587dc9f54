"""Numbers read of the arguments alone are guarded before the graph runs; all others after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functionalize as fz

FULL, PADDED = torch.ones(4, dtype=torch.bool), torch.tensor([True, True, False, True])


def masked(x: Tensor, mask: Tensor) -> Tensor:
    return x * 2 if mask.all() else torch.where(mask, x, 0.0)


def run(step: Callable[..., Any], calls: list[tuple[Tensor, ...]]) -> Any:
    """Every call through `step` and a captured `step`; returns the latter."""
    captured = fz.capture(step)
    for args in calls:
        mine, eager = [a.clone() for a in args], [a.clone() for a in args]
        assert torch.equal(captured(*mine), step(*eager))
        assert all(map(torch.equal, mine, eager))
    return captured


def test_of_two_programs_the_one_that_fits_the_mask_is_replayed() -> None:
    calls = [(torch.rand(4), mask) for mask in (FULL, FULL, PADDED, PADDED, *(FULL, PADDED) * 4)]
    captured = run(masked, calls)
    assert captured.stats.captures == 2
    assert captured.stats.replays >= 8
    assert all(program.value_guards == () for program in captured.programs)
    full = next(p for p in captured.programs if "where" not in p.print_readable(print_output=False))
    assert [spec.name for spec in full.inputs] == ["x"]  # the mask is only looked at


def test_a_failure_says_where_the_number_was_read() -> None:
    captured = run(masked, [(torch.rand(4), FULL)] * 4 + [(torch.rand(4), PADDED)])
    (failure,) = captured.stats.guard_failures
    assert "in masked: return x * 2 if mask.all() else" in failure


def test_a_comparison_is_guarded_not_the_number() -> None:
    def step(x: Tensor) -> Tensor:
        return x + 1 if x.sum().item() > 1 else x - 1

    captured = run(step, [(torch.full((2,), float(i)),) for i in (1, 1, 1, 2, 3, 4, 5)])
    assert captured.stats.captures == 1
    assert captured.program.value_guards == ()


def test_an_argument_is_read_as_it_is_when_it_is_read() -> None:
    def step(x: Tensor) -> Tensor:
        x.add_(1)
        return x * 2 if bool((x > 1).all()) else x * 3

    up, down = torch.ones(2), torch.zeros(2)
    captured = run(step, [(x,) for x in (up, up, up, down, down, up, down, up, down)])
    assert captured.stats.captures == 2 and captured.stats.replays >= 5


def test_a_part_of_an_argument_is_read() -> None:
    base = torch.arange(8.0)

    def step(x: Tensor, y: Tensor) -> Tensor:
        return y + 1 if x[2:4].sum() > 100 else y + x.sum()

    big = base.clone()
    big[3] = 1000
    calls = [(t[1:7], torch.rand(2)) for t in (base, base, base, big, big, base, big)]
    captured = fz.capture(step)
    for args in calls:
        assert torch.equal(captured(*args), step(*args))
    assert captured.stats.captures == 2 and captured.stats.replays >= 3


LATE: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "a parameter": lambda model, x: model(x).sum(),
    "a random number": lambda model, x: (x + torch.rand(4)).sum() - 99,
    "an argument written from a parameter": lambda model, x: x.copy_(model(x)).sum(),
    "a copy of such": lambda model, x: torch.empty(4).copy_(model(x)).sum(),
}


@pytest.mark.parametrize("name", LATE)
def test_what_depends_on_more_is_guarded_after_the_graph(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)

    def step(x: Tensor) -> Tensor:
        with torch.no_grad():
            return x + 1 if LATE[name](model, x) > 1e6 else x - 1

    captured = fz.capture(step)
    for i in range(5):
        x, y = torch.full((4,), float(i)), torch.full((4,), float(i))
        torch.manual_seed(i)
        mine = captured(x)
        torch.manual_seed(i)
        assert torch.equal(mine, step(y)) and torch.equal(x, y)
    assert captured.stats.replays >= 3
    assert len(captured.program.value_guards) == 1


def test_a_guard_that_fails_draws_no_random_number() -> None:
    def step(x: Tensor, mask: Tensor) -> Tensor:
        noise = torch.rand(4)
        return x + noise if mask.all() else x - noise

    captured = fz.capture(step)
    for i, mask in enumerate([FULL, FULL, FULL, PADDED, FULL, PADDED, PADDED]):
        torch.manual_seed(i)
        mine, after = captured(torch.ones(4), mask), torch.get_rng_state()
        torch.manual_seed(i)
        assert torch.equal(mine, step(torch.ones(4), mask))
        assert torch.equal(after, torch.get_rng_state())
    assert captured.stats.captures == 2 and captured.stats.replays >= 3
