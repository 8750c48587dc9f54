"""Hooks on the nodes that accumulate gradients, as Megatron and older DDP hang them, run as in eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import functionalize as fz
from functionalize._compat.autograd import accumulator_hooks, reference_count
from tests.ranks import run_on_ranks

pytestmark = pytest.mark.usefixtures("ample_allowance")

CALLS = 24


def node_of(leaf: Tensor) -> Any:
    return leaf.view_as(leaf).grad_fn.next_functions[0][0]


class Trainer:
    """A model whose gradients hooks may change. nodes: kept, so that their hooks stay."""

    def __init__(self, capture: Callable[[Any], Any]) -> None:
        torch.manual_seed(0)
        self.model, self.nodes, self.scale, self.runs = nn.Linear(3, 2), [], 1.0, 0
        self.step = capture(self.loss)

    def loss(self, x: Tensor) -> Tensor:
        self.model.zero_grad()
        loss = self.model(x).square().sum()
        loss.backward()
        return loss.detach()

    def hang(self, before: bool, hook: Callable[..., Any]) -> Any:
        self.nodes.append(node_of(self.model.weight))
        node = self.nodes[-1]
        return node.register_prehook(hook) if before else node.register_hook(hook)


def run(capture: Callable[[Any], Any], change: Callable[[Trainer, int], Any]) -> list[Any]:
    trainer, found = Trainer(capture), []
    for i in range(CALLS):
        change(trainer, i)
        loss = trainer.step(torch.full((2, 3), float(i % 5)))
        grads = [p.grad.tolist() for p in trainer.model.parameters()]
        found.append((loss.item(), grads, trainer.runs))
    if isinstance(trainer.step, fz.step.captured_step.CapturedStep):
        assert trainer.step.stats.replays + trainer.step.stats.audits > CALLS // 3
        assert trainer.step.stats.audit_failures == 0
    return found


def from_the_start(trainer: Trainer, i: int) -> None:
    if i == 0:
        trainer.hang(True, lambda grads: (grads[0] * 2,))


def later(trainer: Trainer, i: int) -> None:
    if i == 8:
        trainer.hang(True, lambda grads: (grads[0] * 2,))


def later_and_removed(trainer: Trainer, i: int) -> None:
    if i == 6:
        trainer.handle = trainer.hang(True, lambda grads: (grads[0] * 2,))
    if i == 14:
        trainer.handle.remove()


def by_a_schedule(trainer: Trainer, i: int) -> None:
    if i == 0:
        trainer.hang(True, lambda grads: (grads[0] * trainer.scale,))
    trainer.scale = 1.0 + i // 6


def counted(trainer: Trainer, i: int) -> None:
    def count(*grads: Any) -> None:
        trainer.runs += 1

    if i == 5:
        trainer.hang(False, count)


def of_an_edge(trainer: Trainer, i: int) -> None:
    if i == 8:
        node = torch.autograd.graph.get_gradient_edge(trainer.model.bias).node
        trainer.nodes.append(node)
        node.register_prehook(lambda grads: (grads[0] + 1,))


def gone_with_its_node(trainer: Trainer, i: int) -> None:
    if i == 8:  # nobody keeps the node: eager drops the hook, too
        node_of(trainer.model.weight).register_prehook(lambda grads: (grads[0] * 2,))


def on_another_node(trainer: Trainer, i: int) -> None:
    """As many hooks as before: only what they do differs."""
    if i in (0, 8):
        factor = 2.0 + i
        trainer.nodes.clear()
        trainer.hang(True, lambda grads: (grads[0] * factor,))


CHANGES = [
    on_another_node,
    from_the_start,
    later,
    later_and_removed,
    by_a_schedule,
    counted,
    of_an_edge,
    gone_with_its_node,
]


@pytest.mark.parametrize("audit", [False, "auto"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_as_in_eager(change: Callable[[Trainer, int], Any], audit: Any) -> None:
    eager = run(lambda step: step, change)
    assert run(lambda step: fz.capture(step, audit=audit), change) == eager


def test_hooks_are_listed_and_nothing_is_left_behind() -> None:
    leaf = torch.ones(2, requires_grad=True)
    assert accumulator_hooks(leaf) == [] and reference_count(leaf) == 1
    node, before, after = node_of(leaf), lambda grads: None, lambda *grads: None
    node.register_prehook(before)
    node.register_hook(after)
    assert accumulator_hooks(leaf) == [before, after]
    assert torch.is_grad_enabled()
    with torch.no_grad():
        assert accumulator_hooks(leaf) == [before, after]
    (leaf * 2).sum().backward()
    assert leaf.grad is not None and leaf.grad.tolist() == [2.0, 2.0]


def main_gradients() -> tuple[list[Any], int]:
    """Megatron's idiom on a plain model beside FSDP2's: the hook adds the gradient to a buffer, and drops it."""

    def trained(capture: Callable[[Any], Any]) -> tuple[list[Any], Any]:
        torch.manual_seed(0)
        head, body = nn.Linear(4, 4), nn.Linear(4, 4)
        fully_shard(body)
        sums = [torch.zeros_like(p) for p in head.parameters()]
        nodes = [node_of(p) for p in head.parameters()]
        for node, parameter, total in zip(nodes, head.parameters(), sums, strict=True):

            def add(*_: Any, p: Tensor = parameter, total: Tensor = total) -> None:
                total.add_(p.grad)
                p.grad = None

            node.register_hook(add)
        optimizer = torch.optim.SGD(body.parameters(), 0.1)

        def step(x: Tensor) -> Tensor:
            loss = head(body(x)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        captured, found = capture(step), []
        for i in range(12):
            loss = captured(torch.full((2, 4), float(i % 3)))
            found.append((loss.item(), [s.tolist() for s in sums], head.weight.grad is None))
        return found, captured

    eager, _ = trained(lambda step: step)
    found, captured = trained(fz.capture)
    assert found == eager
    return found, captured.stats.replays


def test_main_gradients_beside_fsdp2_on_ranks() -> None:
    for _, replays in run_on_ranks(main_gradients, world=2):
        assert replays >= 6
