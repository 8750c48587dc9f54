"""The points of a grid, and who takes what of a point."""

from __future__ import annotations

import pytest

from functionalize.errors import PlanError
from functionalize.planner.sweep.points import StepFunctions, points


def test_points_are_the_product_of_the_axes():
    found = list(points({"world": [8, 64], "batch": (1, 2)}))
    assert found == [{"world": w, "batch": b} for w in (8, 64) for b in (1, 2)]
    assert list(points(None)) == [{}] and list(points({"world": 8})) == [{"world": 8}]


def test_an_axis_may_be_one_value():
    assert list(points({"target": "cuda", "mesh": (2, 4)})) == [{"target": "cuda", "mesh": (2, 4)}]
    assert [p["mesh"] for p in points({"mesh": [(8,), {"dp": 4, "tp": 2}]})] == [
        (8,),
        {"dp": 4, "tp": 2},
    ]


def build(layers=2): ...
def inputs(batch, length=8): ...
def step(model, *, batch): ...


def test_functions_take_what_they_name():
    wants = StepFunctions.of(["world", "layers", "batch", "length", "reshard"], build, inputs, step)
    assert wants.keys["build"] == {"layers"}
    assert wants.keys["inputs"] == {"batch", "length"} and wants.keys["step"] == {"batch"}
    point = {"world": 8, "layers": 2, "batch": 4, "length": 16, "reshard": True}
    assert wants.of_model(point) == {"layers": 2, "reshard": True}


def test_what_takes_everything():
    wants = StepFunctions.of(["layers"], lambda **given: None, None, lambda *args: None)
    assert wants.keys["build"] == {"layers"} and not wants.keys["step"]


def test_what_a_grid_refuses():
    with pytest.raises(
        PlanError, match="no function accepts `widht`: give `build`, `inputs` or `step`"
    ):
        StepFunctions.of(["widht"], build, inputs, step)
    with pytest.raises(PlanError, match="the axis `batch` of the grid has no values"):
        list(points({"batch": []}))
