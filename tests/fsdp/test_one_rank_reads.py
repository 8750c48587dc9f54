"""A number that one rank alone reads, to print or to log it: all ranks are captured, and none waits for another."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import types
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import functionalize as fz
from functionalize.step import vote as agreement
from tests.allowance import ample_allowance
from tests.calls.twins import Kept
from tests.fsdp.pair import Pair, step_of
from tests.fsdp.sharded import build_mlp
from tests.fsdp.steps import pairs
from tests.fsdp.twins import differences, state_of
from tests.ranks import run_on_ranks

pytestmark = pytest.mark.long

CALLS = 16
log = logging.getLogger("tests.one_rank_reads")


class Trainer:
    """A script on one rank. kind: what its first rank does with the loss."""

    def __init__(self, kind: str, mesh: tuple[int, ...] = ()) -> None:
        options = (
            {"mesh": init_device_mesh("cpu", mesh, mesh_dim_names=("copies", "shards"))}
            if mesh
            else {}
        )
        self.model, self.optimizer = build_mlp(**options)
        if kind.endswith("sgd"):
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2)
        self.report: Callable[[Trainer, Tensor], None] = REPORTS[kind.removesuffix("_sgd")]
        self.number, self.best = 0, 1e9
        self.writer = _writer_class()()
        self.bar: Any = None

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.number += 1
        if dist.get_rank() == 0:
            self.report(self, loss.detach())
        return loss.detach()


def prints(self: Trainer, loss: Tensor) -> None:
    print("loss", loss.item())


def logs(self: Trainer, loss: Tensor) -> None:
    if self.number % 5 == 0:
        log.info("step %d: %.4f", self.number, loss.item())


def logs_stored(self: Trainer, loss: Tensor) -> None:
    if self.number % 8 == 0:
        text = f"{loss.item():.4f}"[:4]  # a guard on a number, in some calls of one rank
        log.info(text)


def keeps_the_best(self: Trainer, loss: Tensor) -> None:
    if loss.item() < self.best:  # a guard on a number, on one rank
        self.best = loss.item()


def writes(self: Trainer, loss: Tensor) -> None:
    self.writer.add_scalar("loss", loss.item(), self.number)


def moves_a_bar(self: Trainer, loss: Tensor) -> None:
    self.bar.set_postfix(loss=loss.item())
    self.bar.update(1)


REPORTS = {
    each.__name__: each for each in (prints, logs, logs_stored, keeps_the_best, writes, moves_a_bar)
}


def _writer_class() -> Any:
    """A `SummaryWriter` that keeps what it writes, where torch has its own."""
    name = "torch.utils.tensorboard.writer"
    if name not in sys.modules:
        module = types.ModuleType(name)
        source = (
            "class SummaryWriter:\n"
            "    def __init__(self): self.events = []\n"
            "    def add_scalar(self, *event): self.events.append(event)\n"
        )
        exec(compile(source, name, "exec"), vars(module))
        sys.modules[name] = module
    return sys.modules[name].SummaryWriter


@contextlib.contextmanager
def impatient() -> Iterator[None]:
    """A rank that waits for one that does not come fails soon."""
    patience, agreement._PATIENCE = agreement._PATIENCE, timedelta(seconds=20)
    try:
        yield
    finally:
        agreement._PATIENCE = patience


@ample_allowance()  # `fast` takes more than is left of two recordings that are not kept
def on_a_rank(
    kind: str, mesh: tuple[int, ...] = (), passes: str = "default"
) -> tuple[list[str], Any, bool, str]:
    """How a captured script differs from its eager twin; its counts; whether its ranks vote."""
    eager, ours = Trainer(kind, mesh), Trainer(kind, mesh)
    bars = [io.StringIO(), io.StringIO()]
    if kind == "moves_a_bar":
        from tqdm import tqdm

        for each, text in zip((eager, ours), bars, strict=True):
            each.bar = tqdm(
                file=text, position=0, mininterval=0, miniters=1, bar_format="{n_fmt}{postfix}"
            )
    captured = fz.capture(ours.step, passes=passes)
    found: list[str] = []
    kept, out = Kept(), io.StringIO()
    log.addHandler(kept)
    log.setLevel("INFO")
    with impatient():
        for i, batch in enumerate(pairs(CALLS)):
            seen = []
            for step, each, bar in zip((eager.step, captured), (eager, ours), bars, strict=True):
                kept.kept.clear()
                out.truncate(out.seek(0))
                with contextlib.redirect_stdout(out):
                    loss = step(*batch)
                said = out.getvalue(), kept.kept, bar.getvalue(), each.writer.events
                seen.append((loss, repr((said, each.best, each.number))))
            found += differences(i, {"loss": seen[1][0]}, {"loss": seen[0][0]})
            states = [state_of(each.model, each.optimizer) for each in (ours, eager)]
            found += differences(i, *states)
            found += [f"{i}: {seen[1][1]}, not {seen[0][1]}"] if seen[0][1] != seen[1][1] else []
    log.removeHandler(kept)
    sys.modules.pop("torch.utils.tensorboard.writer")
    return found, captured.stats, captured.core.vote is not None, captured.explain()


@pytest.mark.parametrize(
    ("kind", "replays", "votes"),
    [
        ("prints", 10, False),
        ("prints_sgd", 10, False),
        ("logs", 9, False),
        ("logs_stored", 8, False),
        ("keeps_the_best", 6, True),
        ("writes", 10, False),
        ("moves_a_bar", 10, False),
    ],
)
def test_what_one_rank_reports_is_repeated_and_no_rank_waits(
    kind: str, replays: int, votes: bool
) -> None:
    for found, stats, has_vote, why in run_on_ranks(on_a_rank, kind):
        assert found == []
        assert stats.replays >= replays, (stats, why)
        assert has_vote is votes


@pytest.mark.parametrize("kind", ["prints", "keeps_the_best"])
def test_with_replicated_shards(kind: str) -> None:
    """A rank of neither of the groups of rank 0 must know, too, whether the ranks vote."""
    for found, stats, has_vote, why in run_on_ranks(on_a_rank, kind, (2, 2), world=4):
        assert found == []
        assert stats.replays >= 6, (stats, why)
        assert has_vote is (kind == "keeps_the_best")


@pytest.mark.parametrize("kind", ["prints", "logs_stored", "keeps_the_best"])
@pytest.mark.parametrize("mesh", [(), (2, 2)])
def test_with_passes_that_change_collectives(kind: str, mesh: tuple[int, ...]) -> None:
    """The ranks compare their collectives before a replay, and only one of them has a guard on a number."""
    for found, stats, has_vote, why in run_on_ranks(
        on_a_rank, kind, mesh, "fast", world=4 if mesh else 2
    ):
        assert found == []
        assert stats.replays >= 5, (stats, why)
        assert has_vote


def captured_on_one_rank(numbers: bool) -> tuple[list[str], Any]:
    both = Pair(numbers)
    if dist.get_rank() == 1:
        both.captured = both.captured.__wrapped__
    with impatient():
        for i in range(8):
            both.call(i, 4)
    return both.differences, getattr(both.captured, "stats", None)


@pytest.mark.parametrize("numbers", [False, True])
def test_a_rank_whose_step_is_not_captured(numbers: bool) -> None:
    """A number on which the program relies would need that rank's vote."""
    (found, stats), (second_found, _) = run_on_ranks(captured_on_one_rank, numbers)
    assert found == second_found == []
    assert stats.replays == (0 if numbers else 6), stats


def raises_on_one_rank(at: int) -> tuple[list[str], Any]:
    """After its collectives, in one call of rank 1."""
    model, optimizer = build_mlp()
    twin, twin_optimizer = build_mlp()

    def made(model: Any, optimizer: Any) -> Any:
        step = step_of(model, optimizer)

        def raising(x: Tensor, y: Tensor, fails: bool) -> Tensor:
            loss = step(x, y)
            if fails:
                raise ValueError("not on this rank")
            return loss

        return raising

    captured, eager = fz.capture(made(model, optimizer)), made(twin, twin_optimizer)
    found: list[str] = []
    with impatient():
        for i, batch in enumerate(pairs(10)):
            fails = i == at and dist.get_rank() == 1
            for step in (captured, eager):
                with contextlib.suppress(ValueError):
                    step(*batch, fails)
            found += differences(i, state_of(model, optimizer), state_of(twin, twin_optimizer))
    return found, captured.stats


@pytest.mark.parametrize("at", [0, 1])
def test_a_rank_whose_recorded_step_raises_is_not_waited_for(at: int) -> None:
    for found, stats in run_on_ranks(raises_on_one_rank, at):
        assert found == []
        assert stats.replays >= 5, stats
