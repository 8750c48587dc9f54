"""Steps with a backward, for tests of provenance: checkpoints, `autograd.Function`s, views, hooks, random graphs."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Squared(torch.autograd.Function):
    """Ops in its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x * x).cos()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x


class Doubled(torch.autograd.Function):
    """No op in its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


doubled = Doubled.apply  # as modules keep it: found before any recording


class Nested(torch.autograd.Function):
    """A `Function` in the forward and in the backward of another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            out = Squared.apply(inner).exp()
        ctx.inner, ctx.out = inner, out
        return out.detach() * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return torch.autograd.grad(ctx.out, ctx.inner, grad)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))


def x() -> Tensor:
    return torch.randn(2, 3, requires_grad=True)


def plain() -> None:
    model()(x()).square().mean().backward()


def checkpointed() -> None:
    checkpoint(model(), x(), use_reentrant=False).square().mean().backward()


def checkpointed_reentrant() -> None:
    checkpoint(model(), x(), use_reentrant=True).square().mean().backward()


def functions() -> None:
    y = Squared.apply(model()(x()))
    z = doubled(y)
    c = x().detach().cos()  # makes no node, though the counter has moved
    (z * c).sum().backward()


def nested_functions() -> None:
    Nested.apply(model()(x())).sum().backward()


def written_views() -> None:
    y = x() * 2
    v = y[0]
    v.mul_(3)
    w = v * v
    w[1].copy_(y[1, 1])
    with torch.no_grad():
        y.detach().cos()
    (y.sum() + w.sum()).backward()


def stale_views() -> None:
    y = x() * 2
    first, second = y[0], y[1]
    first.mul_(3)
    (second * 2 + first).sum().backward()


def twice() -> None:
    a = x()
    (grad,) = torch.autograd.grad(a.sin().square().sum(), a, create_graph=True)
    grad.pow(2).sum().backward()


def hooks() -> None:
    net, a = model(), x()
    y = net(a)
    y.register_hook(lambda g: g * 2)
    y.grad_fn.register_hook(lambda gi, go: tuple(g * 3 for g in gi if g is not None) and None)
    y.square().sum().backward()


CASES = [
    plain,
    checkpointed,
    checkpointed_reentrant,
    functions,
    nested_functions,
    written_views,
    stale_views,
    twice,
    hooks,
]


def root_to_no_input() -> None:
    a, b = x(), x()
    torch.autograd.backward([a.sin().sum(), b.cos().sum()], inputs=[b])


def one_root_to_no_input() -> None:
    torch.autograd.grad(x().sin().sum(), x(), allow_unused=True)


def random_graph(seed: int) -> Callable[[], None]:
    """A step over a random graph: some of its leaves are used several times, some backwards are of inputs alone."""

    def step() -> None:
        draw = random.Random(seed)
        torch.manual_seed(seed)
        leaves = [torch.randn(2, 3, requires_grad=True) for _ in range(draw.randint(1, 5))]
        values = list(leaves)
        for _ in range(draw.randint(3, 14)):
            a, b = draw.choice(values), draw.choice(values)
            values.append(
                draw.choice(
                    [
                        lambda a=a, b=b: a * b,
                        lambda a=a, b=b: a + b,
                        lambda a=a, b=b: a.sin() - b,
                        lambda a=a, b=b: torch.cat([a[:1], b[1:]]),
                        lambda a=a, b=b: doubled(a),
                        lambda a=a, b=b: a.t().t(),
                    ]
                )()
            )
        roots = [v.sum() for v in draw.sample(values, min(len(values), draw.randint(1, 3)))]
        how = draw.randint(0, 2)
        if how == 0:
            torch.autograd.backward(roots)
        elif how == 1:
            torch.autograd.backward(roots, inputs=draw.sample(leaves, 1))
        else:
            inner = draw.choice([v for v in values if v.requires_grad])
            torch.autograd.grad(roots, [inner], allow_unused=True)

    step.__name__ = f"random_{seed}"
    return step
