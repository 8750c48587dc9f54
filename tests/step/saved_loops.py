"""Loops that count, schedule, print and log, which test_saved_effects.py saves; another process makes them, too."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

log = logging.getLogger("tests.saved_effects")


def batch(i: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(i))


class Loop:
    """A loop that counts, schedules, prints and logs. calls: what a step does at its end."""

    def __init__(self, calls: Callable[[Any, Tensor], Any], kind: str = "cosine") -> None:
        torch.manual_seed(0)
        self.model, self.calls, self.n = nn.Linear(3, 2), calls, 0
        self.losses: list[float] = []
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.01)
        schedulers: dict[str, Any] = {
            "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 30),
            "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=1),
            "sequence": lambda o: torch.optim.lr_scheduler.SequentialLR(
                o,
                [
                    torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=7),
                    torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
                ],
                [7],
            ),
        }
        self.scheduler = schedulers[kind](self.optimizer)

    def step(self, x: Tensor) -> Any:
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.n += 1
        self.calls(self, loss.detach())
        return loss.detach()


def prints(loop: Loop, loss: Tensor) -> None:
    print("step", loop.n, f"{loss.item():.4f}", "%.3e" % loss.item(), loss, sep=" | ")  # noqa: UP031
    print(f"{loop.n:>5}", file=sys.stderr, flush=True)


def logs(loop: Loop, loss: Tensor) -> None:
    log.warning("step %d: %s", loop.n, loss.item(), extra={"at": loop.n})
    log.debug("not logged: %s", loss.item())


def says(loop: Loop, loss: Tensor) -> None:
    log.warning("loss %6d %s", loop.n, "abc", extra={"at": loop.n})
    print("n %7d" % loop.n, f"{loop.n:8d}", sep="|", end="$\n")  # noqa: UP031
    warnings.warn(f"step {loop.n}", RuntimeWarning)  # noqa: B028


def schedules(loop: Loop, loss: Tensor) -> None:
    loop.scheduler.step()
    print(loop.scheduler.get_last_lr()[0], loop.optimizer.param_groups[0]["lr"] * 2)


def schedules_by_the_loss(loop: Loop, loss: Tensor) -> None:
    loop.scheduler.step(loss.item())
    loop.losses.append(loss.item())


CALLS: dict[str, tuple[Any, str]] = {
    "print": (prints, "cosine"),
    "logging": (logs, "cosine"),
    "a scheduler": (schedules, "cosine"),
    "several schedulers": (schedules, "sequence"),
    "a scheduler that gets the loss": (schedules_by_the_loss, "plateau"),
}
