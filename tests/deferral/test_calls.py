"""`lazy.module` and `lazy.optimizer`: bit for bit as eager, whoever looks and whatever Python does in between."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functionalize as fz
from functionalize.deferral.lazy import Lazy
from functionalize.errors import PassError
from tests.deferral.eagerly import image, poisoned
from tests.fsdp.twins import state_of

JOINED = "with an optimizer's step"


@pytest.fixture(autouse=True)
def nothing_is_right_by_chance() -> Iterator[None]:
    with poisoned():
        yield


class Model(nn.Module):
    """Embedding, two layers, a loss; keeps a buffer that it writes."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.scale = 1.0
        self.table = nn.Embedding(16, 8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 16))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> dict[str, Any]:
        logits = self.dropout(self.body(self.table(x)))
        loss = nn.functional.cross_entropy(logits * self.scale, x)
        return {"loss": loss, "logits": logits, "name": "model"}


def trained(step: Callable[[Any], Any], lazy: Lazy | None, steps: int = 9, **options: Any) -> Any:
    """The images of what `step` returns in each call, and of all state at the end."""
    torch.manual_seed(0)
    model = Model(**options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    run = SimpleNamespace(
        model=model,
        optimizer=optimizer,
        call=lazy.module(model) if lazy is not None else model,
        steps=lazy.optimizer(optimizer) if lazy is not None else optimizer,
        barrier=lazy.barrier if lazy is not None else lambda: None,
        schedule=torch.optim.lr_scheduler.StepLR(optimizer, 3),
    )
    found: list[Any] = []
    with lazy if lazy is not None else nullcontext():
        for run.i in range(steps):
            run.x = torch.arange(run.i, run.i + 12) % 16
            found.append(step(run))
    held = {name: image(t) for name, t in state_of(model, optimizer).items()}
    grads = [None if p.grad is None else image(p.grad) for p in model.parameters()]
    return [[image(t) for t in each] for each in found], held, grads, image(torch.get_rng_state())


def as_eager(step: Callable[[Any], Any], passes: str = "", **options: Any) -> Lazy:
    """Assert equality with eager."""
    lazy = fz.lazy(passes=passes)
    want, got = trained(step, None, **options), trained(step, lazy, **options)
    names = ("results", "state", "gradients", "generator")
    for mine, eager, what in zip(got, want, names, strict=True):
        assert mine == eager, f"{what} differ from eager\n{lazy.explain()}"
    return lazy


def joined(lazy: Lazy) -> int:
    """How many iterations ran as one captured step."""
    return sum(each._ran[JOINED] for each in lazy._calls if hasattr(each, "_ran"))


def plain(run: Any) -> Any:
    loss = run.call(run.x)["loss"]
    loss.backward()
    run.steps.step()
    run.steps.zero_grad()
    run.schedule.step()
    return (loss,)


@pytest.mark.parametrize("passes", ["", "default"])
def test_a_loop_runs_as_one_program(passes: str) -> None:
    lazy = as_eager(plain, passes)
    # Of the others the first is recorded, the second shows what it returns, the ninth is audited.
    assert joined(lazy) == 6
    text = lazy.explain()
    assert f"calls of Model: 3 at once, 6 {JOINED}" in text
    assert "iteration" in text


# -- who looks, in any place -----------------------------------------------------------------------

LOOKS: dict[str, Callable[[Any, Any], Any]] = {
    "item": lambda run, out: out["loss"].item(),
    "print": lambda run, out: repr(out["loss"].detach()),
    "numpy": lambda run, out: out["logits"].detach().numpy().sum(),
    "data_ptr": lambda run, out: out["logits"].data_ptr() and None,
    "op": lambda run, out: image(out["logits"].detach() * 2),
    "parameters": lambda run, out: image(run.model.body[0].weight * 2),
    "buffers": lambda run, out: image(run.model.body[1].running_mean.clone()),
    "gradient": lambda run, out: image(run.model.table.weight.grad),
    "barrier": lambda run, out: run.barrier(),
    "evaluation": lambda run, out: evaluated(run),
    "another forward": lambda run, out: image(run.call(run.x)["loss"]),
    "generator": lambda run, out: image(torch.rand(2)),
    "thread setting": lambda run, out: torch.set_num_threads(torch.get_num_threads()),
}


def evaluated(run: Any) -> Any:
    run.model.eval()
    with torch.no_grad():
        found = run.call(run.x)["loss"].item()
    run.model.train()
    return found


@pytest.mark.parametrize("look", LOOKS)
def test_somebody_looks(look: str) -> None:
    """In each iteration in another place, and in every fourth in none."""

    def step(run: Any) -> Any:
        seen: list[Any] = []

        def after(place: int) -> None:
            if run.i % 4 == place:
                seen.append(LOOKS[look](run, out))

        out = run.call(run.x)
        after(0)
        out["loss"].backward()
        after(1)
        run.steps.step()
        after(2)
        run.steps.zero_grad()
        return out["loss"], seen

    assert joined(as_eager(step)) >= 2


# -- Python in between -----------------------------------------------------------------------------


def between(
    change: Callable[[Any], Any], undo: Callable[[Any], Any], place: int
) -> Callable[[Any], Any]:
    """place: 0: before the optimizer's step, 1: after it."""

    def step(run: Any) -> Any:
        if run.i == 0:
            run.spare = [torch.full_like(run.model.table.weight, 0.1 * i).detach() for i in (1, 2)]
            run.means = [torch.full((8,), 0.1 * i) for i in (1, 2)]
        out = run.call(run.x)
        out["loss"].backward()
        for at in range(2):
            if run.i > 4 and at == place:
                change(run)
            if at == 0:
                run.steps.step()
            if at == place:
                undo(run)
        run.steps.zero_grad()
        return (out["loss"],)

    return step


def replace_data(run: Any) -> None:
    weight = run.model.table.weight
    run.kept = weight.data
    weight.data = torch.zeros_like(run.kept)


def restore_data(run: Any) -> None:
    if hasattr(run, "kept"):
        run.model.table.weight.data = run.kept.clone()


CHANGES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "mode": (lambda run: run.model.eval(), lambda run: run.model.train()),
    "attribute": (
        lambda run: setattr(run.model, "scale", 3.0),
        lambda run: setattr(run.model, "scale", 1.0),
    ),
    "learning rate": (
        lambda run: run.optimizer.param_groups[0].update(lr=0.03),
        lambda run: None,
    ),
    "zero_grad": (lambda run: run.optimizer.zero_grad(), lambda run: None),
    "gradient": (lambda run: run.model.table.weight.grad.mul_(0.5), lambda run: None),
    "batch": (lambda run: run.x.zero_(), lambda run: None),
    "buffer": (
        lambda run: setattr(run.model.body[1], "running_mean", run.means[run.i % 2]),
        lambda run: None,
    ),
    "storage": (
        lambda run: setattr(run.model.table.weight, "data", run.spare[run.i % 2]),
        lambda run: None,
    ),
    "determinism": (
        lambda run: torch.use_deterministic_algorithms(True),
        lambda run: torch.use_deterministic_algorithms(False),
    ),
}


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("what", CHANGES)
def test_python_changes_what_a_waiting_call_has_read(what: str, place: int) -> None:
    as_eager(between(*CHANGES[what], place))


@pytest.mark.parametrize("options", [{}, {"set_to_none": False}])
def test_gradients_that_the_optimizer_does_not_drop_stay(options: dict[str, Any]) -> None:
    """Of two optimizers the first drops its own; `zero_grad` comes right after the step, or before the next forward."""

    def step(run: Any) -> Any:
        if run.i == 0:
            run.rest = torch.optim.SGD(run.optimizer.param_groups[0]["params"][1:], lr=0.1)
            del run.optimizer.param_groups[0]["params"][1:]
        run.steps.zero_grad(**options)
        out = run.call(run.x)
        out["loss"].backward()
        run.steps.step()
        if run.i % 2:
            run.steps.zero_grad(**options)
        run.rest.step()
        run.rest.zero_grad()
        return (out["loss"],)

    lazy = as_eager(step, "default")
    assert joined(lazy) > 3


def test_zero_grad_before_the_backward() -> None:
    def step(run: Any) -> Any:
        out = run.call(run.x)
        run.steps.zero_grad()
        out["loss"].backward()
        run.steps.step()
        return (out["loss"],)

    assert joined(as_eager(step)) > 4


def test_a_number_that_changes_before_the_backward_is_that_of_the_forward() -> None:
    def step(run: Any) -> Any:
        loss = run.call(run.x)["loss"]
        run.model.scale = 2.0 if run.i == 5 else 1.0
        loss.backward()
        run.model.scale = 1.0
        run.steps.step()
        run.steps.zero_grad()
        return (loss,)

    as_eager(step)


def test_another_storage_of_a_parameter_before_the_step() -> None:
    """Forward and backward have used the old one, the step updates the new one."""

    def step(run: Any) -> Any:
        out = run.call(run.x)
        out["loss"].backward()
        if run.i > 4:
            replace_data(run)
        run.steps.step()
        restore_data(run)
        run.steps.zero_grad()
        return (out["loss"],)

    as_eager(step)


def test_memory_of_numpy_may_be_written_before_the_forward_runs() -> None:
    def step(run: Any) -> Any:
        array = run.x.numpy().copy()
        out = run.call(torch.from_numpy(array))
        if run.i == 5:
            array[:] = 1  # the backward reads it, too
        out["loss"].backward()
        array[:] = 0
        run.steps.step()
        run.steps.zero_grad()
        return (out["loss"],)

    assert joined(as_eager(step)) > 4


def test_autocast_above_the_forward() -> None:
    def step(run: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            out = run.call(run.x)
        out["loss"].backward()
        run.steps.step()
        run.steps.zero_grad()
        return (out["loss"],)

    assert joined(as_eager(step)) > 0


def test_microbatches_clipping_and_gradients_that_stay() -> None:
    def step(run: Any) -> Any:
        losses = []
        for part in run.x.chunk(3):
            out = run.call(part)
            out["loss"].backward()
            losses.append(out["loss"].detach())
        if run.i % 2:
            nn.utils.clip_grad_norm_(run.model.parameters(), 0.5)
        run.steps.step()
        if run.i % 3:
            run.steps.zero_grad()
        return losses

    assert joined(as_eager(step)) >= 2


def test_dropout_runs_at_once() -> None:
    lazy = as_eager(plain, dropout=0.5)
    assert joined(lazy) == 0
    assert "runs at once: it draws random numbers" in lazy.explain()


def test_hooks_on_parameters_see_every_gradient() -> None:
    def step(run: Any) -> Any:
        seen: list[Tensor] = []
        handle = run.model.table.weight.register_hook(lambda g: seen.append(g.clone()))
        loss = run.call(run.x)["loss"]
        loss.backward()
        run.steps.step()
        run.steps.zero_grad()
        handle.remove()
        return loss, *seen

    as_eager(step)


def test_other_gradients_than_those_of_all_leaves() -> None:
    def step(run: Any) -> Any:
        loss = run.call(run.x)["loss"]
        found = torch.autograd.grad(loss, [run.model.table.weight], retain_graph=True)
        loss.backward()
        run.steps.step()
        run.steps.zero_grad()
        return loss, *found

    as_eager(step)


def test_a_second_backward_raises() -> None:
    def step(run: Any) -> Any:
        loss = run.call(run.x)["loss"]
        loss.backward()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        run.steps.step()
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        run.steps.zero_grad()
        return (loss,)

    as_eager(step)


def test_another_loss_over_the_same_parameters() -> None:
    def step(run: Any) -> Any:
        loss = run.call(run.x)["loss"]
        penalty = run.model.table.weight.square().sum() if run.i % 2 else None
        loss.backward()
        if penalty is not None:
            penalty.backward()
        run.steps.step()
        run.steps.zero_grad()
        return (loss,)

    as_eager(step)


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("waits", [False, True])
def test_an_error_of_the_forward_comes_when_it_runs_with_the_line_of_the_call(waits: bool) -> None:
    """waits: whether the optimizer's step waits, too, since a program covers it."""
    lazy = fz.lazy()

    def step(run: Any) -> Any:
        if run.i == 6:
            run.x[3] = 99
            with pytest.raises(IndexError) as raised:
                out = run.call(run.x)
                loss = out["loss"]
                if not waits:
                    del out  # other results than before are held
                loss.backward()
                run.steps.step()
                assert waits
                run.steps.zero_grad()
            if run.call is not run.model:
                assert "this forward was called at" in raised.value.__notes__[0]
                assert "run.call(run.x)" in raised.value.__notes__[0]
            run.steps.zero_grad()
            return ()
        out = run.call(run.x)
        out["loss"].backward()
        run.steps.step()
        run.steps.zero_grad()
        return (out["loss"],)

    assert trained(step, lazy) == trained(step, None)
    assert joined(lazy) > 4


def test_an_exception_between_the_calls_leaves_the_state_of_eager() -> None:
    def step(run: Any) -> Any:
        try:
            loss = run.call(run.x)["loss"]
            if run.i == 4:
                raise ValueError
            loss.backward()
            if run.i == 6:
                raise KeyboardInterrupt
            run.steps.step()
        except (ValueError, KeyboardInterrupt):
            pass
        grads = [image(p.grad) for p in run.model.parameters()]
        run.steps.zero_grad()
        return loss, grads

    as_eager(step)


def test_ctrl_c_while_the_step_runs_comes_after_it() -> None:
    def step(run: Any) -> Any:
        loss = run.call(run.x)["loss"]
        loss.backward()
        if run.i == 6:
            handle = run.optimizer.register_step_pre_hook(
                lambda *_: signal.raise_signal(signal.SIGINT)
            )
            try:
                run.steps.step()
                interrupted = False
            except KeyboardInterrupt:
                interrupted = True
            handle.remove()
            assert interrupted
            if run.call is run.model:  # eager stops before the step
                run.steps.step()
        else:
            run.steps.step()
        run.steps.zero_grad()
        return (loss,)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        as_eager(step)
    finally:
        signal.signal(signal.SIGINT, before)


def test_leaving_the_block_computes_what_waits() -> None:
    lazy = fz.lazy()
    torch.manual_seed(0)
    model = Model()
    call, optimizer = (
        lazy.module(model),
        lazy.optimizer(torch.optim.SGD(model.parameters(), lr=0.1)),
    )
    x = torch.arange(12)
    for _ in range(4):
        with lazy:
            loss = call(x)["loss"]
            loss.backward()
        assert torch.isfinite(loss)
        assert model.table.weight.grad is not None
        with lazy:
            optimizer.step()
            optimizer.zero_grad()
    assert lazy._mode.looked["the end of the block"] == 2


# -- switched off ----------------------------------------------------------------------------------


def test_switched_off_and_outside_of_the_block_the_objects_themselves_run() -> None:
    lazy = fz.lazy(enabled=False)
    assert trained(plain, lazy) == trained(plain, None)
    assert joined(lazy) == 0
    model = Model()
    call = fz.lazy().module(model)
    call(torch.arange(12))["loss"].backward()
    assert model.table.weight.grad is not None
    assert call.training
    assert list(call.parameters()) == list(model.parameters())


def test_passes_that_change_collectives_are_refused() -> None:
    optimizer = torch.optim.SGD(Model().parameters())
    with pytest.raises(PassError, match="changes collectives, and ranks that look at different"):
        fz.lazy(passes="bucket_reduces").optimizer(optimizer)


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "mean square": lambda y: y.square().mean(),
    "sum": lambda y: y.sum(),
    "scaled mean": lambda y: y.mean() * 2,
    "two": lambda y: y[:, 0].exp().sum() + y[:, 1].square().sum(),
}
LOOKED_AT: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "nobody": lambda lazy, loss, y: None,
    "at the loss": lambda lazy, loss, y: loss.item(),
    "at the result": lambda lazy, loss, y: y.tolist(),
    "all": lambda lazy, loss, y: lazy.barrier(),
}


@pytest.mark.parametrize("looks", LOOKED_AT)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_a_loss_outside_of_the_module(loss: str, looks: str, kind: Any) -> None:
    """The gradient of the module's result is made by ops that wait: its backward reads what they write."""

    def trained(is_lazy: bool) -> list[Tensor]:
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
        optimizer = kind(plain.parameters(), lr=0.05)
        lazy = fz.lazy(enabled=is_lazy)
        model, stepped, found = lazy.module(plain), lazy.optimizer(optimizer), []
        with lazy:
            for i in range(7):
                y = model(torch.ones(3, 4) * (i + 1) * 0.1)
                made = LOSSES[loss](y)
                LOOKED_AT[looks](lazy, made, y)
                made.backward()
                stepped.step()
                stepped.zero_grad()
        found = [p.detach().clone() for p in plain.parameters()]
        return found

    assert all(map(torch.equal, trained(True), trained(False)))
