"""One program for all sizes that a step computes: replays equal eager, and what does not fit is recorded or refused."""

from __future__ import annotations

import pytest

from tests.late_sizes.computed import BODIES, Body, trained


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_replays_equal_eager_whatever_the_step_selects(body: Body) -> None:
    captured = trained(body, [40] * 60)
    print(captured.explain())
    assert captured.stats.replays > 20, captured.explain()
