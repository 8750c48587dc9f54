"""Runners: what executes a program's graph.

    runner(None)            boxed: one op after the other, each value freed after its last use
    runner("inductor")      inductor: stretches of the graph compiled
    runner("cudagraphs")    cudagraphs: the whole graph recorded once by the device, and launched as one

A runner is a function of a program that returns what runs it: `run(inputs) -> results`, and at stage INPLACE
`run(inputs, commit)`, see `ir/commit.py`.
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
    """The runner that `capture(compile=name)` means; raises `ValueError` for a name it does not know."""
    if name not in RUNNERS:
        known = ", ".join(map(repr, RUNNERS))
        raise ValueError(f"compile is one of {known}, not {name!r}")
    return RUNNERS[name]
