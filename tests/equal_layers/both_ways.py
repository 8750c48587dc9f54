"""A plan with short runs, and the same recorded whole: they must be equal, event for event."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import functionalize as fz
from functionalize.equal_layers.planned_step import PlannedStep
from functionalize.sweep import plan
from functionalize.sweep.summary import Plan
from tests.sweep.comparing import assert_equal, everything

BATCHES = (1, 2, 4)


def train(model: Any, optimizer: Any, x: Any) -> None:
    """One step of a model that returns its loss."""
    model(x).backward()
    optimizer.step()
    optimizer.zero_grad()


def why_whole(
    build: Callable[..., Any], step: Any, inputs: Any, batches: Any = BATCHES, **fixed: Any
) -> list[str | None]:
    """Plan both ways, and compare; for each batch, why its step was recorded whole, None if it was not."""
    reasons: dict[bool, list[str | None]] = {True: [], False: []}
    short, whole = (  # from one line, as stacks are compared
        _planned(is_short, reasons[is_short], build, step, inputs, batches, fixed)
        for is_short in (True, False)
    )
    for one, other in zip(short, whole, strict=True):
        assert one.figures is not None, one.error
        assert other.figures is not None, other.error
        assert_equal(_all_of(one), _all_of(other))
    return reasons[True]


def _planned(
    short: bool,
    reasons: list[str | None],
    build: Any,
    step: Any,
    inputs: Any,
    batches: Any,
    fixed: Any,
) -> list[Plan]:
    class Noting(PlannedStep):
        def __init__(self, fn: Any, is_short: bool = True) -> None:
            super().__init__(fn, is_short and short)

        def _finish(self, *given: Any, **more: Any) -> None:
            super()._finish(*given, **more)
            if self.program is not None:
                reasons.append(self.whole_because)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "PlannedStep", Noting)
        grid = {"batch": list(batches)}
        return list(fz.plan(build, step, inputs=inputs, grid=grid, **{"world": 8, **fixed}).plans)


def _all_of(one: Plan) -> dict[str, Any]:
    """All that a plan knows, but for the values that numbers had when it was recorded: those move from step to step."""
    assert one.figures is not None
    found = everything(one.figures)
    found["nodes"] = [
        (
            name,
            {k: v for k, v in meta.items() if k != "hint" and not (k == "val" and _is_number(v))},
        )
        for name, meta in found["nodes"]
    ]
    return found


def _is_number(text: str) -> bool:
    return text.replace(".", "").replace("-", "").replace("e", "").isdigit()
