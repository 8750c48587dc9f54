"""Calls in a captured forward (`backward=True`): its replay makes them again, a forward that runs again does not."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import functionalize as fz
from tests.ranks import run_on_ranks

from .twins import Twin, compared

LOG = logging.getLogger("tests.calls")


# The walk looks at no attribute of a callable object of this package: one whose code is a library's, too.
_CONTENT = {"__module__": "functionalize.unseen", "__call__": torch.nn.Module.__call__}
UNSEEN: Any = type("_Unseen", (), _CONTENT)()


def says(loss: Tensor, twin: Twin) -> None:
    print("loss", loss.item(), f"{loss.item():.3f}", loss, file=sys.stderr)
    LOG.info("loss %s", loss.item())


def test_a_replayed_forward_prints_and_logs() -> None:
    def between(i: int) -> None:
        if i == 8:
            sys.stderr = io.StringIO()

    captured = compared(says, between, audit=4, train=Twin.trained)
    assert captured.stats.replays >= 5 and captured.stats.audits, captured.explain()
    assert "sys.stderr is another stream" in captured.explain()


def test_a_forward_that_runs_again_makes_no_call_again() -> None:
    def train(twin: Twin, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        twin.model.note = "forward"  # type: ignore[assignment]
        loss = forward(x)
        twin.model.note = "backward"  # type: ignore[assignment]
        twin.calls = getattr(twin, "calls", 0) + 1  # type: ignore[attr-defined]
        if twin.calls % 8:
            loss.backward()
        else:  # no recorded backward has this gradient alone
            (twin.model.weight.grad,) = torch.autograd.grad(loss, twin.model.weight)
        twin.optimizer.step()
        twin.optimizer.zero_grad()
        return loss.detach()

    captured = compared(says, train=train, audit=False)
    assert captured.stats.reruns == 1 and captured.stats.replays >= 8, captured.explain()


def in_backward(loss: Tensor, twin: Twin) -> None:
    if not hasattr(twin, "hooked"):
        twin.hooked = twin.model.register_full_backward_pre_hook(lambda *_: print("backward"))  # type: ignore[attr-defined]


def decays(loss: Tensor, twin: Twin) -> None:
    twin.optimizer.param_groups[0]["lr"] *= 0.9


def keeps(loss: Tensor, twin: Twin) -> None:
    twin.last = loss.item()  # type: ignore[attr-defined]


def hides(loss: Tensor, twin: Twin) -> None:
    UNSEEN.kept[id(twin)] = loss.item()


def shown(twin: Twin, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A step that shows what the forward has kept."""

    def then(x: Tensor) -> Tensor:
        loss = forward(x)
        print(type(getattr(twin, "last", 0)))
        return loss

    loss = twin.trained(then, x)
    print([(type(each), each) for each in (getattr(twin, "last", 0), UNSEEN.kept.get(id(twin)))])
    return loss


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler", "ignore:Full backward hook")
@pytest.mark.parametrize(
    ("after", "why"),
    [
        (in_backward, "which its backward does not repeat (`backward=True`)"),
        (lambda loss, twin: twin.scheduler.step(), "which it does not repeat"),
        (decays, "sets `optimizer` group 0: lr, which a replay would not"),
        (keeps, "last` is a number that the step reads from a tensor, was"),
        (
            lambda loss, twin: setattr(twin.model, "last", loss.item()),
            "has last = no constant, had",
        ),
        (hides, "keeps a number that it reads from a tensor"),
    ],
)
def test_what_a_captured_forward_does_not_repeat(after: Any, why: str) -> None:
    UNSEEN.kept = {}
    eager = {"on_uncapturable": "eager"}
    captured = compared(
        after,
        train=shown,
        capture=eager,
        scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
    )
    assert captured.stats.replays == 0 and why in captured.explain(), captured.explain()


class Meets(logging.Handler):
    """Adds up a number of all ranks for each message, as `self.log(..., sync_dist=True)` does."""

    def emit(self, record: logging.LogRecord) -> None:
        total = torch.tensor(dist.get_rank() + 1.0)
        dist.all_reduce(total)
        UNSEEN.kept.append(total.item())


def talks(backward: bool) -> tuple[list[float], list[float], int]:
    """A step that logs between two collectives, at whose ninth call one rank alone has no program."""
    UNSEEN.kept, handler, settings = [], Meets(), {"scale": 1.0}
    weight = torch.ones(2, requires_grad=True)

    def step(x: Tensor) -> Tensor:
        loss = (x * weight).sum() * settings["scale"]
        first = loss.detach().clone()
        dist.all_reduce(first)
        LOG.info("in the middle")
        second = first + 1
        dist.all_reduce(second)
        return loss * second

    captured = fz.capture(step, backward=backward)
    LOG.addHandler(handler)
    LOG.setLevel("INFO")
    LOG.propagate = False
    try:
        found = []
        for i in range(12):
            settings["scale"] = 2.0 if i >= 8 and dist.get_rank() == 0 else 1.0
            with torch.set_grad_enabled(backward):
                loss = captured(torch.full((2,), float(i + 1)))
            found.append(loss.item())
            if backward:
                loss.backward()
    finally:
        LOG.removeHandler(handler)
        LOG.setLevel("NOTSET")
        LOG.propagate = True
    return found, UNSEEN.kept, captured.stats.replays


@pytest.mark.long
@pytest.mark.parametrize("backward", [False, True])
def test_ranks_make_calls_that_communicate_together(backward: bool) -> None:
    for rank, (found, kept, replays) in enumerate(run_on_ranks(talks, backward, world=2)):
        scales = [(2.0 if i >= 8 else 1.0, 1.0) for i in range(12)]
        losses = [[2.0 * (i + 1) * s for s in scales[i]] for i in range(12)]
        assert found == [each[rank] * (2 * sum(each) + 2) for each in losses]
        assert kept == [3.0] * 12 and replays >= 5, replays
