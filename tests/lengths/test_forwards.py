"""`capture(forward, backward=True, dynamic=True)`: a forward and its backward at sizes that were not recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import functionalize as fz
from tests.fsdp.twins import differences, state_of
from tests.lengths.capturing import NEVER, capture
from tests.lengths.sized_calls import linear, plain_loss
from tests.ranks import run_on_ranks
from tests.step.twins import same_state
from tests.steps import tripled_in_backward

Forward = Callable[[nn.Module, Tensor], Any]
LEARNED = (8, 12, 20, 33, 64)
NEW = (37, 16, 9, 50, 22, 41, 14, 60, 10, 48)


def trained(forward: Forward, sizes: Sequence[int], microbatches: int = 1, **options: Any) -> Any:
    """A captured forward and its eager twin: equal outputs, gradients and random numbers after every backward."""
    models = [linear(), linear()]
    options = options if "every" in options else {"dynamic": True, **options}
    captured = capture(lambda x: forward(models[0], x), backward=True, audit=False, **options)
    forwards = [captured, lambda x: forward(models[1], x)]
    optimizers = [torch.optim.AdamW(model.parameters(), fused=True) for model in models]
    for i, size in enumerate(sizes):
        x = torch.randn(2, size, 8, generator=torch.Generator().manual_seed(i))
        found = []
        for fn, model, optimizer in zip(forwards, models, optimizers, strict=True):
            torch.manual_seed(i)
            inner = x.clone().requires_grad_()
            out = fn(inner)
            # Of a forward that returns more than a loss, the tangents vary in size, too.
            (out if out.dim() == 0 else (out * 0.3).square().sum()).backward()
            grads = [inner.grad, *(p.grad for p in model.parameters())]
            found.append([out.detach(), *(g.clone() for g in grads), torch.get_rng_state()])
            if i % microbatches == microbatches - 1:
                optimizer.step()
                optimizer.zero_grad()
        assert all(map(torch.equal, *found)), (i, size)
        assert same_state(*models), (i, size)
    return captured


def logits(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    return out


@pytest.mark.parametrize("passes", ["", "default"])
@pytest.mark.parametrize("forward", [plain_loss, logits])
def test_new_lengths_are_replayed(forward: Forward, passes: str) -> None:
    stats = trained(forward, [*LEARNED, *NEW], passes=passes).stats
    assert (stats.captures, stats.mispredictions, stats.reruns) == (3, 0, 0)
    assert stats.instances >= 6 and stats.backwards == stats.replays >= 6


def test_microbatches() -> None:
    """The first one and those that add to gradients begin in other states: three recordings of each."""
    stats = trained(plain_loss, [n for n in (*LEARNED, *NEW) for _ in range(2)], 2).stats
    assert (stats.captures, stats.mispredictions, stats.reruns) == (6, 0, 0)
    assert stats.instances >= 12


# -- where a size decides something ----------------------------------------------------------------


ODD = 41  # lies between others


def branches(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    return out.square().mean() if x.shape[1] != ODD else out.abs().mean()


Branches = tripled_in_backward(lambda grad: grad.size(1) == ODD)


def branches_in_backward(model: nn.Module, x: Tensor) -> Tensor:
    return plain_loss(nn.Identity(), Branches.apply(model(x)))


def has_a_hook(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    out.register_hook(lambda grad: grad * (2 if grad.shape[1] != ODD else 3))
    return plain_loss(nn.Identity(), out)


@pytest.mark.parametrize("forward", [branches, branches_in_backward, has_a_hook])
def test_what_decides_by_size(forward: Forward) -> None:
    """A hook, and the `backward` of a function, run only when autograd goes backward."""
    stats = trained(forward, [*LEARNED, *NEW, 28, 30], every=NEVER).stats
    assert stats.instances >= 6 and stats.reruns == 0 < stats.mispredictions, stats


class KeepsASize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.rows = x.shape[1]
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * (2 if ctx.rows != ODD else 3)


def keeps_a_size(model: nn.Module, x: Tensor) -> Tensor:
    return plain_loss(nn.Identity(), KeepsASize.apply(model(x)))


def test_a_size_that_is_left_for_the_backward() -> None:
    """It is plain there, so every first call is compared."""
    stats = trained(keeps_a_size, [*LEARNED, *NEW]).stats
    assert stats.instances == 0 and stats.predictions >= 3, stats


# -- backwards that were not recorded --------------------------------------------------------------


def test_another_backward_ends_predictions() -> None:
    """Programs for other sizes have the recorded backward only, and ranks run their forwards again together."""
    models = [linear(), linear()]
    captured = fz.capture(lambda x: logits(models[0], x), backward=True, dynamic=True, audit=False)
    for i, size in enumerate((*LEARNED, *NEW, *NEW)):
        x, found = torch.randn(2, size, 8), []
        for fn in (captured, models[1]):
            torch.manual_seed(i)
            inner = x.clone().requires_grad_()
            inputs = (inner,) if i == 12 else (inner, *models[fn is not captured].parameters())
            found.append(torch.autograd.grad(fn(inner).square().sum(), inputs))
        assert all(map(torch.equal, *found)), (i, size)
    assert captured.stats.instances >= 4 and captured.stats.reruns == 1
    assert any("not predicted any more" in each for each in captured.stats.guard_failures)
    assert all(not cached.is_unseen for cached in captured.core.cache)


def test_a_parameter_that_is_replaced_by_a_parametrization() -> None:
    models = [linear(), linear()]
    captured = fz.capture(lambda x: plain_loss(models[0], x), backward=True, dynamic=True)
    for i, size in enumerate(LEARNED):
        found = []
        for fn, model in zip((captured, lambda x: plain_loss(models[1], x)), models, strict=True):
            torch.manual_seed(i)
            if i == 3:
                nn.utils.parametrize.register_parametrization(model[0], "weight", nn.Tanh())
            fn(torch.full((2, size, 8), 0.5)).backward()
            found.append([p.grad for p in model.parameters()])
        assert all(map(torch.equal, *found)), (i, size)


def fails(*args: Any) -> Any:
    raise RuntimeError("broken")


def test_a_backward_that_fails_runs_eagerly() -> None:
    """Of a program that no call was compared with."""
    captured = trained(plain_loss, [*LEARNED, *NEW])
    unseen = next(each for each in captured.core.cache if each.is_unseen)
    unseen.backwards[0].program._run = fails
    x, found = torch.randn(captured.core.cache.key_of(unseen)[2][0]), []
    for fn in (captured, captured.callable):
        torch.manual_seed(0)
        inner = x.clone().requires_grad_()
        fn(inner).backward()
        found.append(inner.grad)
    assert torch.equal(*found) and captured.stats.reruns == 1
    assert any("at a size that was not compared fails" in e for e in captured.stats.guard_failures)


# -- ranks -----------------------------------------------------------------------------------------


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        hidden = F.dropout(self.first(x).masked_fill(mask[..., None], 0), 0.1, self.training)
        return F.cross_entropy(self.second(hidden.cos()).flatten(0, 1), mask.flatten().long())


def build() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Masked()
    for part in (*model.children(), model):
        fully_shard(part)
    return model, torch.optim.AdamW(model.parameters(), fused=True)


def on_ranks(several: Sequence[int]) -> tuple[list[str], Any]:
    """Lengths that differ between ranks; two microbatches, the first of which does not reduce gradients."""
    twins = [build(), build()]
    captured = fz.capture(
        lambda *args: twins[0][0](*args), backward=True, dynamic=True, audit=False
    )
    found: list[str] = []
    for i in range(2 * len(several)):
        length = several[i // 2] + 3 * dist.get_rank() + i % 2
        x = torch.randn(2, length, 8)
        mask = torch.arange(length) >= torch.tensor([[length], [length - 2]])
        states = []
        for fn, (model, optimizer) in zip((captured, twins[1][0]), twins, strict=True):
            torch.manual_seed(i)
            model.set_requires_gradient_sync(i % 2 == 1)
            loss = fn(x, mask)
            loss.backward()
            states.append({"loss": loss.detach(), "drawn": torch.get_rng_state()})
            if i % 2:
                optimizer.step()
            states[-1] |= state_of(model, optimizer)
            if i % 2:
                optimizer.zero_grad()
        found += differences(i, *states)
    return found, captured.stats


def test_lengths_of_each_rank() -> None:
    for found, stats in run_on_ranks(on_ranks, (9, 9, 60, 31, 20, 42, 14, 35, 51), world=2):
        assert found == []
        assert stats.mispredictions == stats.reruns == 0
        assert stats.captures <= 7 and stats.predictions + stats.instances >= 7, stats
