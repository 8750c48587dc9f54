"""A step that runs eagerly and captured, from one seed: what both write, log and keep is equal after every call."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import functionalize as fz

CALLS = 12


class Kept(logging.Handler):
    """Keeps what each record says."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record."""
        self.kept.append(
            (
                record.getMessage(),
                record.levelname,
                record.name,
                record.pathname,
                record.lineno,
                record.funcName,
                repr(record.args),
                getattr(record, "loss", None),
            )
        )


class Twin:
    """A model, its optimizer, a scheduler. after: called in the step with the loss and the twin."""

    def __init__(
        self,
        after: Callable[[Tensor, Twin], Any],
        scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 3)
        lr = options.pop("lr", 0.1)
        options["lr"] = lr.clone() if isinstance(lr, Tensor) else lr
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **options)
        self.scheduler = scheduler(self.optimizer) if scheduler is not None else None
        self.after = after

    def step(self, x: Tensor) -> Tensor:
        """One training step."""
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.after(loss.detach(), self)
        return loss.detach()

    def forward(self, x: Tensor) -> Tensor:
        """The loss, for `trained`."""
        loss: Tensor = self.model(x).square().mean()
        self.after(loss.detach(), self)
        return loss

    def trained(self, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """One training step around `forward`."""
        loss = forward(x)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def state(self) -> Any:
        """What the step changes."""
        groups = [
            {k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups
        ]
        scheduler = self.scheduler.state_dict() if self.scheduler is not None else None
        weights = [p.detach().numpy().tobytes() for p in self.model.parameters()]
        return weights, groups, str(scheduler)


def batch(i: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(i))


@contextlib.contextmanager
def watched() -> Iterator[Callable[[], Any]]:
    """What is printed and logged: the value returns it, and forgets it."""
    out, err, kept = io.StringIO(), io.StringIO(), Kept()
    logger = logging.getLogger("tests.calls")
    before = logger.level, logger.propagate
    logger.setLevel("INFO")
    logger.propagate = False
    logger.addHandler(kept)

    def found() -> Any:
        seen = out.getvalue(), err.getvalue(), list(kept.kept)
        for stream in (out, err):
            stream.seek(0)
            stream.truncate()
        kept.kept.clear()
        return seen

    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            yield found
        finally:
            logger.removeHandler(kept)
            logger.setLevel(before[0])
            logger.propagate = before[1]


def compared(
    after: Callable[[Tensor, Twin], Any],
    between: Callable[[int], Any] = lambda i: None,
    audit: Any = "auto",
    capture: Any = None,
    calls: int = CALLS,
    train: Callable[[Twin, Callable[[Tensor], Tensor], Tensor], Tensor] | None = None,
    **options: Any,
) -> Any:
    """The captured step, after calls that were equal to eager's. between: called before each call.

    train: a step around the forward, which alone is captured.
    """
    eager, other = Twin(after, **options), Twin(after, **options)
    if train is None:
        captured = fz.capture(other.step, audit=audit, **(capture or {}))
        steps: Any = eager.step, captured
    else:
        captured = fz.capture(other.forward, audit=audit, backward=True, **(capture or {}))
        steps = partial(train, eager, eager.forward), partial(train, other, captured)
    with watched() as found:
        for i in range(calls):
            between(i)
            results = []
            for step, twin in zip(steps, (eager, other), strict=True):
                result = step(batch(i))
                results.append((result.item(), found(), twin.state()))
            assert results[0] == results[1], f"call {i}"
    assert not captured.stats.differences
    return captured


def replayed(after: Callable[[Tensor, Twin], Any], **options: Any) -> Any:
    """The same, of a step that replays."""
    captured = compared(after, **options)
    assert captured.stats.replays >= CALLS // 2, captured.stats
    return captured


def refused(after: Callable[[Tensor, Twin], Any], calls: int = 6, **options: Any) -> str:
    """The reason for which a step is refused; each call is as eager's."""
    eager, other = Twin(after, **options), Twin(after, **options)
    captured = fz.capture(other.step, on_uncapturable="eager")
    with watched() as found:
        for i in range(calls):
            results = []
            for step, twin in ((eager.step, eager), (captured, other)):
                result = step(batch(i))
                results.append((result.item(), found(), twin.state()))
            assert results[0] == results[1], f"call {i}"
    assert captured.stats.replays == 0
    (error,) = captured.core.refused.values()
    return str(error)
