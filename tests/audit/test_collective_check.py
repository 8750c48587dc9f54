"""Ranks that record different collectives: one of them says so by name, and nobody is kept waiting."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

import functionalize as fz
from functionalize.audit.collective_check import _first_difference
from tests.ranks import run_on_ranks


def parted(alike: bool = False) -> tuple[str, int]:
    """Gloo does not look at the reduction: eager goes on, with another result on each rank."""
    kinds = (dist.ReduceOp.SUM, dist.ReduceOp.SUM if alike else dist.ReduceOp.MAX)

    def step(x: Tensor) -> Tensor:
        y = x * 2
        dist.all_reduce(y)
        dist.all_reduce(y, kinds[dist.get_rank()])
        return y

    captured = fz.capture(step, on_uncapturable="eager")
    results = [float(captured(torch.ones(1))) for _ in range(5)]
    assert len(set(results)) == 1
    return captured.explain(), captured.stats.replays


def test_another_reduction_is_told_by_name() -> None:
    texts = [text for text, _ in run_on_ranks(parted)]
    told = [
        f"the ranks do not record the same collectives: number 2 of 2 in process group '0' is "
        f"allreduce_(float32[1], {mine}) here and allreduce_(float32[1], {other}) on rank {rank}"
        for mine, other, rank in (("sum", "max", 1), ("max", "sum", 0))
    ]
    assert any(message in text for message, text in zip(told, texts, strict=True)), texts


def test_equal_ones_are_kept() -> None:
    assert [replays for _, replays in run_on_ranks(parted, True)] == [4, 4]


def test_lists_are_compared_from_their_ends() -> None:
    assert _first_difference("0", ("a", "b", "c"), ("b", "c"), 1) is None
    assert _first_difference("0", ("b", "c"), ("a", "b", "c"), 1) is None
    told = _first_difference("0", ("a", "b", "c"), ("x", "c"), 3)
    assert told == (
        "the ranks do not record the same collectives: number 2 of 3 in process group '0' is b here and x on rank 3"
    )
