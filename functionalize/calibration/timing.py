"""Seconds of calls, while every rank makes the same calls: rates are of a machine that is as busy as in training.

    clock = Clock(device, budget=60.0)
    clock.seconds(calls)          of one round of the calls: the median of several, the mean of the ranks

All ranks make the same number of rounds, which the first rank's first round decides.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist


class Clock:
    """Measures calls. each: seconds, about, that one measurement takes."""

    def __init__(self, device: str, each: float) -> None:
        self.device, self.each = device, each

    def seconds(self, calls: Sequence[Callable[[], Any]], most: int = 4096) -> float:
        """Seconds of one round of the calls. most: rounds, at most."""
        for _ in range(2):
            self._round(calls, 1)
        once = self.agreed(self._round(calls, 1))
        rounds = int(min(max(self.each / 5 / max(once, 1e-7), 1), most / 5))
        found = []
        for _ in range(5):
            dist.barrier()
            found.append(self._round(calls, rounds))
        return self.agreed(statistics.median(found))

    def agreed(self, value: float) -> float:
        """The mean of the ranks' values."""
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return float(total) / dist.get_world_size()

    def _round(self, calls: Sequence[Callable[[], Any]], rounds: int) -> float:
        self._wait()
        start = time.perf_counter()
        for _ in range(rounds):
            for call in calls:
                call()
        self._wait()
        return (time.perf_counter() - start) / rounds

    def _wait(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()
