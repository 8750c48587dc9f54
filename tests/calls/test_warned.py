"""`warnings.warn` in a step: replays warn as eager does, under any filter, as the same line, with their own numbers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functionalize as fz
from functionalize.errors import SaveError

CALLS = 8


class Trainer:
    def __init__(self, warn: Callable[[float], None]) -> None:
        torch.manual_seed(0)
        self.model, self.warn = nn.Linear(4, 2), warn
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.warn(loss.item())
        return loss.detach()


def constant(loss: float) -> None:
    warnings.warn("careful")  # noqa: B028


def number(loss: float) -> None:
    warnings.warn(f"the loss is {loss:.4f}", stacklevel=1)


def category(loss: float) -> None:
    warnings.warn("careful", RuntimeWarning, stacklevel=1)


def of_the_step(loss: float) -> None:
    warnings.warn("careful", UserWarning, 2)


def of_the_caller(loss: float) -> None:
    warnings.warn("careful", stacklevel=3)


def made(loss: float) -> None:
    warnings.warn(DeprecationWarning("old"), stacklevel=1)


def seen(warn: Callable[[float], None], action: Any, capture: Any) -> tuple[list[Any], Any]:
    globals().pop("__warningregistry__", None)
    trainer = Trainer(warn)
    step = capture(trainer.step)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter(action)
        for i in range(CALLS):
            step(torch.randn(3, 4, generator=torch.Generator().manual_seed(i)))
    return [(str(w.message), w.category, Path(w.filename).name, w.lineno) for w in found], step


@pytest.mark.parametrize("action", ["always", "default", "module", "once", "ignore"])
@pytest.mark.parametrize("warn", [constant, number, category, of_the_step, of_the_caller, made])
def test_replays_warn_as_eager_does(warn: Callable[[float], None], action: str) -> None:
    expected, _ = seen(warn, action, lambda f: f)
    found, step = seen(warn, action, fz.capture(on_uncapturable="raise"))
    assert found == expected
    assert step.stats.replays >= CALLS - 3, step.explain()
    if action == "always":
        assert len(found) == CALLS and found[0][2] == Path(__file__).name


def test_a_warning_that_is_an_error_is_raised_in_the_step() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = fz.capture(Trainer(constant).step)
        with pytest.raises(UserWarning, match="careful"):
            step(torch.ones(3, 4))


def test_a_loaded_program_warns(tmp_path: Path) -> None:
    found, step = seen(number, "always", fz.capture)
    step.save(tmp_path / "step.fzp")

    def loaded(fn: Any) -> Any:
        other = fz.capture(fn, on_uncapturable="raise")
        other.load(tmp_path / "step.fzp")
        return other

    again, other = seen(number, "always", loaded)
    assert again == found and other.stats.replays >= CALLS - 1, other.explain()


class OwnWarning(UserWarning):
    pass


def of_an_own_class(loss: float) -> None:
    warnings.warn("careful", OwnWarning, stacklevel=1)


def test_a_class_of_ones_own_is_not_saved(tmp_path: Path) -> None:
    _, step = seen(of_an_own_class, "always", fz.capture)
    with pytest.raises(SaveError, match="warns by `OwnWarning`, a class that is not Python's own"):
        step.save(tmp_path / "step.fzp")
