"""Graphs with hooks of every kind: one function for each, run with either backward.

    def hook_order(model, x, run): ...; run.backward(loss); return what else is to be compared

A case is called several times, so gradients are accumulated, and hooks that it registers on the model are there more
than once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from tests.step_backward.runs import Run


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
    weight = m[0].weight
    after = weight.register_post_accumulate_grad_hook(lambda p: (p.grad.mul_(0.5), None)[1])
    before = weight.register_hook(lambda g: g + 1)
    run.backward(m(x).square().mean())
    after.remove()
    before.remove()


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


def adam_in_backward(m: Any, x: Tensor, run: Run) -> Any:
    """The first backward makes the states of the optimizers, the others write them."""
    optimizers = {p: torch.optim.Adam([p]) for p in m.parameters()}

    def update(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    handles = [p.register_post_accumulate_grad_hook(update) for p in m.parameters()]
    for _ in range(3):
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


HOOKED: Sequence[Callable[[Any, Tensor, Run], Any]] = (
    hook_order,
    retained_after_write,
    retained_twice,
    accumulated,
    optimizer_in_backward,
    adam_in_backward,
    saved_half,
    saved_int8,
    saved_on_cpu,
    saved_hooks_disabled,
    gradient_edges,
    zero_bubble,
    multi_grad_hook,
    accumulate_grad_hook,
    current_node,
    module_hooks,
    callback,
    random_hook,
    read_number,
    written_buffer,
)
