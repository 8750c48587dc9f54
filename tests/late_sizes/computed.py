"""Steps whose sizes depend on what they compute, and a captured step beside its eager twin."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import functionalize as fz
from tests.step.twins import same_state
from tests.steps import make_loss_step

Body = Callable[[Any, Tensor], Tensor]
WIDTH = 8


class Model(nn.Module):
    """A router, experts and a head. body: what it computes of them."""

    def __init__(self, body: Body, experts: int = 3) -> None:
        super().__init__()
        self.body = body
        self.router = nn.Linear(WIDTH, experts)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(experts))
        self.head = nn.Linear(WIDTH, 4)
        self.missing = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def above(scores: Tensor) -> Tensor:
    return scores > scores.mean()


def selected(model: Any, x: Tensor) -> Tensor:
    hidden = model.experts[0](x)
    return model.head(hidden[above(hidden.sum(-1))]).square().mean()


def found(model: Any, x: Tensor) -> Tensor:
    hidden = model.experts[0](x)
    at = above(hidden.sum(-1)).nonzero().squeeze(-1)
    return model.head(hidden.index_select(0, at)).square().sum()


def masked(model: Any, x: Tensor) -> Tensor:
    hidden = model.experts[0](x)
    return hidden.masked_select(above(hidden.sum(-1, keepdim=True))).square().mean()


def written(model: Any, x: Tensor) -> Tensor:
    """The backward selects."""
    hidden = model.experts[0](x) * 2
    hidden[above(hidden.sum(-1))] = model.missing
    return hidden.square().mean()


def distinct(model: Any, x: Tensor) -> Tensor:
    best = (model.experts[0](x).sum(-1) * 9).long()
    values, counts = best.unique(return_counts=True)
    return (model.head(x)[values % 7] * counts.unsqueeze(-1)).square().mean()


def repeated(model: Any, x: Tensor) -> Tensor:
    hidden = model.experts[0](x)
    times = (hidden.sum(-1) * 4).long().clamp(0, 3)
    return model.head(hidden.repeat_interleave(times, 0)).square().sum()


def routed(model: Any, x: Tensor) -> Tensor:
    """A mixture of experts that runs each expert on the tokens that chose it."""
    weights, chosen = model.router(x).softmax(-1).topk(2, -1)
    mask = F.one_hot(chosen, len(model.experts)).permute(2, 1, 0)
    out = torch.zeros_like(x)
    for number, expert in enumerate(model.experts):
        rank, token = torch.where(mask[number])
        out.index_add_(0, token, expert(x[token]) * weights[token, rank, None])
    return model.head(out).square().mean()


def halves(model: Any, x: Tensor) -> Tensor:
    """Python computes an integer of the size."""
    hidden = model.experts[0](x)
    kept = hidden[above(hidden.sum(-1))]
    return kept[: kept.shape[0] // 2].square().mean() + kept.view(kept.shape[0], 2, -1).sum()


def branches(model: Any, x: Tensor) -> Tensor:
    """Python decides by the size."""
    hidden = model.experts[0](x)
    kept = hidden[above(hidden.sum(-1))]
    return kept.sin().mean() if kept.shape[0] > 19 else kept.cos().mean()


def dropped(model: Any, x: Tensor) -> Tensor:
    """As many random numbers are drawn as there are elements."""
    hidden = model.experts[0](x)
    return F.dropout(model.head(hidden[above(hidden.sum(-1))]), 0.3).square().mean()


def twice(model: Any, x: Tensor) -> Tensor:
    """What the second op selects of depends on what the first one has selected."""
    first = model.experts[0](x)
    first = first[above(first.sum(-1))]
    second = model.experts[1](first)
    return second[above(second.sum(-1))].square().mean() + first.mean()


def attended(model: Any, x: Tensor) -> Tensor:
    """Products of sizes."""
    kept = model.experts[0](x)
    kept = kept[above(kept.sum(-1))]
    scores = (kept @ kept.T).softmax(-1)
    return (scores @ model.head(kept)).reshape(-1).square().sum() + scores.flatten()[::2].sum()


BODIES: Sequence[Body] = (
    selected,
    found,
    masked,
    written,
    distinct,
    repeated,
    routed,
    halves,
    branches,
    dropped,
    twice,
    attended,
)


def lengths_of(seed: int, count: int, few: Sequence[int]) -> list[int]:
    """Lengths of arguments for so many calls."""
    return random.Random(seed).choices(few, k=count)


def trained(body: Body, lengths: Sequence[int], wide: int = 1, **options: Any) -> Any:
    """A captured step after calls with arguments of these lengths; it equals its eager twin bit for bit after each.

    wide: how much data the first layers are multiplied by, so that routing varies.
    """
    steps, models = [], []
    for _ in range(2):
        torch.manual_seed(0)
        model = Model(body)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        steps.append(make_loss_step(model, optimizer))
        models.append(model)
    captured = fz.capture(steps[0], **{"audit": False} | options)
    for i, length in enumerate(lengths):
        x = wide * torch.randn(length, WIDTH, generator=torch.Generator().manual_seed(i))
        results = []
        for step in (captured, steps[1]):
            torch.manual_seed(i)
            results.append(step(x.clone()))
        assert torch.equal(*results) or results[0].isnan(), (i, length, results)
        assert same_state(*models), (i, length)
    return captured
