"""The calls of modules, captured in place: equal to eager, wherever the module is called."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from functionalize.integrations.captured_calls import CapturedCalls, captured
from tests.ranks import run_on_ranks

CALLS = 12


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 2)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.inner(x)))


def batch(i: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(i))


def ordinary(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    return loss.detach()


def in_parts(model: nn.Module, x: Tensor) -> Tensor:
    loss = model.head(model.inner(x).tanh()).square().mean()
    loss.backward()
    return loss.detach()


def two_forwards(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).square().mean() - model(x.flip(0) * 2).mean()
    loss.backward()
    return loss.detach()


def no_backward(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        model(x)
    model(x)  # dropped
    return ordinary(model, x)


def trained(
    capture: Callable[[nn.Module], Any] | None,
    loss_of: Callable[[nn.Module, Tensor], Tensor],
    prepare: Callable[[nn.Module], Any] = lambda model: None,
) -> tuple[list[Tensor], Any]:
    """Losses and gradients of each call, and what captures."""
    model = Outer()
    prepare(model)
    found = capture(model) if capture is not None else None
    seen = []
    for i in range(CALLS):
        seen.append(loss_of(model, batch(i)))
        for p in model.parameters():
            assert p.grad is not None
            local = getattr(p.grad, "to_local", lambda p=p: p.grad)()
            seen.append(local.clone())
            p.grad = None
    return seen, found


def same_as_eager(
    capture: Callable[[nn.Module], CapturedCalls],
    loss_of: Callable[[nn.Module, Tensor], Tensor],
    prepare: Callable[[nn.Module], Any] = lambda model: None,
) -> CapturedCalls:
    (eager, _), (ours, found) = trained(None, loss_of, prepare), trained(capture, loss_of, prepare)
    assert all(map(torch.equal, eager, ours)), found.explain()
    return found


def whole(model: nn.Module) -> CapturedCalls:
    return CapturedCalls([model])


def with_children(model: nn.Module) -> CapturedCalls:
    return CapturedCalls([model, *model.children()])


@pytest.mark.parametrize("capture", [whole, with_children])
def test_a_module_is_captured_where_it_is_called(capture: Callable[..., CapturedCalls]):
    found = same_as_eager(capture, ordinary)
    assert found.calls[0].step.stats.backwards >= CALLS - 7, found.explain()
    replays = found.calls[0].step.stats.replays
    assert found.explain().splitlines()[:2] == [
        f"boundary: calls of `Outer`, forward with hooks, and their backward: {replays} of {CALLS} calls replayed",
        "eager around it: loss, clipping, optimizer, scheduler",
    ]


def test_a_module_inside_a_captured_one_is_a_part_of_it():
    found = same_as_eager(with_children, ordinary)
    assert all(not call.step.stats.captures for call in found.calls[1:])


def test_modules_that_are_called_by_themselves_are_captured_each():
    found = same_as_eager(with_children, in_parts)
    assert not found.calls[0].step.stats.captures
    assert all(call.step.stats.backwards >= CALLS - 7 for call in found.calls[1:]), found.explain()


def test_forwards_without_a_backward_do_not_count_as_pending():
    found = same_as_eager(whole, no_backward)
    assert found.calls[0].step.stats.backwards, found.explain()


def test_two_forwards_before_one_backward_stay_eager():
    found = same_as_eager(whole, two_forwards)
    assert not found.replays
    assert "calls of `Outer` run eagerly: it is called again before the backward" in found.explain()


def sharded(loss_of: Callable[[nn.Module, Tensor], Tensor]) -> tuple[int, str]:
    def prepare(model: nn.Module) -> None:
        fully_shard(model.inner)
        fully_shard(model)

    found = same_as_eager(whole, loss_of, prepare)
    return found.replays, found.explain()


def test_a_sharded_module_is_captured():
    for replays, text in run_on_ranks(sharded, ordinary, world=2):
        assert replays >= CALLS - 8, text


def test_two_forwards_of_a_sharded_module_stay_eager():
    """A captured forward would reduce the gradients of each forward by itself, which is an error."""
    for replays, text in run_on_ranks(sharded, two_forwards, world=2):
        assert not replays, text


def test_the_module_stays_what_it_is():
    model = Outer()
    before = dict(model.state_dict())
    found = CapturedCalls([model])
    assert captured(model) is found and captured(nn.Linear(1, 1)) is None
    assert type(model) is Outer and model.state_dict().keys() == before.keys()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert captured(other) is None
        assert torch.equal(other(batch(0)), model(batch(0)))
    found.remove()
    assert captured(model) is None and "_compiled_call_impl" not in vars(model)


def test_a_compiled_module_is_left_as_it_is():
    model = Outer()
    model.compile(backend="eager")
    compiled = model._compiled_call_impl
    found = CapturedCalls([model])
    assert model._compiled_call_impl is compiled and not found.calls
    assert "`Outer` are not captured: it is compiled (`compile()`)" in found.explain()


def test_a_module_is_captured_once():
    model = Outer()
    first, second = CapturedCalls([model]), CapturedCalls([model])
    assert captured(model) is first and not second.calls


def test_an_exception_is_that_of_the_module():
    model = Outer()
    CapturedCalls([model])
    for _ in range(CALLS):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model(torch.ones(3, 5))
        ordinary(model, batch(0))


def cleared_after_the_forward(
    rank: int, microbatches: int, captures: bool
) -> tuple[list[Tensor], tuple[int, ...]]:
    """Accumulation; gradients are cleared between a forward and its backward, as Lightning does."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 8), nn.Linear(8, 2))
    for block in model:
        if isinstance(block, nn.Linear):
            fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found = CapturedCalls([model], audit=4) if captures else None
    torch.manual_seed(rank)
    for i in range(24):
        loss = model(batch(i)).square().mean() / microbatches
        if i % microbatches == 0:
            optimizer.zero_grad()
        loss.backward()
        if i % microbatches == microbatches - 1:
            optimizer.step()
    tensors = [p.to_local().detach().clone() for p in model.parameters()]
    if found is None:
        return tensors, ()
    stats = found.calls[0].step.stats
    found.remove()
    return tensors, (stats.audits, stats.audit_failures, stats.captures, stats.reruns)


def both(microbatches: int) -> tuple[bool, tuple[int, ...]]:
    rank = dist.get_rank()
    eager, _ = cleared_after_the_forward(rank, microbatches, False)
    ours, counts = cleared_after_the_forward(rank, microbatches, True)
    return all(map(torch.equal, eager, ours)), counts


@pytest.mark.long
@pytest.mark.parametrize("microbatches", [2, 3])
def test_gradients_cleared_between_forward_and_backward_audit_alike(microbatches: int):
    """Of three microbatches the first recorded one is the second: the one after it has the same backward."""
    for same, (audits, failures, captures, reruns) in run_on_ranks(both, microbatches, world=2):
        assert same
        assert audits >= 4 and not failures and captures == 2 and not reruns
