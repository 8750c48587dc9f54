"""Whole FSDP2 training steps on two gloo ranks: the program, passes, what makes a step record again, errors.

Every feature of FSDP2 has its row in `features.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import functionalize as fz
from tests.allowance import ample_allowance
from tests.fsdp.sharded import build_llama, build_mlp
from tests.fsdp.steps import STEPS, pairs
from tests.fsdp.twins import Verdict, compare_twins, grown_storages, state_of
from tests.ranks import run_on_ranks


def zero_last(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., Tensor]:
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def llama_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., Tensor]:
    def step(tokens: Tensor) -> Tensor:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


# -- on the ranks ----------------------------------------------------------------------------------


def mlp_twins() -> Verdict:
    return compare_twins(build_mlp, zero_last, pairs())


def mlp_twins_through_passes() -> Verdict:
    return compare_twins(build_mlp, zero_last, pairs(), passes="default")


def llama_twins() -> Verdict:
    g = torch.Generator().manual_seed(dist.get_rank())
    batches = [(torch.randint(0, 64, (2, 8), generator=g),) for _ in range(STEPS)]
    return compare_twins(build_llama, llama_step, batches, passes="default", allowance=None)


def shapes_change() -> Verdict:
    return compare_twins(build_mlp, zero_last, [*pairs(4), *pairs(2, rows=6), *pairs(2)])


def averaging(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """A copy that holds the moving average of the parameters, and never runs forward."""
    average = build_mlp()[0]
    train = zero_last(model, optimizer)

    def step(x: Tensor, y: Tensor) -> Any:
        loss = train(x, y)
        with torch.no_grad():
            for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(parameter, 0.1)
        return loss, [mean.to_local().clone() for mean in average.parameters()]

    return step


def average_twins() -> Verdict:
    return compare_twins(build_mlp, averaging, pairs())


def returns_its_tensors() -> tuple[int, list[bool]]:
    """Whether a replay returns the objects that the model and the optimizer hold."""
    model, optimizer = build_mlp()
    train = zero_last(model, optimizer)

    def train_step(x: Tensor, y: Tensor) -> Any:
        train(x, y)
        return list(model.parameters()), {"state": [s["exp_avg"] for s in optimizer.state.values()]}

    step = fz.capture(train_step)
    for batch in pairs(4):
        parameters, kept = step(*batch)
    states = [s["exp_avg"] for s in optimizer.state.values()]
    found = [*zip(parameters, model.parameters(), strict=True)]
    found += zip(kept["state"], states, strict=True)
    return step.stats.replays, [a is b for a, b in found]


@ample_allowance()
def modes_change() -> tuple[list[str], int, int, int]:
    """`model.train()` in the step, and after every second step an evaluation, which is captured, too.

    An evaluation leaves the parameters of the root gathered.
    """
    (a, opt_a), (b, opt_b) = build_mlp(), build_mlp()

    def training(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., Tensor]:
        train = zero_last(model, optimizer)

        def step(x: Tensor, y: Tensor) -> Tensor:
            model.train()
            return train(x, y)

        return step

    def evaluating(model: nn.Module) -> Callable[[Tensor], Tensor]:
        @torch.no_grad()
        def evaluate(x: Tensor) -> Tensor:
            assert vars(model)["training"]  # code that may read anything
            return model.eval()(x)  # type: ignore[no-any-return]

        return evaluate

    eager, step, found = training(a, opt_a), fz.capture(training(b, opt_b), audit=False), []
    evaluate = fz.capture(evaluating(b), audit=False)
    for i, batch in enumerate(pairs(18)):
        found += [] if torch.equal(eager(*batch), step(*batch)) else [f"loss {i}"]
        modes = [[m.training for m in model.modules()] for model in (a, b)]
        found += [] if modes[0] == modes[1] else [f"modes {i}"]
        if i % 2:
            results = [evaluating(a)(batch[0]), evaluate(batch[0])]
            found += [] if torch.equal(*results) else [f"evaluation {i}"]
    return found, step.stats.warmups, step.stats.replays, evaluate.stats.replays


def rate_changes() -> tuple[list[str], int]:
    model, optimizer = build_mlp()
    step = fz.capture(zero_last(model, optimizer))
    for batch in pairs(4):
        step(*batch)
    optimizer.param_groups[0]["lr"] = 0.5
    step(*pairs(1)[0])
    return step.stats.guard_failures, step.stats.captures


@ample_allowance()
def raises(where: str, at: int) -> tuple[list[str], list[str], bool]:
    """Step `at` fails in both twins; both train on, and must stay equal."""

    class Trap(torch.autograd.Function):
        armed = False

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Tensor:
            if Trap.armed and where == "backward":
                raise ValueError("trap in backward")
            return g

    def make_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., Tensor]:
        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = F.mse_loss(Trap.apply(model(x)), y)
            if Trap.armed and where == "forward":
                raise ValueError("trap in forward")
            loss.backward()
            if Trap.armed and where == "optimizer":
                raise ValueError("trap in optimizer")
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step

    (model, optimizer), (twin, twin_optimizer) = build_mlp(), build_mlp()
    eager, step = make_step(twin, twin_optimizer), fz.capture(make_step(model, optimizer))
    messages, patched, found = [], False, []
    for i, batch in enumerate(pairs()):
        Trap.armed = i == at
        for run in (eager, step):
            try:
                run(*batch)
            except ValueError as error:
                messages.append(str(error))
                patched = patched or "resize_" in vars(torch.UntypedStorage)
                optimizer.zero_grad()
                twin_optimizer.zero_grad()
        a, b = state_of(model, optimizer), state_of(twin, twin_optimizer)
        found += [f"step {i}: {n}" for n in a if not torch.equal(a[n], b[n])]
    assert step.stats.replays >= 2
    return messages, found + grown_storages(model), patched


# -- the tests -------------------------------------------------------------------------------------


def check(verdicts: list[Verdict], captures: int = 1) -> None:
    for verdict in verdicts:
        assert verdict.differences == []
        assert verdict.captures == captures
        assert verdict.replays >= 3
    assert verdicts[0].collectives == verdicts[1].collectives


def test_mlp() -> None:
    verdicts = run_on_ranks(mlp_twins)
    check(verdicts)
    first = verdicts[0]
    assert first.collectives == {"all_gather_into_tensor": 5, "reduce_scatter_tensor": 3}
    assert first.resizes == 36
    assert "resize" not in first.program
    assert (first.warmups, first.replays) == (1, STEPS - 2)


@pytest.fixture(scope="module")
def through_passes() -> list[Verdict]:
    return run_on_ranks(mlp_twins_through_passes)


def test_through_the_default_pipeline(through_passes: list[Verdict]) -> None:
    check(through_passes)


def test_llama() -> None:
    check(run_on_ranks(llama_twins))


def test_another_shape_has_another_program() -> None:
    verdicts = run_on_ranks(shapes_change)
    check(verdicts, captures=2)
    assert verdicts[0].guard_failures == ["`x` is float32[6, 8], was float32[4, 8]"]


def test_a_sharded_copy_that_never_ran_forward() -> None:
    check(run_on_ranks(average_twins))


def test_returned_tensors_are_the_objects_of_model_and_optimizer() -> None:
    for replays, same in run_on_ranks(returns_its_tensors):
        assert replays >= 2
        assert all(same)


def test_modes_that_the_step_sets() -> None:
    for found, warmups, replays, evaluated in run_on_ranks(modes_change):
        assert found == []
        assert (warmups, replays, evaluated) == (1, 15, 8)


def test_another_rate_needs_no_other_program() -> None:
    for failures, captures in run_on_ranks(rate_changes):
        assert failures == []
        assert captures == 1


@pytest.mark.parametrize("where", ["forward", "optimizer"])
@pytest.mark.parametrize("at", [0, 1])
def test_an_error_while_recording_leaves_the_model_as_eager_does(where: str, at: int) -> None:
    for messages, found, patched in run_on_ranks(raises, where, at):
        assert messages == [f"trap in {where}"] * 2
        assert found == []
        assert not patched


def test_program_snapshot(expect: Any, through_passes: list[Verdict]) -> None:
    expect("mlp", through_passes[0].program)
