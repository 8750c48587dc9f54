"""`Span`: when an op runs on a modelled machine, for schedules and pictures of them."""

from __future__ import annotations

from typing import NamedTuple


class Span(NamedTuple):
    """An op on a stream.

    stream: `compute`, or a communication stream such as `all-gather 0` (kind and process group).
    start, end: modelled seconds since the start of the step.
    nbytes: the bytes that a collective sends per rank; 0 for other ops.
    """

    stream: str
    name: str
    start: float
    end: float
    phase: str = ""
    module: str = ""
    nbytes: int = 0
