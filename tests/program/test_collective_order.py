"""The collectives of a program as texts: what ranks must share is in them, and nothing else."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

import functionalize as fz
from functionalize.program.collective_order import fingerprints, sequences
from tests.ranks import run_on_ranks


def talk(x: Tensor) -> Tensor:
    y = x + dist.get_rank()
    dist.all_reduce(y, dist.ReduceOp.AVG if x.dim() > 1 else dist.ReduceOp.MAX)
    out = x.new_empty(2 * len(x), *x.shape[1:])
    dist.all_gather_into_tensor(out, x)
    dist.barrier()
    return out + y.sum()


def texts(length: int, dims: int = 1) -> tuple[dict[str, tuple[str, ...]], dict[str, int]]:
    step = fz.capture(talk)
    for _ in range(3):
        step(torch.ones([length] * dims))
    program = step.program
    program.describe()
    return sequences(program.graph), fingerprints(program.graph)


def test_texts_have_sizes_and_reductions_and_no_ranks() -> None:
    (first, number), (second, same) = run_on_ranks(texts, 3)
    assert (
        first
        == second
        == {
            "0": (
                "all_reduce(float32[3], max)",
                "all_gather_into_tensor(float32[3])",
                "barrier()",
            )
        }
    )
    assert number == same


def test_other_sizes_have_another_fingerprint() -> None:
    ((_, three), _), ((_, four), _) = run_on_ranks(texts, 3), run_on_ranks(texts, 4)
    assert three != four
    assert all(0 < n < 2**56 for n in (*three.values(), *four.values()))


def unequal() -> dict[str, tuple[str, ...]]:
    mine = [1, 2] if dist.get_rank() == 0 else [3, 4]
    theirs = [1, 3] if dist.get_rank() == 0 else [2, 4]

    @fz.capture
    def step(x: Tensor) -> Tensor:
        out = x.new_empty(sum(theirs))
        dist.all_to_all_single(out, x, theirs, mine)
        return out

    for _ in range(3):
        step(torch.ones(sum(mine)))
    step.program.describe()
    return sequences(step.program.graph)


def test_what_may_differ_between_ranks_is_left_out() -> None:
    first, second = run_on_ranks(unequal)
    assert first == second == {"0": ("all_to_all_single(float32)",)}
