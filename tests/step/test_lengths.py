"""Calls whose lengths change: which are recorded, when the passes run, how much memory programs take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import functionalize as fz
from functionalize.step import cache
from functionalize.step.policy import Kinds
from tests.step.twins import batch, same_state, twins
from tests.steps import make_step

pytestmark = pytest.mark.usefixtures("ample_allowance")


def trained_on(lengths: list[int], **options: Any) -> Any:
    """A captured step after these lengths, with programs side by side; it equals its eager twin after every call."""
    options = {"dynamic": False} | options
    (model, optimizer), (twin, twin_optimizer) = twins()
    captured = fz.capture(make_step(model, optimizer), audit=False, **options)
    eager = make_step(twin, twin_optimizer)
    for i, rows in enumerate(lengths):
        torch.manual_seed(i)
        found = captured(batch(i, rows))
        torch.manual_seed(i)
        assert torch.equal(found, eager(batch(i, rows))), (i, rows)
        assert same_state(model, twin)
    return captured


def test_lengths_that_never_return_record_one_of_them() -> None:
    stats = trained_on(list(range(2, 42)), dynamic="auto").stats
    assert (stats.warmups, stats.captures, stats.replays) == (1, 0, 0)
    assert (stats.eager, stats.rare) == (39, 32)  # then it rests


def test_the_same_after_the_step_has_settled() -> None:
    captured = trained_on([2] * 5 + list(range(3, 43)))
    stats = captured.stats
    assert stats.captures == 1 + 1
    assert stats.eager == stats.rare == 39
    assert "39 calls eagerly, 39 of them of kinds that came too seldom" in captured.explain()


def test_a_few_lengths_that_return_are_all_replayed() -> None:
    lengths = [3 + i * i % 7 for i in range(60)]
    stats = trained_on(lengths).stats
    assert stats.captures == len(set(lengths))
    assert stats.replays >= 60 - 5 * len(set(lengths))


def test_lengths_that_return_once_record_few() -> None:
    stats = trained_on([*[2] * 4, *range(3, 33), *range(3, 33)]).stats
    assert stats.warmups + stats.captures <= 8
    assert stats.rare >= 50


def test_every_kind_is_recorded_at_once_if_one_says_so() -> None:
    stats = trained_on([2, 2, 2, *range(3, 10)], allowance=None).stats
    assert stats.captures == 8
    assert stats.rare == 0


def test_a_replay_lets_other_kinds_be_recorded() -> None:
    kinds = Kinds()
    assert not kinds.is_rare("a")
    kinds.recorded("a")
    assert kinds.is_rare("b")
    kinds.replayed("a")
    assert not kinds.is_rare("c")


def test_a_kind_must_come_twice_as_often_for_each_kind_that_waits_beyond_two() -> None:
    kinds = Kinds()
    needed = []
    for kind in range(5):
        calls = 1
        while kinds.is_rare(kind):
            calls += 1
        kinds.recorded(kind)
        needed.append(calls)
    assert needed == [1, 2, 2, 4, 8]


def test_more_kinds_than_places_are_not_recorded_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MOST_PROGRAMS", 4)
    generator = torch.Generator().manual_seed(0)
    step = fz.capture(lambda x: x.sin(), audit=False)
    for rows in (torch.randint(6, (400,), generator=generator) + 2).tolist():
        assert torch.equal(step(torch.ones(rows)), torch.ones(rows).sin())
    assert step.stats.captures <= 40
    assert step.stats.replays >= 200


def test_a_kind_whose_program_was_evicted_must_come_twice_as_often() -> None:
    kinds, needed = Kinds(), []
    for _ in range(3):
        calls = 1
        while kinds.is_rare("a"):
            calls += 1
        needed.append(calls)
        kinds.recorded("a")
        kinds.replayed("a")
        kinds.evicted("a")
    assert needed == [1, 4, 8]


def test_kinds_are_forgotten() -> None:
    kinds = Kinds()
    kinds.recorded("a")
    kinds.recorded("b")
    rare = [kinds.is_rare(i) for i in range(5000)]
    assert all(rare[:4000])
    assert not any(rare[4096:])  # "a" and "b" are forgotten


# -- memory ----------------------------------------------------------------------------------------


def test_programs_are_dropped_when_they_take_too_much_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def step(x: Tensor) -> Tensor:
        return x.sin().cos().tan()

    captured = fz.capture(step)
    monkeypatch.setattr(cache, "MAX_PROGRAM_BYTES", 50_000)  # two of three nodes fit
    for rows in (1, 1, 2, 2, 3, 3):
        assert torch.equal(captured(torch.ones(rows)), step(torch.ones(rows)))
    assert [p.inputs[0].geometry.size for p in captured.programs] == [(2,), (3,)]
    alone = fz.capture(step)
    monkeypatch.setattr(cache, "MAX_PROGRAM_BYTES", 1)  # the only program is kept
    for _ in range(3):
        alone(torch.ones(1))
    assert alone.stats.replays == 2


def test_programs_for_the_same_numbers_and_other_state_stand_side_by_side() -> None:
    model, kinds = torch.nn.Linear(3, 3), ["sin"]

    def step(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = getattr(model(x), kinds[0])()
        return y + 1 if y.square().sum().item() < 1e9 else y

    captured = fz.capture(step, allowance=None, audit=False)
    for i in range(12):
        kinds[0] = ("sin", "exp")[i % 2]
        assert torch.equal(captured(torch.ones(3)), step(torch.ones(3)))
    assert captured.stats.captures <= 3
