"""`explain()`: its first line says what the next call does; then what went wrong; a program is one line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functionalize as fz

X = torch.ones(3)
LIKE = "the next call like the last one "


def first(step: Any) -> str:
    line: str = step.explain().partition("\n")[0]
    return line


def trained(**options: Any) -> tuple[Any, nn.Module]:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters())

    def train_step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return fz.capture(train_step, **options), model


def test_before_the_first_call() -> None:
    step, _ = trained()
    assert first(step) == "the next call is recorded, as the first one"


def test_a_recording_that_was_not_kept_names_the_reason_then_its_program_is_replayed() -> None:
    step, _ = trained()
    step(X)
    assert first(step).startswith(
        f"{LIKE}is recorded: the last recording was not kept, since the step "
    )
    step(X)
    assert step.stats.captures == 1 and first(step) == f"{LIKE}replays program 1"
    step(X)
    assert step.stats.replays == 1 and first(step) == f"{LIKE}replays program 1"


def test_an_audit_is_announced() -> None:
    step, _ = trained(audit=3)
    for _ in range(4):
        step(X)
    assert first(step) == f"{LIKE}is audited: it runs eagerly, and is compared with program 1"
    step(X)
    assert step.stats.audits == 1 and first(step) == f"{LIKE}replays program 1"


def test_the_program_of_the_last_kind_of_call_is_named() -> None:
    step = fz.capture(lambda x: x * 2, audit=False, dynamic=False)
    for rows in (3, 3, 4, 4, 4, 3):
        step(torch.ones(rows))
    assert len(step.programs) == 2 and first(step) == f"{LIKE}replays program 2"
    assert step.programs[-1].inputs[0].geometry.size == (3,)


def test_the_ledger_names_its_price() -> None:
    class Counter:
        n = 0

    counter = Counter()
    step = fz.capture(lambda x: x * {counter.n: 2.0}[counter.n])
    for counter.n in range(5):
        step(X)
    step.core.policy.ledger.balance = 3.2
    price = "a recording costs 11.8 eager steps, and 3.2 are left; each call adds 0.05"
    assert first(step) == f"{LIKE}runs eagerly: {price}"


def test_kinds_that_come_too_seldom() -> None:
    step = fz.capture(lambda x: x * 2, dynamic=False)
    step(torch.ones(3))
    step(torch.ones(4))
    assert step.stats.rare == 1
    assert first(step) == f"{LIKE}is recorded: calls of its kind have come often enough"
    step(torch.ones(4))
    assert step.stats.captures == 2 and first(step) == f"{LIKE}replays program 2"


def test_a_rest_says_how_long() -> None:
    class Counter:
        n = 0

    counter = Counter()

    def running(x: Tensor) -> Tensor:
        counter.n += 1
        return x * {counter.n: 2.0}[counter.n]

    step = fz.capture(running)
    with pytest.warns(fz.errors.UncapturableWarning):
        for _ in range(200):
            step(X)
    text = first(step)
    assert "runs eagerly: " in text
    assert "rests for" in text or "cannot be captured" in text, text


def test_a_refusal_comes_first_and_is_named_below() -> None:
    def reads(x: Tensor) -> Tensor:
        return x[x.sin() > 0.1].sum() * float(torch.seed())

    eager = fz.capture(reads, dynamic=False)
    with pytest.warns(fz.errors.UncapturableWarning):
        for _ in range(6):
            eager(X)
    lines = eager.explain().splitlines()
    assert lines[0] == (
        f"{LIKE}runs eagerly: it could not be captured, see below, and is tried again ever more rarely"
    )
    assert lines[1].startswith("cannot be captured: ")

    raising = fz.capture(reads, on_uncapturable="raise", dynamic=False)
    with pytest.raises(fz.errors.UncapturableError):
        for _ in range(6):
            raising(X)
    assert first(raising).startswith(f"{LIKE}raises UncapturableError: ")


def test_what_went_wrong_stands_before_the_counts_and_the_programs() -> None:
    step, model = trained()
    for _ in range(4):
        step(X)
    model.eval()
    step(X)
    lines = step.explain().splitlines()
    at = lines.index("guards that missed, the most frequent first")
    counts = next(i for i, line in enumerate(lines) if line.startswith("train_step: "))
    programs = [i for i, line in enumerate(lines) if line.startswith("program ")]
    assert 0 < at < counts < programs[0]
    assert len(lines) < 12


def test_verbose_adds_the_inputs_and_what_is_said_without_it_stays() -> None:
    step, _ = trained()
    for _ in range(4):
        step(X)
    short, long = step.explain().splitlines(), step.explain(verbose=True).splitlines()
    assert [line for line in long if not line.startswith("  ")] == short
    assert len(long) - len(short) == len(step.program.inputs)
    assert any("parameter `weight` of a Linear" in line for line in long)


def test_to_ask_changes_nothing() -> None:
    """The sequence of calls is the same whether somebody asks before each."""
    steps = [trained()[0] for _ in range(2)]
    counts = []
    for asks, step in zip((True, False), steps, strict=True):
        for i in range(30):
            step(torch.ones(2 if i % 5 else 4, 3))
            if asks:
                step.explain()
        counts.append(repr(step.stats))
    assert counts[0] == counts[1]


def test_a_guard_whose_recordings_are_not_kept_says_why() -> None:
    """As the calls of a model that generates tokens, beside those that train it."""

    def grow(x: Tensor, cache: list[Tensor] | None = None) -> Tensor:
        if cache is not None:
            cache.append(x)
        return x + 1

    step = fz.capture(grow)
    for _ in range(4):
        step(X)
    for _ in range(3):
        step(X, [X])
    (miss,) = [line for line in step.explain().splitlines() if " times: " in line]
    assert miss == (
        "  3 times: the structure of the arguments changed; recordings of such calls were not kept, since the step "
        "appends to `args[1]`, which a replay does not repeat: return what it appends, and append it outside the step"
    )
