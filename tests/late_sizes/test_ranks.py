"""Steps of two FSDP2 ranks that compute sizes, other ones on each: bit for bit as eager after every call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.fsdp import fully_shard

import functionalize as fz
from functionalize.step import pass_schedule
from tests.allowance import ample_allowance
from tests.fsdp.twins import call_differences
from tests.late_sizes.computed import mixture
from tests.ranks import run_on_ranks
from tests.steps import make_loss_step

pytestmark = pytest.mark.long

WIDTH = 16


class Mixture(nn.Module):
    """A mixture of experts, each of which runs on the tokens that chose it."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, experts)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(mixture(self.router, self.experts, x), 0.1, self.training)


class Skipping(Mixture):
    """Experts that no token chose do not run: Python asks for the size."""

    def forward(self, x: Tensor) -> Tensor:
        return x + mixture(self.router, self.experts, x, skips=True)


class Filtered(nn.Module):
    """The loss is of the rows that the model is least sure of. on: the ranks on which it is."""

    def __init__(self, on: Sequence[int] = (0, 1)) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.on = on

    def forward(self, x: Tensor) -> Tensor:
        out = x + self.layer(x).relu()
        if dist.get_rank() not in self.on:
            return out
        entropy = torch.distributions.Categorical(logits=out, validate_args=False).entropy()
        return out[entropy > entropy.mean()]


class Sending(nn.Module):
    """Rows that both ranks choose alike are summed over the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out = x + self.layer(x).relu()
        scores = all_reduce(out.detach().sum(-1), "sum", dist.group.WORLD)
        kept = out[scores > scores.mean()]
        return kept * all_reduce(kept.detach(), "sum", dist.group.WORLD)


def build(kind: str) -> tuple[Any, Any]:
    torch.manual_seed(0)
    parts: dict[str, Any] = {
        "mixtures": [Mixture(3), Mixture(4)],
        "skipping": [Skipping(3), Skipping(3)],
        "filtered": [nn.Linear(WIDTH, WIDTH), Filtered()],
        "sending": [nn.Linear(WIDTH, WIDTH), Sending()],
        "filtered on one rank": [nn.Linear(WIDTH, WIDTH), Filtered((0,))],
    }
    model = nn.Sequential(*parts[kind])
    for part in (*model, model):
        fully_shard(part)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


@ample_allowance()
def trained(kind: str, calls: int, lengths: Sequence[int], passes: str, **options: Any) -> Any:
    """Twins, one of them captured, on data of other lengths on each rank."""
    (model, optimizer), (twin, twin_optimizer) = build(kind), build(kind)
    captured = fz.capture(
        make_loss_step(lambda x: model(x).square().mean(), optimizer), passes=passes, **options
    )
    eager = make_loss_step(lambda x: twin(x).square().mean(), twin_optimizer)
    generator = torch.Generator().manual_seed(dist.get_rank())
    twins = (model, optimizer), (twin, twin_optimizer)
    found: list[str] = []
    for i in range(calls):
        length = lengths[int(torch.randint(len(lengths), (1,), generator=generator))]
        x = torch.randn(length, WIDTH, generator=generator)
        found += call_differences(i, (captured, eager), twins, x)
    return found, captured.stats, captured.explain()


@pytest.mark.parametrize(
    ("kind", "lengths"),
    [
        ("mixtures", (96,)),
        ("mixtures", (90, 96, 100)),
        ("skipping", (96,)),
        ("filtered", (90, 96, 100)),
        ("filtered on one rank", (96,)),
    ],
)
def test_sizes_of_each_rank(kind: str, lengths: Sequence[int]) -> None:
    for found, stats, text in run_on_ranks(trained, kind, 38, lengths, "default", world=2):
        assert found == []
        assert stats.mispredictions == stats.audit_failures == 0
        assert stats.replays >= 15, text
        assert f"step: {len(lengths)} program" in text  # on a rank that computes no size, too


def test_a_collective_that_sends_a_computed_size_is_not_replayed() -> None:
    for found, stats, text in run_on_ranks(trained, "sending", 24, (96,), "", world=2):
        assert found == []
        assert stats.replays == 0 and stats.captures <= 20
        assert "what it sends has a size that the step computes" in text


def test_ranks_whose_passes_run_after_a_few_replays() -> None:
    for found, stats, text in run_on_ranks(trained_after_passes, world=2):
        assert found == []
        assert stats.replays >= 15, text
        assert "without passes" not in text


def trained_after_passes() -> Any:
    with mock.patch.object(pass_schedule, "GAIN", 2.5):
        return trained("mixtures", 44, (96,), "default")
