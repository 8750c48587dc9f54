"""Calls whose lengths change: which are recorded, when the passes run, how much memory programs take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functionalize as fz
from functionalize.errors import PassError
from functionalize.passes import Pass
from functionalize.program.program import Program
from functionalize.step.policy import Kinds
from functionalize.step.vote import RankVote
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
    assert stats.eager == stats.rare == 39


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
    stats = trained_on([2, 2, 2, *range(3, 10)], record_after=1).stats
    assert stats.captures == 8
    assert stats.rare == 0


def test_a_replay_lets_other_kinds_be_recorded() -> None:
    kinds = Kinds(2)
    assert not kinds.is_rare("a")
    kinds.recorded("a")
    assert kinds.is_rare("b")
    kinds.replayed("a")
    assert not kinds.is_rare("c")


def test_a_kind_must_come_twice_as_often_for_each_kind_that_waits_beyond_two() -> None:
    kinds = Kinds(2)
    needed = []
    for kind in range(5):
        calls = 1
        while kinds.is_rare(kind):
            calls += 1
        kinds.recorded(kind)
        needed.append(calls)
    assert needed == [1, 2, 2, 4, 8]


def test_more_kinds_than_places_are_not_recorded_in_turn() -> None:
    generator = torch.Generator().manual_seed(0)
    step = fz.capture(lambda x: x.sin(), max_programs=4, audit=False)
    for rows in (torch.randint(6, (400,), generator=generator) + 2).tolist():
        assert torch.equal(step(torch.ones(rows)), torch.ones(rows).sin())
    assert step.stats.captures <= 40
    assert step.stats.replays >= 200


def test_a_kind_whose_program_was_evicted_must_come_twice_as_often() -> None:
    kinds, needed = Kinds(2), []
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
    kinds = Kinds(2)
    kinds.recorded("a")
    kinds.recorded("b")
    rare = [kinds.is_rare(i) for i in range(5000)]
    assert all(rare[:4000])
    assert not any(rare[4096:])  # "a" and "b" are forgotten


# -- passes ----------------------------------------------------------------------------------------


def test_passes_wait_until_a_kind_has_returned_except_for_the_first_program() -> None:
    (model, optimizer), (twin, twin_optimizer) = twins()
    options = {"passes": "default", "audit": False, "dynamic": False}
    captured = fz.capture(make_step(model, optimizer), **options)
    eager = make_step(twin, twin_optimizer)

    def call(rows: int) -> Program:
        torch.manual_seed(0)
        found = captured(batch(0, rows))
        torch.manual_seed(0)
        assert torch.equal(found, eager(batch(0, rows)))
        assert same_state(model, twin)
        return captured.program

    while not captured.stats.captures:
        first = call(3)
    assert first.stage == "INPLACE" and first.history
    call(3)
    assert call(4).history == ()
    assert "its passes have not run: 8 more calls of its kind" in captured.explain()
    nodes = captured.stats.nodes
    for _ in range(7):
        assert call(4).history == ()
    assert "its passes have not run: 1 more call of its kind" in captured.explain()
    assert call(4).stage == "INPLACE"
    assert captured.stats.nodes == captured.program.nodes() != nodes
    assert "its passes" not in captured.explain().replace("waited for its passes", "")
    assert captured.stats.replays == 1
    assert captured.stats.waiting == captured.stats.eager == 8
    for i in range(4):
        assert call(3 + i % 2).history
    assert captured.stats.replays == 5


def test_a_program_that_was_found_while_it_waited_was_of_use() -> None:
    options = {"max_programs": 2, "audit": False, "dynamic": False}
    step = fz.capture(lambda x: x.sin(), passes="elide_copies", **options)
    for rows in range(3, 12):
        for _ in range(4):
            assert torch.equal(step(torch.ones(rows)), torch.ones(rows).sin())
    stats = step.stats
    assert (stats.captures, stats.waiting, stats.replays) == (9, 8 * 3, 3)


def many_ops(x: torch.Tensor) -> torch.Tensor:
    """More ops than a program may have whose passes run at once."""
    for _ in range(1000):
        x = x + 1
    return x


def test_the_passes_of_a_large_first_program_wait_until_they_pay() -> None:
    step, x = fz.capture(many_ops, passes="elide_copies", audit=False), torch.zeros(3)
    while not step.stats.captures:
        step(x)
    recorded = step.stats.eager
    for left in range(48, 0, -1):
        assert f"{left} more call" in step.explain()
        assert torch.equal(step(x), many_ops(x))
    stats = step.stats
    assert (stats.waiting, stats.eager - recorded, stats.replays) == (48, 48, 0)
    assert torch.equal(step(x), many_ops(x))
    assert step.stats.replays == 1 and step.program is not None and step.program.history


def test_the_passes_of_a_large_program_run_at_once_if_every_kind_is_recorded_at_once() -> None:
    step = fz.capture(many_ops, passes="elide_copies", audit=False, record_after=1)
    for _ in range(4):
        step(torch.zeros(3))
    assert step.stats.waiting == 0 and step.stats.replays > 0


def deep_twins() -> list[tuple[nn.Module, torch.optim.Optimizer]]:
    """A model twice whose step has so many ops that its second recording may wait."""
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(50)))
        found.append((model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)))
    return found


def test_the_second_recording_of_a_large_step_waits_until_it_pays() -> None:
    (model, optimizer), (twin, other) = deep_twins()
    eager = make_step(twin, other)
    step = fz.capture(make_step(model, optimizer), passes="default", audit=False)

    def call(i: int) -> None:
        assert torch.equal(step(batch(i)), eager(batch(i)))
        assert same_state(model, twin)

    call(0)
    assert step.stats.warmups == 1
    for left in range(60, 0, -1):
        assert f"the next recording, and its passes, wait: {left} more call" in step.explain()
        call(left)
    assert (step.stats.waiting, step.stats.eager, step.program) == (60, 60, None)
    call(61)
    assert step.stats.captures == 1 and step.program is not None and step.program.history
    assert "wait:" not in step.explain()
    call(62)
    assert step.stats.replays == 1


@pytest.mark.parametrize("options", [{}, {"passes": "default", "record_after": 1}])
def test_the_second_recording_of_a_large_step_does_not_wait_otherwise(options: Any) -> None:
    model, optimizer = deep_twins()[0]
    step = fz.capture(make_step(model, optimizer), audit=False, **options)
    for i in range(3):
        step(batch(i))
    assert (step.stats.waiting, step.stats.replays) == (0, 1)


class Fails(Pass):
    """A pass that fails for one size."""

    name = "fails"

    def apply(self, program: Program) -> int:
        if any(spec.geometry.size == (4,) for spec in program.inputs):
            raise self.error("not for four")
        return 0

    def __init__(self, error: type[Exception] = PassError) -> None:
        self.error = error


def test_a_pass_that_fails_later_refuses_the_kind_alone() -> None:
    step = fz.capture(lambda x: x.sin(), passes=[Fails()], audit=False, on_uncapturable="raise")
    for rows in (3, 3, *[4] * 9):  # when the pass fails the call runs eagerly
        assert torch.equal(step(torch.ones(rows)), torch.ones(rows).sin())
    with pytest.raises(PassError, match="not for four"):
        step(torch.ones(4))
    assert torch.equal(step(torch.ones(3)), torch.ones(3).sin())


def test_a_bug_in_a_pass_does_not_end_a_loop_that_replays(caplog: Any) -> None:
    step = fz.capture(lambda x: x.sin(), passes=[Fails(RuntimeError)], audit=False)
    for rows in (3, 3, *[4] * 12):
        assert torch.equal(step(torch.ones(rows)), torch.ones(rows).sin())
    assert "replays a program without its passes: not for four" in caplog.text
    assert step.stats.replays == 12


def test_a_pass_that_fails_later_on_one_of_several_ranks_is_left_out(caplog: Any) -> None:
    """A rank that refused alone would leave the others waiting for its vote."""
    step = fz.capture(lambda x: x.sin(), passes=[Fails()], audit=False, dynamic=False)
    for rows in (3, 3, *[4] * 12):
        assert torch.equal(step(torch.ones(rows)), torch.ones(rows).sin())
        step.core.vote = RankVote((), torch.device("cpu"))
    assert "replays a program without its passes: not for four" in caplog.text
    assert step.stats.replays == 1 + 3
    assert step.stats.eager == step.stats.rare == 8


def test_a_saved_program_has_its_passes(tmp_path: Any) -> None:
    model, optimizer = twins()[0]
    step = fz.capture(make_step(model, optimizer), passes="default", audit=False)
    for rows in (3, 3, 3, 3, 4):
        step(batch(0, rows))
    assert not step.programs[-1].history
    step.save(tmp_path / "step.fzp")
    assert all(program.history for program in step.programs)


# -- memory ----------------------------------------------------------------------------------------


def test_programs_are_dropped_when_they_take_too_much_memory() -> None:
    def step(x: Tensor) -> Tensor:
        return x.sin().cos().tan()

    captured = fz.capture(step, max_program_bytes=50_000)  # two of three nodes fit
    for rows in (1, 1, 2, 2, 3, 3):
        assert torch.equal(captured(torch.ones(rows)), step(torch.ones(rows)))
    assert [p.inputs[0].geometry.size for p in captured.programs] == [(2,), (3,)]
    alone = fz.capture(step, max_program_bytes=1)  # the only program is kept
    for _ in range(3):
        alone(torch.ones(1))
    assert alone.stats.replays == 2


def test_programs_for_the_same_numbers_and_other_state_stand_side_by_side() -> None:
    model, kinds = torch.nn.Linear(3, 3), ["sin"]

    def step(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = getattr(model(x), kinds[0])()
        return y + 1 if y.square().sum().item() < 1e9 else y

    captured = fz.capture(step, record_after=1, audit=False)
    for i in range(12):
        kinds[0] = ("sin", "exp")[i % 2]
        assert torch.equal(captured(torch.ones(3)), step(torch.ones(3)))
    assert captured.stats.captures <= 3
