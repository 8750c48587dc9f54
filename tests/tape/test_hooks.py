"""The kind of the hook in which an op ran, and the line in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.checkpoint import checkpoint

import functionalize as fz
from tests.tape.graphs import Squared

aten = torch.ops.aten
Hooks = set[tuple[str, str]]


def hooks_of(loss_of: Callable[[Tensor], Tensor]) -> Hooks:
    """(kind, code of the line) of all ops in hooks, of a captured step."""

    def train(x: Tensor) -> Any:
        x = x.detach().requires_grad_()
        loss_of(x).backward()
        return x.grad

    step = fz.capture(train)
    for _ in range(3):
        step(torch.ones(2, 3))
    assert step.program is not None
    step.program.describe()
    metas = [n.meta for n in step.program.graph.nodes]
    return {
        (kind, line.rpartition(": ")[2]) for kind, line in (m["hook"] for m in metas if "hook" in m)
    }


def on_tensor(x: Tensor) -> Tensor:
    def hook(g: Tensor) -> Tensor:
        return g.cos()

    y = x.sin()
    y.register_hook(hook)
    return y.sum()


def on_node(x: Tensor) -> Tensor:
    def before(grads: Any) -> Any:
        return (grads[0].cos(),)

    y = x.sin()
    y.grad_fn.register_prehook(before)
    return y.sum()


def after_node(x: Tensor) -> Tensor:
    def after(of_inputs: Any, grads: Any) -> Any:
        return (of_inputs[0].cos(),)

    y = x.sin()
    y.grad_fn.register_hook(after)
    return y.sum()


class Method:
    def hook(self, g: Tensor) -> Tensor:
        return g.cos()


def bound(x: Tensor) -> Tensor:
    y = x.sin()
    y.register_hook(Method().hook)
    return y.sum()


def accumulated(x: Tensor) -> Tensor:
    def hook(leaf: Tensor) -> None:
        leaf.grad = leaf.grad.cos()

    x.register_post_accumulate_grad_hook(hook)
    return x.sin().sum()


def at_the_end(x: Tensor) -> Tensor:
    def callback() -> None:
        x.grad = x.grad.cos()

    def hook(g: Tensor) -> None:
        Variable._execution_engine.queue_callback(callback)

    y = x.sin()
    y.register_hook(hook)
    return y.sum()


def saved(x: Tensor) -> Tensor:
    def pack(t: Tensor) -> Tensor:
        return t.exp()

    def unpack(t: Tensor) -> Tensor:
        return t.log()

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return x.sin().sum()


def no_hooks(x: Tensor) -> Tensor:
    return checkpoint(Squared.apply, x, use_reentrant=False).sum()


FOUND: list[tuple[Callable[[Tensor], Tensor], Hooks]] = [
    (on_tensor, {("tensor pre-hook", "return g.cos()")}),
    (bound, {("tensor pre-hook", "return g.cos()")}),
    (on_node, {("node pre-hook", "return (grads[0].cos(),)")}),
    (after_node, {("node post-hook", "return (of_inputs[0].cos(),)")}),
    (accumulated, {("post-accumulate-grad hook", "leaf.grad = leaf.grad.cos()")}),
    (at_the_end, {("queue_callback", "x.grad = x.grad.cos()")}),
    (saved, {("saved-tensor pack", "return t.exp()"), ("saved-tensor unpack", "return t.log()")}),
    (no_hooks, set()),
]


@pytest.mark.parametrize(
    ("loss_of", "found"), FOUND, ids=lambda each: getattr(each, "__name__", "")
)
def test_the_kind_of_a_hook_and_its_line(loss_of: Callable[[Tensor], Tensor], found: Hooks) -> None:
    assert hooks_of(loss_of) == found


def test_a_backward_hook_of_a_module() -> None:
    def hook(module: nn.Module, of_inputs: Any, grads: Any) -> Any:
        return (of_inputs[0].cos(),)

    model = nn.Tanh()
    model.register_full_backward_hook(hook)
    assert ("node post-hook", "return (of_inputs[0].cos(),)") in hooks_of(lambda x: model(x).sum())
