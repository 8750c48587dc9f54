"""What `fully_shard` has had since torch 2.15: models, steps, and their rows of `features.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy as Policy
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

from tests.fsdp import steps
from tests.fsdp.extensions import GatheredInBFloat16, GatheredInInt8, gathered_as
from tests.fsdp.feature import Feature
from tests.fsdp.models import WIDTH, Block, Build, Built, Net, wrapped

SYNC, REDUCE = "set_requires_gradient_sync", "set_requires_all_reduce"


def one_by_one(parameters: Any) -> Optimizer:
    """An optimizer that takes gradients of another dtype than the parameter's."""
    return torch.optim.SGD(parameters, lr=0.1, foreach=False)


# -- dtypes of gradients ---------------------------------------------------------------------------


def with_grad_dtype(
    dtype: torch.dtype | None,
    wanted: Callable[[nn.Parameter], bool] = lambda p: True,
    make: Callable[[], Net] = Net,
) -> Callable[[], Net]:
    """A model of which some parameters accumulate gradients in another dtype than their own."""

    def made() -> Net:
        model = make()
        for p in filter(wanted, model.parameters()):
            p.grad_dtype = dtype
        return model

    return made


def is_bias(p: nn.Parameter) -> bool:
    return p.dim() == 1


def in_bfloat16() -> Net:
    return Net().bfloat16()


class NormedBlock(Block):
    """A layer norm, which has a kernel for bfloat16 activations and float32 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(F.relu(self.a(self.norm(x))))


def norms_in_float32() -> Built:
    torch.manual_seed(0)
    model = Net()
    model.blocks = nn.ModuleList([NormedBlock(), NormedBlock()])
    norms = {id(p) for block in model.blocks for p in block.norm.parameters()}
    policy = Policy(
        param_dtype=torch.bfloat16,
        param_dtype_override_fn=lambda p: torch.float32 if id(p) in norms else None,
    )
    for module in (*model.blocks, model):
        fully_shard(module, mp_policy=policy)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


# -- gradients half reduced ------------------------------------------------------------------------


class Briefly(Block):
    """Leaves its second layer out while it is `brief`."""

    brief = False

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.a(x))
        return x + (h[:, :WIDTH] if self.brief else self.b(h))


def late_used() -> Net:
    model = Net()
    model.blocks[1] = Briefly()
    return model


def used_later(model: Any, optimizer: Optimizer) -> steps.Step:
    """A layer has its first gradient in the second microbatch, when others were half reduced."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        total = x.new_zeros(())
        for i, (a, b) in enumerate(zip(x.chunk(2), y.chunk(2), strict=True)):
            model.set_requires_all_reduce(i == 1)
            model.blocks[1].brief = i == 0
            loss = steps.loss_of(model, a, b)
            loss.backward()
            total += loss.detach()
        steps.finish(optimizer)
        return total

    return step


# -- finalisation by hand --------------------------------------------------------------------------


def by_hand(model: Any) -> None:
    model.set_manual_backward_finalization(True)


def finalizing(*setters: str, async_op: bool = False) -> Callable[[Any, Optimizer], steps.Step]:
    """`finalize_backward` after the backwards of two microbatches; setters as in `steps.accumulating`."""

    def make(model: Any, optimizer: Optimizer) -> steps.Step:
        def step(x: Tensor, y: Tensor) -> Tensor:
            parts = 2 if setters else 1
            for i, (a, b) in enumerate(zip(x.chunk(parts), y.chunk(parts), strict=True)):
                for setter in setters:
                    getattr(model, setter)(i == parts - 1)
                loss = steps.loss_of(model, a, b)
                loss.backward()
            handle = model.finalize_backward(async_op=async_op)
            if handle is not None:
                handle.wait()
            steps.finish(optimizer)
            return loss.detach()

        return step

    return make


# -- extensions ------------------------------------------------------------------------------------


class GatheredAndReleased(GatheredInInt8):
    """What was gathered is freed as soon as it is decompressed."""

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: Any) -> GatheredInBFloat16:
        return GatheredAndReleased(inner["_inner"])

    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> bool:
        return True


def keep_storage(model: Any) -> None:
    model.set_keep_unsharded_storage(True)


def _row(name: str, build: Build, make_step: Any = steps.plain, **options: Any) -> Feature:
    return Feature(name, build, make_step, since="2.15", **options)


ROWS: dict[str, Feature] = {
    "grad_dtype_of_some": _row(
        "`grad_dtype` of some parameters of a group",
        wrapped(make=with_grad_dtype(torch.bfloat16, is_bias), optimizer=one_by_one),
    ),
    "grad_dtype_wider": _row(
        "`grad_dtype` wider than the parameter",
        wrapped(make=with_grad_dtype(torch.float32, make=in_bfloat16), optimizer=one_by_one),
        batches=steps.in_bfloat16,
    ),
    "grad_dtype_none": _row(
        "`grad_dtype=None`",
        wrapped(
            make=with_grad_dtype(None),
            mp_policy=Policy(param_dtype=torch.bfloat16),
            optimizer=one_by_one,
        ),
    ),
    "grad_dtype_no_sync": _row(
        "`grad_dtype`, accumulated without reduction",
        wrapped(make=with_grad_dtype(torch.float32, make=in_bfloat16), optimizer=one_by_one),
        steps.accumulating(SYNC),
        batches=steps.in_bfloat16,
    ),
    "param_dtype_override": _row("`param_dtype_override_fn`: norms in float32", norms_in_float32),
    "late_partial_gradient": _row(
        "HSDP without the all-reduce, a layer used later",
        wrapped(2, 2, make=late_used),
        used_later,
        world=4,
    ),
    "keep_unsharded_storage": _row("`set_keep_unsharded_storage`", wrapped(then=keep_storage)),
    "finalize": _row("`finalize_backward()`", wrapped(then=by_hand), finalizing()),
    "finalize_async": _row(
        "`finalize_backward(async_op=True)`", wrapped(then=by_hand), finalizing(async_op=True)
    ),
    "finalize_no_sync": _row(
        "`finalize_backward()` after microbatches", wrapped(then=by_hand), finalizing(SYNC)
    ),
    "finalize_hsdp": _row(
        "`finalize_backward()` under HSDP", wrapped(2, 2, then=by_hand), finalizing(), world=4
    ),
    "gathered_and_released": _row(
        "an all-gather extension that releases what was gathered",
        gathered_as(GatheredAndReleased, None),
    ),
}
