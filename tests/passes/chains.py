"""FSDP2's chains of collectives, written out as functions, and what tests on ranks share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

import functionalize as fz
from functionalize import passes
from functionalize.passes.patterns import collectives
from tests.fsdp.features import FEATURES
from tests.fsdp.twins import compare_twins
from tests.passes.helpers import count, seen

aten, functional = torch.ops.aten, torch.ops._c10d_functional


def orders(graph: fx.Graph) -> dict[str, list[tuple[Any, ...]]]:
    """For each group, its collectives in order: kind, group, reduction, dtypes and sizes."""
    found: dict[str, list[tuple[Any, ...]]] = {}
    for each in collectives(graph):
        facts = (each.kind, each.group, each.op, each.dtypes, each.sizes)
        found.setdefault(each.group, []).append(facts)
    return found


def unshard(*shards: Tensor, group: str = "0", world: int = 2) -> list[Tensor]:
    """The full parameters of shards, as FSDP2 gathers them."""
    cat = torch.cat([shard.view(-1) for shard in shards])
    whole = functional.wait_tensor(functional.all_gather_into_tensor(cat, world, group))
    sizes = [shard.numel() for shard in shards]
    parts = aten.split_with_sizes_copy.default(whole.view(world, -1), sizes, 1)
    sizes = [(shard.shape[0] * world, *shard.shape[1:]) for shard in shards]
    return [part.view(size) for part, size in zip(parts, sizes, strict=True)]


def reduce(*grads: Tensor, op: str = "avg", group: str = "0", world: int = 2) -> list[Tensor]:
    """The shards of reduced gradients, as FSDP2 reduces them."""
    packed = aten._chunk_cat.default(list(grads), 0, world).view(-1)
    whole = functional.wait_tensor(functional.reduce_scatter_tensor(packed, op, world, group))
    return sliced(whole, grads, world)


def all_reduced(grad: Tensor, op: str = "avg", again: str = "1") -> list[Tensor]:
    """A gradient under HSDP: reduced over one dimension of the mesh, then over the other."""
    packed = aten._chunk_cat.default([grad, grad + 1], 0, 2).view(-1)
    shard = functional.wait_tensor(functional.reduce_scatter_tensor(packed, op, 2, "0"))
    whole = functional.wait_tensor(functional.all_reduce(shard, op, again))
    return sliced(whole, [grad, grad])


def sliced(whole: Tensor, grads: Sequence[Tensor], world: int = 2) -> list[Tensor]:
    """The shard of each gradient, of an equal part for every rank."""
    sizes = [(grad.shape[0] // world, *grad.shape[1:]) for grad in grads]
    found, at = [], 0
    for size in sizes:
        n = torch.Size(size).numel()
        found.append(whole[at : at + n].view(size))
        at += n
    return found


def traced(fn: Any, *args: Tensor, each: passes.Pass) -> tuple[int, fz.Program]:
    """The rewrites of one pass on `fn`, and the program after it; a second run finds nothing."""
    after = passes.run(fz.functions.trace(fn, *args), [each])
    again = passes.run(after, [each])
    assert count(again) == 0, again.history
    return count(after), after


def feature(name: str, pipeline: str) -> tuple[list[str], int, dict[str, int], list[str]]:
    """On a rank: a feature after passes against its eager twin.

    Returns the differences, the replays, the collectives, and what the program sends.
    """
    row = FEATURES[name]
    step = row.build, row.make_step, row.batches()
    verdict = compare_twins(*step, passes=pipeline, allowance=None)
    lines = [line.strip() for line in verdict.program.splitlines()]
    sent = [line for line in lines if "= _c10d_functional" in line and "wait" not in line]
    return verdict.differences, verdict.replays, verdict.collectives, sent


def same_bits(fn: Any, makes: Sequence[Tensor], pipeline: str) -> bool:
    """On a rank: whether `fn` gives the same bits before and after passes."""
    before = fz.functions.trace(fn, *makes)
    after = passes.run(before, pipeline)

    def make() -> tuple[Tensor, ...]:
        return tuple(t.clone() for t in makes)

    return seen(after, make) == seen(before, make)
