"""Random programs at random lengths: replays of recorded, compared and predicted programs equal eager bit for bit.

A predicted program equals the one that is recorded at its length, leaf for leaf. Sizes that Python asks for, and that
ops make of masks among the arguments, are part of the programs. `--fuzz-long` draws 2,000, the same each time.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

import functionalize as fz
from functionalize.step import pass_schedule
from functionalize.templates.leaves import leaves_of
from tests.laws.sized_programs import SizedProgram, SizesOfCalls, sized_programs
from tests.lengths.capturing import NEVER, capture

# Importing torch's op database loads a profile of its own, which has fewer examples: the number is said here.
EXAMPLES = 2000 if settings().max_examples > 1000 else 16
PASSES = "recompute_views,elide_copies{parts=true},merge_duplicates,reinplace"


def check(program: SizedProgram, seed: int, every: int) -> Any:
    """Call a captured program at sizes in random order, and compare every call with eager."""
    draw, passes = random.Random(seed), PASSES if seed % 3 == 0 else ""
    captured = capture(
        program.run,
        every=every,
        passes=passes,
        audit=False,
        on_uncapturable="eager",
    )
    sizes = program.sizes
    known = list(draw.sample(sizes.known, len(sizes.known)))
    later = [*sizes.probes, *sizes.others, *sizes.small]
    calls = [each for each in draw.sample(later, len(later)) for _ in range(draw.choice((1, 1, 3)))]
    for i, size in enumerate([*(n for n in known for _ in range(3)), *calls]):
        more = 0 if i < 15 else draw.choice((0, 0, 0, 0, 0, 0, 0, 1))
        given, before = sizes.arguments(size, i, more), _predicted(captured)
        _compare(program, captured, given)
        if not passes and _predicted(captured) > before and draw.random() < 0.25:
            _compare_leaves(program, captured.program, given)
    return captured


def _predicted(captured: Any) -> int:
    stats = captured.stats
    return int(stats.predictions + stats.instances)


def _compare(program: SizedProgram, captured: Any, given: list[Tensor]) -> None:
    twins = [[t.clone() for t in given] for _ in range(2)]
    expected, error = _result(program.run, twins[0])
    drawn = torch.get_rng_state()
    found, other = _result(captured, twins[1])
    assert error == other, (program, [tuple(t.shape) for t in given])
    assert torch.equal(drawn, torch.get_rng_state()), (program, [tuple(t.shape) for t in given])
    for a, b in zip([*expected, *twins[0]], [*found, *twins[1]], strict=True):
        if not isinstance(a, Tensor):  # a sum over no rows
            assert (type(a), a) == (type(b), b)
            continue
        assert a.shape == b.shape and a.stride() == b.stride()
        assert torch.equal(_bits(a), _bits(b)), (program, [tuple(t.shape) for t in given])


def _result(run: Any, given: list[Tensor]) -> tuple[tuple[Any, ...], str | None]:
    """A program may fail at sizes of which it does not know: then eager's error is expected."""
    torch.manual_seed(0)
    try:
        return run(*given), None
    except Exception as error:
        return (), type(error).__name__


def _bits(t: Tensor) -> Tensor:
    return t.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def _compare_leaves(program: SizedProgram, predicted: Any, given: list[Tensor]) -> None:
    """A predicted program equals the one that is recorded for these arguments."""
    recorded = fz.capture(program.run, allowance=None, audit=False)
    for _ in range(3):
        recorded(*[t.clone() for t in given])
    made, expected = leaves_of(predicted), leaves_of(recorded.program)
    assert made.tokens == expected.tokens, program
    assert made.integers == expected.integers, program


# The template is made of lengths of which three divides all; another length, recorded later, is another program.
_REMAINDER = SizedProgram(
    ("t0 = y * (x.shape[0] % 3)", "t1 = x[m]", "t2 = x.sin()"),
    ("t0", "t1", "t2"),
    SizesOfCalls(
        known=((7, 5), (9, 7), (15, 13), (21, 19), (33, 31)),
        probes=((8, 6), (10, 8)),
        others=((11, 9), (12, 10), (13, 11), (14, 12), (16, 14), (17, 15), (18, 16)),
        small=(),
        follows=False,
    ),
)


@example(_REMAINDER, 3, 1)
@given(sized_programs(), st.integers(0, 10_000), st.sampled_from((1, 8, NEVER, NEVER)))
@settings(max_examples=EXAMPLES, derandomize=True)  # CI draws the long run, too: the same each time
def test_random_programs_at_random_sizes(program: SizedProgram, seed: int, every: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pass_schedule, "GAIN", 5.0)  # passes run after a few replays
        check(program, seed, every)
