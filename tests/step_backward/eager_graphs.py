"""Graphs that eager builds, with custom Functions, recomputation, views and writes: cases as in `hooked_graphs.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from tests.step_backward.runs import Run


class Cube(torch.autograd.Function):
    generate_vmap_rule = False

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x * x * g

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> Any:
        return Cube.apply(x), in_dims[0]


class Nested(torch.autograd.Function):
    """Its backward goes backward through a graph of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            again = x.detach().requires_grad_()
            (found,) = torch.autograd.grad(again.sin(), again, g)
        return found


def plain(m: Any, x: Tensor, run: Run) -> Any:
    run.backward(m(x).square().mean())


def given_gradient(m: Any, x: Tensor, run: Run) -> Any:
    run.backward(m(x), torch.linspace(0, 1, 15).view(5, 3))


def several_roots(m: Any, x: Tensor, run: Run) -> Any:
    h = m[0](x)
    run.backward([h.square().mean(), m[2](h.tanh()).sum()])


def leaf_as_root(m: Any, x: Tensor, run: Run) -> Any:
    leaf = x[0, 0].clone().requires_grad_()
    leaf.register_hook(lambda g: g * 3)
    run.backward(leaf)
    return leaf.grad


def custom_function(m: Any, x: Tensor, run: Run) -> Any:
    run.backward(Cube.apply(m(x)).mean())


def custom_function_vmap(m: Any, x: Tensor, run: Run) -> Any:
    run.backward(torch.func.vmap(Cube.apply)(m(x)).mean())


def nested_function(m: Any, x: Tensor, run: Run) -> Any:
    run.backward(Nested.apply(m(x)).mean())


def second_derivative(m: Any, x: Tensor, run: Run) -> Any:
    x = x.detach().requires_grad_()
    y = m(x).tanh().sum()
    (g,) = torch.autograd.grad(y, x, create_graph=True)
    penalty = (g.norm(dim=1) - 1).square().mean()
    run.backward(y * 0.1 + penalty)
    return x.grad


def functional_gradient(m: Any, x: Tensor, run: Run) -> Any:
    found = torch.func.grad(lambda w: (x @ w.t()).tanh().square().mean())(m[0].weight)
    run.backward(m(x).square().mean())
    return found.detach()


def hessian(m: Any, x: Tensor, run: Run) -> Any:
    h = m[1](m[0](x)).detach()
    found = torch.func.hessian(lambda w: (h @ w.t()).tanh().square().mean())(m[2].weight.detach())
    run.backward(m(x).square().mean())
    return found


def forward_mode(m: Any, x: Tensor, run: Run) -> Any:
    with forward_ad.dual_level():
        out = m(forward_ad.make_dual(x, torch.ones_like(x)))
        tangent = forward_ad.unpack_dual(out).tangent.detach()
    run.backward(m(x).square().mean())
    return tangent


def accumulated_twice(m: Any, x: Tensor, run: Run) -> Any:
    loss = m(x).square().mean()
    run.backward(loss, retain_graph=True)
    run.backward(loss)


def frozen(m: Any, x: Tensor, run: Run) -> Any:
    m[0].requires_grad_(False)
    run.backward(m(x).square().mean())


def only_the_input(m: Any, x: Tensor, run: Run) -> Any:
    x = x.detach().requires_grad_()
    return run.grad(m(x).square().mean(), x), x.grad


def only_some_inputs(m: Any, x: Tensor, run: Run) -> Any:
    x = x.detach().requires_grad_()
    m[0].weight.register_hook(lambda g: g * 2)
    run.backward(m(x).square().mean(), inputs=[x, m[0].weight])
    return x.grad


def unused_input(m: Any, x: Tensor, run: Run) -> Any:
    other = torch.ones(2, requires_grad=True)
    return run.grad(m(x).square().mean(), [m[0].weight, other], allow_unused=True)


def anomaly(m: Any, x: Tensor, run: Run) -> Any:
    with torch.autograd.detect_anomaly(check_nan=False):
        run.backward(m(x).square().mean())


def anomaly_checked(m: Any, x: Tensor, run: Run) -> Any:
    with torch.autograd.detect_anomaly(check_nan=True):
        run.backward(m(x).square().mean())


def checkpointed(m: Any, x: Tensor, run: Run) -> Any:
    run.backward(checkpoint(m, x, use_reentrant=False).square().mean())


def checkpointed_reentrant(m: Any, x: Tensor, run: Run) -> Any:
    x = x.detach().requires_grad_()
    run.backward(checkpoint(m, x, use_reentrant=True).square().mean())
    return x.grad


def checkpointed_dropout(m: Any, x: Tensor, run: Run) -> Any:
    drop = nn.Sequential(m, nn.Dropout(0.5), nn.Linear(3, 3, dtype=x.dtype))
    run.backward(checkpoint(drop, x, use_reentrant=False).square().mean())
    return [p.grad for p in drop.parameters()]


def checkpointed_norm(m: Any, x: Tensor, run: Run) -> Any:
    """The recomputation writes the running statistics again."""
    norm = nn.BatchNorm1d(3)
    run.backward(checkpoint(nn.Sequential(m, norm), x, use_reentrant=False).square().mean())
    return norm.running_mean, norm.running_var, norm.num_batches_tracked


def shared_weight(m: Any, x: Tensor, run: Run) -> Any:
    h = m[2](m[1](m[0](x)))
    run.backward(m[2](m[1](m[0](h))).square().mean())


def views_and_writes(m: Any, x: Tensor, run: Run) -> Any:
    h = m[0](x)
    h[:, 1:3].mul_(2)
    h[0].zero_()
    run.backward(m[2](h.tanh()).t().square().mean())


def sparse_free_index(m: Any, x: Tensor, run: Run) -> Any:
    table = nn.Embedding(7, 3)
    run.backward(m(table(torch.tensor([1, 2, 1, 5]))).square().mean())
    return table.weight.grad


def of_complex(m: Any, x: Tensor, run: Run) -> Any:
    z = torch.fft.rfft(m(x))
    run.backward((z * z.conj()).real.sum())


PLAIN: Sequence[Callable[[Any, Tensor, Run], Any]] = (
    plain,
    given_gradient,
    several_roots,
    leaf_as_root,
    custom_function,
    custom_function_vmap,
    nested_function,
    second_derivative,
    functional_gradient,
    hessian,
    forward_mode,
    accumulated_twice,
    frozen,
    only_the_input,
    only_some_inputs,
    unused_input,
    anomaly,
    anomaly_checked,
    checkpointed,
    checkpointed_reentrant,
    checkpointed_dropout,
    checkpointed_norm,
    shared_weight,
    views_and_writes,
    sparse_free_index,
    of_complex,
)
