"""A captured forward of an FSDP2 model on two gloo ranks: its backward is replayed, too, the optimizer is eager."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import functionalize as fz
from tests.fsdp.models import nested, root_only
from tests.fsdp.test_capture import build_llama, build_mlp, pairs
from tests.fsdp.test_checkpointing import Model, sharded
from tests.fsdp.twins import (
    differences,
    flat,
    grown_storages,
    hidden_of,
    layouts_of,
    local,
    run,
    state_of,
    unequal,
)
from tests.ranks import run_on_ranks

Forward = Callable[..., Any]
STEPS = 8


@dataclass
class Seen:
    """What one rank saw: how eager and captured differ, and the counts."""

    differences: list[str]
    replays: int
    backwards: int
    captures: int
    reruns: int
    guard_failures: list[str]


def mse(model: nn.Module) -> Forward:
    return lambda x, y: F.mse_loss(model(x), y)


def with_logits(model: nn.Module) -> Forward:
    """Several outputs; some are never gone backward from."""

    def forward(x: Tensor, y: Tensor) -> dict[str, Any]:
        out = model(x)
        return {"loss": F.mse_loss(out, y), "logits": out, "rows": len(x), "seen": out.detach()}

    return forward


def outputs_only(model: nn.Module) -> Forward:
    return lambda x, y: model(x)


def language(model: nn.Module) -> Forward:
    return lambda tokens: model(input_ids=tokens, labels=tokens)


def loss_backward(out: Any, batch: Sequence[Tensor], model: nn.Module) -> Tensor:
    loss = out if isinstance(out, Tensor) else out["loss"]
    loss.backward()
    return loss.detach()


def outside_loss(out: Any, batch: Sequence[Tensor], model: nn.Module) -> Tensor:
    """The loss is computed eagerly from a captured forward's output."""
    loss = F.mse_loss(out, batch[1]) + out.square().mean()
    loss.backward()
    return loss.detach()


def compare(
    build: Callable[[], tuple[nn.Module, torch.optim.Optimizer]],
    make: Callable[[nn.Module], Forward],
    batches: Sequence[Any],
    go_back: Callable[..., Tensor] = loss_backward,
    micro: int = 1,
    before: Callable[[nn.Module, int], None] = lambda model, i: None,
    clear: str = "after",
    **options: Any,
) -> Seen:
    """Train two twins, one with a captured forward; both must be equal, bit for bit, after every backward.

    micro: backwards per optimizer step. before: what is done before each forward. clear: when gradients are.
    """
    (eager_model, eager_optimizer), (model, optimizer) = build(), build()
    captured = fz.capture(make(model), backward=True, **options)
    twins = [
        (eager_model, eager_optimizer, make(eager_model)),
        (model, optimizer, captured),
    ]
    found: list[str] = []
    drawn = [torch.get_rng_state()] * 2
    for i, batch in enumerate(batches):
        results = []
        for which, (m, o, forward) in enumerate(twins):
            torch.set_rng_state(drawn[which])
            before(m, i)
            out = run(forward, batch)
            if clear == "between":
                o.zero_grad()
            loss = go_back(out, batch, m)
            results.append((flat(out), {"loss": local(loss)}, state_of(m, o), hidden_of(m)))
            results[-1] += (layouts_of(m), grown_storages(m))
            if (i + 1) % micro == 0:
                o.step()
                if clear == "after":
                    o.zero_grad()
            drawn[which] = torch.get_rng_state()
        theirs, mine = results
        for a, b in list(zip(mine, theirs, strict=True))[:4]:
            found += differences(i, a, b)
        found += unequal(i, mine[4], theirs[4])
        found += [] if mine[5] == theirs[5] else [f"step {i}: left grown {mine[5]}"]
        found += differences(i, state_of(model, optimizer), state_of(eager_model, eager_optimizer))
        found += differences(i, {"rng": drawn[1]}, {"rng": drawn[0]})
    stats = captured.stats
    return Seen(
        found, stats.replays, stats.backwards, stats.captures, stats.reruns, stats.guard_failures
    )


# -- on the ranks ----------------------------------------------------------------------------------


def tokens() -> list[tuple[Tensor]]:
    g = torch.Generator().manual_seed(dist.get_rank())
    return [(torch.randint(0, 64, (2, 8), generator=g),) for _ in range(STEPS)]


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def build_checkpointed(reentrant: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = sharded(Model(partial(checkpoint, use_reentrant=reentrant)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def no_sync(model: nn.Module, i: int) -> None:
    model.set_requires_gradient_sync(i % 2 == 1)  # type: ignore[operator]


CASES: dict[str, Callable[[], Seen]] = {
    "mlp": lambda: compare(build_mlp, mse, pairs(STEPS)),
    "nested": lambda: compare(nested, mse, pairs(STEPS)),
    "root only": lambda: compare(root_only, mse, pairs(STEPS)),
    "mixed precision": lambda: compare(
        lambda: build_mlp(mp_policy=BF16), with_logits, pairs(STEPS)
    ),
    "without reshard": lambda: compare(
        lambda: build_mlp(reshard_after_forward=False), mse, pairs(STEPS)
    ),
    "several outputs": lambda: compare(build_mlp, with_logits, pairs(STEPS)),
    "loss outside": lambda: compare(nested, outputs_only, pairs(STEPS), outside_loss),
    "llama": lambda: compare(build_llama, language, tokens()),
    "through passes": lambda: compare(build_mlp, mse, pairs(STEPS), passes="default"),
    "checkpointed": lambda: compare(lambda: build_checkpointed(False), mse, pairs(STEPS)),
    "reentrant checkpoints": lambda: compare(lambda: build_checkpointed(True), mse, pairs(STEPS)),
    "accumulation": lambda: compare(build_mlp, mse, pairs(2 * STEPS), micro=2),
    "accumulation without sync": lambda: compare(
        build_mlp, mse, pairs(2 * STEPS), micro=2, before=no_sync
    ),
    "cleared between": lambda: compare(build_mlp, mse, pairs(STEPS), clear="between"),
}


def case(name: str) -> Seen:
    return CASES[name]()


@pytest.mark.parametrize("name", CASES)
def test_equals_eager(name: str) -> None:
    for seen in run_on_ranks(case, name):
        assert seen.differences == []
        assert seen.replays >= 4, seen
        assert seen.backwards == seen.replays, seen
        assert seen.reruns == 0
