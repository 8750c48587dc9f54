"""Audits of a captured forward and of its backward: with guards off, what the backward reads; what is no difference."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import functionalize as fz
from functionalize.errors import AuditError
from tests.audit.unguarded import unguarded
from tests.step.twins import batch
from tests.walk.cases import same_process

Loss = Callable[[Tensor], Tensor]


def hook_on_a_result(model: nn.Module, scale: list[Any]) -> Loss:
    def loss_of(x: Tensor) -> Tensor:
        y = model(x)
        y.register_hook(lambda gradient: gradient * scale[0])
        return y.square().mean()

    return loss_of


def hook_on_a_module(model: nn.Module, scale: list[Any]) -> Loss:
    def scaled(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        return tuple(each * scale[0] for each in inputs)

    model.register_full_backward_hook(scaled)
    return lambda x: model(x.clone().requires_grad_()).square().mean()


def own_function(model: nn.Module, scale: list[Any]) -> Loss:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * scale[0]

    return lambda x: Scaled.apply(model(x)).square().mean()


def unpacked(model: nn.Module, scale: list[Any]) -> Loss:
    def loss_of(x: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda t: t, lambda t: t * scale[0]):
            return model(x).square().mean()

    return loss_of


def recomputed(model: nn.Module, scale: list[Any]) -> Loss:
    def scaled(x: Tensor) -> Tensor:
        is_recomputed = torch._C._current_graph_task_id() != -1
        return (model(x) * (scale[0] if is_recomputed else 1.0)).sin()

    return lambda x: checkpoint(scaled, x, use_reentrant=False).square().mean()


def which_of_two(model: nn.Module, scale: list[Any]) -> Loss:
    def loss_of(x: Tensor) -> Tensor:
        y = model(x)
        y.register_hook(lambda gradient: gradient.cos() if scale[0] == 1.0 else gradient.sin())
        return y.square().mean()

    return loss_of


def branch(gradient: Tensor, scale: list[Any]) -> Tensor:
    if scale[0] != 1.0:
        raise ValueError("another scale")
    return gradient


def raising(model: nn.Module, scale: list[Any]) -> Loss:
    def loss_of(x: Tensor) -> Tensor:
        y = model(x)
        y.register_hook(lambda gradient: branch(gradient, scale))
        return y.square().mean()

    return loss_of


CASES: dict[str, Any] = {
    "hook on a result": (hook_on_a_result, "is 0.5, the program has 1.0"),
    "hook on a module": (hook_on_a_module, "is 0.5, the program has 1.0"),
    "own function": (own_function, "is 0.5, the program has 1.0"),
    "unpacked": (unpacked, "is 0.5, the program has 1.0"),
    "recomputed": (recomputed, "is 0.5, the program has 1.0"),
    "which of two": (which_of_two, "the step runs aten.sin.default, the program aten.cos.default"),
    "raises": (raising, "the step raises ValueError: another scale; the program goes on"),
}


def gradients(forward: Loss, model: nn.Module, x: Tensor) -> list[Tensor]:
    """The loss and the gradients of one call, which are cleared then."""
    loss = forward(x)
    loss.backward()
    found = [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    model.zero_grad()
    return found


@pytest.mark.parametrize("name", CASES)
def test_an_audit_alone_finds_what_a_backward_reads(name: str) -> None:
    torch.manual_seed(0)
    make, text = CASES[name]
    model, scale = nn.Linear(6, 2), [1.0]
    loss_of = make(model, scale)
    captured = fz.capture(loss_of, backward=True)
    with same_process(), unguarded():
        for i in range(4):
            gradients(captured, model, batch(i))
        done = captured.stats.backwards
        assert done > 0, captured.explain()
        scale[0] = 0.5
        for i in range(done, 7):
            gradients(captured, model, batch(i))
            assert captured.stats.audit_failures == 0
        if name == "raises":
            with pytest.raises(ValueError, match="another scale"):
                gradients(captured, model, batch(8))
        else:
            assert all(map(torch.equal, gradients(captured, model, batch(8)), expected(name, 8)))
    assert captured.stats.audit_failures == 1, captured.explain()
    assert text in captured.stats.differences[0]
    if name == "raises":
        return
    for i in range(4):  # recorded again
        assert all(map(torch.equal, gradients(captured, model, batch(i)), expected(name, i)))


def expected(name: str, i: int) -> list[Tensor]:
    """What eager computes with the changed number."""
    torch.manual_seed(0)
    model, scale = nn.Linear(6, 2), [0.5]
    return gradients(CASES[name][0](model, scale), model, batch(i))


def test_another_backward_is_no_difference() -> None:
    """Accumulation, other tangents, a second backward, `autograd.grad`: eager's gradients, and no failed audit."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 2))
    twin = copy.deepcopy(model)
    captured = fz.capture(lambda x: model(x), backward=True, audit=3)
    eager: Loss = lambda x: twin(x)  # noqa: E731
    for i in range(48):
        results = []
        for forward, each in ((eager, twin), (captured, model)):
            torch.manual_seed(i)
            y = forward(batch(i))
            if i % 4 == 0:
                y.backward(torch.ones(2).expand_as(y))  # of other strides than the next ones
            elif i % 4 == 1:
                y.backward(y.detach().clone(), retain_graph=True)
                y.sum().backward()
            elif i % 4 == 2:
                results += torch.autograd.grad(y.sum(), [next(iter(each.parameters()))])
            else:
                y.square().sum().backward()
            results += [p.grad.clone() for p in each.parameters() if p.grad is not None]
            if i % 4 == 3:
                each.zero_grad()
        half = len(results) // 2
        assert all(map(torch.equal, results[:half], results[half:])), i
    stats = captured.stats
    assert (stats.audit_failures, stats.differences) == (0, [])
    assert stats.audits >= 12
    assert stats.backwards >= 12


def test_raise_comes_after_the_gradients() -> None:
    torch.manual_seed(0)
    model, scale = nn.Linear(6, 2), [1.0]
    captured = fz.capture(hook_on_a_result(model, scale), backward=True, audit="raise")
    with same_process(), unguarded():
        for i in range(20):
            scale[0] = 1.0 if captured.stats.backwards == 0 else 0.5
            if captured.stats.replays == 7:
                break
            gradients(captured, model, batch(i))
        loss = captured(batch(8))
        with pytest.raises(AuditError, match=r"is 0\.5, the program has 1\.0"):
            loss.backward()
    found = [loss.detach(), *(p.grad for p in model.parameters())]
    assert all(map(torch.equal, found, expected("hook on a result", 8)))


def test_an_error_of_the_audit_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr("functionalize.step_backward.audited_forward.compared", broken)
    monkeypatch.setattr("functionalize.step_backward.audited_forward._missed", broken)
    torch.manual_seed(0)
    model, scale = nn.Linear(6, 2), [0.5]
    captured = fz.capture(hook_on_a_result(model, scale), backward=True, audit=2)
    for i in range(6):
        found = gradients(captured, model, batch(i))
        assert all(map(torch.equal, found, expected("hook on a result", i)))
    assert captured.stats.audit_failures == 0
    assert "a bug in functionalize, please report it: an audit failed" in caplog.text


def test_a_saved_value_that_was_written_is_no_difference() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 2)
    captured = fz.capture(lambda x: model(x).exp(), backward=True, audit=3)
    for i in range(12):
        y = captured(batch(i))
        with torch.no_grad():
            y.mul_(2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
        captured(batch(i)).sum().backward()
    assert captured.stats.audits >= 3
    assert captured.stats.audit_failures == 0
