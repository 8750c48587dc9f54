"""Graphs that eager builds, with every kind of hook: one function for each, run with either backward.

    def hook_order(model, x, run): ...; run.backward(loss); return what else is to be compared

`run` is `EAGER`, or `TRACED`: the same calls by `fz.trace_backward`, which asserts that the trace leaves every tensor
of the process, and the generator, as they were. A case is called several times, so gradients are accumulated, and
hooks that it registers on the model are there more than once.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.checkpoint import checkpoint

import functionalize as fz


@dataclass(frozen=True)
class Run:
    """How a case goes backward."""

    backward: Callable[..., None]
    grad: Callable[..., Sequence[Tensor]]


def everything() -> list[tuple[Tensor, Tensor, int, Tensor | None]]:
    """Every tensor of the process with its contents, its version and its gradient, as long as this is held."""
    found = [t for t in gc.get_objects() if type(t) in (Tensor, nn.Parameter)]
    with torch.no_grad():
        return [(t, bits(t), t._version, t.grad if has_grad(t) else None) for t in found]


def bits(t: Tensor) -> Tensor:
    return t.detach().resolve_conj().clone().reshape(-1).view(torch.uint8)


def has_grad(t: Tensor) -> bool:
    return t.is_leaf or t.retains_grad


def traced(*args: Any) -> Any:
    """`fz.trace_backward`, compared with having done nothing."""
    before, state = everything(), torch.get_rng_state()
    program = fz.trace_backward(*args)
    assert torch.equal(torch.get_rng_state(), state)
    for t, was, version, grad in before:
        assert torch.equal(bits(t), was)
        assert t._version == version
        assert (t.grad if has_grad(t) else None) is grad
    return program


def _backward(loss: Any, gradient: Any = None, retain_graph: bool = False) -> None:
    assert traced(loss, None, gradient)() is None


def _grad(loss: Any, inputs: Any, gradient: Any = None, retain_graph: bool = False) -> Any:
    return traced(loss, inputs, gradient)()


EAGER = Run(torch.autograd.backward, torch.autograd.grad)
TRACED = Run(_backward, _grad)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))


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


def hook_order(m: Any, x: Tensor, run: Run) -> Any:
    h = m[0](x)
    y = h.tanh()
    y.retain_grad()
    y.register_hook(lambda g: g * 2)
    y.grad_fn.register_prehook(lambda gs: (gs[0] + 1,))
    y.grad_fn.register_hook(lambda of_inputs, gs: (of_inputs[0] * 3 + gs[0].sum(),))
    h.register_hook(lambda g: g.clamp(-1, 1))
    run.backward(m[2](y).square().mean())
    return y.grad


def retained_after_write(m: Any, x: Tensor, run: Run) -> Any:
    y = m[0](x)
    y.retain_grad()
    z = y.mul_(2)
    z.register_hook(lambda g: g * 3)
    run.backward(m[2](z.tanh()).square().mean())
    return y.grad


def retained_twice(m: Any, x: Tensor, run: Run) -> Any:
    y = m[0](x)
    y.retain_grad()
    loss = m[2](y.tanh()).square().mean()
    run.backward(loss, retain_graph=True)
    run.backward(loss)
    return y.grad


def accumulated(m: Any, x: Tensor, run: Run) -> Any:
    m[0].weight.register_post_accumulate_grad_hook(lambda p: (p.grad.mul_(0.5), None)[1])
    m[0].weight.register_hook(lambda g: g + 1)
    run.backward(m(x).square().mean())


def optimizer_in_backward(m: Any, x: Tensor, run: Run) -> Any:
    def update(p: Tensor) -> None:
        with torch.no_grad():
            p.add_(p.grad, alpha=-0.1)
        p.grad = None

    handles = [p.register_post_accumulate_grad_hook(update) for p in m.parameters()]
    run.backward(m(x).square().mean())
    for handle in handles:
        handle.remove()
    return [p.detach().clone() for p in m.parameters()]


def saved_half(m: Any, x: Tensor, run: Run) -> Any:
    def pack(t: Tensor) -> Tensor:
        return (t * 0.5).to(torch.bfloat16)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t.float() * 2):
        loss = m(x).square().mean()
    run.backward(loss)


def saved_int8(m: Any, x: Tensor, run: Run) -> Any:
    def pack(t: Tensor) -> tuple[Tensor, Tensor]:
        scale = t.abs().amax() / 127 + 1e-9
        return (t / scale).round().to(torch.int8), scale

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda p: p[0].float() * p[1]):
        loss = m(x).square().mean()
    run.backward(loss)


def saved_on_cpu(m: Any, x: Tensor, run: Run) -> Any:
    with torch.autograd.graph.save_on_cpu():
        loss = m(x).square().mean()
    run.backward(loss)


def saved_hooks_disabled(m: Any, x: Tensor, run: Run) -> Any:
    with torch.autograd.graph.disable_saved_tensors_hooks("no"):
        loss = m(x).square().mean()
    run.backward(loss)


def custom_function(m: Any, x: Tensor, run: Run) -> Any:
    run.backward(Cube.apply(m(x)).mean())


def custom_function_vmap(m: Any, x: Tensor, run: Run) -> Any:
    run.backward(torch.func.vmap(Cube.apply)(m(x)).mean())


def nested_function(m: Any, x: Tensor, run: Run) -> Any:
    run.backward(Nested.apply(m(x)).mean())


def gradient_edges(m: Any, x: Tensor, run: Run) -> Any:
    h = m[0](x)
    edge = torch.autograd.graph.get_gradient_edge(h)
    loss = m[2](h.tanh()).square().mean()
    (of_h,) = run.grad(loss, [edge], retain_graph=True)
    end = torch.autograd.graph.get_gradient_edge(loss)
    (of_w,) = run.grad(end, [m[0].weight], torch.ones(()))
    return of_h, of_w


def zero_bubble(m: Any, x: Tensor, run: Run) -> Any:
    h = m[0](x)
    loss = m[2](h.tanh()).square().mean()
    (g,) = run.grad(loss, [torch.autograd.graph.get_gradient_edge(h)], retain_graph=True)
    run.backward(h, g)
    return g


def second_derivative(m: Any, x: Tensor, run: Run) -> Any:
    x = x.detach().requires_grad_()
    y = m(x).tanh().sum()
    (g,) = torch.autograd.grad(y, x, create_graph=True)
    penalty = (g.norm(dim=1) - 1).square().mean()
    run.backward(y * 0.1 + penalty)
    return x.grad


def frozen(m: Any, x: Tensor, run: Run) -> Any:
    m[0].requires_grad_(False)
    run.backward(m(x).square().mean())


def only_the_input(m: Any, x: Tensor, run: Run) -> Any:
    x = x.detach().requires_grad_()
    return run.grad(m(x).square().mean(), x), x.grad


def anomaly(m: Any, x: Tensor, run: Run) -> Any:
    with torch.autograd.detect_anomaly(check_nan=False):
        run.backward(m(x).square().mean())


def anomaly_checked(m: Any, x: Tensor, run: Run) -> Any:
    with torch.autograd.detect_anomaly(check_nan=True):
        run.backward(m(x).square().mean())


def multi_grad_hook(m: Any, x: Tensor, run: Run) -> Any:
    a = m[0](x)
    b = a.tanh()
    sums: list[Any] = []

    def hook(grads: Sequence[Any]) -> None:
        sums.append(sum(g.sum() for g in grads))

    handle = torch.autograd.graph.register_multi_grad_hook((a, b), hook)
    run.backward(m[2](b).square().mean())
    handle.remove()
    return sums


def accumulate_grad_hook(m: Any, x: Tensor, run: Run) -> Any:
    node = torch.autograd.graph.get_gradient_edge(m[0].weight).node
    node.register_prehook(lambda gs: (gs[0] * 2,))
    node.register_hook(lambda _, gs: None)
    run.backward(m(x).square().mean())


def current_node(m: Any, x: Tensor, run: Run) -> Any:
    y = m[0](x)
    y.register_hook(lambda g: g * float(len(torch._C._current_autograd_node().name())))
    run.backward(m[2](y.tanh()).square().mean())


def module_hooks(m: Any, x: Tensor, run: Run) -> Any:
    x = x.detach().requires_grad_()
    first = m[0].register_full_backward_hook(lambda _, of_inputs, gs: (of_inputs[0] * 2,))
    second = m[2].register_full_backward_pre_hook(lambda _, gs: (gs[0] * 3,))
    run.backward(m(x).square().mean())
    first.remove()
    second.remove()
    return x.grad


def callback(m: Any, x: Tensor, run: Run) -> Any:
    def at_end() -> None:
        for p in m.parameters():
            p.grad.mul_(2)

    def hook(g: Tensor) -> None:
        Variable._execution_engine.queue_callback(at_end)  # type: ignore[attr-defined]

    y = m[0](x)
    y.register_hook(hook)
    run.backward(m[2](y.tanh()).square().mean())


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


def random_hook(m: Any, x: Tensor, run: Run) -> Any:
    y = m[0](x)
    y.register_hook(lambda g: g * torch.rand_like(g))
    run.backward(m[2](y.tanh()).square().mean())


def read_number(m: Any, x: Tensor, run: Run) -> Any:
    y = m[0](x)
    y.register_hook(lambda g: g / g.norm().item())
    run.backward(m[2](y.tanh()).square().mean())


def written_buffer(m: Any, x: Tensor, run: Run) -> Any:
    norms = torch.zeros(4)

    def hook(g: Tensor) -> None:
        norms.mul_(0.9).add_(g.norm(dim=0), alpha=0.1)

    y = m[0](x)
    y.register_hook(hook)
    run.backward(m[2](y.tanh()).square().mean())
    return norms


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


CASES: Sequence[Callable[[Any, Tensor, Run], Any]] = (
    plain,
    given_gradient,
    several_roots,
    leaf_as_root,
    hook_order,
    retained_after_write,
    retained_twice,
    accumulated,
    optimizer_in_backward,
    saved_half,
    saved_int8,
    saved_on_cpu,
    saved_hooks_disabled,
    custom_function,
    custom_function_vmap,
    nested_function,
    gradient_edges,
    zero_bubble,
    second_derivative,
    frozen,
    only_the_input,
    anomaly,
    anomaly_checked,
    multi_grad_hook,
    accumulate_grad_hook,
    current_node,
    module_hooks,
    callback,
    checkpointed,
    checkpointed_reentrant,
    checkpointed_dropout,
    checkpointed_norm,
    random_hook,
    read_number,
    written_buffer,
    shared_weight,
    views_and_writes,
    sparse_free_index,
    of_complex,
)
