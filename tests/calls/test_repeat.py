"""`fz.repeat`: functions that a step calls for what they do, and that replays call again."""

from __future__ import annotations

import copy
import pickle
import random
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor

import functionalize as fz
from functionalize.calls.repeat import RepeatedFunction

from .twins import Twin, batch

ROWS: list[Any] = []


@fz.repeat
def to_rows(metrics: dict[str, Any], *, note: str = "") -> None:
    """Keeps a row."""
    ROWS.append((metrics, note))


class Table:
    """A metrics logger of one's own, with state that every call moves."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self.count = 0

    @fz.repeat
    def log(self, metrics: dict[str, Any], text: str = "") -> None:
        self.count += 1
        self.rows.append((self.count, metrics, text))

    @fz.repeat(when=lambda self, metrics: metrics["n"] % 3 == 0)
    def log_some(self, metrics: dict[str, Any]) -> None:
        self.rows.append(metrics)


def with_tables(after: Any) -> tuple[list[Twin], list[Any]]:
    twins = [Twin(after), Twin(after)]
    for twin in twins:
        twin.table, twin.n = Table(), 0  # type: ignore[attr-defined]
    return twins, [twins[0].step, fz.capture(twins[1].step)]


def compare(after: Any, calls: int = 14) -> Any:
    twins, run = with_tables(after)
    for i in range(calls):
        for step in run:
            step(batch(i))
        assert twins[0].table.rows == twins[1].table.rows  # type: ignore[attr-defined]
        assert twins[0].state() == twins[1].state()
    assert run[1].stats.replays >= calls - 4, run[1].explain()
    return twins[1].table  # type: ignore[attr-defined]


def test_a_method_is_called_by_every_replay() -> None:
    def after(loss: Tensor, twin: Any) -> None:
        twin.n += 1
        twin.table.log({"loss": loss.item(), "n": twin.n}, text=f"{loss.item():.3f}")

    table = compare(after)
    assert table.count == 14 and [row["n"] for _, row, _ in table.rows] == list(range(1, 15))


def test_a_condition_on_the_arguments_needs_no_branch() -> None:
    def after(loss: Tensor, twin: Any) -> None:
        twin.n += 1
        twin.table.log_some({"loss": loss.item(), "n": twin.n})

    assert [row["n"] for row in compare(after).rows] == [3, 6, 9, 12]


def test_tensors_are_passed_as_they_are_at_the_call() -> None:
    kept: list[list[Any]] = [[], []]
    logs = [fz.repeat(lambda p, n, i=i: kept[i].append((p.clone(), n))) for i in range(2)]

    def before_update(loss: Tensor, twin: Any) -> None:
        twin.write(twin.model.weight.detach(), 1)
        with torch.no_grad():
            twin.model.weight.mul_(0.5)

    twins = [Twin(before_update), Twin(before_update)]
    for twin, log in zip(twins, logs, strict=True):
        twin.write = log  # type: ignore[attr-defined]
    run = [twins[0].step, fz.capture(twins[1].step)]
    for i in range(10):
        for step in run:
            step(batch(i))
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(*kept, strict=True))
    assert len(kept[1]) == 10 and run[1].stats.replays >= 6, run[1].explain()


def test_calls_keep_their_order() -> None:
    order: list[Any] = []
    first, second = (
        fz.repeat(lambda n: order.append(("a", n))),
        fz.repeat(lambda n: order.append(("b", n))),
    )

    def step(x: Tensor) -> Tensor:
        y = x.sum()
        first(y.item())
        second(1)
        first(2.0)
        return y

    captured = fz.capture(step)
    for i in range(6):
        order.clear()
        captured(torch.full((2,), float(i)))
        assert order == [("a", 2.0 * i), ("b", 1), ("a", 2.0)]
    assert captured.stats.replays >= 3


def refusal(after: Any, prepare: Any = lambda twin: None) -> str:
    """Why a step is refused whose calls are as eager's. prepare: called with each twin."""
    twins, run = with_tables(after)
    for twin in twins:
        prepare(twin)
    with pytest.warns(fz.errors.UncapturableWarning):
        for i in range(6):
            for step in run:
                step(batch(i))
            assert twins[0].table.rows == twins[1].table.rows  # type: ignore[attr-defined]
            assert twins[0].state() == twins[1].state()
    assert run[1].stats.replays == 0
    (error,) = run[1].core.refused.values()
    return str(error)


def test_a_result_that_the_step_uses_is_refused() -> None:
    def after(loss: Tensor, twin: Any) -> None:
        if twin.table.log({"loss": 1.0}):
            twin.n += 1

    assert "uses the result of fz.repeat(" in refusal(after)


def test_a_function_that_changes_what_the_step_reads_is_refused() -> None:
    def after(loss: Tensor, twin: Any) -> None:
        twin.table.log({"loss": loss.item()})
        twin.n = twin.table.count

    assert "table.count`, which the step reads" in refusal(after)


def test_a_list_that_the_step_reads_is_refused() -> None:
    def after(loss: Tensor, twin: Any) -> None:
        twin.table.log({"loss": loss.item()})
        twin.n = len(twin.table.rows)

    assert "which the step reads" in refusal(after)


def test_a_list_to_which_both_append_is_refused() -> None:
    def after(loss: Tensor, twin: Any) -> None:
        twin.table.log({"loss": loss.item()})
        twin.table.rows.append(loss.item())

    assert "which the step reads" in refusal(after)


def test_hyperparameters_are_what_the_step_reads() -> None:
    def after(loss: Tensor, twin: Any) -> None:
        twin.lower()

    def prepare(twin: Any) -> None:
        twin.lower = fz.repeat(lambda: twin.optimizer.param_groups[0].update(lr=0.25))

    assert "param_groups[0]['lr']`, which the step reads" in refusal(after, prepare)


@pytest.mark.parametrize("draw", [random.random, lambda: torch.rand(2)])
def test_draws_are_refused(draw: Any) -> None:
    def after(loss: Tensor, twin: Any) -> None:
        twin.draw()

    def prepare(twin: Any) -> None:
        twin.draw = fz.repeat(draw)

    assert "it draws random numbers" in refusal(after, prepare)


def test_tensors_that_were_not_passed_are_refused() -> None:
    def after(loss: Tensor, twin: Any) -> None:
        twin.norm()

    def prepare(twin: Any) -> None:
        twin.norm = fz.repeat(lambda: ROWS.append(twin.model.weight.norm().item()))

    assert "a tensor of the step that it was not passed" in refusal(after, prepare)


def test_objects_are_refused_by_name() -> None:
    def after(loss: Tensor, twin: Any) -> None:
        twin.table.log_some({"n": 1, "twin": twin})

    assert "with a Twin" in refusal(after)


def test_an_error_is_the_call_s() -> None:
    @fz.repeat
    def fails(n: float) -> None:
        raise RuntimeError(f"no room for {n}")

    step = fz.capture(lambda x: (fails(x.sum().item()), x * 2)[1])
    for _ in range(3):
        with pytest.raises(RuntimeError, match=r"no room for 2\.0"):
            step(torch.ones(2))


def test_without_a_recording_it_is_the_function() -> None:
    double = fz.repeat(lambda x: 2 * x)
    assert double(3) == 6 and repr(double).startswith("fz.repeat(<function")
    odd = fz.repeat(lambda x: 2 * x, when=lambda x: x % 2 == 1)
    assert odd(3) == 6 and odd(4) is None
    assert to_rows.__name__ == "to_rows" and to_rows.__doc__ == "Keeps a row."
    assert pickle.loads(pickle.dumps(to_rows)) is to_rows is copy.deepcopy(to_rows)
    assert isinstance(Table.log, RepeatedFunction)
    for wrong in (lambda: fz.repeat(3), lambda: fz.repeat(len, when=3)):  # type: ignore[call-overload]
        with pytest.raises(TypeError):
            wrong()


def test_a_run_of_a_library_is_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run like that of Weights & Biases, whose `log` takes a dict: found without `fz.repeat`."""

    class Run:
        def __init__(self) -> None:
            self.rows: list[Any] = []

        def log(self, data: dict[str, Any], step: int | None = None) -> None:
            self.rows.append((data, step))

    Run.__module__, Run.__qualname__ = "wandb.sdk.wandb_run", "Run"
    module = types.ModuleType("wandb.sdk.wandb_run")
    module.Run = Run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb.sdk.wandb_run", module)
    runs = [Run(), Run()]

    def after(loss: Tensor, twin: Any) -> None:
        twin.n += 1
        twin.run.log({"loss": loss.item(), "half": loss.item() / 2}, step=twin.n)

    twins = [Twin(after), Twin(after)]
    for twin, run in zip(twins, runs, strict=True):
        twin.run, twin.n = run, 0  # type: ignore[attr-defined]
    steps = [twins[0].step, fz.capture(twins[1].step)]
    for i in range(10):
        for step in steps:
            step(batch(i))
    assert runs[0].rows == runs[1].rows and len(runs[1].rows) == 10
    assert steps[1].stats.replays >= 6, steps[1].explain()
