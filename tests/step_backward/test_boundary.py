"""`capture(..., backward=True)` in one process: a forward whose backward is a program, too, equal to eager."""

from __future__ import annotations

import functools
import gc
import operator
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import functionalize as fz
from functionalize.errors import GuardError, UncapturableError
from functionalize.step.captured_step import CapturedStep
from tests.step.twins import Model, batch, same_state

Loss = Callable[..., Any]


def loss_of(model: nn.Module) -> Loss:
    return lambda x: model(x).square().mean()


def output_of(model: nn.Module) -> Loss:
    return lambda x: model(x)


def twins(make: Callable[[nn.Module], Loss] = loss_of) -> list[tuple[Any, Any]]:
    """An eager callable and a captured one, each with its own model from the same seed."""
    found: list[tuple[Any, Any]] = []
    for captured in (False, True):
        torch.manual_seed(0)
        model = Model()
        fn = make(model)
        found.append(
            (model, fz.capture(fn, backward=True, on_uncapturable="raise") if captured else fn)
        )
    return found


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.stride() == b.stride() and torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


def compare(
    use: Callable[[Any, Loss, int], Any],
    make: Callable[[nn.Module], Loss] = loss_of,
    steps: int = 6,
) -> CapturedStep:
    """`use(model, forward, i)` for both twins: what it returns, gradients, state and generator are equal."""
    (a, eager), (b, captured) = twins(make)
    for i in range(steps):
        torch.manual_seed(i)
        expected, after = use(a, eager, i), torch.get_rng_state()
        torch.manual_seed(i)
        assert equal(use(b, captured, i), expected), i
        assert torch.equal(torch.get_rng_state(), after)
        assert equal(gradients(a), gradients(b)), i
        assert same_state(a, b)
        with torch.no_grad():
            for model in (a, b):
                for p in model.parameters():
                    p -= 0.1 * p.grad if p.grad is not None else 0
    return captured


def train(model: nn.Module, forward: Loss, i: int) -> Any:
    model.zero_grad()
    loss = forward(batch(i))
    loss.backward()
    return loss.detach()


def test_forward_and_backward_replay_bitwise_with_dropout_and_batch_norm() -> None:
    captured = compare(train)
    stats = captured.stats
    assert (stats.captures, stats.reruns, stats.eager) == (1, 0, 0)
    assert stats.replays == stats.backwards == 5


def test_the_two_graphs(expect: Callable[[str, str], None]) -> None:
    captured = compare(lambda model, forward, i: (train(model, forward, i), model.zero_grad())[0])
    assert captured.stats.captures == 1
    (backward,) = captured.backward_programs
    expect("forward", captured.program.print_readable(print_output=False))
    expect("backward", backward.print_readable(print_output=False))
    inputs = {spec.name for spec in backward.inputs}
    assert "m_b_weight" in {n.removeprefix("model_") for n in inputs} or "model_b_weight" in inputs


def test_an_optimizer_outside_is_eager() -> None:
    (a, eager), (b, captured) = twins()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (a, b)]
    for i in range(6):
        for (_m, forward), optimizer in zip(((a, eager), (b, captured)), optimizers, strict=True):
            torch.manual_seed(i)
            forward(batch(i)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert same_state(a, b)
    left, right = (o.state_dict()["state"] for o in optimizers)
    assert all(torch.equal(left[k][n], right[k][n]) for k in left for n in left[k])
    assert captured.stats.backwards == 5


def test_gradients_accumulate_outside() -> None:
    def micro(model: nn.Module, forward: Loss, i: int) -> None:
        if i % 3 == 0:
            model.zero_grad()
        forward(batch(i)).backward()

    assert compare(micro, steps=9).stats.backwards >= 6


# -- other ways to go backward ---------------------------------------------------------------------


def test_autograd_grad_of_parameters_leaves_grad_alone() -> None:
    def use(model: nn.Module, forward: Loss, i: int) -> Any:
        return torch.autograd.grad(forward(batch(i)), list(model.parameters()))

    captured = compare(use)
    assert captured.stats.backwards == 5
    assert captured.stats.reruns == 0


def test_gradients_flow_to_arguments_that_were_computed_outside() -> None:
    outside = nn.Linear(6, 6)

    def use(model: nn.Module, forward: Loss, i: int) -> Any:
        outside.zero_grad()
        model.zero_grad()
        x = outside(batch(i))
        forward(x).backward()
        return [p.grad for p in outside.parameters()]

    assert compare(use).stats.backwards >= 4


def test_a_call_that_cannot_be_recorded_gives_gradients_to_computed_arguments() -> None:
    layer = nn.Linear(4, 4)
    captured = fz.capture(
        lambda h, s: h.sum() + torch.sparse.mm(s, h).sum(), backward=True, on_uncapturable="eager"
    )
    for _ in range(2):  # the call that is refused, and one after it
        layer.zero_grad()
        captured(layer(torch.ones(4, 4)), torch.eye(4).to_sparse()).backward()
        assert torch.equal(layer.weight.grad, torch.full((4, 4), 8.0))
    assert captured.stats.eager == 2


def test_only_the_gradient_of_the_input() -> None:
    def use(model: nn.Module, forward: Loss, i: int) -> Any:
        x = batch(i).requires_grad_()
        return torch.autograd.grad(forward(x), x)

    captured = compare(use)
    assert captured.stats.backwards == 5
    (backward,) = captured.backward_programs
    assert len(backward.outputs) == 1 + len(list(Model().parameters()))
    assert sum("mm" in n.name for n in backward.graph.nodes if n.op == "call_function") == 2


def test_two_backwards_through_a_retained_graph() -> None:
    def use(model: nn.Module, forward: Loss, i: int) -> Any:
        model.zero_grad()
        x = batch(i).requires_grad_()
        loss = forward(x)
        (g,) = torch.autograd.grad(loss, x, retain_graph=True)
        loss.backward(retain_graph=True)
        (2 * loss).backward()
        return g, x.grad

    captured = compare(use, steps=8)
    stats = captured.stats
    assert stats.reruns in (1, 2)  # each other way to go backward is recorded once, in a rerun
    assert stats.backwards >= 15


def test_a_second_backward_needs_a_retained_graph() -> None:
    _, (_model, captured) = twins()
    for i in range(4):
        loss = captured(batch(i))
        loss.backward()
        with pytest.raises(RuntimeError, match="retain_graph=True"):
            loss.backward()
    assert captured.stats.backwards >= 2


def test_double_backward_is_refused_by_name() -> None:
    _, (model, captured) = twins()
    for i in range(4):
        loss = captured(batch(i))
        with pytest.raises(UncapturableError, match="create_graph=True"):
            torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        loss.backward()


def test_two_forwards_before_one_backward() -> None:
    def use(model: nn.Module, forward: Loss, i: int) -> Any:
        model.zero_grad()
        loss = forward(batch(i)) + forward(batch(i + 100))
        loss.backward()
        return loss.detach()

    captured = compare(use)
    assert captured.stats.replays >= 8
    assert captured.stats.reruns == 0


def test_gradients_emptied_between_forward_and_backward_of_every_second_microbatch() -> None:
    def use(model: nn.Module, forward: Loss, i: int) -> Any:
        losses = []
        for microbatch in range(2):
            loss = forward(batch(2 * i + microbatch))
            if microbatch == 0:
                model.zero_grad()
            loss.backward()
            losses.append(loss.detach())
        return losses

    captured = compare(use, steps=12)
    assert (captured.stats.captures, captured.stats.reruns) == (3, 0), captured.explain()
    assert captured.stats.replays >= 18


@pytest.mark.parametrize("beside", ["eager", "audited"])
def test_statistics_that_eager_graphs_have_saved(beside: str) -> None:
    def losses(capture: Any) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        forward, found = capture(lambda x: model(x).square().mean()), []
        for _ in range(24):
            x, y, z = torch.randn(3, 5, 4)
            optimizer.zero_grad()
            loss = (model(x).mean() if beside == "eager" else forward(x)) + forward(y) + forward(z)
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
        return [*found, *model.state_dict().values()], forward

    (expected, _), (found, forward) = (
        losses(lambda f: f),
        losses(lambda f: fz.capture(f, backward=True)),
    )
    assert equal(found, expected)
    assert forward.stats.replays >= 40 and forward.stats.audits >= 2, forward.explain()


def test_hooks_on_parameters_run_once_and_outside() -> None:
    calls: list[list[Tensor]] = []

    def make(model: nn.Module) -> Loss:
        seen: list[Tensor] = []
        calls.append(seen)
        model.a.weight.register_hook(lambda g: seen.append(g.clone()) or 2 * g)
        model.a.bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        return loss_of(model)

    assert compare(train, make).stats.backwards >= 3
    assert len(calls[0]) == 12
    assert equal(*calls)


# -- outputs ---------------------------------------------------------------------------------------


@dataclass
class Output:
    loss: Tensor
    logits: Tensor
    hidden: list[Tensor]
    rows: int


def structured(model: nn.Module) -> Loss:
    def forward(x: Tensor) -> Output:
        hidden = model.a(x)
        logits = model.b(F.relu(model.norm(hidden)))
        return Output(logits.square().mean(), logits, [hidden, hidden.detach()], len(x))

    return forward


@pytest.mark.parametrize("which", ["loss", "logits", "both", "hidden"])
def test_only_some_outputs_are_gone_backward_from(which: str) -> None:
    def use(model: nn.Module, forward: Loss, i: int) -> Any:
        model.zero_grad()
        out = forward(batch(i))
        assert not out.hidden[1].requires_grad
        total = {
            "loss": lambda: out.loss,
            "logits": lambda: F.cross_entropy(out.logits, torch.tensor([0, 1, 0, 1, 1])),
            "both": lambda: out.loss + out.logits.sum(),
            "hidden": lambda: out.hidden[0].exp().sum(),
        }[which]()
        total.backward()
        return total.detach(), out.logits.detach(), out.rows

    captured = compare(use, structured)
    assert captured.stats.backwards >= 4
    assert captured.stats.reruns == 0


def test_an_output_may_be_written_in_place() -> None:
    def use(model: nn.Module, forward: Loss, i: int) -> Any:
        model.zero_grad()
        loss = forward(batch(i))
        loss /= 4
        loss.backward()
        return loss.detach()

    assert compare(use).stats.backwards >= 4


def test_an_output_that_backward_needs_may_not_be_written() -> None:
    """As eager says it, for a recorded forward and for a replayed one."""
    for forward in (f for _, f in twins(lambda m: lambda x: m.a(x).exp())):
        for i in range(4):
            out = forward(batch(i))
            if i != 2:
                out.sum().backward()
                continue
            out.mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.sum().backward()
    first = fz.capture(lambda x: x.exp(), backward=True)
    x = torch.ones(3, requires_grad=True)
    out = first(x)
    out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_parameter_may_not_be_written_between() -> None:
    for i_bad in (0, 4):
        for model, forward in twins():
            for i in range(i_bad):
                forward(batch(i)).backward()
            loss = forward(batch(9))
            with torch.no_grad():
                model.b.weight.mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


def test_an_argument_that_is_returned_is_the_callers_own() -> None:
    captured = fz.capture(lambda x, w: (x, (x * w).sum()), backward=True)
    x, w = torch.ones(3, requires_grad=True), torch.full((3,), 2.0)
    for _ in range(3):
        same, loss = captured(x, w)
        assert same is x
        x.grad = None
        loss.backward()
        assert torch.equal(x.grad, w)
    assert captured.stats.backwards >= 1


def escaping(name: str) -> Callable[[nn.Module], Loss]:
    """Forwards from which a gradient reaches the graph of their argument in other ways than through an output."""

    def make(model: nn.Module) -> Loss:
        model.kept = None

        def forward(x: Tensor) -> Any:
            if name == "returns it":
                return x.to(model.a.weight.dtype)
            if name == "keeps it":
                model.kept = x
                return model(x).detach()
            hidden = model(x)
            if name == "keeps a part of its graph":
                model.kept = hidden.square().mean()
                return hidden
            hidden.mean().backward()
            return hidden.detach()

        return forward

    return make


@pytest.mark.parametrize(
    "name, calls, reason",
    [
        ("returns it", 6, None),
        ("keeps it", 3, r"assigns another tensor to `model\.kept`"),
        ("keeps a part of its graph", 3, r"assigns another tensor to `model\.kept`"),
        ("goes backward itself", 1, "runs a backward that goes on beyond an argument"),
    ],
)
@pytest.mark.parametrize("is_leaf", [False, True])
def test_gradients_reach_the_graph_of_an_argument(
    name: str, calls: int, reason: str | None, is_leaf: bool
) -> None:
    def use(model: Any, forward: Loss, i: int) -> Any:
        model.zero_grad()
        weight = batch(i).requires_grad_()
        out = forward(weight if is_leaf else weight.exp())
        if isinstance(model.kept, Tensor):
            out = out + model.kept.sum()
        if out.requires_grad:
            out.sum().backward()
        return weight.grad

    captured = compare(use, escaping(name), calls)
    if reason is None:
        assert captured.stats.replays >= 3
    else:
        with pytest.raises(UncapturableError, match=reason):
            captured(batch(0).requires_grad_())


def test_hooks_that_run_in_a_backward_inside_are_refused() -> None:
    """Guards of a captured forward do not look at what hooks of parameters read, since they run outside."""
    factor = [1.0]

    def inside(model: nn.Module) -> Loss:
        model.a.weight.register_hook(lambda gradient: gradient * factor[0])

        def step(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            return loss.detach()

        return step

    captured = twins(inside)[1][1]
    captured(batch(0))
    with pytest.raises(UncapturableError, match=r"hooks of `.*weight.*` run.*whole step"):
        captured(batch(1))


def test_parameters_and_buffers_are_returned_themselves() -> None:
    (a, b) = (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for _ in range(2))
    b.load_state_dict(a.state_dict())

    def forward(model: nn.Sequential) -> Callable[[Tensor], Any]:
        return lambda x: (model(x)[0].sum(), [model[0].weight], model[1].running_mean)

    eager, captured = forward(a), fz.capture(forward(b), backward=True)
    for i in range(5):
        x = torch.randn(3, 2, generator=torch.Generator().manual_seed(i))
        for model, run in ((a, eager), (b, captured)):
            loss, (weight,), mean = run(x)
            assert weight is model[0].weight and mean is model[1].running_mean
            model.zero_grad()
            (loss + weight.square().sum()).backward()
        grads = ([p.grad for p in model.parameters()] for model in (a, b))
        assert all(map(torch.equal, *grads))
    assert captured.stats.backwards == 3


def test_modes_that_a_forward_sets() -> None:
    (a, b) = (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)) for _ in range(2))
    b.load_state_dict(a.state_dict())

    def forward(model: nn.Module) -> Callable[[Tensor], Any]:
        return lambda x: model.train()(x)[0].sum()

    eager, captured = forward(a), fz.capture(forward(b), backward=True)
    for i in range(24):
        x = torch.randn(3, 2, generator=torch.Generator().manual_seed(i))
        losses = [run(x) for run in (eager, captured)]
        assert torch.equal(*losses)
        assert all(module.training for module in b.modules())
        for model, loss in zip((a, b), losses, strict=True):
            model.zero_grad()
            loss.backward()
        grads = ([p.grad for p in model.parameters()] for model in (a, b))
        assert all(map(torch.equal, *grads))
        assert all(map(torch.equal, a.buffers(), b.buffers()))
        if i % 2:
            assert torch.equal(a.eval()(x), b.eval()(x))
    assert captured.stats.replays == captured.stats.backwards >= 18
    assert (captured.stats.audits, captured.stats.audit_failures) == (2, 0)


def test_a_result_that_is_a_leaf_of_the_forward_is_refused() -> None:
    model = nn.Linear(2, 2)

    def forward(x: Tensor) -> Any:
        return model(x).sum(), torch.ones(2, requires_grad=True)

    captured = fz.capture(forward, backward=True, on_uncapturable="raise")
    captured(torch.ones(1, 2))[0].backward()
    with pytest.raises(UncapturableError, match=r"returns a parameter .* that no module holds"):
        captured(torch.ones(1, 2))


# -- a backward that was not recorded --------------------------------------------------------------


def test_a_backward_of_another_kind_runs_the_forward_again_once() -> None:
    def use(model: nn.Module, forward: Loss, i: int) -> Any:
        model.zero_grad()
        x = batch(i).requires_grad_()
        loss = forward(x)
        torch.rand(i)  # the generator has gone on
        if i < 4 or i % 2:
            loss.backward()
            return loss.detach(), x.grad
        return loss.detach(), torch.autograd.grad(loss, x)

    captured = compare(use, steps=12)
    assert captured.stats.reruns == 1
    assert any("other gradients" in text for text in captured.stats.guard_failures)
    assert len(captured.backward_programs) >= 2


def test_a_rerun_begins_from_the_buffers_of_its_forward() -> None:
    """Another forward, which moves the batch norm's buffers, ran in between."""

    def use(model: nn.Module, forward: Loss, i: int) -> Any:
        model.zero_grad()
        first, second = forward(batch(i)), forward(batch(i + 50))
        if i > 2:
            return torch.autograd.grad(first, list(model.parameters()))
        first.backward()
        return second.detach()

    captured = compare(use, steps=6)
    assert captured.stats.reruns == 1


def test_a_rerun_has_the_modes_of_the_forward() -> None:
    def use(model: nn.Module, forward: Loss, i: int) -> Any:
        model.kept = torch.ones(2)
        loss = forward(batch(i).requires_grad_(i > 3))
        model.eval()
        if i < 6:
            loss.backward()
        found = torch.autograd.grad(loss, model.parameters()) if i == 6 else None
        assert not model.training
        model.train()
        return loss.detach(), found

    captured = compare(use, loss_of, 7)
    assert captured.stats.reruns == 1


def test_a_rerun_is_refused_when_the_forward_would_be_another_one() -> None:
    scales = [1.0]
    _, (model, captured) = twins(lambda model: lambda x: model(x).square().mean() * scales[0])
    for i in range(4):
        captured(batch(i)).backward()
    x = batch(4).requires_grad_()
    captured(x).backward()
    captured(x).backward()
    loss = captured(x)
    scales[0] = 2.0
    before = gradients(model)
    with pytest.raises(GuardError, match=r"`scales.0` is 2.0, was 1.0. Nothing was changed"):
        torch.autograd.grad(loss, x)
    assert equal(gradients(model), before)


def test_tangents_of_another_layout_are_recorded_beside() -> None:
    def use(model: nn.Module, forward: Loss, i: int) -> Any:
        model.zero_grad()
        out = forward(batch(i))
        seed = torch.ones(5, 2) if i % 2 else torch.ones(2, 5).t()
        out.backward(seed)
        return out.detach()

    captured = compare(use, output_of, steps=10)
    assert captured.stats.reruns == 1


# -- no backward -----------------------------------------------------------------------------------


def test_without_gradients_it_is_an_ordinary_captured_step() -> None:
    _, (model, captured) = twins()
    eager = loss_of(model)
    model.eval()
    with torch.no_grad():
        for i in range(4):
            assert torch.equal(captured(batch(i)), eager(batch(i)))
    assert captured.stats.replays == 3
    assert captured.backward_programs == ()


def test_saved_values_go_with_the_outputs() -> None:
    _, (_model, captured) = twins(output_of)
    for i in range(3):
        captured(batch(i)).sum().backward()
    out = captured(batch(5))
    saved = [weakref.ref(t) for t in out.grad_fn.captured._saved]
    assert len(saved) >= 3
    assert captured.stats.replays >= 2
    del out
    gc.collect()
    assert not any(ref() is not None for ref in saved)
    out = captured(batch(6))
    saved = [weakref.ref(t) for t in out.grad_fn.captured._saved]
    out.sum().backward()
    assert not any(ref() is not None for ref in saved)


def test_a_forward_that_nobody_goes_backward_from(caplog: pytest.LogCaptureFixture) -> None:
    (a, eager), (b, captured) = twins()
    for i in range(12):
        torch.manual_seed(i)
        expected = eager(batch(i))
        torch.manual_seed(i)
        assert torch.equal(captured(batch(i)), expected)
    assert same_state(a, b)
    assert captured.stats.captures == 0
    assert sum("no backward is called" in r.message for r in caplog.records) == 1
    for i in range(12):
        captured(batch(i)).backward()
    assert captured.stats.backwards >= 4


# -- inside ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_draws_the_same_masks(reentrant: bool) -> None:
    def make(model: nn.Module) -> Loss:
        def forward(x: Tensor) -> Tensor:
            h = checkpoint(lambda x: model.drop(model.a(x)), x, use_reentrant=reentrant)
            return model.b(h).square().mean()

        return forward

    def use(model: nn.Module, forward: Loss, i: int) -> Any:
        model.zero_grad()
        x = batch(i).requires_grad_()
        loss = forward(x)
        loss.backward()
        return loss.detach(), x.grad

    assert compare(use, make).stats.backwards >= 3


def test_frozen_parameters_and_evaluation() -> None:
    def use(model: nn.Module, forward: Loss, i: int) -> Any:
        model.zero_grad()
        model.a.requires_grad_(i < 4)
        model.train(i % 4 < 2)
        loss = forward(batch(i))
        loss.backward()
        return loss.detach()

    captured = compare(use, steps=16)
    assert captured.stats.backwards >= 6


def test_a_gradient_inside_the_forward() -> None:
    """A gradient penalty: the forward takes a derivative itself."""

    def make(model: nn.Module) -> Loss:
        def forward(x: Tensor) -> Tensor:
            x = x.detach().requires_grad_()
            out = model.b(torch.tanh(model.a(x))).sum()
            (g,) = torch.autograd.grad(out, x, create_graph=True)
            return out + g.square().sum()

        return forward

    assert compare(train, make).stats.backwards >= 3


def test_shapes_live_side_by_side() -> None:
    def use(model: nn.Module, forward: Loss, i: int) -> Any:
        model.zero_grad()
        loss = forward(batch(i, rows=5 + i % 2))
        loss.backward()
        return loss.detach()

    captured = compare(use, steps=10)
    assert captured.stats.backwards >= 6
    assert "replays" in captured.explain()


def test_a_number_that_python_read_is_saved() -> None:
    """The scale is another number at every call; the backward multiplies by it, too."""

    def make(model: nn.Module) -> Loss:
        def forward(x: Tensor) -> Tensor:
            scale = x.abs().max().item()
            return (model(x) * scale).square().mean() / (1 + scale)

        return forward

    captured = compare(train, make, steps=8)
    assert captured.stats.reruns == 0
    assert captured.stats.backwards >= 5
    (backward,) = captured.backward_programs
    assert "a number" in backward.print_readable(print_output=False)
    assert backward.graph_module.code  # its fake values can be made


def test_a_number_that_decides_is_a_guard_of_the_forward() -> None:
    def make(model: nn.Module) -> Loss:
        def forward(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            return loss * 2 if x.sum().item() > 0 else loss

        return forward

    captured = compare(train, make, steps=12)
    assert captured.stats.backwards >= 6


def test_passes_run_on_both_programs() -> None:
    """The caller gets a view of a value that the forward saves, and a write to it is seen."""

    def make(model: nn.Module) -> Any:
        def forward(x: Tensor) -> tuple[Tensor, Tensor]:
            kept = model(x).tanh()
            return kept.square().mean(), kept.t()

        return forward

    (a, _), (b, _) = twins()
    captured = fz.capture(make(b), backward=True, passes="default")
    for i in range(5):
        results = []
        for model, forward in ((a, make(a)), (b, captured)):
            torch.manual_seed(i)
            model.zero_grad()
            loss, kept = forward(batch(i))
            loss.backward()
            results.append([*gradients(model), kept])
        assert equal(*results)
    for forward in (make(a), captured):
        loss, kept = forward(batch(i))
        kept.detach().zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    assert captured.program.history
    assert captured.backward_programs[0].history
    assert captured.stats.backwards >= 3


_READS = torch.ops.aten.tanh_backward.default


def saved_alive(keep: bool, passes: Any) -> tuple[int, list[int], list[Any]]:
    """How many values a replayed forward has saved; how many are alive at each op of its backward; these ops."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)])
    x = torch.randn(4, 8)
    forward = fz.capture(loss_of(model), backward=True, passes=passes)
    for _ in range(4):
        forward(x).backward()
        model.zero_grad()
    loss = forward(x)
    saved = [t for t in loss.grad_fn.captured._saved if isinstance(t, Tensor)]
    alive = [StorageWeakRef(t.untyped_storage()) for t in saved]
    del saved
    counts: list[int] = []
    funcs: list[Any] = []

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            funcs.append(func)
            counts.append(sum(not each.expired() for each in alive))
            return func(*args, **(kwargs or {}))

    with Counting():
        loss.backward(retain_graph=keep)
    assert forward.stats.reruns == 0
    return len(alive), counts, funcs


def eager_alive() -> list[int]:
    """How many outputs of the layers of the same model are alive at each of the ops that read one, in eager."""
    alive: list[StorageWeakRef] = []
    counts: list[int] = []

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is _READS:
                counts.append(sum(not each.expired() for each in alive))
            out = func(*args, **(kwargs or {}))
            if func is torch.ops.aten.tanh.default:
                alive.append(StorageWeakRef(out.untyped_storage()))
            return out

    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)])
    with Counting():
        loss_of(model)(torch.randn(4, 8)).backward()
    return counts


@pytest.mark.parametrize("passes", [(), "default"])
def test_saved_values_are_freed_as_the_backward_goes(passes: Any) -> None:
    saved, counts, funcs = saved_alive(False, passes)
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == saved >= 6
    at_reads = [count for func, count in zip(funcs, counts, strict=True) if func is _READS]
    assert len(at_reads) == 6 and all(map(operator.le, at_reads, eager_alive()))
    assert set(range(1, saved)) <= set(counts)
    assert saved_alive(True, passes)[1][-1] == saved


def test_optimizer_that_a_forward_only_reaches() -> None:
    """What LBFGS counts between two forwards is no state of the forward: it was recorded anew at every call."""

    class Fitter:
        def __init__(self) -> None:
            torch.manual_seed(0)
            self.model = nn.Linear(3, 1)
            self.optimizer = torch.optim.LBFGS(self.model.parameters(), max_iter=3)

        def loss(self, x: Tensor) -> Tensor:
            result: Tensor = self.model(x).square().mean()
            return result

    def fitted(capture: Any) -> Any:
        fitter, found = Fitter(), []
        forward = capture(fitter.loss)

        def closure(x: Tensor) -> Tensor:
            fitter.optimizer.zero_grad()
            loss: Tensor = forward(x)
            loss.backward()
            found.append(loss.item())
            return loss

        for i in range(12):
            x = torch.full((4, 3), 0.1 * i)
            fitter.optimizer.step(functools.partial(closure, x))
            found.extend(fitter.model.weight.flatten().tolist())
        return found, forward

    (expected, _), (found, forward) = (
        fitted(lambda f: f),
        fitted(lambda f: fz.capture(f, backward=True)),
    )
    assert found == expected
    assert forward.stats.captures == 1 and forward.stats.replays > 20, forward.explain()
