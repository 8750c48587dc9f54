"""Effects of a step on Python objects: a replay repeats them in their order, with values of its own."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functionalize as fz
from functionalize._compat.dispatch import current_modes
from functionalize.errors import GuardError, SaveError, UncapturableError
from functionalize.ir.inputs import Call
from functionalize.recorder.recorder import Recorder

pytestmark = pytest.mark.usefixtures("ample_allowance")


# The walk looks at no attribute of a callable object of this package: one whose code is a library's, too.
_CONTENT = {"__module__": "functionalize.board", "__call__": torch.nn.Module.__call__}
BOARD: Any = type("_Board", (), _CONTENT)()
_FULL = object()


@dataclass(frozen=True)
class Written:
    """Appends its value to the board."""

    what: str = "writes on the board"

    def repeat(self, call: Call, value: Any) -> None:
        if any(each is _FULL for each in BOARD.written):
            raise BOARD.error
        BOARD.written.append(value)


def write(value: Any) -> None:
    """An effect that the recorder of this step, if there is one, notes."""
    for mode in current_modes():
        if isinstance(mode, Recorder):
            mode.python_effects.append((Written(), value))
            return
    BOARD.written.append(value)


class Twin:
    """A model, its optimizer, and a step that writes each of `values(loss)`, and something after its update."""

    def __init__(self, values: Callable[..., Any]) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.values = values

    def step(self, x: Tensor) -> Tensor:
        loss: Tensor = self.model(x).square().mean()
        loss.backward()
        for value in self.values(loss):
            write(value)
        self.optimizer.step()
        self.optimizer.zero_grad()
        write(("after", len(self.values.__name__)))
        return loss.detach()


def run(step: Callable[[Tensor], Tensor], calls: int) -> list[list[Any]]:
    """What each call has written, and its result."""
    found = []
    for i in range(calls):
        BOARD.written = []
        result = step(torch.randn(4, 3, generator=torch.Generator().manual_seed(i)))
        found.append([*BOARD.written, result])
    return found


def mixed(loss: Tensor) -> list[Any]:
    n = loss.item()
    return [
        loss.detach(),
        n,
        math.trunc(n * 100),
        {"loss": [n * 2, None, "text"]},
        n > -1,
        round(n),
    ]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and same(list(a.values()), list(b.values()))
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b) and a.requires_grad == b.requires_grad
    return type(a) is type(b) and a == b


def captured_run(twin: Twin, calls: int, **options: Any) -> tuple[Any, list[list[Any]]]:
    """The captured step and what its replays have written: a recording only notes it."""
    captured = fz.capture(twin.step, audit=False, **options)
    return captured, run(captured, calls)


def test_a_replay_repeats_the_effects_in_their_order_with_its_own_values() -> None:
    expected = run(Twin(mixed).step, 8)
    captured, actual = captured_run(Twin(mixed), 8)
    assert captured.stats.replays >= 4, captured.explain()
    for was, now in list(zip(expected, actual, strict=True))[-captured.stats.replays :]:
        assert same(was, now), (was, now)


def test_an_audited_call_repeats_nothing_and_compares_the_values() -> None:
    captured = fz.capture(Twin(mixed).step, audit=1)
    found = run(captured, 6)
    assert captured.stats.audits >= 2, captured.explain()
    assert [len(each) for each in found] == [1] * 6
    assert not captured.stats.audit_failures, captured.explain()


def test_an_audit_notices_another_value() -> None:
    twin = Twin(lambda loss: [BOARD.text])
    captured = fz.capture(twin.step, audit=1)
    BOARD.text = "a"
    run(captured, 4)
    BOARD.text = "b"
    run(captured, 1)
    assert captured.stats.audit_failures == 1, captured.explain()


@pytest.mark.parametrize(
    "error", [RuntimeError("the board is full"), GuardError("of another step")]
)
def test_an_effect_that_raises_leaves_the_step_done(error: Exception) -> None:
    twin, eager = Twin(mixed), Twin(mixed)
    run(eager.step, 5)
    captured, _ = captured_run(twin, 4)
    replays = captured.stats.replays
    BOARD.error = error
    BOARD.written = [_FULL]
    with pytest.raises(type(error), match=str(error)):
        captured(torch.randn(4, 3, generator=torch.Generator().manual_seed(4)))
    assert torch.equal(twin.model.weight, eager.model.weight)
    assert captured.stats.replays == replays + 1
    assert captured.stats.captures == 1  # it did not run a second time


def test_a_value_with_an_autograd_history_is_refused() -> None:
    twin = Twin(lambda loss: [loss])
    captured = fz.capture(twin.step, audit=False, on_uncapturable="raise")
    with pytest.raises(
        UncapturableError, match="writes on the board with a tensor that has an autograd history"
    ):
        run(captured, 7)


def test_a_new_value_that_requires_a_gradient_is_refused() -> None:
    twin = Twin(lambda loss: [loss.detach().requires_grad_()])
    captured = fz.capture(twin.step, audit=False, on_uncapturable="raise")
    with pytest.raises(
        UncapturableError, match="writes on the board with a new tensor that requires a gradient"
    ):
        run(captured, 4)


def test_a_parameter_as_a_value_is_the_parameter() -> None:
    twin = Twin(mixed)
    twin.values = lambda loss: [twin.model.weight]
    captured, found = captured_run(twin, 5)
    assert captured.stats.replays and found[-1][0] is twin.model.weight


def test_an_effect_without_a_form_is_not_saved(tmp_path: Any) -> None:
    captured, _ = captured_run(Twin(mixed), 5)
    with pytest.raises(
        SaveError,
        match="writes on the board, a call that a replay makes again",
    ):
        captured.save(tmp_path / "step.fzp")
