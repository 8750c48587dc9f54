"""Runners execute a program's graph.

    runner(None)            boxed: one op after the other, each value freed after its last use
    runner("inductor")      inductor: stretches of the graph compiled
    runner("cudagraphs")    cudagraphs: the whole graph recorded once by the device, and launched as one

A runner is a function that compiles a program to a callable `run(inputs) -> results`; at stage INPLACE
`run(inputs, commit) -> results`, see `ir/commit.py`.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from functionalize.program.program import Program
from functionalize.run import boxed, cudagraphs, inductor

RUNNERS: Mapping[str | None, Callable[[Program], Callable[..., Sequence[Any]]]] = (
    types.MappingProxyType(
        {None: boxed.boxed, "inductor": inductor.inductor, "cudagraphs": cudagraphs.cudagraphs}
    )
)


def runner(name: str | None) -> Callable[[Program], Callable[..., Sequence[Any]]]:
    """The runner of `capture(compile=name)`; raises `ValueError` for an unknown name."""
    if name not in RUNNERS:
        names = ", ".join(map(repr, RUNNERS))
        raise ValueError(f"compile is one of {names}, not {name!r}")
    return RUNNERS[name]
