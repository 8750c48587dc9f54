"""The program of a backward: it runs once, frees its values, and refuses what has changed since the trace."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import functionalize as fz
from functionalize import passes
from functionalize.errors import GuardError, UncapturableError
from tests.step_backward.runs import model


def loss_of(m: nn.Module) -> Tensor:
    torch.manual_seed(1)
    loss: Tensor = m(torch.randn(5, 3)).square().mean()
    return loss


def test_inputs_are_tangents_leaves_gradients_and_saved_tensors() -> None:
    m = model()
    loss_of(m).backward()
    program = fz.functions.trace_backward(loss_of(m))
    assert [spec.name for spec in program.inputs] == [
        "tangent_0",
        "leaf_0",
        *[f"leaf_{i}_grad" for i in range(4)],
        *[f"saved_{i}" for i in range(3)],
    ]
    assert program.tape().nodes[0].name == "MeanBackward0"


def test_a_second_call_is_refused() -> None:
    program = fz.functions.trace_backward(loss_of(model()))
    program()
    with pytest.raises(GuardError, match="runs a traced backward a second time"):
        program()


def test_it_takes_no_arguments() -> None:
    program = fz.functions.trace_backward(loss_of(model()))
    with pytest.raises(TypeError, match="is called without arguments"):
        program(torch.ones(()))


def test_a_value_that_was_written_since_the_trace() -> None:
    m = model()
    program = fz.functions.trace_backward(loss_of(m))
    with torch.no_grad():
        m[2].weight.add_(1)
    with pytest.raises(
        GuardError, match=r"`leaf_0` was written since the trace\. Nothing was changed"
    ):
        program()
    assert m[0].weight.grad is None


def test_a_gradient_that_was_not_there_at_the_trace() -> None:
    m = model()
    first, second = fz.functions.trace_backward(loss_of(m)), fz.functions.trace_backward(loss_of(m))
    first()
    with pytest.raises(GuardError, match=r"grad` is there, was not there. Nothing was changed"):
        second()


def test_gradients_that_are_written_between_trace_and_call_are_added_to() -> None:
    m, twin = model(), model()
    for each in (m, twin):
        loss_of(each).backward()
    program = fz.functions.trace_backward(loss_of(m))
    for each in (m, twin):
        for p in each.parameters():
            p.grad.mul_(0.5)
    program()
    loss_of(twin).backward()
    for p, q in zip(m.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("is_replaced", [False, True])
def test_gradients_may_not_change_if_a_hook_kept_what_depends_on_them(is_replaced: bool) -> None:
    m, kept = model(), []
    loss_of(m).backward()
    m[0].weight.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad.norm()))
    program = fz.functions.trace_backward(loss_of(m))
    if is_replaced:
        m[0].weight.grad = torch.ones(4, 3)
    else:
        m[0].weight.grad.mul_(0.5)
    with pytest.raises(GuardError, match=r"grad` was written since .* a hook kept a tensor"):
        program()


def test_a_pass_rewrites_a_copy_and_one_of_both_runs() -> None:
    m, twin = model(), model()
    program = fz.functions.trace_backward(loss_of(m))
    rewritten = passes.run(program, "default")
    rewritten()
    loss_of(twin).backward()
    for p, q in zip(m.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    with pytest.raises(GuardError, match="a second time"):
        program()


class Alive(TorchDispatchMode):
    """How many of these tensors are alive after each product."""

    def __init__(self, tensors: list[Any]) -> None:
        super().__init__()
        self.tensors, self.counts = tensors, list[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mul.Tensor:
            self.counts.append(sum(ref() is not None for ref in self.tensors))
        return out


def saved_by(layers: int) -> tuple[Tensor, list[weakref.ref[Any]]]:
    """A loss, and weak references to the tensors that its graph saves."""
    alive: list[Any] = []

    class Saving(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            kept = x.sin()
            alive.append(weakref.ref(kept))
            ctx.save_for_backward(kept)
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            (kept,) = ctx.saved_tensors
            return g * kept

    x = torch.ones(3, requires_grad=True)
    for _ in range(layers):
        x = Saving.apply(x)
    return x.sum(), alive


def test_a_saved_value_is_freed_after_its_last_use() -> None:
    loss, eager = saved_by(6)
    with Alive(eager) as seen_by_eager:
        loss.backward()
    loss, ours = saved_by(6)
    program = fz.functions.trace_backward(loss)
    del loss
    gc.collect()
    assert sum(ref() is not None for ref in ours) == 6
    with Alive(ours) as seen:
        program()
    assert seen.counts == seen_by_eager.counts == [6, 5, 4, 3, 2, 1]
    assert all(ref() is None for ref in ours)


def test_a_graph_that_is_not_retained_is_freed_by_the_trace() -> None:
    loss, ours = saved_by(6)
    program = fz.functions.trace_backward(loss, retain_graph=False)
    gc.collect()
    with Alive(ours) as seen:
        program()
    assert seen.counts == [6, 5, 4, 3, 2, 1]
    with pytest.raises(RuntimeError, match="after they have already been freed"):
        loss.backward()
    loss, _ = saved_by(2)
    fz.functions.trace_backward(loss)()
    loss.backward()


def test_a_hook_that_keeps_the_gradient_itself() -> None:
    m, kept = model(), []
    m[0].weight.register_post_accumulate_grad_hook(lambda p: kept.append(p.grad))
    with pytest.raises(
        UncapturableError, match=r"a hook keeps the tensor that becomes `leaf_\d.grad`"
    ):
        fz.functions.trace_backward(loss_of(m))
    assert m[0].weight.grad is None


def test_a_hook_runs_once() -> None:
    m, calls = model(), []
    m[0].weight.register_hook(lambda g: calls.append(float(g.sum())))
    program = fz.functions.trace_backward(loss_of(m))
    assert len(calls) == 1
    program()
    assert len(calls) == 1


def test_a_failing_hook_leaves_everything() -> None:
    m = model()

    def fail(g: Tensor) -> None:
        raise KeyError("mine")

    loss_of(m).backward()
    before = [p.grad.clone() for p in m.parameters()]
    loss = loss_of(m)
    handle = m[0].weight.register_hook(fail)
    with pytest.raises(KeyError, match="mine"):
        fz.functions.trace_backward(loss)
    assert all(torch.equal(p.grad, b) for p, b in zip(m.parameters(), before, strict=True))
    handle.remove()
    fz.functions.trace_backward(loss)()
    assert all(torch.equal(p.grad, 2 * b) for p, b in zip(m.parameters(), before, strict=True))


def test_reads_by_numpy_are_refused_and_backward_still_runs() -> None:
    m, twin = model(), model()
    m[0].weight.register_hook(lambda g: g * float(g.detach().numpy().sum()))
    loss = loss_of(m)
    with pytest.raises(UncapturableError, match=r"numpy.*Nothing was changed: call backward\(\)"):
        fz.functions.trace_backward(loss)
    loss.backward()
    twin[0].weight.register_hook(lambda g: g * float(g.detach().numpy().sum()))
    loss_of(twin).backward()
    for p, q in zip(m.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_another_storage_of_a_leaf_is_refused_and_undone() -> None:
    m = model()
    weight = m[0].weight
    at = weight.data_ptr()

    def move(g: Tensor) -> None:
        weight.data = weight.data * 2

    weight.register_hook(move)
    with pytest.raises(UncapturableError, match="gives a leaf another storage"):
        fz.functions.trace_backward(loss_of(m))
    assert weight.data_ptr() == at


def test_where_a_backward_cannot_be_traced() -> None:
    m = model()
    with pytest.raises(RuntimeError, match="implicitly created only for scalar outputs"):
        fz.functions.trace_backward(m(torch.ones(2, 3)))

    def step() -> Any:
        return fz.functions.trace_backward(loss_of(m))()

    with pytest.raises(UncapturableError, match="cannot be traced inside of a recording"):
        fz.capture(step)()
    with pytest.raises(UncapturableError, match="cannot be traced inside of `vmap` or another"):
        torch.vmap(lambda g: fz.functions.trace_backward(m(torch.ones(3)), gradient=g)())(
            torch.eye(3)
        )
    sparse = torch.ones(2, 3).to_sparse()
    with pytest.raises(
        UncapturableError, match=r"`tangent_0`: the backward meets a tensor of .*sparse_coo"
    ):
        fz.functions.trace_backward(m(torch.ones(2, 3)), gradient=sparse)
    loss = loss_of(m)
    m[0].weight.register_hook(lambda g: fz.functions.trace_backward(loss_of(model()))())
    with pytest.raises(UncapturableError, match="cannot be traced inside of a backward"):
        loss.backward()
