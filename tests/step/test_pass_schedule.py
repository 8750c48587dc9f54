"""When the passes of a program run: when the ledger pays for them, with `allowance=None` at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import functionalize as fz
from functionalize.errors import PassError
from functionalize.passes import Pass
from functionalize.passes.reinplace import Reinplace
from functionalize.program.program import Program
from functionalize.step import cache
from functionalize.step.vote import RankVote
from tests.step.twins import batch, same_state, twins
from tests.steps import make_step


@pytest.mark.parametrize("fused", [True, False])
def test_passes_run_when_the_ledger_pays_for_them(fused: bool) -> None:
    """A program that needs a second copy of the optimizer's states without them is not replayed before."""
    (model, optimizer), (twin, twin_optimizer) = twins(fused=fused)
    options = {"passes": "default", "audit": False, "dynamic": False}
    captured = fz.capture(make_step(model, optimizer), **options)
    eager, stats = make_step(twin, twin_optimizer), captured.stats

    def call(rows: int) -> Program:
        torch.manual_seed(0)
        found = captured(batch(0, rows))
        torch.manual_seed(0)
        assert torch.equal(found, eager(batch(0, rows)))
        assert same_state(model, twin)
        return captured.program

    while not stats.replays:
        first = call(3)
    assert first.stage == "INPLACE" and first.history
    assert (stats.warmups, stats.captures, stats.waiting) == (1, 1, 0)
    while captured.core.policy.ledger.balance < 17.1:  # a recording, a program and its passes
        call(3)
    assert call(4).history == ()
    captured.core.policy.ledger.balance = 1.0
    waits = "runs eagerly: program 2 waits for its passes, which cost 9.6 eager steps, and 1.0 are"
    assert (waits in captured.explain()) is not fused
    nodes, replays = stats.nodes, stats.replays
    assert call(4).history == ()
    assert stats.replays - replays == fused
    why = "replays must return first" if fused else "and its calls run eagerly"
    assert f"its passes have not run{': ' if fused else ', '}{why}" in captured.explain()
    while captured.core.policy.ledger.balance < 9.6:
        assert call(3).history
    assert stats.replays - replays > 8 and stats.waiting == 1 - fused
    assert call(4).stage == "INPLACE"
    assert stats.nodes == captured.program.nodes() != nodes
    assert "its passes" not in captured.explain().replace("waited for its passes", "")
    for i in range(4):
        assert call(3 + i % 2).history
    assert stats.waiting == stats.eager == 1 - fused


def test_a_program_that_was_found_while_it_waited_was_of_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cache, "MOST_PROGRAMS", 2)
    options = {"audit": False, "dynamic": False}
    step = fz.capture(make_step(*twins(fused=False)[0]), passes="elide_copies", **options)
    for captures, rows in enumerate(range(3, 12)):
        while step.stats.captures == captures:
            step.core.policy.ledger.balance = (
                30.0  # for a recording and a program, and what others wait for
            )
            step(batch(0, rows))
        step.core.policy.ledger.balance = 1.0  # not for passes
        for _ in range(3):
            step(batch(0, rows))
    assert (step.stats.waiting, step.stats.replays) == (3 * 9, 0)
    assert not step.core.cache.thrashing


def many_ops(x: torch.Tensor) -> torch.Tensor:
    for _ in range(1000):
        x = x + 1
    return x


def deep_step() -> Any:
    """A step with many ops."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(50)))
    return make_step(model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True))


@pytest.mark.parametrize("options", [{}, {"allowance": None}])
@pytest.mark.parametrize("pipeline", ["default", "fast", "cleanup"])
def test_a_large_step_is_replayed_after_its_passes_from_the_third_call_on(
    pipeline: str, options: Any
) -> None:
    step = fz.capture(deep_step(), passes=pipeline, audit=False, **options)
    for i in range(5):
        step(batch(i))
    assert (step.stats.waiting, step.stats.replays, step.stats.eager) == (0, 3, 0)
    assert step.program.history


def test_passes_that_cost_more_than_is_saved_at_most_run_when_all_is_saved() -> None:
    step = fz.capture(many_ops, passes=",".join(["drop_dead_code"] * 50), audit=False)
    for _ in range(4):
        step(torch.zeros(3))
    assert step.stats.replays == 3 and not step.program.history
    step.core.policy.ledger.balance = 60.0
    step(torch.zeros(3))
    assert step.stats.replays == 4 and step.program.history


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
    options = {"audit": False, "dynamic": False, "on_uncapturable": "raise"}
    step = fz.capture(lambda x: x.sin(), passes=[Fails()], **options)
    for rows in (3, 3, 4, 4):  # when the pass fails the call runs eagerly
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
    assert (step.stats.replays, step.stats.eager) == (1 + 11, 0)


def test_a_saved_program_has_its_passes(tmp_path: Any) -> None:
    model, optimizer = twins()[0]
    step = fz.capture(make_step(model, optimizer), passes="default", audit=False)
    for rows in (3, 3, 3, 3, 4):
        step.core.policy.ledger.balance = 25.0
        step(batch(0, rows))
    assert len(step.programs) == 2 and not step.programs[-1].history
    step.save(tmp_path / "step.fzp")
    assert all(program.history for program in step.programs)


# -- if no passes are asked for ----------------------------------------------------------------------


def replayed(step: Any) -> Program:
    """The program that replays run."""
    found: Program = step.core.cache.latest.program
    return found


@pytest.mark.parametrize("fused", [True, False])
def test_a_whole_step_writes_in_place_and_shows_the_functional_program(fused: bool) -> None:
    (model, optimizer), (twin, twin_optimizer) = twins(fused=fused)
    step, eager = fz.capture(make_step(model, optimizer)), make_step(twin, twin_optimizer)
    for i in range(6):
        torch.manual_seed(i)
        found = step(batch(i))
        torch.manual_seed(i)
        assert torch.equal(found, eager(batch(i)))
        assert same_state(model, twin)
    assert step.stats.replays >= 3
    assert (step.program.stage, step.program.history) == ("FUNCTIONAL", ())
    assert [each.stage for each in step.programs] == ["FUNCTIONAL"]
    assert replayed(step).stage == "INPLACE"
    written = {replayed(step).inputs[i].name for i in replayed(step).writes}
    assert {f"model_{name.replace('.', '_')}" for name, _ in model.named_parameters()} <= written


@pytest.mark.parametrize("options", [{"passes": ""}, {"memory": True}, {"passes": (), "audit": 1}])
def test_where_nothing_is_written_in_place(options: Any) -> None:
    step = fz.capture(make_step(*twins(fused=False)[0]), **options)
    for i in range(4):
        step(batch(i))
    assert replayed(step) is step.program
    assert step.program.stage == "FUNCTIONAL"


def test_a_step_that_writes_nothing_pays_for_no_pass() -> None:
    step = fz.capture(lambda x: x.sin().cos(), audit=False)
    for _ in range(4):
        step(torch.ones(3))
    assert replayed(step) is step.program
    stats, balance = step.stats, step.core.policy.ledger.balance
    spent = 4.5 * (stats.warmups + stats.captures) + 2.5 * stats.captures
    assert balance == pytest.approx(30 - spent + 0.65 * stats.replays + 0.05 * 4)


@pytest.mark.parametrize("error", [PassError("not this graph"), KeyError("a bug")])
@pytest.mark.parametrize("allowance", [30, None])
def test_a_program_that_cannot_be_rewritten_is_replayed_as_it_was_recorded(
    error: Exception, allowance: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No passes were asked for, so that none may refuse the step."""

    def refuse(self: Any, program: Program) -> int:
        raise error

    monkeypatch.setattr(Reinplace, "apply", refuse)
    step = fz.capture(
        make_step(*twins(fused=False)[0]), on_uncapturable="raise", allowance=allowance
    )
    for i in range(5):
        step(batch(i))
    assert step.stats.replays >= 2
    assert replayed(step) is step.program


def test_a_file_holds_the_functional_program_and_is_replayed_in_place(tmp_path: Any) -> None:
    (model, optimizer), (twin, twin_optimizer) = twins(fused=False)
    step = fz.capture(make_step(model, optimizer))
    for i in range(4):
        step(batch(i))
    step.save(tmp_path / "step.fzp")
    loaded = fz.capture(make_step(twin, twin_optimizer))
    twin.load_state_dict(model.state_dict())
    make_step(twin, twin_optimizer)(batch(0))  # makes the optimizer's state
    loaded.load(tmp_path / "step.fzp")
    assert loaded.program.stage == "FUNCTIONAL"
    loaded(batch(4))
    assert (loaded.stats.captures, loaded.stats.replays) == (0, 1)
    assert (loaded.program.stage, replayed(loaded).stage) == ("FUNCTIONAL", "INPLACE")
