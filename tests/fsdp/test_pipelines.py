"""Schedules of torch.distributed.pipelining in captured steps, their stages under FSDP2 or not."""

import pytest

from tests.fsdp.pipelines import (
    V_SHAPED,
    Accumulating,
    ByCalls,
    Evaluating,
    EvaluatingByTheSame,
    ForLong,
    KnownShapes,
    KnownShapesAndEvaluation,
    WithShortBatches,
    trained,
)
from tests.ranks import run_on_ranks


def sharded(kind, passes):
    return trained(kind, True, passes=passes)


KINDS = [
    *("ScheduleGPipe", "Schedule1F1B", "ScheduleLoopedBFS", "ScheduleInterleaved1F1B"),
    *("ScheduleInterleavedZeroBubble", *V_SHAPED),
]
LONG = [KINDS[2], KINDS[4], V_SHAPED[1]]
SHARDED = ["Schedule1F1B", "ScheduleInterleaved1F1B", *V_SHAPED]


@pytest.mark.parametrize(
    "kind", [pytest.param(each, marks=[pytest.mark.long] if each in LONG else []) for each in KINDS]
)
def test_a_schedule(kind):
    """The first call exchanges shapes, and is a warm-up."""
    for (share,), text in run_on_ranks(trained, kind, False, world=2):
        assert share >= 0.7, text


@pytest.mark.long
@pytest.mark.parametrize("passes", ["", "default", "fast"])
@pytest.mark.parametrize("kind", SHARDED)
def test_a_schedule_of_sharded_stages(kind, passes):
    for (share,), text in run_on_ranks(sharded, kind, passes, world=4):
        assert share >= 0.7, text


LOOPS = {
    "two runs for a step of the optimizer, in one call": Accumulating,
    "two runs for a step of the optimizer, in two calls": ByCalls,
    "some batches of fewer microbatches, by another schedule": WithShortBatches,
    "evaluation by another schedule, captured, too": Evaluating,
    "stages whose shapes are given": KnownShapes,
}


@pytest.mark.parametrize("made", LOOPS.values(), ids=lambda made: made.__name__)
def test_a_loop(made):
    for shares, text in run_on_ranks(trained, "Schedule1F1B", False, made, 24, world=2):
        assert shares[0] >= 0.6 and shares[-1] >= 0.3, text


@pytest.mark.filterwarnings("ignore::functionalize.errors.UncapturableWarning")
@pytest.mark.parametrize(
    "made, why",
    [(EvaluatingByTheSame, "exchanges Python objects"), (KnownShapesAndEvaluation, "step: ")],
)
def test_an_evaluation_by_the_same_schedule(made, why):
    """After it, torch exchanges shapes anew: these calls run eagerly on all ranks. Or it votes on them anew."""
    for _, text in run_on_ranks(trained, "Schedule1F1B", False, made, 10, world=2):
        assert why in text


@pytest.mark.long
def test_many_steps():
    """What `python -m tests.fsdp.soak` does for longer."""
    for shares, text in run_on_ranks(trained, "Schedule1F1B", True, ForLong, 40, world=4):
        assert shares[0] >= 0.6, text
