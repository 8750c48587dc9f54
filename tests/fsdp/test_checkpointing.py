"""Activation checkpointing of FSDP2 blocks with dropout, on two gloo ranks: captured once, equal to eager.

Every way to checkpoint, with `fully_shard` inside and outside of it. Each twin draws from one stream of
random numbers, seeded once: what the recomputation draws, and what it leaves to the next step, must be
eager's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as checkpoint_module
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from tests.fsdp.checkpointed import Block, Model, Run, sharded
from tests.fsdp.steps import pairs
from tests.fsdp.twins import Verdict, compare_twins
from tests.ranks import run_on_ranks

aten = torch.ops.aten
STEPS = 8


def fsdp_inside(run: Run, **options: Any) -> Model:
    """The model checkpoints calls of wrapped blocks: their hooks run again in the recomputation."""
    return sharded(Model(run), **options)


def fsdp_outside(run: Run) -> Model:
    """Each wrapped block checkpoints what is inside it."""
    return sharded(Model(inside=run))


def composable(order: str, **options: Any) -> Model:
    model = Model()
    if order == "first":
        for block in model.blocks:
            checkpoint_module(block, **options)
    sharded(model)
    if order == "last":
        for block in model.blocks:
            checkpoint_module(block, **options)
    return model


def wrapped(order: str, wrapper: Any = checkpoint_wrapper, **options: Any) -> Model:
    model = Model()
    if order == "last":
        for block in model.blocks:
            fully_shard(block)
    for i, block in enumerate(model.blocks):
        model.blocks[i] = wrapper(block, **options)
    return fully_shard(model) if order == "last" else sharded(model)


def applied() -> Model:
    model = Model()
    apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, Block))
    return sharded(model)


def nested(block: nn.Module, x: Tensor) -> Tensor:
    """A checkpoint in a checkpoint; the outer one draws a mask of its own."""

    def outer(x: Tensor) -> Tensor:
        return F.dropout(checkpoint(block, x, use_reentrant=False), 0.1)

    return checkpoint(outer, x, use_reentrant=False)


def saved_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    products = (aten.mm.default, aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE


NON_REENTRANT = partial(checkpoint, use_reentrant=False)
REENTRANT = partial(checkpoint, use_reentrant=True)
SELECTIVE = partial(create_selective_checkpoint_contexts, saved_products)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

MODELS: dict[str, Callable[[], Model]] = {
    "no checkpoint": lambda: sharded(Model()),
    "non-reentrant, FSDP inside": lambda: fsdp_inside(NON_REENTRANT),
    "non-reentrant, FSDP outside": lambda: fsdp_outside(NON_REENTRANT),
    "non-reentrant to the end, FSDP inside": lambda: fsdp_inside(
        partial(NON_REENTRANT, early_stop=False)
    ),
    "non-reentrant, other masks, FSDP inside": lambda: fsdp_inside(
        partial(NON_REENTRANT, preserve_rng_state=False)
    ),
    "non-reentrant, other masks, FSDP outside": lambda: fsdp_outside(
        partial(NON_REENTRANT, preserve_rng_state=False)
    ),
    "non-reentrant, kept unsharded": lambda: fsdp_inside(
        NON_REENTRANT, reshard_after_forward=False
    ),
    "non-reentrant, mixed precision": lambda: fsdp_inside(NON_REENTRANT, mp_policy=BF16),
    "reentrant, FSDP inside": lambda: fsdp_inside(REENTRANT),
    "reentrant, FSDP outside": lambda: fsdp_outside(REENTRANT),
    "reentrant, other masks": lambda: fsdp_inside(partial(REENTRANT, preserve_rng_state=False)),
    "composable, then FSDP": lambda: composable("first"),
    "FSDP, then composable": lambda: composable("last"),
    "composable, other masks": lambda: composable("first", preserve_rng_state=False),
    "composable, selective": lambda: composable("first", context_fn=SELECTIVE),
    "wrapper, then FSDP": lambda: wrapped("first"),
    "FSDP, then wrapper": lambda: wrapped("last"),
    "reentrant wrapper, then FSDP": lambda: wrapped(
        "first", checkpoint_impl=CheckpointImpl.REENTRANT
    ),
    "FSDP, then reentrant wrapper": lambda: wrapped(
        "last", checkpoint_impl=CheckpointImpl.REENTRANT
    ),
    "wrapper, other masks": lambda: wrapped("first", preserve_rng_state=False),
    "wrapper, selective": lambda: wrapped("first", context_fn=SELECTIVE),
    "offload wrapper": lambda: wrapped("first", offload_wrapper),
    "wrappers applied, then FSDP": applied,
    "nested, FSDP inside": lambda: fsdp_inside(nested),
    "nested, FSDP outside": lambda: fsdp_outside(nested),
    "nested around FSDP": lambda: sharded(Model(NON_REENTRANT, NON_REENTRANT)),
    "selective, FSDP inside": lambda: fsdp_inside(partial(NON_REENTRANT, context_fn=SELECTIVE)),
    "selective, FSDP outside": lambda: fsdp_outside(partial(NON_REENTRANT, context_fn=SELECTIVE)),
}
# No generator is read back in these: nothing is preserved, or nothing is run again.
UNSET = {"no checkpoint", "offload wrapper", *(name for name in MODELS if "other masks" in name)}


def build(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = MODELS[name]()
    torch.manual_seed(100 + dist.get_rank())  # each rank draws its own masks
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def make_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., Tensor]:
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x.clone().requires_grad_()).float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def compare(name: str, passes: str) -> Verdict:
    return compare_twins(lambda: build(name), make_step, pairs(STEPS), reseed=False, passes=passes)


@pytest.mark.parametrize("name", MODELS)
def test_checkpointed_dropout_draws_what_eager_draws(name: str) -> None:
    for verdict in run_on_ranks(compare, name, ""):
        assert verdict.differences == []
        assert (verdict.captures, verdict.guard_failures) == (1, [])
        assert verdict.replays >= STEPS - 3
        assert ("functionalize.set_rng_state" in verdict.program) is (name not in UNSET)
        assert verdict.resizes > 0


@pytest.mark.parametrize("name", ["non-reentrant, FSDP inside", "selective, FSDP outside"])
def test_passes_keep_every_bit(name: str) -> None:
    for verdict in run_on_ranks(compare, name, "default"):
        assert verdict.differences == []
        assert (verdict.captures, verdict.guard_failures) == (1, [])
