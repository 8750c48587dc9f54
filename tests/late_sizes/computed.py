"""Steps whose sizes depend on what they compute, and a captured step beside its eager twin."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import functionalize as fz
from tests.fsdp.twins import bits
from tests.step.twins import same_state
from tests.steps import make_loss_step, tripled_in_backward

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


def mixture(router: nn.Module, experts: Any, x: Tensor, skips: bool = False) -> Tensor:
    """Each expert runs on the tokens that chose it. skips: if no token did, it does not run."""
    weights, chosen = router(x).softmax(-1).topk(2, -1)
    mask = F.one_hot(chosen, len(experts)).permute(2, 1, 0)
    out = torch.zeros_like(x)
    for number, expert in enumerate(experts):
        rank, token = torch.where(mask[number])
        if skips and token.numel() == 0:
            continue
        out.index_add_(0, token, expert(x[token]) * weights[token, rank, None])
    return out


def routed(model: Any, x: Tensor) -> Tensor:
    return model.head(mixture(model.router, model.experts, x)).square().mean()


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


def joined(model: Any, x: Tensor) -> Tensor:
    """Sums of sizes."""
    parts = [expert(x) for expert in model.experts[:2]]
    parts = [part[above(part.sum(-1))] for part in parts]
    return torch.cat([*parts, x[:3]]).sort(0).values.square().mean()


def compared(model: Any, x: Tensor) -> Tensor:
    """Python asks for a size that is never one that it acts upon."""
    hidden = model.experts[0](x)
    kept = hidden[above(hidden.sum(-1))]
    return kept.square().mean() if kept.numel() else x.sum()


BODIES: Sequence[Body] = (
    selected,
    found,
    masked,
    written,
    distinct,
    repeated,
    routed,
    halves,
    dropped,
    twice,
    joined,
    compared,
)


Doubled = tripled_in_backward(lambda grad: grad.shape[0] >= 20)


def kept_of(model: Any, x: Tensor) -> Tensor:
    hidden = model.experts[0](x)
    kept: Tensor = hidden[above(hidden.sum(-1))]
    return kept


def in_backward(model: Any, x: Tensor) -> Tensor:
    return Doubled.apply(kept_of(model, x)).square().mean()


def in_a_hook(model: Any, x: Tensor) -> Tensor:
    kept = kept_of(model, x) * 1
    kept.register_hook(lambda grad: grad * 2 if grad.numel() < 160 else grad * 3)
    return kept.square().mean()


def in_a_recomputed_block(model: Any, x: Tensor) -> Tensor:
    def block(x: Tensor) -> Tensor:
        kept = kept_of(model, x)
        return kept.square() if kept.shape[0] > 18 else kept.abs()

    return checkpoint(block, x, use_reentrant=False).mean()


def by_rows(model: Any, x: Tensor) -> Tensor:
    total = x.new_zeros(WIDTH)
    for row in kept_of(model, x)[::4]:
        total = total + row
    return total.square().mean()


def by_root(model: Any, x: Tensor) -> Tensor:
    kept = kept_of(model, x)
    return kept.square().sum() / math.sqrt(kept.shape[0])


def by_length(model: Any, x: Tensor) -> Tensor:
    kept = kept_of(model, x)
    return kept.square().sum() * len(kept)


def by_bytes(model: Any, x: Tensor) -> Tensor:
    kept = kept_of(model, x)
    return kept.square().mean() * (2 if kept.nbytes > 640 else 1)


def by_text(model: Any, x: Tensor) -> Tensor:
    kept = kept_of(model, x)
    return kept.square().mean() * len(str(kept.shape[0] * 5))


def by_table(model: Any, x: Tensor) -> Tensor:
    kept = kept_of(model, x)
    return kept.square().mean() * {n: n / 10 for n in range(200)}[kept.shape[0]]


def at_most(model: Any, x: Tensor) -> Tensor:
    kept = kept_of(model, x)
    return kept[: min(kept.shape[0], 20)].square().sum()


def by_remainder(model: Any, x: Tensor) -> Tensor:
    kept = kept_of(model, x)
    return kept.square().mean() if kept.shape[0] % 3 else kept.abs().mean()


def by_root_of_rows(model: Any, x: Tensor) -> Tensor:
    kept = kept_of(model, x)
    return kept[: math.isqrt(kept.shape[0])].square().sum()


def in_chunks(model: Any, x: Tensor) -> Tensor:
    return torch.stack([chunk.sum() for chunk in kept_of(model, x).chunk(4)]).square().mean()


def padded(model: Any, x: Tensor) -> Tensor:
    kept = kept_of(model, x)
    whole = F.pad(kept, (0, 0, 0, -kept.shape[0] % 8))
    return whole.view(-1, 8, WIDTH).sum(1).square().mean()


def counted_by_the_step(model: Any, x: Tensor) -> Tensor:
    hidden = model.experts[0](x)
    mask = above(hidden.sum(-1))
    return hidden[: int(mask.sum())].sum() + hidden[mask].square().mean()


def kept_in_the_model(model: Any, x: Tensor) -> Tensor:
    model.seen = kept_of(model, x).shape[0]
    return model.head(x).square().mean() * (1 + 0.1 * (model.seen > 20))


def sometimes(model: Any, x: Tensor) -> Tensor:
    """Python decides by a number whether a size is computed."""
    kept, loss = kept_of(model, x), model.head(x).square().mean()
    return loss + kept.square().mean() if loss.item() > 0.6 else loss


def seldom(model: Any, x: Tensor) -> Tensor:
    loss = model.head(x).square().mean()
    return loss + kept_of(model, x).square().mean() if x[0, 0] > 1.5 else loss


# Python or torch decides by a computed size: replayed where that is known to be as in a recording, else eager.
DECIDING: Sequence[Body] = (
    branches,
    attended,
    in_backward,
    in_a_hook,
    in_a_recomputed_block,
    by_rows,
    by_root,
    by_length,
    by_bytes,
    by_text,
    by_table,
    at_most,
    by_remainder,
    by_root_of_rows,
    in_chunks,
    padded,
    counted_by_the_step,
    kept_in_the_model,
    sometimes,
    seldom,
)


def trained(body: Body, lengths: Sequence[int], **options: Any) -> Any:
    """A captured step after calls with arguments of these lengths; it equals its eager twin bit for bit after each."""
    steps, models = [], []
    for _ in range(2):
        torch.manual_seed(0)
        model = Model(body)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        steps.append(make_loss_step(model, optimizer))
        models.append(model)
    captured = fz.capture(steps[0], **{"audit": False, "on_uncapturable": "eager"} | options)
    for i, length in enumerate(lengths):
        x = torch.randn(length, WIDTH, generator=torch.Generator().manual_seed(i))
        results = []
        for step in (captured, steps[1]):
            torch.manual_seed(i)
            results.append(step(x.clone()))
        assert torch.equal(*map(bits, results)), (i, length, results)
        assert same_state(*models), (i, length)
    return captured
