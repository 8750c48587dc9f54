"""Random programs of views, writes, resizes and reads inside `fz.lazy`, looked at in random places, against eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import functionalize as fz
from tests.deferral.eagerly import RUNS, poisoned
from tests.laws.outcomes import outcome
from tests.laws.programs import HELPERS, Example, examples

FEW = 40  # without --fuzz-long


def looked_at(
    example: Example, looks: list[bool], barrier: Callable[[], None]
) -> Callable[..., Any]:
    """The program with a barrier after each line for which `looks` says so."""
    names = ", ".join(f"r{i}" for i in range(len(example.inputs)))
    lines = [f"def program({names}):"]
    for i, line in enumerate(example.lines):
        lines.append(f"    {line}")
        if looks[i % len(looks)]:
            lines.append("    barrier()")
    lines.append(f"    return {example.returned}")
    namespace: dict[str, Any] = {**HELPERS, "barrier": barrier}
    exec(compile("\n".join(lines), "<example>", "exec"), namespace)
    found: Callable[..., Any] = namespace["program"]
    return found


@given(
    examples(), st.lists(st.booleans(), min_size=1, max_size=6), st.sampled_from(["", "default"])
)
@settings(max_examples=FEW if settings().max_examples <= 100 else settings().max_examples)
def test_programs(example: Example, looks: list[bool], passes: str) -> None:
    if example.error is not None:
        return  # eager must not run it
    lazy = fz.lazy(passes=passes)
    program = looked_at(example, looks, lazy.barrier)

    def run(*args: Any) -> Any:
        with lazy, torch.no_grad():
            return program(*args)

    for seed in range(RUNS):
        expected = outcome(example, example.run, seed)
        with poisoned():
            actual = outcome(example, run, seed)
        for e, a in zip(expected, actual, strict=True):
            assert a == e, f"run {seed} differs: {a}, expected {e}\n{lazy.explain()}"
