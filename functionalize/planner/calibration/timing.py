"""Seconds of calls, while every rank makes the same calls: rates are of a machine that is as busy as in training.

    clock = Clock(device, each=0.1)
    clock.begin()                 a pass over all measurements; in the next one each is made again
    clock.seconds(calls)          of one run of the calls: the median of several, the mean of the ranks, and the median
                                  of the passes so far

The speed of a machine varies from minute to minute: several passes measure everything at about the same speeds.
All ranks make the same number of runs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist


class Clock:
    """Measures calls. each: seconds, about, that one measurement takes in a pass.

    tell: called after each measurement with (measurements so far, measurements of a pass as far as is known).
    """

    def __init__(self, device: str, each: float) -> None:
        self.device, self.each = device, each
        self._passes: list[list[float]] = []  # of each measurement, in their order in a pass
        self._next = 0
        self.tell: Callable[[int, int], None] = lambda done, of_pass: None

    def begin(self) -> None:
        """Begin a pass, which makes the same measurements in the same order as those before."""
        self._next = 0

    def seconds(self, calls: Sequence[Callable[[], Any]], most: int = 4096) -> float:
        """Seconds of one run of the calls. most: runs, at most."""
        self._run(calls, 1)
        once = self._agreed(self._run(calls, 1))
        runs = int(min(max(self.each / 3 / max(once, 1e-7), 1), most / 3))
        found = []
        for _ in range(3):
            dist.barrier()
            found.append(self._run(calls, runs))
        return self.noted(statistics.median(found))

    def noted(self, seconds: float) -> float:
        """Note a measurement of this rank: the median of the passes so far, of the means of the ranks."""
        if self._next == len(self._passes):
            self._passes.append([])
        found = self._passes[self._next]
        found.append(self._agreed(seconds))
        self._next += 1
        self.tell(sum(map(len, self._passes)), len(self._passes))
        return statistics.median(found)

    def _agreed(self, value: float) -> float:
        """The mean of the ranks' values."""
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return float(total) / dist.get_world_size()

    def _run(self, calls: Sequence[Callable[[], Any]], runs: int) -> float:
        self._wait()
        start = time.perf_counter()
        for _ in range(runs):
            for call in calls:
                call()
        self._wait()
        return (time.perf_counter() - start) / runs

    def _wait(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()
