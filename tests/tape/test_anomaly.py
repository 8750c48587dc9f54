"""A nan in a replay in anomaly mode: the autograd node and its forward's line are named before anything runs again."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functionalize as fz
from functionalize.ir.guards import NanGuard
from functionalize.program.early_guard import EarlyGuard
from functionalize.recorder.recorder import Recorder

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def anomaly_mode() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Anomaly Detection has been enabled")
        warnings.filterwarnings("ignore", "Error detected in \\S+ Traceback of forward")  # eager's
        with torch.autograd.detect_anomaly():
            yield


class Twin:
    """A model with dropout, and the step that is captured. catches: it goes on where autograd raises."""

    def __init__(self, catches: bool = False) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Linear(3, 3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        self.catches = catches

    def train(self, x: Tensor) -> Any:
        self.optimizer.zero_grad()
        loss = (self.model(x) + 2).sqrt().sum()
        try:
            loss.backward()
        except RuntimeError as error:
            if self.catches:
                return str(error)
            raise
        self.optimizer.step()
        return loss.detach()

    def left(self) -> list[Any]:
        """What a step leaves behind, as values that compare."""
        of_parameters = [
            (p.tolist(), p.grad if p.grad is None else str(p.grad)) for p in self.model.parameters()
        ]
        return [*of_parameters, torch.get_rng_state().tolist()]


GOOD, BAD = torch.ones(2, 3), torch.full((2, 3), -1e3)


def replayed(twin: Twin) -> Any:
    step = fz.capture(twin.train, allowance=None)
    for _ in range(5):
        step(GOOD)
    assert step.stats.replays >= 2
    return step


def run(step: Callable[[Tensor], Any], twin: Twin) -> tuple[str, list[Any]]:
    """What a call on nan says, and what it leaves."""
    torch.manual_seed(1)
    try:
        said = step(BAD)
    except RuntimeError as error:
        said = str(error)
    return said, twin.left()


NAMED = (
    r"^Error detected in SqrtBackward0, in a replay. Traceback of forward call that caused the error:\n"
    r"(.*\n)*.*test_anomaly.py\", line \d+, in train\n    loss = \(self.model\(x\) \+ 2\).sqrt\(\).sum\(\)\n"
    r"The replay has changed nothing"
)


@pytest.mark.parametrize("catches", [False, True])
def test_a_nan_in_a_replay_is_named_and_leaves_what_eager_leaves(catches: bool) -> None:
    twin, eager = Twin(catches), Twin(catches)
    step = replayed(twin)
    for _ in range(5):
        torch.manual_seed(0)
        eager.train(GOOD)
    twin.model.load_state_dict(eager.model.state_dict())
    with pytest.warns(UserWarning, match=NAMED):
        found = run(step, twin)
    assert found == run(eager.train, eager)
    assert found[0] == "Function 'SqrtBackward0' returned nan values in its 0th output."
    (failure,) = step.stats.guard_failures
    assert failure.startswith("SqrtBackward0 returned nan values in the backward at ")
    assert failure.endswith(", in train loss = (self.model(x) + 2).sqrt().sum()")


def test_the_warning_needs_no_second_run() -> None:
    step = replayed(Twin())

    def warned(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt  # ends the call with the first warning

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warnings, "warn", warned)
        patch.setattr(Recorder, "__enter__", None)  # nothing is recorded
        with pytest.raises(KeyboardInterrupt):
            step(BAD)


def test_every_check_has_a_guard_that_a_file_keeps(tmp_path: Path) -> None:
    step = replayed(Twin())
    guards = step.program.value_guards
    assert guards and all(type(guard) is NanGuard for guard in guards)
    assert {guard.what for guard in guards} >= {"SqrtBackward0", "AddmmBackward0", "MulBackward0"}
    step.save(tmp_path / "step.fzp")
    again = fz.capture(Twin().train)
    again.load(tmp_path / "step.fzp")
    assert again.programs[0].value_guards == guards


def test_a_check_of_the_users_is_a_number_that_python_reads() -> None:
    def hook(grad: Tensor) -> None:
        if aten._is_any_true(grad.isnan()).item():
            raise ValueError

    def train(x: Tensor) -> Any:
        x = x.detach().requires_grad_()
        y = x.sin()
        y.register_hook(hook)
        y.exp().sum().backward()
        return x.grad

    step = fz.capture(train, allowance=None)
    for _ in range(3):
        step(GOOD)
    assert all(type(guard) is NanGuard for guard in step.program.value_guards)
    (early,) = (guard for guard in step.program.guards if isinstance(guard, EarlyGuard))
    (own,) = early.program.value_guards
    assert own.what == "a tensor's value" and "in hook" in own.where


def test_outside_of_anomaly_mode_nothing_is_checked() -> None:
    with torch.autograd.set_detect_anomaly(False):
        program = replayed(Twin()).program
    assert not program.value_guards
    assert not any(n.target is aten.isnan.default for n in program.graph.nodes)
