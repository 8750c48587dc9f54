"""State in Python that a step moves: after every call, the captured twin holds what the eager twin holds."""

from __future__ import annotations

import itertools
import math
import re
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functionalize as fz
from functionalize.errors import UncapturableError
from tests.step.moving_steps import REFUSED, REPLAYS, STEPS, World, difference

pytestmark = pytest.mark.usefixtures("ample_allowance")

CALLS = 12


def batch(i: int) -> Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(i))


def is_timed(name: str) -> bool:
    """Whether twins differ by the time at which they run."""
    return name in ("time_of_the_call", "nodes_in_all")


def run(name: str, optimizer: str, calls: int = CALLS, **options: Any) -> Any:
    """Train twins, compare them after every call; returns the captured step and the call at which it was refused."""
    eager, ours = World(STEPS[name], optimizer), World(STEPS[name], optimizer)
    captured = fz.capture(ours.step, on_uncapturable="eager", **options)
    refused_at = 0
    for i in range(calls):
        expected, actual = eager.step(batch(i)), captured(batch(i))
        if not is_timed(name):
            found = difference([expected, eager.state()], [actual, ours.state()])
            assert found is None, f"call {i}: {found}\n{captured.explain()}"
        if captured.core.refused and not refused_at:
            refused_at = i + 1
    return captured, refused_at


REPLAYED = [n for n in STEPS if n not in REFUSED]
OPTIMIZERS = dict(zip(REPLAYED, itertools.cycle(["SGD", "Adam", "AdamW"]), strict=False))


@pytest.mark.parametrize(("name", "optimizer"), OPTIMIZERS.items())
def test_a_replay_moves_state_as_eager_does(name: str, optimizer: str) -> None:
    captured, _ = run(name, optimizer, audit=False)
    assert captured.stats.replays >= REPLAYS.get(name, CALLS - 4), captured.explain()


@pytest.mark.parametrize("name", REPLAYED)
def test_audited_calls_move_state_too_and_differ_from_no_program(name: str) -> None:
    captured, _ = run(name, "SGD", audit=2)
    assert captured.stats.audits >= 1 and not captured.stats.audit_failures, captured.explain()


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_replay_repeats_is_refused_at_the_first_call_that_shows_it(name: str) -> None:
    message, at = REFUSED[name]
    captured, refused_at = run(name, "SGD")
    (error,) = captured.core.refused.values()
    assert re.search(message, str(error), re.DOTALL), str(error)
    assert refused_at == at, captured.explain()


def counting(raises_at: int) -> Any:
    """A step that raises at its call number `raises_at`, between a change and the next."""

    def make(w: World) -> Any:
        w.calls, w.losses, w.total = 0, [], 0.0

        def step(x: Tensor) -> Tensor:
            w.calls += 1
            loss = w.model(x).square().mean()
            w.total += loss.item()
            w.losses.append(loss.item())
            w.model[3 if x.size(0) == 7 else 2](torch.ones(1, 4))  # type: ignore[index]
            loss.backward()
            w.optimizer.step()
            w.optimizer.zero_grad()
            w.n += 1
            return loss.detach()

        return step

    return make


@pytest.mark.parametrize("raises_at", [0, 1, 2, 4])
def test_an_exception_leaves_plain_numbers(raises_at: int) -> None:
    eager, ours = World(counting(raises_at), "Adam"), World(counting(raises_at), "Adam")
    captured = fz.capture(ours.step)
    for i in range(8):
        x = torch.randn(7 if i == raises_at else 5, 3)
        if i == raises_at:
            for step in (eager.step, captured):
                with pytest.raises(IndexError):
                    step(x)
        else:
            assert difference(eager.step(x), captured(x)) is None
        found = difference(eager.state(), ours.state())
        assert found is None, f"call {i}: {found}"
    assert captured.stats.replays >= 3, captured.explain()


def test_a_number_that_becomes_another_type_is_noticed() -> None:
    eager, ours = World(STEPS["average_meter"], "SGD"), World(STEPS["average_meter"], "SGD")
    captured: Any = fz.capture(ours.step)
    for i in range(24):
        if i % 8 == 6:
            eager.meter.reset(), ours.meter.reset()  # type: ignore[attr-defined]
        assert difference(eager.step(batch(i)), captured(batch(i))) is None
        assert difference(eager.state(), ours.state()) is None
    assert captured.stats.replays >= 14, captured.explain()


def test_a_list_that_gets_a_second_name_is_no_longer_only_appended_to() -> None:
    def make(w: World) -> Any:
        w.losses, w.others = [], []

        def step(x: Tensor) -> float:
            w.losses.append(w.train(x).item())
            return float(len(w.others))

        return step

    eager, ours = World(make, "SGD"), World(make, "SGD")
    captured = fz.capture(ours.step, on_uncapturable="eager")
    for i in range(12):
        if i == 6:
            for w in (eager, ours):
                w.others = w.losses  # type: ignore[attr-defined]
        assert eager.step(batch(i)) == captured(batch(i))
        assert difference(eager.state(), ours.state()) is None
    assert 0 < captured.stats.replays < 8, captured.explain()


def test_a_number_of_more_than_64_bits_runs_eagerly() -> None:
    def make(w: World) -> Any:
        w.n = 2**60

        def step(x: Tensor) -> Tensor:
            w.n = w.n * 2
            return w.train(x).detach()

        return step

    eager, ours = World(make, "SGD"), World(make, "SGD")
    captured = fz.capture(ours.step, on_uncapturable="eager")
    for i in range(8):
        eager.step(batch(i)), captured(batch(i))
        assert difference(eager.state(), ours.state()) is None, i


def test_a_change_from_outside_is_seen() -> None:
    eager, ours = World(STEPS["attribute"], "SGD"), World(STEPS["attribute"], "SGD")
    captured = fz.capture(ours.step)
    for i in range(12):
        if i % 3 == 0:
            eager.n = ours.n = 100 * i
        eager.step(batch(i)), captured(batch(i))
        assert type(ours.n) is int and ours.n == eager.n
    assert captured.stats.replays == 8, captured.explain()


VARYING: dict[str, Callable[[Any, Tensor], Any]] = {
    "a factor": lambda c, x: x * c.weight,
    "an expression": lambda c, x: x * max(0.0, 1 - c.weight / 40) + math.exp(-c.weight),
    "an argument of an op": lambda c, x: x.clamp(max=c.weight),
    "an integer": lambda c, x: x / (1 + c.count),
    "both": lambda c, x: x * c.weight + c.count,
}


@pytest.mark.parametrize("name", VARYING)
def test_a_number_that_code_outside_has_changed_is_live(name: str) -> None:
    config = types.SimpleNamespace(weight=0.5, count=3)
    captured = fz.capture(body := lambda x: VARYING[name](config, x))
    for i in range(12):
        config.weight, config.count = 0.5 + 0.25 * i, 3 + i
        assert torch.equal(captured(batch(i)), body(batch(i)))
    assert captured.stats.captures == 2 and captured.stats.replays == 9, captured.explain()


@pytest.mark.parametrize("name", ["negative_slope", "eps", "own"])
def test_a_number_of_a_module_that_code_outside_has_changed(name: str) -> None:
    """`eps` is a number of C++, which is guarded by its value wherever it comes from."""

    def made() -> Any:
        torch.manual_seed(0)
        found = nn.Sequential(nn.Linear(3, 3), nn.LeakyReLU(), nn.LayerNorm(3))
        found[0].own = 1.0
        return found

    eager, ours = made(), made()
    captured = fz.capture(lambda x: ours(x) * ours[0].own, audit=False)
    for i in range(12):
        for model in (eager, ours):
            holder = next(each for each in model if hasattr(each, name))
            setattr(holder, name, 0.01 * (i + 1))
        assert torch.equal(captured(batch(i)), eager(batch(i)) * eager[0].own)
    assert name == "eps" or captured.stats.replays >= 9, captured.explain()


def test_a_number_that_changes_once_stays_guarded() -> None:
    config = types.SimpleNamespace(weight=0.5)
    captured = fz.capture(body := lambda x: x * config.weight)
    for i in range(12):
        config.weight = 0.5 if i < 6 else 2.0
        assert torch.equal(captured(batch(i)), body(batch(i)))
    assert captured.stats.captures == 2


def test_the_shape_of_what_an_earlier_call_has_left_is_guarded() -> None:
    """No op reads the tensor, and the step replaces it."""

    def made(held: Any) -> Callable[[Tensor], Tensor]:
        held.last = torch.ones(3)

        def step(x: Tensor) -> Tensor:
            out = x * held.last.shape[0]
            held.last = x.clone()
            return out

        return step

    eager = made(torch.nn.Identity())
    captured = fz.capture(made(torch.nn.Identity()), allowance=None, audit=False)
    for rows in (3, 3, 3, 3, 5, 5, 3, 5, 5, 5, 3):
        assert torch.equal(captured(torch.ones(rows)), eager(torch.ones(rows)))
    assert captured.stats.replays >= 4


def test_a_branch_on_a_varying_number_has_a_program_for_each_side() -> None:
    config = types.SimpleNamespace(epoch=0)
    captured = fz.capture(body := lambda x: x * 2 if config.epoch < 7 else x + 1)
    for i in range(14):
        config.epoch = i
        assert torch.equal(captured(batch(i)), body(batch(i)))
    assert captured.stats.replays >= 9, captured.explain()


def test_a_varying_number_that_goes_to_exact_code_stays_guarded() -> None:
    class Temperature:
        value = 1.0

        def __float__(self) -> float:
            return self.value

    config = Temperature()
    captured = fz.capture(body := lambda x: x * float(config))
    for i in range(6):
        config.value = 1.0 + i
        assert torch.equal(captured(batch(i)), body(batch(i)))
    assert captured.stats.replays == 0


def test_a_captured_forward_refuses_to_move_state_with_the_line() -> None:
    w = World(STEPS["attribute"], "SGD")

    def forward(x: Tensor) -> Tensor:
        w.n += 1
        loss: Tensor = w.model(x).square().mean()
        return loss

    captured = fz.capture(forward, backward=True, on_uncapturable="raise")
    with pytest.raises(
        UncapturableError,
        match=r"`w.n` is 2, was 1: do so outside.*\n  `n` of a World\n  changed at .*w.n \+= 1",
    ):
        for i in range(3):
            captured(batch(i)).backward()
