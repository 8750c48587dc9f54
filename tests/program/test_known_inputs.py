"""The inputs of the last call: found again without a guard, learned again after a change, not learned in vain."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functionalize as fz
from functionalize._compat.fast_guards import (
    tensor_match,
    tensor_match_in_python,
    window_in_python,
    window_within,
)
from functionalize.ir.inputs import Call
from functionalize.state.mode_guard import ModeGuard
from functionalize.state.sources import Gradient
from functionalize.state.step_guards import ModuleGuard
from functionalize.util.reader import ReadLog
from functionalize.util.unchanged import Unchanged
from tests.steps import make_step

X = torch.ones(2, 4)


def captured_step() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    model[0].note = object()  # read by no code
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
    step = fz.capture(make_step(model, optimizer), audit=False)
    while step.stats.replays < 4:  # after the passes, which wait for two
        step(X)
    return model, optimizer, step


def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The guards on modules that were asked, one entry for each time."""
    found: list[Any] = []
    failure = ModuleGuard.failure

    def noted(guard: ModuleGuard, call: Any) -> str | None:
        found.append(guard)
        return failure(guard, call)

    monkeypatch.setattr(ModuleGuard, "failure", noted)
    return found


def test_a_second_replay_asks_no_guard_on_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, step = captured_step()
    found = asked(monkeypatch)
    step(X), step(X)
    assert not found
    model.eval()
    step(X)
    assert found  # and has the words
    assert "training = False, had True" in step.explain()


def test_a_second_replay_assigns_gradients_to_known_parameters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    parameters = dict(model.named_parameters())

    def train(x: Tensor) -> Tensor:
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    step = fz.capture(train, audit=False)
    for _ in range(6):
        step(X)
    looked_up: list[Any] = []
    assign = Gradient.assign
    monkeypatch.setattr(Gradient, "assign", lambda *args: looked_up.append(args) or assign(*args))
    kept = {name: p.grad for name, p in parameters.items()}
    step(X), step(X + 1)
    assert not looked_up
    for name, p in parameters.items():
        assert p.grad is not kept[name]
    expected = torch.autograd.grad(model(X + 1).square().mean(), list(parameters.values()))
    assert all(torch.equal(p.grad, g) for p, g in zip(parameters.values(), expected, strict=True))


def noted(guard: ModeGuard) -> Unchanged:
    """What the guard reads."""
    log = ReadLog()
    assert guard.failure(Call((), [], reader=log)) is None
    assert log.settle()
    log.facts.freeze()
    return log.facts


CHANGED_MODES: dict[str, Callable[[], Any]] = {
    "grad mode": torch.no_grad,
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu"),
    "anomaly detection": lambda: torch.autograd.set_detect_anomaly(True),
    "attention": lambda: nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH),
    "a device mode": lambda: torch.device("cpu"),
    "saved tensors": lambda: torch.autograd.graph.save_on_cpu(),
}


@pytest.mark.parametrize("name", CHANGED_MODES)
def test_a_mode_is_noticed_without_asking_its_guard(name: str) -> None:
    facts = noted(ModeGuard.now())
    assert facts.hold()
    with CHANGED_MODES[name]():
        assert not facts.hold()
    assert facts.hold()


def test_a_global_hook_is_noticed_without_asking_its_guard() -> None:
    facts = noted(ModeGuard.now())
    handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
    assert not facts.hold()
    handle.remove()
    assert facts.hold()


def test_a_loaded_state_is_learned_and_the_old_one_is_released(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, optimizer, step = captured_step()
    found = asked(monkeypatch)
    old = weakref.ref(optimizer.state[model[0].weight]["exp_avg"])
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.state[model[0].weight]["exp_avg"] = torch.zeros(4, 4)
    replays = step.stats.replays
    step(X), step(X), step(X)
    gc.collect()
    assert old() is None
    assert step.stats.replays == replays + 3
    assert len(found) == 2  # asked, and asked again for what it reads


@pytest.mark.parametrize("every", [1, 3])
def test_learning_stops_where_something_is_new_at_every_call(
    every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or after every few, as where an evaluation follows a few steps."""
    model, _, step = captured_step()
    learned: list[Any] = []
    known = step.core.cache.latest.program._known
    learn = type(known._last).of

    def noted(*args: Any, **options: Any) -> Any:
        learned.append(args)
        return learn(*args, **options)

    monkeypatch.setattr(type(known._last), "of", noted)
    for i in range(40):
        if i % every == 0:
            model[0].note = object()
        step(X)
    assert len(learned) <= 6
    for _ in range(40):
        step(X)
    assert known._last is not None


def test_an_argument_that_a_module_holds_as_well() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.batch = nn.Linear(4, 4), X

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.layer(self.batch)

    torch.manual_seed(0)
    eager, ours = Model(), Model()
    ours.load_state_dict(eager.state_dict())
    step = make_step(eager, torch.optim.SGD(eager.parameters(), 0.1))
    captured = fz.capture(make_step(ours, torch.optim.SGD(ours.parameters(), 0.1)), audit=False)
    batches = [X + i for i in range(4)]
    for held in (0, 0, 0, 0, 0, 1, 0, 0, 0, 2, 3):
        for passed in (0, 0, held):
            eager.batch = ours.batch = batches[held]
            expected = step(batches[passed])
            assert torch.equal(captured(batches[passed]), expected)
    assert captured.stats.replays > 10


def _tensors() -> list[Tensor]:
    return [torch.zeros(2, 3), torch.zeros(4), torch.zeros(3, dtype=torch.complex64)]


OTHERS: dict[str, Callable[[list[Tensor]], Any]] = {
    "a size": lambda t: t.__setitem__(1, torch.zeros(5)),
    "a stride": lambda t: t.__setitem__(0, torch.zeros(3, 2).t()),
    "a dtype": lambda t: t.__setitem__(1, torch.zeros(4, dtype=torch.int32)),
    "a device": lambda t: t.__setitem__(1, torch.zeros(4, device="meta")),
    "a flag": lambda t: t[1].requires_grad_(),
    "a conjugate": lambda t: t.__setitem__(2, t[2].conj()),
    "a negative": lambda t: t.__setitem__(1, torch._neg_view(t[1])),
    "a class": lambda t: t.__setitem__(1, nn.Parameter(t[1], requires_grad=False)),
    "no tensor": lambda t: t.__setitem__(1, None),
}


@pytest.mark.parametrize("match", [tensor_match, tensor_match_in_python])
@pytest.mark.parametrize("name", OTHERS)
def test_tensors_with_other_properties_do_not_match(
    name: str, match: Callable[[Sequence[Tensor]], Callable[[Sequence[Any]], bool]]
) -> None:
    tensors = _tensors()
    test = match(tensors)
    assert test(tensors) and test(_tensors())
    OTHERS[name](tensors)
    try:
        assert not test(tensors)
    except (AttributeError, TypeError):
        assert name == "no tensor"


@pytest.mark.parametrize("within", [window_within, window_in_python])
def test_a_window_within_a_tensor(within: Callable[..., Tensor]) -> None:
    whole = torch.arange(20.0)[4:]
    expected = whole[3:9].view(2, 3)
    found = within(whole, (2, 3), (3, 1), 3)
    assert torch.equal(found, expected) and found.data_ptr() == expected.data_ptr()
