"""Several programs of one step side by side, their bound, what is said of them, and the eager mode."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functionalize as fz
from functionalize.errors import UncapturableError, UnsupportedTensorError
from functionalize.program.program import Program
from functionalize.step import cache
from functionalize.step.recording import StepRecording

pytestmark = pytest.mark.usefixtures("ample_allowance")


def trained(**options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters())

    def train_step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        if model.training:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return model, fz.capture(train_step, **options)


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(
        torch.equal(x, y)
        for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    )


def run(step: Any, x: Tensor, seed: int) -> Tensor:
    torch.manual_seed(seed)
    return step(x)


def test_train_and_eval_and_lengths_side_by_side() -> None:
    (a, step), (b, eager) = trained(), trained()
    eager = eager.__wrapped__
    for i in range(32):
        rows = (3, 5)[i // 2 % 2]
        for model in (a, b):
            model.train(i % 2 == 0)
        x = torch.randn(rows, 4)
        assert torch.equal(run(step, x, i), run(eager, x, i)), i
        assert same(a, b)
    assert len(step.programs) == 4
    assert step.stats.captures == 4
    assert step.stats.replays >= 32 - 4 - 8


def test_a_program_is_found_without_trying_the_others() -> None:
    """Thirty lengths: what a call costs does not depend on how many programs there are."""
    step = fz.capture(lambda x: x.sin() + 1, allowance=None, dynamic=False)
    tried: list[int] = []
    for rows in [*range(1, 31)] * 2:
        step(torch.ones(rows))
    original = Program.known

    def counted(self: Program, *args: Any) -> Any:
        tried.append(id(self))
        return original(self, *args)

    Program.known = counted  # type: ignore[method-assign]
    try:
        for rows in range(1, 31):
            step(torch.ones(rows))
    finally:
        del Program.known  # it is inherited
    assert len(tried) == 30 == len(set(tried))


def test_programs_for_the_branches_of_a_number() -> None:
    def step(x: Tensor) -> Tensor:
        total = x.sum().item()
        return x + 1 if total > 0 else x - 1 if total > -10 else x * 2

    captured = fz.capture(step)
    values = [1.0, 1.0, -1.0, -9.0, 1.0, -1.0, -9.0, -9.0, 1.0]
    for value in values:
        x = torch.full((3,), value)
        assert torch.equal(captured(x), step(x))
    assert len(captured.programs) == 3
    assert captured.stats.replays == len(values) - 4


def test_the_least_recently_used_goes(caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MOST_PROGRAMS", 2)
    step = fz.capture(lambda x: x + 1)
    with caplog.at_level(logging.WARNING, "functionalize"):
        for rows in (1, 1, 2, 2, 1, 3, 3):
            assert torch.equal(step(torch.ones(rows)), torch.ones(rows) + 1)
    assert len(step.programs) == 2
    assert {p.inputs[0].geometry.size for p in step.programs} == {(3,), (1,)}
    assert step.stats.captures == 3
    assert caplog.records == []  # each was of use


def test_when_no_program_is_of_use_the_warning_names_the_guard(
    caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number that is no input, and another one at every call."""
    monkeypatch.setattr(cache, "MOST_PROGRAMS", 3)
    captured = fz.capture(lambda x, n: x * n, allowance=None)
    with caplog.at_level(logging.WARNING, "functionalize"):
        for n in range(12):
            assert torch.equal(captured(torch.ones(2), complex(n)), torch.ones(2) * complex(n))
    assert captured.stats.captures == 6
    assert captured.stats.eager == 6
    first, last = caplog.messages
    assert "has 3 programs, as many as it may (the most that are kept), and" in first
    assert "`n` is (" in first
    assert "runs eagerly from now on" in last
    assert "(4 times): `n` is (5+0j), was (4+0j)" in last
    assert "tried again after 1024 such calls" in last


def test_a_step_that_was_given_up_keeps_nothing_and_is_tried_again_ever_more_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cache, "MOST_PROGRAMS", 2)
    captured = fz.capture(lambda x, n: x * n, allowance=None)
    x, recorded = torch.ones(2), []
    for n in range(1, 4200):
        before = captured.stats.captures
        assert captured(x, complex(n))[0] == n
        if captured.stats.captures > before:
            recorded.append(n)
    assert recorded == [1, 2, 3, 4, *range(1029, 1032), *range(3080, 3083)]
    assert len(captured.programs) == 0
    assert captured.stats.replays == 0


def test_a_step_that_was_given_up_and_settles_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MOST_PROGRAMS", 2)
    captured = fz.capture(lambda x, n: x * n, allowance=None)
    x = torch.ones(2)
    for n in range(1100):
        assert captured(x, complex(min(n, 900)))[0] == min(n, 900)
    assert captured.stats.captures == 5
    assert captured.stats.replays > 60


def test_a_kind_of_call_that_is_replayed_goes_on_while_others_are_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cache, "MOST_PROGRAMS", 3)
    captured = fz.capture(lambda x, n: x * n, allowance=None)
    x = torch.ones(2)
    for n in range(40):
        assert captured(x, complex(n))[0] == n
        assert captured(torch.ones(3), 7j)[0] == 7j
    assert captured.stats.replays + captured.stats.audits == 39
    assert captured.stats.captures < 12
    assert len(captured.programs) == 1


def refused_step() -> tuple[Any, list[int]]:
    calls, weight = [0], torch.ones((), requires_grad=True)

    def step(x: Tensor) -> Tensor:
        return torch.nonzero(x * weight.detach()).sum() + len(calls)

    return step, calls


def test_on_uncapturable_eager_warns_once_and_goes_on(caplog: Any) -> None:
    step, _ = refused_step()
    captured = fz.capture(step, on_uncapturable="eager", dynamic=False)
    with caplog.at_level(logging.WARNING, "functionalize"):
        for i in range(5):
            x = torch.arange(i + 1).remainder(2)[:1]
            assert torch.equal(captured(x), step(x))
    assert len(caplog.messages) == 1
    assert "it runs eagerly: aten.nonzero.default gives a result whose size" in (caplog.messages[0])
    assert (captured.stats.warmups, captured.stats.eager) == (1, 4)


def test_on_uncapturable_raise_runs_nothing() -> None:
    step, _ = refused_step()
    captured = fz.capture(step, dynamic=False, on_uncapturable="raise")
    captured(torch.ones(2))
    for _ in range(2):
        with pytest.raises(UncapturableError, match="whose size depends on data"):
            captured(torch.ones(2))


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="'raise' or 'eager', not 'ignore'"):
        fz.capture(lambda x: x, on_uncapturable="ignore")
    with pytest.raises(ValueError, match="allowance is at least 0 eager steps, or None, not -1"):
        fz.capture(lambda x: x, allowance=-1)
    for wrong in (3, ["remat"]):
        with pytest.raises(ValueError, match="passes is the text of a pipeline"):
            fz.capture(lambda x: x, passes=wrong)


def sparse(x: Tensor) -> Tensor:
    return x.to_sparse().to_dense() + 1


def quantised(x: Tensor) -> Tensor:
    return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8).dequantize()


def quantised_by_channel(x: Tensor) -> Tensor:
    scales, zeros = torch.full((3,), 0.1), torch.zeros(3, dtype=torch.long)
    return torch.quantize_per_channel(x, scales, zeros, 0, torch.qint8).dequantize()


def nested(x: Tensor) -> Tensor:
    return torch.nested.nested_tensor([x[0], x[1, :2]]).to_padded_tensor(0.0)


# torch warns of both kinds, and of some of it from C++ once in a process.
ODD = pytest.mark.filterwarnings("ignore:.*quantize:UserWarning", "ignore:.*nested:UserWarning")
MORE = "which is more than a storage, a size and strides: only plain strided tensors can be"


@ODD
@pytest.mark.parametrize("fn", [sparse, quantised, quantised_by_channel, nested])
def test_a_tensor_that_no_program_can_hold_does_not_stop_the_step(fn: Any) -> None:
    step = fz.capture(fn, on_uncapturable="eager")
    for _ in range(3):
        assert torch.equal(step(torch.eye(3)), fn(torch.eye(3)))
    assert (step.stats.warmups, step.stats.eager) == (1, 2)
    assert "cannot be captured: " in step.explain()
    assert fn.__name__.partition("_")[0] in step.explain()


@ODD
@pytest.mark.parametrize(
    ("fn", "op"),
    [
        (quantised, "aten.quantize_per_tensor.default makes a quantised tensor, "),
        (quantised_by_channel, "aten.quantize_per_channel.default makes a quantised tensor, "),
        (nested, "aten._nested_tensor_from_tensor_list.default makes a nested tensor, "),
    ],
)
def test_a_tensor_of_more_than_a_storage_is_refused_by_its_op(fn: Any, op: str) -> None:
    with pytest.raises(UnsupportedTensorError, match=re.escape(op + MORE)):
        fz.functions.trace(fn, torch.eye(3))  # on fakes, which do not say that they are quantised
    step = fz.capture(fn, on_uncapturable="raise")
    assert torch.equal(step(torch.eye(3)), fn(torch.eye(3)))
    with pytest.raises(UncapturableError, match=re.escape(op + MORE)):
        step(torch.eye(3))


@ODD
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (
            lambda: torch.quantize_per_tensor(torch.eye(2), 0.1, 0, torch.qint8),
            "quantised tensor of torch.qint8",
        ),
        (
            lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(1)]),
            "nested tensor of torch.float32",
        ),
    ],
)
def test_a_tensor_of_more_than_a_storage_that_is_given(make: Any, kind: str) -> None:
    def step(x: Tensor) -> Tensor:
        return x.dequantize() if x.is_quantized else x.to_padded_tensor(0.0)

    given, told = make(), re.escape(f"meets a {kind}, {MORE}")
    with pytest.raises(UnsupportedTensorError, match=told):
        fz.functions.trace(step, given)
    with pytest.raises(UnsupportedTensorError, match=told):
        fz.capture(step, on_uncapturable="raise")(given)
    eager = fz.capture(step, on_uncapturable="eager")
    for _ in range(3):
        assert torch.equal(eager(given), step(given))
    assert re.search(told, eager.explain()) and not eager.stats.captures
    held = fz.capture(lambda: step(given), on_uncapturable="eager")
    assert torch.equal(held(), step(given)) and torch.equal(held(), step(given))
    assert re.search(told, held.explain()) and not held.stats.captures


def test_explain_counts_one_of_a_thing() -> None:
    step = fz.capture(lambda x: x.sin())
    for _ in range(2):
        step(torch.ones(2))
    lines = step.explain().splitlines()
    assert lines[0] == "the next call like the last one replays program 1"
    assert lines[1] == "<lambda>: 1 program, 1 replay, 1 capture, 0 warm-ups"
    assert lines[3].startswith("program 1: 1 replay, ") and " 1 input, 0 actions after" in lines[3]


def test_explain() -> None:
    model, step = trained()
    for _ in range(4):
        step(torch.randn(3, 4))
    step(torch.randn(5, 4))
    model.eval()
    step(torch.randn(5, 4))
    text = step.explain(verbose=True)
    assert text.startswith("the next call like the last one ") and "\ntrain_step: " in text
    assert "recorded because of the first call" in text
    assert "recorded because of `x` is float32[5, 4], was float32[3, 4]" in text
    assert "recorded because of `model` has training = False, had True" in text
    assert "parameter `weight` of a Linear" in text
    assert "state `exp_avg` of parameter 0 in group 0" in text
    assert "leaf 0 of the arguments" in text
    assert "guards that missed, the most frequent first" in text


def test_a_warm_up_of_one_kind_is_not_compared_with_another() -> None:
    """Two kinds of calls in turn settle as each would alone."""
    step = fz.capture(lambda x, double: x * 2 if double else x + torch.tensor([1.0]))
    for i in range(8):
        x = torch.ones(2) * i
        assert torch.equal(step(x, bool(i % 2)), x * 2 if i % 2 else x + 1)
    assert len(step.programs) == 2
    assert step.stats.replays >= 4


def test_explain_a_captured_forward() -> None:
    model = nn.Linear(4, 1)
    forward = fz.capture(lambda x: model(x).square().mean(), backward=True)
    for _ in range(5):
        forward(torch.randn(3, 4)).backward()
        model.zero_grad()
    (backward,) = (x for x in forward.explain(True).splitlines() if x.startswith("  backward: "))
    assert f"backward: {forward.stats.backwards} replays; " in backward
    assert "1 saved value, 0 actions after the graph" in backward


def test_a_bug_is_called_one_and_costs_no_step(monkeypatch: Any, caplog: Any) -> None:
    def broken(self: StepRecording, in_spec: Any) -> Any:
        raise KeyError("lost")

    monkeypatch.setattr(StepRecording, "program", broken)
    step = fz.capture(lambda x: x + 1, on_uncapturable="raise")
    assert torch.equal(step(torch.ones(2)), torch.ones(2) + 1)
    with pytest.raises(
        UncapturableError, match="a bug in functionalize: KeyError: 'lost'"
    ) as raised:
        step(torch.ones(2))
    assert isinstance(raised.value.__cause__, KeyError)
    assert "a bug in functionalize, please report it" in caplog.messages


def test_of_a_ring_s_programs_one_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """That which came after the last one in the last round."""
    ring, at = torch.zeros(3), torch.zeros((), dtype=torch.long)

    def step(x: Tensor) -> Tensor:
        ring[int(at)] = x.sum()
        at.add_(1).remainder_(3)
        return ring * 2

    captured = fz.capture(step, audit=False)
    for i in range(20):
        captured(torch.full((2,), float(i)))
    asked, known = [], Program.known
    monkeypatch.setattr(
        Program, "known", lambda self, *args: asked.append(self) or known(self, *args)
    )
    for i in range(20, 26):
        assert captured(torch.full((2,), float(i)))[i % 3] == 4 * i
    assert captured.stats.captures == 3
    assert len(asked) == 6
    assert len(set(map(id, asked))) == 3
