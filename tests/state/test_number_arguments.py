"""Numbers among the arguments: constants of a program, and inputs of one from the call on that brings others."""

from __future__ import annotations

import decimal
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import functionalize as fz
from functionalize.state.arguments import flatten
from functionalize.state.number_arguments import VaryingArguments, varying_leaves
from functionalize.step.cache import key_of
from tests.ranks import run_on_ranks


class Trainer:
    """A model, an optimizer and a step that takes a number. use: what the loss and the number make."""

    def __init__(self, use: Callable[[Trainer, Tensor, Any], Any]) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.use, self.total, self.last, self.kept = use, 0.0, 0, []

    def step(self, x: Tensor, n: Any) -> Any:
        result = self.use(self, self.model(x).square().mean(), n)
        loss = result[0] if isinstance(result, tuple) else result
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        rest = result[1:] if isinstance(result, tuple) else ()
        return loss.detach(), *rest

    def state(self) -> Any:
        group = self.optimizer.param_groups[0]
        parameters = [p.tolist() for p in self.model.parameters()]
        return parameters, group["lr"], self.total, self.last, self.kept[:]


def times(trainer: Trainer, loss: Tensor, n: Any) -> Any:
    return loss * n


def annealed(trainer: Trainer, loss: Tensor, n: Any) -> Any:
    return loss * (0.5 * (1 + math.cos(math.pi * n / 50)))


def sets_the_rate(trainer: Trainer, loss: Tensor, n: Any) -> Any:
    trainer.optimizer.param_groups[0]["lr"] = 0.01 / (n + 1)
    return loss


def decides(trainer: Trainer, loss: Tensor, n: Any) -> Any:
    return loss * 2 if n < 6 else loss


def every_third(trainer: Trainer, loss: Tensor, n: Any) -> Any:
    return loss * 2 if n % 3 == 0 else loss


def counts(trainer: Trainer, loss: Tensor, n: Any) -> Any:
    trainer.total += n
    trainer.last = n
    trainer.kept.append(n)
    return loss


def returns(trainer: Trainer, loss: Tensor, n: Any) -> Any:
    return loss, n, n * 2 + 1, {"n": n}


def of_a_read_number(trainer: Trainer, loss: Tensor, n: Any) -> Any:
    return loss, loss.item() / (n + 1)


USES = (
    times,
    annealed,
    sets_the_rate,
    decides,
    every_third,
    counts,
    returns,
    of_a_read_number,
)


def run(
    trainer: Trainer,
    step: Callable[..., Any],
    numbers: list[Any],
    state: Callable[[], Any] | None = None,
) -> list[Any]:
    generator, found = torch.Generator().manual_seed(1), []
    for n in numbers:
        try:
            loss, *rest = step(torch.randn(3, 4, generator=generator), n)
        except Exception as error:
            found.append((type(error), str(error)))
        else:
            found.append(repr((loss.tolist(), rest, (state or trainer.state)())))
    return found


def compared(use: Callable[..., Any], numbers: list[Any], **options: Any) -> fz.CapturedStep:
    eager, mine = Trainer(use), Trainer(use)
    step = fz.capture(mine.step, **options)
    assert run(mine, step, numbers) == run(eager, eager.step, numbers)
    return step


@pytest.mark.parametrize("kind", [int, float])
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_one_program_serves_all_numbers(use, kind):
    numbers = [kind(i + 1) if kind is int else i + 0.5 for i in range(24)]
    step = compared(use, numbers, audit=False)
    assert step.stats.captures <= 2 and step.stats.replays >= 17, step.stats


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_audits_agree(use):
    step = compared(use, [*range(1, 13)], audit=1)
    assert step.stats.audits >= 5 and not step.stats.audit_failures


def test_a_number_that_never_varies_is_a_constant():
    step = compared(times, [3] * 8, audit=False)
    assert step.stats.captures == 1 and step.stats.replays == 6
    assert all(each.name != "n" for each in step.program.inputs)


def test_a_program_of_one_number_stays_beside_that_of_all():
    step = compared(times, [3, 3, 3, 3, 4, 5, 3, 6, 3, 7, 8], audit=False)
    assert step.stats.captures == 2 and step.stats.replays == 8, step.stats


ODD = [1, True, 2, 3.0, math.nan, math.inf, -0.0, 0.0, 2**63, 2**70, -5, 1.5, "a", None, 2 + 1j, 7]


def test_other_types_and_large_numbers():
    def use(trainer: Trainer, loss: Tensor, n: Any) -> Any:
        return (loss, n) if isinstance(n, (str, complex)) or n is None else (loss * n, n)

    step = compared(use, ODD * 3, audit=False, allowance=None)
    assert step.stats.replays > 15


def test_what_c_code_takes_exactly_is_a_constant():
    def use(trainer: Trainer, loss: Tensor, n: Any) -> Any:
        return loss * float(decimal.Decimal(n) / 3)

    step = compared(use, [*range(6)] * 3, audit=False, allowance=None)
    assert step.stats.replays >= 11


def test_numbers_in_containers_are_constants():
    def use(trainer: Trainer, loss: Tensor, n: Any) -> Any:
        return loss * n["scale"]

    with pytest.warns(
        fz.errors.UncapturableWarning, match=r"`n_scale` is 32, was 31: pass a number"
    ):
        step = compared(use, [{"scale": i} for i in range(40)], audit=False)
    assert step.stats.replays == 0


def test_a_list_that_grows_is_named():
    grown: list[int] = []

    def use(trainer: Trainer, loss: Tensor, n: Any) -> Any:
        return loss, len(n)

    trainer = Trainer(use)
    step = fz.capture(trainer.step, audit=False)
    with pytest.warns(
        fz.errors.UncapturableWarning,
        match=r"structure of `args\[1\]` changed \(33 elements, had 32",
    ):
        for i in range(40):
            grown.append(i)
            step(torch.ones(3, 4), grown)


def test_a_step_that_appends_to_an_argument_is_told_at_the_second_recording():
    kept: list[Tensor] = []

    def use(trainer: Trainer, loss: Tensor, n: Any) -> Any:
        n.append(loss.detach())
        return loss

    step = fz.capture(Trainer(use).step, audit=False, allowance=None)
    with pytest.warns(
        fz.errors.UncapturableWarning,
        match=r"2 recordings .* appends to `args\[1\]`.*: return what it",
    ):
        for _ in range(3):
            step(torch.ones(3, 4), kept)
    assert len(kept) == 3


def test_keywords_and_defaults():
    def build() -> tuple[Trainer, Callable[..., Any]]:
        trainer = Trainer(times)

        def step(x: Tensor, *more: Any, scale: float = 1.0, **others: Any) -> Any:
            return trainer.step(x, more[0] * scale + others["bias"])

        return trainer, step

    (eager, step), (mine, other) = build(), build()
    captured = fz.capture(other, audit=False)

    def call(fn: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, n: fn(x, n, 7, scale=1 / (n + 1), bias=n * 0.1)

    numbers = [*range(12)]
    assert run(mine, call(captured), numbers) == run(eager, call(step), numbers)
    assert captured.stats.captures == 1 and captured.stats.replays >= 9


def sharded(passes: Any) -> tuple[bool, int, int]:
    """Whether a captured FSDP2 step equals eager, how often it was recorded, and replayed."""

    def build() -> tuple[Trainer, Callable[..., Any], Callable[[], Any]]:
        trainer = Trainer(times)
        for layer in (trainer.model[0], trainer.model[2]):
            fully_shard(layer)
        fully_shard(trainer.model)
        trainer.optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=0.01)

        def step(x: Tensor, n: int) -> Any:
            for group in trainer.optimizer.param_groups:
                group["lr"] = 0.01 / (n + 1)
            return trainer.step(x, n)

        def state() -> Any:
            return [p.to_local().tolist() for p in trainer.model.parameters()]

        return trainer, step, state

    (eager, step, state), (mine, other, mine_state) = build(), build()
    captured = fz.capture(other, audit=False, passes=passes)
    numbers = [*range(16)]
    is_equal = run(mine, captured, numbers, mine_state) == run(eager, step, numbers, state)
    return is_equal, captured.stats.captures, captured.stats.replays


@pytest.mark.parametrize("passes", [(), "default"])
def test_under_fsdp(passes):
    for is_equal, captures, replays in run_on_ranks(sharded, passes, world=2):
        assert is_equal and captures == 1 and replays >= 12


def test_a_captured_forward_has_a_program_for_each_number():
    def build() -> tuple[Trainer, Callable[..., Any]]:
        trainer = Trainer(times)
        return trainer, lambda x, n: trainer.model(x).square().mean() * n

    def train(trainer: Trainer, forward: Callable[..., Any]) -> Callable[..., Any]:
        def step(x: Tensor, n: int) -> Any:
            loss = forward(x, n)
            loss.backward()
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()
            return (loss.detach(),)

        return step

    (eager, forward), (mine, other) = build(), build()
    captured = fz.capture(other, backward=True, audit=False)
    numbers = [i % 3 + 1 for i in range(15)]
    assert run(mine, train(mine, captured), numbers) == run(eager, train(eager, forward), numbers)
    assert captured.stats.captures == 3


def test_a_saved_step_replays_with_other_numbers(tmp_path: Path):
    first, second, eager = Trainer(times), Trainer(times), Trainer(times)
    step = fz.capture(first.step, audit=False)
    run(first, step, [*range(6)])
    step.save(tmp_path / "step.fzp")
    run(second, second.step, [1])
    run(eager, eager.step, [1])
    loaded = fz.capture(second.step, audit=False)
    loaded.load(tmp_path / "step.fzp")
    assert run(second, loaded, [50, 51, 52]) == run(eager, eager.step, [50, 51, 52])
    assert loaded.stats.replays == 3 and loaded.stats.captures == 0


def test_the_listing_names_the_argument():
    step = compared(times, [*range(6)], audit=False)
    assert "the argument `n`, a number" in step.explain(verbose=True)


def test_keys():
    varying = VaryingArguments()

    def key(*args: Any) -> Any:
        leaves, spec = flatten(args, {})
        varying.learn(spec, leaves)
        return varying.key(key_of(leaves, spec), leaves)

    assert varying_leaves(key(1, 2.0)) == ()
    assert varying_leaves(key(1, 2.5)) == (1,)
    assert key(1, 2.5) == key(1, 3.5) != key(1, 3)
    assert varying_leaves(key(4, 3.5)) == (0, 1)
    assert varying_leaves(key(True, 3.5)) == (1,)
    assert varying_leaves(key([1])) == varying_leaves(key([2])) == ()
