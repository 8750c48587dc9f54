"""Random graphs with random hooks, bit for bit as in eager: `trace_backward`, captured steps, captured forwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import functionalize as fz
from tests.step_backward.runs import same

pytestmark = pytest.mark.long

UNARY = (
    torch.sin,
    torch.tanh,
    lambda t: t.t(),
    lambda t: t * 2,
    lambda t: t.clone().mul_(3),
    lambda t: t[:1].expand(2, 2),
)
BINARY = (torch.add, torch.mul, torch.matmul, lambda a, b: torch.cat([a, b])[1:3])
HOOKS = ("none", "tensor", "before", "after", "retain", "checkpoint")
places = st.integers(0, 7)
ops = st.lists(st.tuples(places, places, places, st.sampled_from(HOOKS)), min_size=1, max_size=8)
of_leaves = st.lists(st.sampled_from(("none", "tensor", "accumulated")), min_size=2, max_size=2)


def built(leaves: list[Tensor], nodes: Any) -> tuple[Tensor, list[Tensor]]:
    """A loss over a random graph, and the tensors that retain their gradients."""
    values, retained = list(leaves), []
    for op, a, b, hook in nodes:
        x, y = values[a % len(values)], values[b % len(values)]
        fn = UNARY[op // 2 % len(UNARY)] if op % 2 else None
        inputs = (x,) if fn is not None else (x, y)
        call: Any = fn or BINARY[op // 2 % len(BINARY)]
        again = hook == "checkpoint"
        value = checkpoint(call, *inputs, use_reentrant=False) if again else call(*inputs)
        if hook == "tensor":
            value.register_hook(lambda g: g * 1.5)
        elif hook == "before":
            value.grad_fn.register_prehook(
                lambda gs: tuple(g if g is None else g + 0.1 for g in gs)
            )
        elif hook == "after":
            value.grad_fn.register_hook(
                lambda of, _: tuple(g if g is None else g.cos() for g in of)
            )
        elif hook == "retain":
            value.retain_grad()
            retained.append(value)
        values.append(value)
    return sum(v.square().mean() for v in values[-2:]), retained


def leaves_with(hooks: list[str]) -> list[Tensor]:
    torch.manual_seed(0)
    leaves = [torch.randn(2, 2, requires_grad=True) for _ in hooks]
    for leaf, hook in zip(leaves, hooks, strict=True):
        if hook == "tensor":
            leaf.register_hook(lambda g: g.clamp(-1, 1))
        elif hook == "accumulated":
            leaf.register_post_accumulate_grad_hook(lambda p: (p.grad.mul_(0.5), None)[1])
    return leaves


def grads(tensors: list[Tensor]) -> list[Any]:
    return [None if t.grad is None else t.grad.clone() for t in tensors]


@given(ops, of_leaves)
def test_as_eager(nodes: Any, hooks: list[str]) -> None:
    eager, ours = leaves_with(hooks), leaves_with(hooks)
    for _ in range(2):
        expected, kept = built(eager, nodes)
        loss, retained = built(ours, nodes)
        expected.backward()
        before = grads(ours)
        program = fz.functions.trace_backward(loss)
        assert same(grads(ours), before)
        assert grads(retained) == [None] * len(retained)
        program()
        assert same(grads([*ours, *retained]), grads([*eager, *kept]))


@given(ops, of_leaves)
def test_inside_a_captured_step(nodes: Any, hooks: list[str]) -> None:
    eager, ours = leaves_with(hooks), leaves_with(hooks)

    def step(leaves: list[Tensor]) -> list[Any]:
        loss, retained = built(leaves, nodes)
        loss.backward()
        return grads([*leaves, *retained])

    captured = fz.capture(lambda: step(ours))
    for _ in range(4):
        assert same(captured(), step(eager))
        assert same(grads(ours), grads(eager))
    assert captured.stats.replays >= 2


@given(ops, of_leaves)
def test_through_a_captured_forward(nodes: Any, hooks: list[str]) -> None:
    eager, ours = leaves_with(hooks), leaves_with(hooks)
    forward = fz.capture(lambda: built(ours, nodes)[0], backward=True)
    for _ in range(4):
        built(eager, nodes)[0].backward()
        forward().backward()
        assert same(grads(ours), grads(eager))
    assert forward.stats.backwards >= 2
