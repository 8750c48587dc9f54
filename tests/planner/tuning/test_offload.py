"""Offload as an axis of a search: tried where `build` has the parameter, told in the answer, refused by name."""

from __future__ import annotations

import json

import pytest

import functionalize as fz
from functionalize.cost.machines.presets import MACHINES
from functionalize.errors import TuneError
from functionalize.planner.timeline.timeline import EAGER
from functionalize.planner.tuning.space import Space
from functionalize.planner.tuning.tune import Tuned
from tests.planner.tuning.training import build, build_offloaded, inputs, step

pytestmark = pytest.mark.long

CONSTANTS = 852 << 20  # of an H100, with one communicator
SMALL = CONSTANTS + (300 << 20)


def tuned(**given) -> Tuned:
    given = {"world": 2, "limit": SMALL, "width": 1024, "batches": [1], "pipelines": [], **given}
    return fz.tune(build_offloaded, step, inputs=inputs, **given)


@pytest.fixture(scope="module")
def found() -> Tuned:
    return tuned()


def test_only_offloaded_configurations_fit_in_a_small_device(found) -> None:
    assert found.best.setting.offload is True and found.policy.offload is True
    assert {each.setting.offload for each in found.candidates} == {False, True}
    without = [each for each in found.candidates if not each.setting.offload]
    assert without and not any(each.fits for each in without)
    assert all("does not fit" in found.why(each) for each in without)
    with pytest.raises(TuneError, match="nothing fits"):
        tuned(offload=False)


def test_a_device_with_room_is_not_offloaded() -> None:
    roomy = tuned(limit="h100")
    assert roomy.best.setting.offload is False and roomy.best.host == 0
    offloaded = next(each for each in roomy.candidates if each.setting.offload)
    assert offloaded.seconds > roomy.best.seconds
    assert "offloaded" in offloaded.setting.text()


def test_composed_figures_are_those_of_plans() -> None:
    """Where activations have most of the bytes; else two short models overestimate what a layer adds."""
    keys = {"width": 512, "offload": True}
    found = tuned(limit="h100", batches=[64], **keys)
    composed = {
        each.policy.layers["blocks.0"].saved: each.composed
        for each in found.candidates
        if {(p.saved in (None, ()), p.reshard) for p in each.policy.layers.values()}
        == {(True, True)}
        and len({*each.policy.layers.values()}) == 1
    }
    for checkpoint, saved in ((False, None), (True, ())):
        keys |= {"world": 2, "batch": 64, "reshard": True, "checkpoint": checkpoint}
        (plan,) = fz.plan(build_offloaded, step, inputs=inputs, **keys).plans
        nbytes = plan.memory.levels(EAGER).requested
        assert composed[saved].peak == pytest.approx(nbytes, rel=0.005)
        assert composed[saved].seconds == pytest.approx(plan.figures.time.seconds, rel=0.02)
        assert found.best.host == plan.memory.host_peak


def test_the_answer_says_where_what_is_kept(found) -> None:
    assert "host" in found.text().splitlines()[1].split()
    assert "batch 1, offloaded" in found.text()
    row = found.row(found.best)
    assert row["offload"] is True and row["host"] == found.best.plan.memory.host_peak > 0
    assert json.loads(found.to_json())["frontier"][0]["host"] > 0
    line = (
        "OFFLOAD = True  # `build` passes offload_policy=CPUOffloadPolicy() to each `fully_shard`"
    )
    assert line in found.policy.code()
    assert str(found.policy).splitlines()[0].endswith("CPUOffloadPolicy()")
    plain = fz.tune(build, step, inputs=inputs, world=2, limit="h100", batches=[1], pipelines=[])
    assert "OFFLOAD" not in plain.policy.code() and plain.policy.offload is None
    assert "host" not in plain.text().splitlines()[1].split()
    without = tuned(limit="h100", offload=False).policy.code()
    assert "OFFLOAD = False  # `build` passes offload_policy=OffloadPolicy()" in without


def test_the_values_that_are_searched() -> None:
    functions, h100 = (build_offloaded, inputs, step), MACHINES["h100"]
    assert Space.of(functions, 2, h100).offloads == (False, True)
    assert Space.of(functions, 2, h100, offload=True).offloads == (True,)
    assert Space.of(functions, 2, h100, offload=False).offloads == (False,)
    assert Space.of((build, inputs, step), 2, h100).offloads == (None,)
    cpu = Space.of(functions, 2, MACHINES["cpu"], has_host=False)
    assert cpu.offloads == (False,)
    assert "offload: the target has no memory apart from its host's" in cpu.left_out


def test_offload_is_refused_on_a_cpu() -> None:
    with pytest.raises(TuneError, match="`offload` needs a device with memory apart from its host"):
        tuned(limit=1e9, target="cpu", offload=True)
