"""Progress bars and TensorBoard in a step: replays call the same methods."""

from __future__ import annotations

import gc
import io
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor

import functionalize as fz

from .twins import Twin, batch, refused

tqdm = pytest.importorskip("tqdm")


def bars(after: Any) -> tuple[list[Twin], list[io.StringIO], list[Any]]:
    twins, texts = [], []
    for _ in range(2):
        text = io.StringIO()
        twin = Twin(after)
        bar_format = "{desc} {n_fmt}/{total_fmt}{postfix}"
        twin.bar = tqdm.tqdm(  # type: ignore[attr-defined]
            total=30, file=text, position=0, mininterval=0, miniters=1, bar_format=bar_format
        )
        twins.append(twin)
        texts.append(text)
    return twins, texts, [twins[0].step, fz.capture(twins[1].step)]


def moves(loss: Tensor, twin: Any) -> None:
    twin.bar.set_postfix(loss=loss.item(), text=f"{loss.item():.2f}")
    twin.bar.update(1)
    twin.bar.set_description(f"loss {loss.item():.3f}")


def test_replays_move_a_bar() -> None:
    twins, texts, run = bars(moves)
    for i in range(12):
        for step in run:
            step(batch(i))
        assert texts[0].getvalue() == texts[1].getvalue()
        assert twins[0].bar.n == twins[1].bar.n == i + 1  # type: ignore[attr-defined]
        assert twins[0].state() == twins[1].state()
    assert run[1].stats.replays >= 8, run[1].stats


def test_a_bar_that_moves_between_calls_is_no_obstacle() -> None:
    twins, texts, run = bars(moves)
    for i in range(12):
        for step, twin in zip(run, twins, strict=True):
            twin.bar.update(2)  # type: ignore[attr-defined]
            step(batch(i))
        assert texts[0].getvalue() == texts[1].getvalue()
    assert run[1].stats.replays >= 8


def reads(loss: Tensor, twin: Any) -> None:
    twin.bar.update(1)
    if twin.bar.n % 2:
        loss.mul_(2)


def uses_the_result(loss: Tensor, twin: Any) -> None:
    if twin.bar.update(1):
        loss.mul_(1)


@pytest.mark.parametrize(
    ("after", "what"),
    [(reads, "reads `n` of a tqdm"), (uses_the_result, "moves a progress bar at ")],
)
def test_a_bar_on_which_the_step_depends_is_refused(after: Any, what: str) -> None:
    twins, _, _ = bars(after)
    captured = fz.capture(twins[1].step, on_uncapturable="eager")
    for i in range(4):
        assert twins[0].step(batch(i)).item() == captured(batch(i)).item()
    (error,) = captured.core.refused.values()
    assert what in str(error)


def test_a_bar_that_was_garbage_before_the_step_is_none_of_it() -> None:
    def makes_garbage() -> None:
        held: list[Any] = [tqdm.tqdm(total=3, file=io.StringIO())]
        held.append(held)

    def collects(loss: Tensor, twin: Any) -> None:
        gc.enable()
        _ = [[] for _ in range(5000)]
        gc.disable()

    twins = [Twin(collects) for _ in range(2)]
    captured = fz.capture(twins[1].step, on_uncapturable="raise")
    gc.disable()  # in the step alone
    try:
        for i in range(6):
            expected = twins[0].step(batch(i)).item()
            makes_garbage()
            assert captured(batch(i)).item() == expected
    finally:
        gc.enable()
    assert captured.stats.replays >= 2


# -- TensorBoard -------------------------------------------------------------------------------------


def fake_tensorboard(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A `SummaryWriter` that keeps what it writes, where torch has its own."""
    name = "torch.utils.tensorboard.writer"
    writer = types.ModuleType(name)
    source = (
        "class SummaryWriter:\n"
        "    def __init__(self): self.events = []\n"
        "    def add_scalar(self, tag, value, global_step=None):\n"
        "        self.events.append((tag, value, global_step))\n"
    )
    exec(compile(source, name, "exec"), vars(writer))
    monkeypatch.setitem(sys.modules, name, writer)
    return writer.SummaryWriter


def writes(loss: Tensor, twin: Any) -> None:
    twin.writer.add_scalar("loss", loss.item(), 3)


def test_replays_write_scalars(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = fake_tensorboard(monkeypatch)
    twins = [Twin(writes) for _ in range(2)]
    for twin in twins:
        twin.writer = kind()  # type: ignore[attr-defined]
    run = [twins[0].step, fz.capture(twins[1].step)]
    for i in range(12):
        for step in run:
            step(batch(i))
        assert twins[0].writer.events == twins[1].writer.events  # type: ignore[attr-defined]
        assert len(twins[0].writer.events) == i + 1  # type: ignore[attr-defined]
    assert run[1].stats.replays >= 8, run[1].stats


# -- Lightning --------------------------------------------------------------------------------------

RESULTS = """
class _ResultCollection(dict):
    def __init__(self): self.batch_size, self.sums = None, 0.0
    def log(self, name, value):
        self.batch_size = 8
        self.sums = self.sums + value.detach() * self.batch_size
        self[name] = value.detach().clone()
"""
MODULE = """
import torch
class LightningModule(torch.nn.Module):
    def log(self, name, value, prog_bar=False): self.results.log(name, value)
"""
METRIC = """
import torch
class Metric(torch.nn.Module):
    def __init__(self): super().__init__(); self._forward_cache = torch.zeros(())
    def detach(self): return self._forward_cache
"""


class Other:
    def detach(self) -> Tensor:
        return torch.ones(())


def fake_lightning(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A `LightningModule` that logs as Lightning's does: into state that changes in the step and between calls."""
    package = "pytorch_lightning"
    names = [f"{package}.trainer.connectors.logger_connector.result", f"{package}.core.module"]
    names.append("torchmetrics.metric")
    for name, source in zip(names, (RESULTS, MODULE, METRIC), strict=True):
        module = types.ModuleType(name)
        module.__file__ = f"/venv/lib/site-packages/{name.replace('.', '/')}.py"
        exec(compile(source, module.__file__, "exec"), vars(module))
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    result, module, metric = map(sys.modules.__getitem__, names)
    return module.LightningModule, result._ResultCollection, metric.Metric


def logs_a_metric(own: Any) -> int:
    own.metric._forward_cache = own.twin.model.weight.detach().sum()
    own.log("again", own.metric)
    return 1


def changes_a_metric_after(own: Any) -> int:
    logs_a_metric(own)
    own.metric._forward_cache.add_(1)
    return 1


@pytest.mark.parametrize(
    ("adds", "refused"),
    [
        (lambda own: 1, None),
        (lambda own: own.results.batch_size or 1, "reads `batch_size` of a _ResultCollection"),
        (lambda own: vars(own.results)["batch_size"] or 1, "reads `__dict__` of a _ResultCol"),
        (lambda own: own.log("again", Other()) or 1, "logs to Lightning with an Other"),
        (logs_a_metric, None),
        (changes_a_metric_after, "logs to Lightning with a Metric, whose value the step changes"),
        (lambda own: own.log("again", type(own.metric)()) or 1, "Metric that the search for"),
    ],
)
def test_replays_log_to_lightning(monkeypatch: pytest.MonkeyPatch, adds: Any, refused: Any) -> None:
    base, results, metric = fake_lightning(monkeypatch)

    class Own(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.twin, self.results = Twin(lambda loss, twin: None), results()
            self.metric = metric()

        def step(self, x: Tensor) -> Tensor:
            model, optimizer = self.twin.model, self.twin.optimizer
            loss = (model(x) * adds(self)).square().mean()
            loss.backward()
            self.log("loss", loss, prog_bar=True)
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

    eager, ours = Own(), Own()
    step = fz.capture(ours.step, on_uncapturable="eager")
    for i in range(10):
        assert torch.equal(eager.step(batch(i)), step(batch(i)))
        assert repr(eager.results) == repr(ours.results)
        assert repr(vars(eager.results)) == repr(vars(ours.results))
        for each in (eager, ours):
            each.results.batch_size = None if i % 3 else i
    text = step.explain()
    assert refused in text if refused is not None else step.stats.replays >= 6, text


def test_a_bar_that_the_step_makes_is_refused() -> None:
    def after(loss: Tensor, twin: Any) -> None:
        tqdm.tqdm(total=2, file=io.StringIO()).update(1)

    assert "tqdm" in refused(after) or "progress bar" in refused(after)
