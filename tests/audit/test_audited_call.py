"""Audits alone, with all guards on Python state switched off, find what a step reads and a program has frozen."""

from __future__ import annotations

import copy
import logging
import math
import os
import sqlite3
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import functionalize as fz
from functionalize.audit.audit_recorder import AuditRecorder
from functionalize.audit.comparison import Comparison
from functionalize.audit.left_state import LeftState
from functionalize.errors import AuditError, UncapturableError
from functionalize.step.recording import StepRecording
from tests.audit.cases import AROUND, CASES, Loss
from tests.audit.unguarded import unguarded
from tests.step.twins import batch
from tests.steps import make_loss_step
from tests.walk.cases import READ, same_process

pytestmark = pytest.mark.usefixtures("ample_allowance")


@pytest.fixture
def guards_off() -> Iterator[None]:
    with same_process(), unguarded():
        yield


def model_and_step(make: Callable[[nn.Module], Any]) -> tuple[Any, Any]:
    """A step that trains by the loss of a case, and the change of the case."""
    torch.manual_seed(0)
    model = nn.Linear(6, 2)
    made = make(model)
    loss_of, change = made if isinstance(made, tuple) else (made, None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return make_loss_step(loss_of, optimizer), change


def until_captured(captured: Any) -> int:
    """Call it until it has a program; returns the number of calls."""
    for i in range(5):
        captured(batch(i))
        if captured.stats.captures:
            return i + 1
    raise AssertionError(captured.explain())


@pytest.mark.usefixtures("guards_off")
@pytest.mark.parametrize("name", CASES)
def test_an_audit_alone_finds(name: str) -> None:
    step, change = model_and_step(CASES[name])
    captured = fz.capture(step)
    until_captured(captured)
    if change is not None:
        captured(batch(5))
        assert captured.stats.replays == 1, captured.explain()
        change()
    for i in range(6, 24):
        captured(batch(i))
        if captured.stats.audit_failures:
            break
    assert captured.stats.audit_failures == 1, captured.explain()
    assert captured.stats.replays == 7  # it was the eighth call of the program
    assert "differs from eager" in captured.explain()


def keeps_in_a_forward(model: nn.Module) -> nn.Module:
    class Remembers(nn.Module):
        last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.last = x.detach() * 2
            return x

    return nn.Sequential(model, Remembers())


def keeps_in_a_hook(model: nn.Module) -> nn.Module:
    def keep(module: Any, args: Any, out: Tensor) -> None:
        module.last = out.detach() * 2

    model.register_forward_hook(keep)
    return model


@pytest.mark.usefixtures("guards_off")
@pytest.mark.parametrize("keeps", [keeps_in_a_forward, keeps_in_a_hook])
def test_what_outlives_the_step_needs_no_audit(keeps: Callable[[nn.Module], nn.Module]) -> None:
    """No guard sees the tensor that is left, but it is alive: no recording is kept."""
    model = keeps(nn.Linear(6, 2))
    captured = fz.capture(lambda x: model(x).square().mean().detach())
    for i in range(6):
        captured(batch(i))
    assert captured.stats.captures == 0
    assert "makes 1 storages that outlive it" in captured.explain()


@pytest.mark.usefixtures("guards_off")
@pytest.mark.parametrize("name", AROUND)
def test_an_audit_alone_finds_a(name: str) -> None:
    around, make = AROUND[name]
    step, _ = model_and_step(make)
    captured = fz.capture(step)
    until_captured(captured)
    with around():
        for i in range(8):
            captured(batch(i))
    assert (captured.stats.replays, captured.stats.audit_failures) == (7, 1), captured.explain()


def written(name: str, file: Any) -> Callable[[Tensor], object]:
    """An effect of the step. file: opened before the step begins."""
    effects: dict[str, Callable[[Tensor], object]] = {
        "a file": lambda loss: open("new.txt", "a").close(),
        "an open file": lambda loss: file.write("a step\n"),
        "a stream": lambda loss: sys.stderr.write("a step\n"),
        "a descriptor": lambda loss: os.write(file.fileno(), b"a step\n"),
        "torch.save": lambda loss: torch.save({"n": 1}, "a.pt"),
        "a database": lambda loss: sqlite3.connect(":memory:").close(),
        "a process": lambda loss: subprocess.run(["true"], check=True),
        "the text of a tensor": lambda loss: str(loss),
        "a formatted tensor": lambda loss: "%s" % loss,  # noqa: UP031
        "the text of a vector": lambda loss: f"{loss.expand(2)}",
    }
    return effects[name]


EFFECTS = {
    "a file": "writes to the file `new.txt`",
    "an open file": "writes to the file `held.txt`",
    "a stream": "writes to sys.stderr",
    "a descriptor": "calls os.write",
    "torch.save": "saves by torch.save",
    "a database": "calls sqlite3.connect",
    "a process": "calls subprocess.Popen",
    "the text of a tensor": "Python reads a tensor as text",
    "a formatted tensor": "Python reads a tensor as text",
    "the text of a vector": "Python reads a tensor as text",
}


@pytest.mark.usefixtures("guards_off")
@pytest.mark.parametrize("name", EFFECTS)
def test_an_audit_alone_finds_an_effect(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """A recording that refuses nothing: replays leave out what the step does beside its ops."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(StepRecording, "refusal", lambda self: None)
    with open("held.txt", "w") as file:
        effect = written(name, file)

        def make(model: nn.Module) -> Loss:
            def loss(x: Tensor) -> Tensor:
                found = model(x).square().mean()
                effect(found.detach())
                return found

            return loss

        captured = fz.capture(model_and_step(make)[0])
        until_captured(captured)
        for i in range(8):
            captured(batch(i))
    assert (captured.stats.replays, captured.stats.audit_failures) == (7, 1), captured.explain()
    assert EFFECTS[name] in captured.stats.differences[0]


def scaled_step(config: dict[str, float]) -> Callable[[Tensor], Tensor]:
    def loss(model: nn.Module) -> Loss:
        return lambda x: (model(x) * config["scale"]).square().mean()

    made: Callable[[Tensor], Tensor] = model_and_step(loss)[0]
    return made


@pytest.mark.usefixtures("guards_off")
def test_a_difference_is_logged_with_its_op_its_line_and_both_values(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = {"scale": 0.5}
    captured = fz.capture(scaled_step(config), audit=1)
    until_captured(captured)
    captured(batch(5))
    assert (captured.stats.audits, captured.stats.audit_failures) == (1, 0)
    config["scale"] = 0.25
    with caplog.at_level(logging.ERROR, "functionalize"):
        captured(batch(6))
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith("an audit of step: call 2 of a program differs from eager")
    assert "argument 1 of aten.mul.Tensor is 0.25, the program has 0.5\n  at " in message
    assert "tests/audit/test_audited_call.py" in message
    assert 'config["scale"]' in message
    assert captured.stats.differences == [message]
    assert message in captured.explain()
    assert captured.programs == ()
    captured(batch(7))  # recorded again, with the number of now
    captured(batch(8))
    assert (captured.stats.captures, captured.stats.audit_failures) == (2, 1)


@pytest.mark.usefixtures("guards_off")
def test_nothing_is_lost_in_an_audited_call() -> None:
    """Two twins: one eager, one whose third call is audited and differs. Both train alike from there on."""
    configs = [{"scale": 0.5}, {"scale": 0.5}]
    eager, captured = scaled_step(configs[0]), fz.capture(scaled_step(configs[1]), audit=1)
    for i in range(10):
        if i == 4:
            configs[0]["scale"] = configs[1]["scale"] = 0.25
        assert torch.equal(eager(batch(i)), captured(batch(i)))
    assert captured.stats.audit_failures == 1
    calls = captured.stats
    assert calls.warmups + calls.captures + calls.replays + calls.audits + calls.eager == 10


@pytest.mark.usefixtures("guards_off")
def test_raise_raises_after_the_step_has_run() -> None:
    config = {"scale": 0.5}
    captured = fz.capture(scaled_step(config), audit="raise")
    until_captured(captured)
    config["scale"] = 0.25
    for i in range(7):
        captured(batch(i))
    with pytest.raises(AuditError, match=r"argument 1 of aten\.mul\.Tensor is 0\.25, the program"):
        captured(batch(7))
    captured(batch(8))
    assert captured.stats.captures == 2


@pytest.mark.usefixtures("guards_off")
def test_the_third_difference_refuses_the_step() -> None:
    config = {"way": "mean"}

    def loss(model: nn.Module) -> Loss:
        return lambda x: getattr(model(x).square(), config["way"])()

    captured = fz.capture(model_and_step(loss)[0], audit=2, on_uncapturable="raise")
    until_captured(captured)
    with pytest.raises(UncapturableError, match="replays differ from eager again and again"):
        for i in range(30):
            config["way"] = ("mean", "sum", "std")[i % 3]
            captured(batch(i))
    assert captured.stats.audit_failures == 3


@pytest.mark.usefixtures("guards_off")
def test_a_hook_that_begins_to_raise_is_a_difference() -> None:
    failing: list[bool] = []

    def make(model: nn.Module) -> Loss:
        def check(grad: Tensor) -> None:
            if failing:
                raise ValueError("the gradient is not finite")

        next(model.parameters()).register_hook(check)
        return lambda x: F.relu(model(x)).square().mean()

    captured = fz.capture(model_and_step(make)[0], audit=2)
    until_captured(captured)
    failing.append(True)
    captured(batch(5))  # a replay, which the hook should have stopped
    with pytest.raises(ValueError, match="not finite"):
        captured(batch(6))
    assert captured.stats.audit_failures == 1
    assert "the step raises ValueError: the gradient is not finite" in captured.stats.differences[0]
    assert captured.programs == ()


def test_an_op_that_raises_in_eager_and_in_a_replay_is_no_difference() -> None:
    table = nn.Embedding(4, 2)
    captured = fz.capture(lambda i: table(i).sum().detach(), audit=1)
    for _ in range(3):
        captured(torch.tensor([1, 2]))
    with pytest.raises(IndexError):
        captured(torch.tensor([1, 9]))
    captured(torch.tensor([1, 2]))
    assert (captured.stats.audit_failures, len(captured.programs)) == (0, 1)


def test_a_guard_on_a_number_that_fails_is_no_difference() -> None:
    """The graph runs first: its guard fails, and the call is recorded as it would be without an audit."""
    captured = fz.capture(lambda x: x + 1 if x.sum().sin().item() > 0 else x - 1, audit=1)
    high, low = torch.tensor([1.0]), torch.tensor([4.0])
    for x in (high, high, high, low, low, high, low):
        assert torch.equal(captured(x), x + 1 if x.sin().item() > 0 else x - 1)
    assert (captured.stats.audits, captured.stats.audit_failures) == (4, 0)
    assert len(captured.programs) == 2


def test_numbers_that_live_are_no_difference() -> None:
    """Learning rates, step counts, numbers that Python computes from them, and what is returned."""
    torch.manual_seed(0)
    model = nn.Linear(6, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(x: Tensor) -> tuple[Tensor, float]:
        loss = model(x).square().mean()
        number = loss.item()
        (loss / (number + 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach() * torch.tensor(number), number * 2

    captured = fz.capture(step, audit=1)
    for i in range(9):
        optimizer.param_groups[0]["lr"] *= 0.9
        captured(batch(i))
    assert (captured.stats.audit_failures, captured.stats.replays) == (0, 0)
    assert captured.stats.audits >= 6


@pytest.mark.usefixtures("guards_off")
def test_a_number_computed_from_a_live_one_in_another_way_is_found() -> None:
    config = {"power": 1.0}

    def step(x: Tensor) -> Tensor:
        return x * (x.sum().item() * config["power"])

    captured = fz.capture(step, audit=1)
    for i in range(4):
        captured(batch(i))
    assert captured.stats.audit_failures == 0
    config["power"] = 0.5
    captured(batch(4))
    assert captured.stats.audit_failures == 1


@pytest.mark.usefixtures("guards_off")
def test_what_the_step_returns_is_compared() -> None:
    config = {"text": "a", "first": True}

    def step(x: Tensor) -> Any:
        a, b = x.sin(), x.cos()
        return (a if config["first"] else b), config["text"]

    for key, value in (("text", "b"), ("first", False)):
        captured = fz.capture(step, audit=1)
        for i in range(3):
            captured(batch(i))
        config[key] = value
        captured(batch(3))
        assert captured.stats.audit_failures == 1, key
        assert "of the result is" in captured.stats.differences[0]


@pytest.mark.usefixtures("guards_off")
def test_an_audited_step_frees_its_old_gradients_when_eager_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LeftState, "difference", lambda *args: None)  # a list grows
    model, seen = nn.Linear(6, 2), {}
    freed: list[bool] = []

    def step(x: Tensor) -> Tensor:
        model.zero_grad()
        freed.append(seen["gradient"]() is None)
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    captured = fz.capture(step, audit=1)
    for i in range(6):
        gradient = model.weight.grad
        seen["gradient"] = weakref.ref(gradient) if gradient is not None else lambda: None
        del gradient
        captured(batch(i))
    assert captured.stats.audits >= 3
    assert freed[-captured.stats.audits :] == [True] * captured.stats.audits


def test_an_error_in_the_comparison_is_logged_and_the_step_goes_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> None:
        raise KeyError("broken")

    captured = fz.capture(lambda x: x.sin().cos(), audit=1)
    until_captured(captured)
    for owner, name in ((AuditRecorder, "_is_result"), (Comparison, "check")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, broken)
            with caplog.at_level(logging.ERROR, "functionalize"):
                y = captured(batch(3))
        assert torch.equal(y, batch(3).sin().cos())
    captured(batch(4))
    assert (captured.stats.audit_failures, len(captured.programs)) == (0, 1)
    assert "a bug in functionalize" in caplog.records[0].getMessage()


def test_a_tensor_without_a_storage_is_a_difference_and_breaks_nothing() -> None:
    config = {"sparse": False}
    dense = torch.eye(6)

    def step(x: Tensor) -> Tensor:
        return torch.mm(dense.to_sparse() if config["sparse"] else dense, x.t())

    with unguarded():
        captured = fz.capture(step, audit=1)
        for i in range(4):
            captured(batch(i))
        config["sparse"] = True
        assert torch.equal(captured(batch(4)), batch(4).t())
    assert captured.stats.audit_failures == 1


def test_audits_can_be_switched_off() -> None:
    for off in (False, None):
        captured = fz.capture(lambda x: x.sin(), audit=off)
        for i in range(12):
            captured(batch(i))
        assert (captured.stats.audits, captured.stats.replays) == (0, 11)


def test_by_default_the_eighth_call_of_each_program_is_audited() -> None:
    captured = fz.capture(lambda x: x.sin())
    for i in range(2 * 12):
        captured(batch(i, rows=4 + i % 2))
    assert (captured.stats.audits, captured.stats.audit_failures) == (2, 0)
    assert [program.audits for program in captured.core.cache] == [1, 1]


def forward_and_gradients(forward: Any, model: nn.Module, x: Tensor) -> list[Tensor]:
    """One loss and its gradients: of an input that another op has made, and of the parameters."""
    leaf = x.clone().requires_grad_()
    loss = forward(leaf * 2)
    loss.backward()
    found = [loss.detach(), leaf.grad, *(p.grad for p in model.parameters())]
    model.zero_grad()
    assert all(t is not None for t in found)
    return found


@pytest.mark.usefixtures("guards_off")
@pytest.mark.parametrize("name", [*READ, "which of two results", "a tensor made from a number"])
def test_an_audit_of_a_forward_finds(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 2)
    loss_of, change = CASES[name](model)
    assert change is not None
    captured = fz.capture(loss_of, backward=True)
    for i in range(3):
        forward_and_gradients(captured, model, batch(i))
    done = captured.stats.replays
    assert done > 0, captured.explain()
    change()
    for i in range(done, 8):
        assert captured.stats.audit_failures == 0
        forward_and_gradients(captured, model, batch(i))
    assert (captured.stats.replays, captured.stats.audit_failures) == (7, 1), captured.explain()
    expected = forward_and_gradients(loss_of, model, batch(9))
    for _ in range(4):  # recorded again
        found = forward_and_gradients(captured, model, batch(9))
        assert all(map(torch.equal, found, expected))


def test_an_audited_forward_has_the_gradients_of_eager() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    twin = copy.deepcopy(model)
    captured = fz.capture(lambda x: model(x).square().mean(), backward=True, audit=2)
    eager = lambda x: twin(x).square().mean()  # noqa: E731
    for i in range(12):
        results = []
        for forward, each in ((eager, twin), (captured, model)):
            torch.manual_seed(i)
            results.append(forward_and_gradients(forward, each, batch(i)))
        assert all(map(torch.equal, *results)), i
        assert all(map(torch.equal, model.buffers(), twin.buffers())), i
    assert (captured.stats.audit_failures, captured.stats.reruns) == (0, 0)
    assert captured.stats.audits >= 4
    assert captured.stats.replays >= 4


def test_a_forward_under_no_grad_is_audited_as_a_step() -> None:
    model = nn.Linear(6, 2)
    captured = fz.capture(model, backward=True, audit=2)
    with torch.no_grad():
        for i in range(8):
            assert torch.equal(captured(batch(i)), model(batch(i)))
    assert captured.stats.audits >= 3


def test_a_forward_with_collectives_is_audited_by_the_number_of_its_calls() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    layer, sharded = nn.Linear(6, 2), fully_shard(nn.Linear(6, 2))
    for fn in (
        lambda x: functional.all_reduce(layer(x), "sum", dist.group.WORLD).sum(),
        lambda x: sharded(x).sum(),
    ):
        captured = fz.capture(fn, backward=True, audit=4)
        for i in range(12):  # of calls of two kinds, which have programs of their own
            captured(batch(i, rows=5 + (i > 4))).backward()
            audits = sum(program.audits for program in captured.core.cache)
            assert audits == captured.stats.audits
            assert captured.stats.audits == (i + 1) // 4
        assert captured.stats.replays >= 4, captured.explain()
        assert (captured.stats.captures > 1, captured.stats.audit_failures) == (True, 0)


@pytest.mark.usefixtures("guards_off")
def test_a_tensor_from_another_place_is_named() -> None:
    step, change = model_and_step(CASES["which of two layers"])
    captured = fz.capture(step, audit=1)
    until_captured(captured)
    change()
    captured(batch(5))
    assert (
        "argument 0 of aten.t.default is float32[2, 6] of a tensor that the program does not read, the program has "
        "float32[2, 6] of `model.twins.0.weight`\n"
    ) in captured.stats.differences[0]


@pytest.mark.usefixtures("guards_off")
def test_numbers_that_python_made_a_tensor_of_are_shown() -> None:
    step, change = model_and_step(CASES["a tensor made from a number"])
    captured = fz.capture(step, audit=1)
    until_captured(captured)
    change()
    captured(batch(5))
    assert "is float32[1] of the numbers [0.25], the program has" in captured.stats.differences[0]


def test_the_option_of_the_decorator() -> None:
    @fz.capture(audit=2)
    def step(x: Tensor) -> Tensor:
        return x.sin()

    for i in range(5):
        step(batch(i))
    assert (step.stats.audits, step.stats.replays) == (2, 2)
    assert "2 audits (no difference)" in step.explain()
    assert "program 1: 2 replays, 2 audited calls, " in step.explain()


def test_the_op_stream_is_made_when_a_run_is_compared_and_keeps_no_tensor_until_then() -> None:
    model = nn.Linear(6, 2)
    captured = fz.capture(lambda x: model(x).square())
    until_captured(captured)
    captured.forget()
    result = captured(batch(5))
    latest, died = captured.core.cache.latest, weakref.ref(result)
    assert callable(latest.op_stream)
    del result
    assert died() is None
    for i in range(8):
        captured(batch(i))
    assert captured.stats.audits == 1 and not callable(latest.op_stream)
    assert [row.target for row in latest.signature.rows] == [
        torch.ops.aten.t.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.pow.Tensor_Scalar,
    ]


def test_a_number_that_cannot_be_computed_is_no_difference() -> None:
    """A replay of that call runs eagerly, and raises what the step raises."""
    captured = fz.capture(lambda x, n: (x * 2, math.log(n)), audit=1)
    for n in [1.0, 2.0, 3.0, 4.0, 0.5, -1.0, 0.0, 5.0, -2.0, 7.0]:
        if n <= 0:
            with pytest.raises(ValueError, match="math domain error"):
                captured(batch(0), n)
        else:
            assert captured(batch(0), n)[1] == math.log(n)
    assert captured.stats.audits >= 4 and not captured.stats.differences
