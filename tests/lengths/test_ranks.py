"""`dynamic=True` under FSDP2 on two ranks with other lengths on each: bit for bit as eager after every call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import functionalize as fz
from tests.allowance import ample_allowance
from tests.fsdp.twins import call_differences
from tests.ranks import run_on_ranks
from tests.steps import make_loss_step

pytestmark = pytest.mark.long


def build() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.1), nn.Linear(8, 4)
    )
    for part in (*model, model):
        fully_shard(part)
    return model, torch.optim.AdamW(model.parameters(), fused=True)


@ample_allowance()
def trained(
    calls: int,
    passes: str,
    lengths: range = range(2, 12),
    reader: int | None = None,
    draw: Callable[[int], int] | None = None,
) -> tuple[list[str], Any]:
    """Twins, one of them captured, on lengths that differ between ranks, at random or of `draw`.

    reader: the rank on which Python decides by a number in the step; -1: all ranks.
    """
    (model, optimizer), (twin, twin_optimizer) = build(), build()
    reads = reader in (-1, dist.get_rank())
    read: dict[str, list[float]] = {"captured": [], "eager": []}

    def loss_of(model: nn.Module, of: str) -> Callable[[Tensor], Tensor]:
        def loss(x: Tensor) -> Tensor:
            found = model(x).square().mean()
            if reads and (number := found.item()) < 1e6:
                read[of].append(number)
            return found

        return loss

    captured = fz.capture(
        make_loss_step(loss_of(model, "captured"), optimizer),
        dynamic=True,
        passes=passes,
    )
    eager = make_loss_step(loss_of(twin, "eager"), twin_optimizer)
    generator = torch.Generator().manual_seed(dist.get_rank())
    twins = (model, optimizer), (twin, twin_optimizer)
    found: list[str] = []
    for i in range(calls):
        length = int(torch.randint(lengths.start, lengths.stop, (1,), generator=generator))
        length = length if draw is None else draw(i)
        x = torch.randn(2, length, 8, generator=generator)
        found += call_differences(i, (captured, eager), twins, x)
    if read["captured"] != read["eager"]:
        found.append("other numbers were read")
    return found, captured.stats


@pytest.mark.parametrize("passes", ["", "default"])
def test_random_lengths_of_each_rank(passes: str) -> None:
    for found, stats in run_on_ranks(trained, 40, passes, world=2):
        assert found == []
        assert (
            stats.captures <= 6
        )  # four of one class; a length that equals a width is one of its own
        assert stats.mispredictions == stats.audit_failures == 0
        assert stats.predictions >= 2
        assert stats.replays >= 15


# At these lengths no two sizes of the model are equal by chance, so the passes hold for all of them.
APART = range(33, 48)


def test_ranks_that_vote_as_passes_change_collectives() -> None:
    for found, stats in run_on_ranks(trained, 50, "fast", APART, world=2):
        assert found == []
        assert stats.captures <= 6
        assert stats.mispredictions == stats.audit_failures == 0
        assert stats.predictions >= 2 and stats.instances >= 2
        assert stats.replays >= 30


@pytest.mark.parametrize(
    ("reader", "passes"), [(-1, "default"), (0, "default"), (-1, "fast"), (0, "fast")]
)
def test_ranks_that_vote_on_a_number(reader: int, passes: str) -> None:
    for found, stats in run_on_ranks(trained, 50, passes, APART, reader, world=2):
        assert found == []
        assert stats.captures <= 6
        assert stats.mispredictions == stats.audit_failures == 0
        assert stats.predictions >= 2 and stats.instances >= 2
        assert stats.replays >= 30


@ample_allowance()
def wider_on_one_rank() -> tuple[list[str], Any]:
    """Rank 0 has all lengths from the beginning, rank 1 few ones; then it has those that rank 0 has compared."""
    few, all_, then = [38, 42, 39, 41, 40], [*APART], [34, 46, 35, 45, 33, 47]
    own = [few[i % len(few)] for i in range(40)] + then
    if dist.get_rank() == 0:
        own = [all_[7 * i % len(all_)] for i in range(40)] + [40] * len(then)
    return trained(len(own), "", draw=own.__getitem__)


def test_a_rank_does_not_compare_what_another_one_has_compared() -> None:
    first, second = run_on_ranks(wider_on_one_rank, world=2)
    for found, stats in (first, second):
        assert found == []
        assert stats.mispredictions == 0
    assert second[1].predictions <= 3 and second[1].instances >= 5
