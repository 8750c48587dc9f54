"""The stages of a recorded call, one by one: what each returns, raises, and leaves as it was."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor

import functionalize as fz
from functionalize._compat.dispatch import current_modes
from functionalize.errors import UncapturableError
from functionalize.recorder.recorder import Recorder
from functionalize.state import arguments
from functionalize.step.cache import CachedProgram, key_of
from functionalize.step.outcome import Built, Outcome, Refused, Steady, WarmUp
from functionalize.step.recording import RecordingSummary, StepRecording
from functionalize.step.stages import Invocation, RecordedRun, agree, build, judge, record
from functionalize.step.stats import ProgramCounts
from functionalize.step.vote import Level, RankVote
from functionalize.util.text import without_numbers

NOTHING = RecordingSummary([], frozenset(), ())
BUILT = Built(cast(CachedProgram, None), NOTHING, cast(ProgramCounts, None))
WARM_UP = WarmUp(NOTHING, "not yet")
REFUSED = Refused(UncapturableError("never"))


def invocation(*args: Any) -> Invocation:
    leaves, spec = arguments.flatten(args, {})
    return Invocation(args, {}, leaves, spec, key_of(leaves, spec), "the first call")


def recorder() -> Recorder:
    return Recorder(ignore_fake=True, live=True, for_real=True)


def recorded(fn: Any, *args: Any) -> RecordedRun:
    run = record(fn, invocation(*args), recorder(), frozenset())
    assert isinstance(run, RecordedRun)
    return run


class Answer(RankVote):
    """A vote whose worst is known."""

    worst_of_all = Level.KEPT

    def worst(self, mine: Level) -> Level:
        return max(mine, self.worst_of_all)


def vote(worst: Level) -> RankVote:
    found = Answer((), torch.device("cpu"))
    object.__setattr__(found, "worst_of_all", worst)
    return found


def test_a_recording_differs_by_the_tensors_that_it_read() -> None:
    one, two, held, other = ("g", b"1"), ("g", b"2"), ("g", "x"), ("g", "y")
    recorded_before = RecordingSummary([held, one, two], frozenset(), ())
    assert not recorded_before.differs([held, one, two])
    assert all(map(recorded_before.differs, ([held, two, one], [one, two], [held, one], [])))
    without_ops = RecordingSummary([held, other, one, two], frozenset(), (), has_ops=False)
    assert not any(map(without_ops.differs, ([held, one, two], [other, one, two], [one, two])))
    assert all(map(without_ops.differs, ([held, two, one], [held, one], [("g", "z"), one, two])))


# -- record ----------------------------------------------------------------------------------------


def test_record_returns_the_result_of_the_step() -> None:
    run = recorded(lambda x: x + 1, torch.ones(2))
    assert torch.equal(run.result, torch.full((2,), 2.0))
    assert [str(r.target) for r in run.recorder.records] == ["aten.add.Tensor"]
    assert run.changed is None


def test_record_names_what_the_step_did_to_its_arguments() -> None:
    run = recorded(lambda batch: batch.pop("x") + 1, {"x": torch.ones(2)})
    assert run.changed is not None
    assert run.changed.startswith("takes `args[0]['x']` away")


def test_record_refuses_before_the_step_runs() -> None:
    calls: list[Tensor] = []
    run = record(calls.append, invocation(torch.eye(2).to_sparse()), recorder(), frozenset())
    assert isinstance(run, Refused)
    assert not run.is_bug
    assert "layout torch.sparse_coo" in str(run.error)
    assert calls == []


def test_record_raises_what_the_step_raises_and_restores_torch() -> None:
    def step(x: Tensor) -> Tensor:
        assert torch.UntypedStorage.resize_ is not resize
        raise ValueError("no")

    resize, modes = torch.UntypedStorage.resize_, current_modes()
    with pytest.raises(ValueError, match="no"):
        record(step, invocation(torch.ones(2)), recorder(), frozenset())
    assert torch.UntypedStorage.resize_ is resize
    assert current_modes() == modes


@pytest.mark.parametrize("live", [False, True])
def test_a_recording_that_will_not_be_kept_has_no_notes_about_autograd(live: bool) -> None:
    """The first one of a step with an optimizer, whose learning rate is live in the next one. It has lines."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    first = Recorder(ignore_fake=True, live=live, for_real=True)
    run = record(step, invocation(torch.ones(1, 2)), first, frozenset())
    assert isinstance(run, RecordedRun)
    notes = first.tape
    assert live is bool(notes.marks) is bool(notes.leaves) is bool(notes.backwards)
    assert live is any(r.makes is not None for r in first.records)
    assert live is any(r.autograd_node is not None for r in first.records)
    assert all(r.traceback is not None for r in first.records)
    assert isinstance(judge(run, None, None), Steady if live else WarmUp)


# -- judge -----------------------------------------------------------------------------------------


def keeper() -> Any:
    """A step that makes a storage in every call and keeps it."""
    made: dict[int, Tensor] = {}

    def step(x: Tensor) -> Tensor:
        made[0] = x + 1
        return made[0] * 2

    return step


def test_judge_a_steady_run() -> None:
    assert isinstance(judge(recorded(lambda x: x + 1, torch.ones(2)), {}, None), Steady)


def test_judge_a_warm_up_until_the_fifth() -> None:
    verdict = judge(recorded(keeper(), torch.ones(2)), {"other reasons": 18}, None)
    assert isinstance(verdict, WarmUp)
    kind = without_numbers(verdict.reason)
    assert isinstance(judge(recorded(keeper(), torch.ones(2)), {kind: 3}, None), WarmUp)
    for unkept, calls in (({kind: 4}, 5), ({"other reasons": 19}, 20)):
        verdict = judge(recorded(keeper(), torch.ones(2)), unkept, None)
        assert isinstance(verdict, Refused)
        assert str(verdict.error).startswith(f"the step did not settle in {calls} calls: ")


def test_judge_a_warm_up_of_a_settled_step() -> None:
    assert isinstance(judge(recorded(keeper(), torch.ones(2)), None, None), WarmUp)


def test_judge_what_a_replay_could_not_repeat() -> None:
    weight = torch.ones(2)  # no argument, and no constant
    verdict = judge(recorded(lambda x: x[x * weight > 0], torch.ones(2)), {}, None)
    assert isinstance(verdict, Refused)
    assert "aten.index.Tensor" in str(verdict.error)


@pytest.mark.parametrize(
    ("error", "is_bug"), [(UncapturableError("no"), False), (KeyError("no"), True)]
)
def test_judge_and_build_raise_nothing(error: Exception, is_bug: bool) -> None:
    class Broken(RecordedRun):
        def recording(self) -> StepRecording:
            raise error

    run = recorded(lambda x: x + 1, torch.ones(2))
    broken = Broken(run.recorder, run.entry, run.result, run.changed, run.moving)

    def make(recording: StepRecording) -> Built:
        raise error

    for found in (judge(broken, {}, None), build(judge(run, {}, None), make)):
        assert isinstance(found, Refused)
        assert found.is_bug is is_bug
        assert (found.error.__cause__ if is_bug else found.error) is error


# -- build -----------------------------------------------------------------------------------------


def test_build_makes_programs_of_steady_recordings_alone() -> None:
    def never(recording: StepRecording) -> Built:
        raise AssertionError(recording)

    assert build(WARM_UP, never) is WARM_UP
    assert build(REFUSED, never) is REFUSED
    steady = judge(recorded(lambda x: x + 1, torch.ones(2)), {}, None)
    with torch.enable_grad():
        assert build(steady, lambda _: BUILT) is BUILT
        assert torch.is_grad_enabled()


# -- agree -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mine", [BUILT, WARM_UP, REFUSED])
def test_agree_alone(mine: Outcome) -> None:
    agreed = agree(mine, recorder(), None)
    assert agreed.outcome is mine
    assert agreed.vote is None


def test_agree_by_the_worst_of_all_ranks() -> None:
    for worst in (Level.KEPT, Level.NOT_YET):
        assert agree(WARM_UP, recorder(), vote(worst)).outcome is WARM_UP
    assert agree(BUILT, recorder(), vote(Level.KEPT)).outcome is BUILT
    outcome = agree(BUILT, recorder(), vote(Level.NOT_YET)).outcome
    assert isinstance(outcome, WarmUp)
    assert outcome.reason == "another rank does not keep its recording"
    outcome = agree(BUILT, recorder(), vote(Level.REFUSED)).outcome
    assert isinstance(outcome, Refused)
    assert outcome.everywhere
    assert str(outcome.error) == "another rank cannot capture this step"
    outcome = agree(REFUSED, recorder(), vote(Level.KEPT)).outcome
    assert isinstance(outcome, Refused)
    assert outcome.everywhere
    assert outcome.error is REFUSED.error


def test_a_rank_that_does_not_answer_leaves_the_step_unchanged() -> None:
    class Silent(RankVote):
        def worst(self, mine: Level) -> Level:
            raise UncapturableError("a rank does not answer")

    step = fz.capture(lambda x: x + 1)
    x = torch.ones(2)
    before = [dict(step.core.unkept), dict(step.core.refused), step._last_summary]
    step.core.vote = Silent((), torch.device("cpu"))
    run = step.record(invocation(x), step.recorder(invocation(x)))
    with pytest.raises(UncapturableError, match="does not answer"):
        step.finish(run, invocation(x))
    assert step.programs == ()
    assert [dict(step.core.unkept), dict(step.core.refused), step._last_summary] == before
    assert step.stats.captures == step.stats.warmups == step.stats.ops == 0
