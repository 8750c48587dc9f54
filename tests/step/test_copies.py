"""Copies and pickles of a captured step, and of what holds one: of its callable as in eager, without programs."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functionalize as fz

Copy = Callable[[Any], Any]


def eager(step: Any, **options: Any) -> Any:
    """As `capture`, without a captured step."""
    return step


class Trainer:
    """It keeps its captured step as an attribute."""

    def __init__(self, wrap: Callable[..., Any], **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.1)
        self.count = 0
        self.set_step(wrap, options)

    def set_step(self, wrap: Callable[..., Any], options: dict[str, Any]) -> None:
        """The attribute."""
        self.step = wrap(self._step, **options)

    def _step(self, x: Tensor) -> Tensor:
        self.count += 1
        loss = self.model(x).square().sum()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


class SameName(Trainer):
    """The attribute has the name of the method."""

    def set_step(self, wrap: Callable[..., Any], options: dict[str, Any]) -> None:
        """The attribute."""
        self._step: Any = wrap(self._step, **options)

    @property
    def step(self) -> Any:
        """The captured step."""
        return self._step


class InTable(Trainer):
    """The step is in a table, of a `partial`."""

    def set_step(self, wrap: Callable[..., Any], options: dict[str, Any]) -> None:
        """The table."""
        self.steps = {"train": wrap(partial(self._step), **options)}

    @property
    def step(self) -> Any:
        """The captured step."""
        return self.steps["train"]


class Decorated(Trainer):
    """What `@capture` made for this trainer is kept as well."""

    def set_step(self, wrap: Callable[..., Any], options: dict[str, Any]) -> None:
        """The attribute."""
        self.step = self.captured if wrap is fz.capture else self._step

    @fz.capture
    def captured(self, x: Tensor) -> Tensor:
        """The step of the decorator."""
        return self._step(x)


def pickled(value: Any) -> Any:
    """By `pickle`."""
    return pickle.loads(pickle.dumps(value))


def saved(value: Any) -> Any:
    """By `torch.save`."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES: list[Copy] = [copy.copy, copy.deepcopy, pickled, saved]


@pytest.mark.parametrize("make_copy", COPIES)
@pytest.mark.parametrize("kind", [Trainer, SameName, InTable, Decorated])
def test_a_trainer(kind: type[Trainer], make_copy: Copy) -> None:
    """A copy trains as the eager one's copy does, and the trainer goes on as it was."""

    def run(wrap: Any) -> tuple[list[float], Trainer, Trainer]:
        trainer = kind(wrap)
        for i in range(5):
            trainer.step(torch.full((2, 3), float(i)))
        other = make_copy(trainer)
        found = [other.step(torch.full((2, 3), float(i))).item() for i in range(5)]
        found += [trainer.step(torch.full((2, 3), float(i))).item() for i in range(3)]
        found += [trainer.count, other.count, *trainer.model.weight.flatten().tolist()]
        return [*found, *other.model.weight.flatten().tolist()], trainer, other

    (expected, _, _), (found, trainer, other) = run(eager), run(fz.capture)
    assert found == expected
    if make_copy is not copy.copy:  # which shares the step, as in eager
        assert other.step is not trainer.step
        assert other.step.stats.replays == 2, other.step.explain()
    assert trainer.step.stats.replays >= 5


@pytest.mark.parametrize("make_copy", [copy.copy, copy.deepcopy, pickled])
def test_a_step_itself(make_copy: Copy) -> None:
    """Without programs, of the copied trainer, with what a script gave to it; it is the trainer's own step."""
    trainer = Trainer(fz.capture, allowance=None, audit=7)
    trainer.step.tag = ["a"]
    for _ in range(3):
        trainer.step(torch.ones(2, 3))
    step = make_copy(trainer.step)
    assert type(step) is type(trainer.step) and not step.programs and not step.stats.replays
    assert step.core.options == trainer.step.core.options and step.tag == ["a"]
    assert step.__wrapped__ == step.callable and step.__name__ == "_step"
    owner = step.callable.__self__
    assert (owner is trainer) == (make_copy is copy.copy)
    assert (owner.step is step) == (make_copy is not copy.copy)


@pytest.mark.parametrize("options", [{"passes": "default"}, {"compile": "inductor"}, {"audit": 2}])
@pytest.mark.parametrize("make_copy", [copy.deepcopy, pickled])
def test_options(make_copy: Copy, options: dict[str, Any]) -> None:
    trainer = Trainer(fz.capture, **options)
    assert make_copy(trainer).step.core.options == trainer.step.core.options


class Model(nn.Module):
    """Whose `forward` is replaced by a captured one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        return self.layer(x).square().sum()


@pytest.mark.parametrize("make_copy", [copy.deepcopy, pickled, saved])
def test_a_captured_forward(make_copy: Copy) -> None:
    def run(wrap: Any) -> list[Any]:
        torch.manual_seed(0)
        model = Model()
        model.forward = wrap(model.forward, backward=True)  # type: ignore[method-assign]
        for _ in range(4):
            model(torch.ones(1, 3)).backward()
        other = make_copy(model)
        for _ in range(4):
            other(torch.ones(1, 3)).backward()
        if wrap is fz.capture:
            assert other.forward.stats.replays and other.forward is not model.forward
        return [str(p.grad) for each in (model, other) for p in each.parameters()]

    assert run(fz.capture) == run(eager)
    model = Model()
    model.forward = fz.capture(model.forward, backward=True)  # type: ignore[method-assign]
    forward = make_copy(model.forward)
    assert forward.callable.__self__.forward is forward is not model.forward


def plain_step(x: Tensor) -> Tensor:
    """Captured under another name."""
    return x * 2


@fz.capture
def by_name(x: Tensor) -> Tensor:
    """Captured under its own name."""
    return x * 2


@pytest.mark.parametrize("make_copy", COPIES)
def test_functions(make_copy: Copy) -> None:
    """They are copied as functions are: one that its module holds is found by its name."""
    assert make_copy(by_name) is by_name
    step = make_copy(fz.capture(plain_step))
    assert step.callable is plain_step
    assert make_copy(Decorated.captured) is Decorated.captured


def test_a_closure() -> None:
    """A deep copy shares the function, as in eager; a pickle fails as in eager, by the function's name."""
    model = nn.Linear(3, 1)

    def train(x: Tensor) -> Tensor:
        return model(x).sum().detach()

    step = fz.capture(train)
    for _ in range(3):
        step(torch.ones(1, 3))
    other = copy.deepcopy(step)
    assert other is not step and not other.programs
    assert other(torch.ones(1, 3)).equal(step(torch.ones(1, 3)))
    errors = []
    for each in (train, step, {"step": step}):
        with pytest.raises((AttributeError, pickle.PicklingError)) as raised:
            pickle.dumps(each)
        errors.append((type(raised.value), str(raised.value)))
    assert errors[0] == errors[1] == errors[2] and "train" in errors[0][1]


@pytest.mark.parametrize("make_copy", COPIES)
def test_backwards_of_eager_graphs(make_copy: Copy) -> None:
    """A copy has the options, and no programs; it goes backward as eager does."""
    model, x = nn.Linear(3, 2), torch.ones(1, 3)
    backward = fz.functions.capture_backward(audit=7, allowance=None)
    backward.tag = "a"

    def gradient(go: Callable[[Tensor], Any]) -> Tensor:
        model.zero_grad()
        go(model(x).square().sum())
        assert model.weight.grad is not None
        return model.weight.grad.clone()

    wanted = gradient(Tensor.backward)
    for _ in range(4):
        assert gradient(backward).equal(wanted)
    other = make_copy(backward)
    assert other.core.options == backward.core.options and other.tag == "a"
    assert other is not backward and not other.programs and not other.refused
    for _ in range(4):
        assert gradient(other).equal(wanted)
    assert other.stats.replays and backward.stats.replays
