"""Mixed integer linear programs, by HiGHS as scipy has it.

    solve(costs, [LinearRow((1, 1), 0, 3)], upper=[1, 1])      integers x, least costs @ x, 0 <= x_0 + x_1 <= 3

HiGHS prints what it does about solutions that are off by rounding, whatever its options say: these lines are dropped.
Refuses (`TuneError`): no scipy; a solver that fails. A program without a solution gives None.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from functionalize.errors import TuneError

_SECONDS = 10.0  # for one program; what is found then has a gap
_INFEASIBLE = 2


class LinearRow(NamedTuple):
    """One constraint: low <= weights @ x <= high."""

    weights: Sequence[float]
    low: float
    high: float


class Solved(NamedTuple):
    """Integers, and how far their costs are from the bound at most, as a fraction of the costs."""

    values: list[int]
    gap: float


def check_solver() -> None:
    """Raises `TuneError` if scipy is not installed."""
    try:
        import scipy.optimize  # noqa: F401
    except ImportError:
        raise TuneError(
            "what to save and what to recompute is solved by scipy, which is not installed: "
            'pip install "functionalize[tune]"'
        ) from None


def solve(
    costs: Sequence[float], rows: Sequence[LinearRow], upper: Sequence[float]
) -> Solved | None:
    """Integers from 0 to `upper` with the least costs that satisfy all rows; None if there are none."""
    check_solver()
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp

    # Rows are scaled to weights of about 1: tolerances of the solver are absolute.
    scales = [max(map(abs, row.weights), default=0) or 1.0 for row in rows]
    matrix = np.array(
        [np.asarray(row.weights, float) / s for row, s in zip(rows, scales, strict=True)]
    )
    lows = [row.low / scale for row, scale in zip(rows, scales, strict=True)]
    highs = [row.high / scale for row, scale in zip(rows, scales, strict=True)]
    unit = max(map(abs, costs), default=0) or 1.0
    with _without_its_lines():
        found = milp(
            np.asarray(costs, float) / unit,
            constraints=LinearConstraint(matrix, lows, highs),
            bounds=Bounds(0, np.asarray(upper, float)),
            integrality=np.ones(len(costs)),
            options={"time_limit": _SECONDS, "mip_rel_gap": 1e-6},
        )
    if found.status == _INFEASIBLE:
        return None
    if found.x is None:
        raise TuneError(f"the solver found nothing: {found.message}")
    return Solved([round(value) for value in found.x], float(found.mip_gap or 0.0))


@contextmanager
def _without_its_lines() -> Iterator[None]:
    """Drop the lines that the solver's C++ writes to descriptor 1; those of other threads come after it."""
    sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:  # closed
        yield
        return
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        try:
            yield
        finally:
            sys.stdout.flush()
            os.dup2(kept, 1)
            os.close(kept)
            file.seek(0)
            rest = [line for line in file if not line.lstrip().startswith(b"Highs")]
            if rest:
                os.write(1, b"".join(rest))
