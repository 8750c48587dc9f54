"""One program for all sizes that a step computes: replays equal eager, and what does not fit is recorded or refused."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import profile

import functionalize as fz
from functionalize.errors import SaveError, UncapturableError
from functionalize.late_sizes import late_sizes
from tests.late_sizes.computed import (
    BODIES,
    DECIDING,
    Body,
    above,
    branches,
    by_length,
    by_root,
    kept_of,
    routed,
    seldom,
    selected,
    sometimes,
    trained,
)

pytestmark = pytest.mark.usefixtures("ample_allowance")


def named(body: Body) -> str:
    return body.__name__


MIXED = random.Random(0).choices((32, 38, 41, 44), k=50)


@pytest.mark.parametrize("body", BODIES, ids=named)
@pytest.mark.parametrize("lengths", [[40] * 32, MIXED], ids=["one length", "lengths"])
def test_replays_equal_eager_whatever_the_step_selects(body: Body, lengths: list[int]) -> None:
    captured = trained(body, lengths)
    assert captured.stats.replays >= len(lengths) // 3, captured.explain()
    assert captured.stats.captures <= 20


@pytest.mark.parametrize("body", DECIDING, ids=named)
def test_a_size_by_which_something_is_decided_is_never_replayed_wrongly(body: Body) -> None:
    captured = trained(body, [40] * 50)
    assert captured.stats.captures <= 20, captured.explain()


@pytest.mark.parametrize("body", [selected, routed], ids=named)
def test_sizes_of_none_and_of_one(body: Body) -> None:
    captured = trained(body, [4, 6, 5] * 12)
    assert captured.stats.captures <= 20


def test_a_size_that_is_always_the_same() -> None:
    def highest(model: Any, x: Tensor) -> Tensor:
        hidden = model.experts[0](x)
        scores = hidden.sum(-1)
        return hidden[scores >= scores.sort().values[-5]].square().mean()  # type: ignore[no-any-return]

    captured = trained(highest, [40] * 20)
    assert captured.stats.replays >= 12, captured.explain()
    assert "in which 0 sizes may vary" in captured.explain()


@pytest.mark.parametrize("body", [sometimes, seldom], ids=named)
def test_calls_that_compute_no_size_are_replayed_beside_those_that_do(body: Body) -> None:
    captured = trained(body, [40] * 60)
    assert captured.stats.replays >= 20, captured.explain()


def test_calls_are_compared_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_sizes, "_EVERY", 4)
    captured = trained(selected, [40] * 60, dynamic=True)
    first = captured.stats.captures
    assert "one in so many later" in "".join(captured.stats.guard_failures)
    assert 8 <= first <= 20


def test_without_dynamic_such_a_size_is_refused() -> None:
    with pytest.raises(
        UncapturableError, match=r"gives a result whose size depends on data at .*computed"
    ):
        trained(selected, [40] * 3, dynamic=False, on_uncapturable="raise")


def test_with_passes_that_change_collectives_such_a_size_is_refused() -> None:
    with pytest.raises(
        UncapturableError, match=r"gives a result whose size depends on data at .*computed"
    ):
        trained(selected, [40] * 3, passes="fast", on_uncapturable="raise")


def test_other_ops_in_each_call_are_refused_where_they_part() -> None:
    with pytest.raises(
        UncapturableError, match=r"4 recorded calls are no one program, at `div = aten.div"
    ):
        trained(by_root, [40] * 9, on_uncapturable="raise")


def test_what_explain_says() -> None:
    text = trained(selected, [40] * 30).explain()
    assert "recorded calls are one program, in which 1 size may vary; " in text
    text = trained(by_length, [40] * 30).explain()
    assert "none is replayed: it is not known what Python learns of sizes" in text


def test_results_of_computed_sizes_are_returned() -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(8))
    step = fz.capture(
        lambda x: (x * weight.detach())[above((x * weight.detach()).sum(-1))], audit=False
    )
    for i in range(20):
        x = torch.randn(40, 8, generator=torch.Generator().manual_seed(i))
        expected = (x * weight.detach())[above((x * weight.detach()).sum(-1))]
        assert torch.equal(step(x), expected)
    assert step.stats.replays >= 8, step.explain()


def test_a_replay_that_misses_changes_nothing_and_other_kinds_replay() -> None:
    """Half of the calls take another branch: the kind rests."""
    captured = trained(branches, [40] * 60)
    (kind,) = captured.part.classes._kinds.values()
    assert kind.rest > 0 or captured.stats.replays > 40
    assert captured.stats.captures <= 20


def test_under_a_profiler() -> None:
    with profile():
        captured = trained(selected, [40] * 20)
    assert captured.stats.replays >= 8


def test_such_programs_are_not_saved(tmp_path: Path) -> None:
    captured = trained(selected, [40] * 12)
    with pytest.raises(SaveError, match="no program but those whose sizes it computes"):
        captured.save(tmp_path / "step.fzp")
    assert not list(tmp_path.iterdir())


def test_a_step_that_forgets() -> None:
    captured = trained(selected, [40] * 12)
    captured.forget()
    assert len(captured.programs) == 0


def test_the_program_can_be_printed() -> None:
    text = trained(selected, [40] * 14).program.print_readable(print_output=False)
    assert "size 0 of `computed results`" in text and "aten.index.Tensor" in text


def test_the_loss_of_a_step_that_raises_is_the_error_of_eager() -> None:
    model = nn.Linear(8, 8)

    def step(x: Tensor, bad: bool) -> Tensor:
        hidden = model(x)
        kept = hidden[above(hidden.sum(-1))]
        return (kept @ torch.ones(7 if bad else 8, 1)).sum()

    captured = fz.capture(step, audit=False)
    for i in range(14):
        x = torch.randn(40, 8, generator=torch.Generator().manual_seed(i))
        assert torch.equal(captured(x, False), step(x, False))
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        captured(torch.randn(40, 8), True)
    assert torch.equal(captured(x, False), step(x, False))


def test_the_same_rows_by_another_way_are_the_same() -> None:
    captured = trained(lambda model, x: kept_of(model, x).flip(0).square().mean(), [40] * 20)
    assert captured.stats.replays >= 8


def test_of_many_kinds_of_calls_the_oldest_are_forgotten() -> None:
    weight = nn.Parameter(torch.randn(8))

    def step(x: Tensor, number: int) -> Tensor:
        scaled = x * weight.detach()
        return scaled[above(scaled.sum(-1))] + number

    captured = fz.capture(step, audit=False, allowance=None)
    with mock.patch.object(late_sizes, "_MOST_KINDS", 2):
        for i in range(48):
            x = torch.randn(40, 8, generator=torch.Generator().manual_seed(i))
            assert torch.equal(captured(x, i // 12), step(x, i // 12))
    assert captured.stats.replays >= 12, captured.explain()
    assert len(captured.programs) <= 2
