"""When ops run on a model of a machine: one row of spans per stream, for schedules and pictures of them."""

from __future__ import annotations

from typing import NamedTuple


class Span(NamedTuple):
    """An op on a stream.

    stream: `compute`, or a communication stream such as `all-gather 0` (kind and process group). start, end: modelled
    seconds from the start of the step. nbytes: those that a collective sends per rank, 0 for others.
    """

    stream: str
    name: str
    start: float
    end: float
    phase: str = ""
    module: str = ""
    nbytes: int = 0
