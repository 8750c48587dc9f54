"""When a call is recorded: the ledger, questions and answers, rests; and which of several programs is replayed."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import functionalize as fz
from functionalize.ir.guards import Miss
from functionalize.program.executable import Executable
from functionalize.step.policy import AUDIT, BUILDING, RECORDING, Ledger, Policy, Questions, Rest
from tests.fsdp.sharded import build_mlp
from tests.ranks import run_on_ranks

X = torch.ones(3)


def miss(answer: Any, question: str = "`n`") -> Miss:
    return Miss(f"{question} is {answer}, was 0", question, repr(answer))


# -- the ledger ------------------------------------------------------------------------------------


def test_a_ledger_pays_from_its_allowance_then_from_calls_and_replays() -> None:
    ledger = Ledger()
    recordings = 0
    while ledger.can_pay(RECORDING + BUILDING):
        ledger.pay(RECORDING + BUILDING)
        recordings += 1
    assert recordings == 4
    for _ in range(99):
        ledger.call()
    assert not ledger.can_pay(RECORDING + BUILDING)
    ledger.call()
    assert ledger.can_pay(RECORDING + BUILDING - 0.01)
    ledger.pay(ledger.balance)
    for _ in range(14):
        ledger.call()
        ledger.replayed()
    assert ledger.can_pay(AUDIT)


def test_what_a_week_of_replays_has_saved_is_bounded() -> None:
    ledger = Ledger()
    for _ in range(100_000):
        ledger.replayed()
    assert ledger.balance == 60.0


def test_a_step_whose_allowance_is_spent_goes_on_eagerly_and_is_recorded_later() -> None:
    captured = fz.capture(lambda x, n: x * n)
    found = [captured(X, complex(n))[0].item() for n in range(12)]
    assert found == [complex(n) for n in range(12)]
    assert captured.stats.captures <= 3
    for _ in range(400):
        assert captured(X, 100j)[0] == 100j
    assert captured.stats.replays > 150


def test_any_allowance_asks_for_more() -> None:
    captured = fz.capture(lambda x, n: x * n, allowance=None)
    for n in range(12):
        captured(X, complex(n))
    assert captured.stats.captures == 12


# -- questions -------------------------------------------------------------------------------------


def test_three_answers_in_a_row_then_those_that_return() -> None:
    questions, found = Questions(), []
    for n in (1, 2, 3, 4, 5, 2, 6, 4, 4, 2):
        found.append(questions.is_worth_recording("key", miss(n)))
        if found[-1]:
            questions.recorded("key", miss(n))
    assert found == [True, True, True, False, False, False, False, False, True, False]
    questions.replayed("key")
    assert questions.is_worth_recording("key", miss(7))


def test_an_answer_whose_recordings_were_of_no_use_must_come_twice_as_often_each_time() -> None:
    questions, recorded = Questions(), []
    for call in range(1, 65):
        if questions.is_worth_recording("key", miss("b")):
            questions.recorded("key", miss("b"))
            recorded.append(call)
    assert recorded == [1, 2, 3, 4, 5, 9, 17, 33]


def test_the_memory_of_answers_and_questions_is_bounded() -> None:
    questions = Questions()
    for n in range(20_000):
        questions.is_worth_recording("key", miss(n))
        questions.is_worth_recording(n, miss(n))
    assert len(questions._of) <= 4096
    assert len(questions._of[hash("key"), "`n`"].answers) <= 512
    assert len(questions._pending) <= 4096


def test_a_question_that_is_forgotten_leaves_others_of_its_kind() -> None:
    questions = Questions()
    questions.is_worth_recording("key", miss(1, "`first`"))
    for n in range(4096):
        questions.is_worth_recording("other", miss(1, f"`n{n}`"))
        questions.is_worth_recording("key", miss(n, "`last`"))
    questions.replayed("key")
    assert questions.is_worth_recording("key", miss(-1, "`last`"))


@pytest.mark.parametrize(
    ("text", "question", "answer"),
    [
        ("`t.mode` is 'a', was 'b'", "`t.mode`", "`t.mode` is 'a'"),
        ("`t.n3` is 17, was 16", "`t.n#`", "`t.n3` is 17"),
        ("no such thing", "no such thing", "no such thing"),
    ],
)
def test_the_question_of_any_guard(text: str, question: str, answer: str) -> None:
    found = Miss.of(text)
    assert (found, found.question, found.answer) == (text, question, answer)


# -- rests -----------------------------------------------------------------------------------------


def test_a_rest_follows_calls_in_vain_and_doubles() -> None:
    rest, looks = Rest(), []
    for call in range(6000):
        if not rest.takes_call():
            looks.append(call)
            rest.is_in_vain()
    assert looks[:36] == [*range(32), 64, 129, 258, 515]
    assert looks[36:] == [1028, 2053, 3078, 4103, 5128]
    rest.is_of_use()
    while rest.takes_call():
        pass
    rest.is_in_vain()
    assert not rest.takes_call()


def test_a_step_that_is_called_in_vain_asks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"n": 0}
    table: dict[int, float] = {}

    def step(x: Tensor) -> Tensor:
        state["n"] += 1
        return x * table.get(state["n"], 1.0)

    captured, asked = fz.capture(step), []
    for _ in range(200):
        captured(X)
    ask = Executable.ask
    monkeypatch.setattr(
        Executable, "ask", lambda self, leaves: asked.append(1) or ask(self, leaves)
    )
    for _ in range(200):
        captured(X)
    assert len(asked) <= 2
    assert captured.stats.captures <= 4


# -- what is told ----------------------------------------------------------------------------------


def test_a_running_number_is_told_once_with_its_line(caplog: pytest.LogCaptureFixture) -> None:
    state, table = {"n": 0}, {3: 2.0}

    def step(x: Tensor) -> Tensor:
        state["n"] += 1
        return x * table.get(state["n"], 1.0)  # the running number

    captured = fz.capture(step)
    for _ in range(100):
        captured(X)
    told = [r.getMessage() for r in caplog.records if "runs eagerly where" in r.getMessage()]
    assert len(told) == 1
    assert re.match(r"step runs eagerly where .*n.* \+ 1.* at .*test_policy.py:\d+", told[0])
    assert "# the running number" in told[0]
    assert "a key or an index that is made of it" in told[0]


# -- several programs ------------------------------------------------------------------------------


class Ring(nn.Module):
    """A pointer in a buffer goes round."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))
        self.register_buffer("kept", torch.zeros(size, 3))
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        at = int(self.pointer)
        self.kept[at] = x
        self.pointer += 1
        self.pointer %= self.size
        return self.kept.sum(0)


def test_a_pointer_that_goes_round_runs_one_program_per_call(
    monkeypatch: pytest.MonkeyPatch, ample_allowance: None
) -> None:
    ours, eager = Ring(12), Ring(12)
    captured = fz.capture(ours)
    ran: list[int] = []
    results = Executable.results

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        ran.append(1)
        return results(self, *args, **kwargs)

    monkeypatch.setattr(Executable, "results", counted)
    for i in range(60):
        x = torch.full((3,), float(i))
        assert torch.equal(captured(x), eager(x))
    ran.clear()
    before = captured.stats.replays
    for i in range(24):
        x = torch.full((3,), float(i))
        assert torch.equal(captured(x), eager(x))
    assert captured.stats.replays - before + captured.stats.audits >= 24
    assert len(ran) <= 24
    assert len(captured.programs) == 12


def branches(number: Callable[[Tensor], Any]) -> tuple[Callable[[Tensor], Tensor], list[Tensor]]:
    def step(x: Tensor) -> Tensor:
        y = x.sin()
        for k in range(3):
            y = y * (k + 2) if number(y) > k else y - 1
        return y

    draw = random.Random(0)
    return step, [torch.full((3,), draw.uniform(-3, 3)) for _ in range(80)]


def test_branches_of_numbers_in_the_graph_try_programs_with_the_same_answers(
    monkeypatch: pytest.MonkeyPatch, ample_allowance: None
) -> None:
    step, inputs = branches(lambda y: (y * torch.ones(())).sum().item())
    weight = torch.ones(3)
    captured = fz.capture(lambda x: step(x * weight))
    for x in inputs:
        assert torch.equal(captured(x), step(x * weight))
    lost: list[int] = []
    replay = Executable.replay

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        lost.append(1)
        return replay(self, *args, **kwargs)

    monkeypatch.setattr(Executable, "replay", counted)
    before = captured.stats.replays
    for x in inputs:
        assert torch.equal(captured(x), step(x * weight))
    assert captured.stats.replays - before >= 70
    assert len(lost) <= 3 * len(inputs)


def flips(calls: int) -> tuple[list[float], list[float], Any, list[str]]:
    """Gradients are clipped by hand, by a norm that only the graph knows: rank 1 alone is over the limit at times."""
    results: list[list[float]] = []
    steps: list[Any] = []
    for capture in (lambda fn: fn, fz.capture):
        model, optimizer = build_mlp()

        def step(x: Tensor, own: Tensor, model: Any = model, optimizer: Any = optimizer) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            if (own * (1 + 0 * loss.detach())).sum().item() > 0:
                for p in model.parameters():
                    p.grad.mul_(0.5)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        steps.append(capture(step))
    draw, together = random.Random(dist.get_rank()), random.Random(7)
    told: list[str] = []
    for run in steps:
        draw.seed(dist.get_rank()), together.seed(7)
        found = []
        for i in range(calls):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(i))
            sign = (together if i % 3 else draw).choice((-1.0, 1.0))
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                found.append(run(x, torch.tensor([sign])).item())
            told += [str(w.message) for w in caught if w.category is fz.errors.UncapturableWarning]
        results.append(found)
    return results[0], results[1], steps[1].stats, told


def test_ranks_replay_another_program_where_a_number_is_another_one() -> None:
    for eager, ours, stats, told in run_on_ranks(flips, 120, world=2):
        assert eager == ours
        assert told == []
        assert stats.captures <= 3
        assert stats.replays >= 90


def test_the_policy_is_the_same_for_the_same_calls() -> None:
    one, other = Policy(), Policy()
    draw = random.Random(0)
    for _ in range(500):
        n, replays = draw.randint(0, 30), draw.random() < 0.3
        found = []
        for policy in (one, other):
            policy.ledger.call()
            if replays:
                policy.ledger.replayed(), policy.replayed("key")
            found.append(policy.may_record("key", miss(n)))
            if found[-1]:
                policy.ledger.pay(RECORDING)
        assert found[0] == found[1]
    assert one.ledger.balance == other.ledger.balance


def test_what_a_program_needs_until_its_first_replay_is_set_aside() -> None:
    ledger = Ledger(10.0)
    ledger.owed = lambda: 4.8
    assert not ledger.can_pay(AUDIT) and ledger.can_pay(5.0)
    assert ledger.can_pay(9.6, is_owed=True) and not ledger.can_pay(10.1, is_owed=True)


def test_a_ring_gets_all_its_programs_before_they_are_audited() -> None:
    """Each position has a program of its own; while the step saves for them, one of those it has is audited."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ring, at = torch.zeros(4, 8), torch.zeros((), dtype=torch.long)

    def step(x: Tensor) -> Tensor:
        ring[int(at)] = x[0]
        at.add_(1).remainder_(4)
        loss = (model(x).square().mean() + ring.square().mean()) * 1.0
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    captured = fz.capture(step)
    audits: list[int] = []
    for i in range(400):
        captured(torch.randn(4, 8, generator=torch.Generator().manual_seed(i)))
        if captured.stats.captures < 4:
            audits = [each.audits for each in captured.core.cache]
    assert captured.stats.captures == len(captured.programs) == 4
    assert sum(map(bool, audits)) <= 1
    before = captured.stats.eager
    for i in range(40):
        captured(torch.randn(4, 8, generator=torch.Generator().manual_seed(i)))
    assert captured.stats.eager == before and captured.stats.audits > 1


# -- refusals are no last word ---------------------------------------------------------------------


class Windowed:
    """A trainer whose history grows to three tensors, then keeps that many."""

    def __init__(self, make: Callable[[], nn.Module] = lambda: nn.Linear(4, 4)) -> None:
        torch.manual_seed(0)
        self.model = make()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.history: list[Tensor] = []

    def step(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.history.append(loss.detach())
        if len(self.history) > 3:
            self.history.pop(0)
        return torch.stack(self.history).mean()


def compared_window(width: int, *make: Callable[[], nn.Module]) -> Any:
    """Whether 80 calls are equal to eager, and the counts of the captured step."""
    eager, ours = Windowed(*make), Windowed(*make)
    captured, same = fz.capture(ours.step), True
    for i in range(80):
        x = torch.randn(3, width, generator=torch.Generator().manual_seed(i))
        same &= torch.equal(captured(x), eager.step(x))
    return same, captured.stats, captured.explain()


def test_a_refused_step_that_has_become_steady_is_captured() -> None:
    with pytest.warns(fz.errors.UncapturableWarning, match="append to it alone") as warned:
        same, stats, text = compared_window(4)
    assert same and stats.replays >= 35, text
    assert len(warned) == 1


def windows_on_ranks() -> Any:
    warnings.simplefilter("ignore")
    return compared_window(8, lambda: build_mlp()[0])


def test_refused_steps_that_have_become_steady_are_captured_on_ranks() -> None:
    for same, stats, text in run_on_ranks(windows_on_ranks):
        assert same and stats.replays >= 25, text


def test_a_step_that_is_never_steady_is_tried_ever_more_rarely_and_warns_once(
    tmp_path: Path,
) -> None:
    path = tmp_path / "log"

    def step(x: Tensor) -> Tensor:
        path.write_text("a step")
        return x * 2

    captured, recorded = fz.capture(step), []
    with pytest.warns(fz.errors.UncapturableWarning, match="writes to the file") as warned:
        for i in range(1200):
            before = captured.stats.warmups
            captured(X)
            if captured.stats.warmups > before:
                recorded.append(i)
    assert recorded == [0, 32, 96, 224, 480, 992]
    assert len(warned) == 1 and captured.stats.replays == 0


def test_a_step_whose_every_call_is_of_another_kind_rests() -> None:
    captured = fz.capture(lambda x, options: x * options["scale"])
    for i in range(400):
        captured(X, {"scale": 1.0 + i, **{str(j): j for j in range(20)}})
    assert captured.stats.replays == 0
    assert captured.stats.rare < 50 and captured.stats.eager > 390
