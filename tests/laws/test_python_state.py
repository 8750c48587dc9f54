"""No replay differs from eager, whatever Python holds around the step and however it changes between calls."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings

import functionalize as fz
from tests.allowance import ample_allowance
from tests.laws.moving_worlds import MovingExample, MovingWorld, moving_examples
from tests.laws.python_worlds import Example, World, examples
from tests.step.moving_steps import difference

pytestmark = pytest.mark.long

SEEN: Counter[str] = Counter()
X = torch.tensor([[1.0, 2.0]])


@ample_allowance()
def check(example: Example) -> None:
    """Train a copy by eager and one by a captured step."""
    eager, ours = World(example), World(example)
    captured = fz.capture(ours.step, on_uncapturable="eager")
    for change in (None, None, *example.changes, None):
        for world in (eager, ours):
            world.change(change)
        expected, actual = eager.step(X.clone()), captured(X.clone())
        if isinstance(expected, torch.Tensor):
            expected, actual = (expected,), (actual,)
        for a, b in zip(expected, actual, strict=True):
            same = torch.equal(a, b) and torch.equal(torch.signbit(a), torch.signbit(b))
            assert same, f"{actual}, expected {expected} after {change}\n{captured.explain()}"
    SEEN["examples"] += 1
    SEEN["replayed"] += captured.stats.replays > 0
    SEEN["refused"] += bool(captured.stats.eager)


@settings(max_examples=max(1000, settings.default.max_examples))
@given(examples())
def test_no_replay_differs_from_eager(example: Example) -> None:
    check(example)


def test_most_examples_replay() -> None:
    assert SEEN["replayed"] > 0.8 * SEEN["examples"] > 0, SEEN
    assert SEEN["refused"] < 0.05 * SEEN["examples"], SEEN


MOVED: Counter[str] = Counter()


@settings(max_examples=max(100, settings.default.max_examples // 4))
@given(moving_examples())
def test_no_replay_moves_state_otherwise_than_eager(example: MovingExample) -> None:
    eager, ours = MovingWorld(example), MovingWorld(example)
    captured = fz.capture(ours.step, on_uncapturable="eager")
    for call, reset in enumerate(example.resets):
        eager.reset(reset)
        ours.reset(reset)
        x = torch.randn(3, 2, generator=torch.Generator().manual_seed(call))
        expected, actual = [eager.step(x), eager.state], [captured(x), ours.state]
        found = difference(expected, actual)
        assert found is None, f"call {call}: {found}\n{captured.explain()}"
    if not example.is_hard:
        MOVED["examples"] += 1
        MOVED["replayed"] += captured.stats.replays > 0
    else:
        MOVED["hard"] += 1
        assert not captured.stats.replays, captured.explain()


def test_most_moves_are_replayed() -> None:
    assert MOVED["replayed"] > 0.7 * MOVED["examples"] > 0, MOVED
    assert MOVED["hard"] > 0, MOVED
