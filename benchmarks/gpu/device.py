"""The device that is measured: its memory and its time, by public functions of torch; on a CPU by c10's own count.

    device = Device("cuda")
    device.live()                  bytes that tensors have now, as requested
    with device.peak() as found:   found.requested, .allocated, .reserved: the most inside of the `with`
        step()
    device.times(step)             seconds: of the calling thread, of the process, until the call returns, of the device

On a CPU the allocator keeps nothing, so only requested bytes exist, and the device's time is that of the call.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from benchmarks.allocations import count_everything, counted


@dataclass
class Levels:
    """Bytes; None: the device has no such level."""

    requested: int = 0
    allocated: int | None = None
    reserved: int | None = None


class Times(NamedTuple):
    """Seconds of one call. thread, process: CPU time. returned: until the call returned. device: until all has run."""

    thread: float
    process: float
    returned: float
    device: float


class Device:
    """One device. kind: "cuda" or "cpu"."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.on_gpu = kind == "cuda"
        if self.on_gpu:
            torch.cuda.init()
        else:
            count_everything()

    @property
    def capability(self) -> tuple[int, int] | None:
        """The compute capability of a GPU."""
        return torch.cuda.get_device_capability() if self.on_gpu else None

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def release(self) -> None:
        """Collect garbage, and release what the allocator keeps."""
        gc.collect()
        self.synchronize()
        if self.on_gpu:
            torch.cuda.empty_cache()

    def live(self) -> Levels:
        """The bytes that are live now."""
        self.synchronize()
        if self.on_gpu:
            return self._levels("current")
        with counted() as count:
            pass
        return Levels(count.before)

    def _levels(self, which: str) -> Levels:
        stats = torch.cuda.memory_stats()
        found = [
            stats[f"{name}_bytes.all.{which}"] for name in ("requested", "allocated", "reserved")
        ]
        return Levels(*found)

    @contextmanager
    def peak(self) -> Iterator[Levels]:
        """The most that is live at one moment inside of the `with`; filled at its end."""
        found = Levels()
        if not self.on_gpu:
            with counted() as count:
                yield found
            found.requested = count.before + count.peak
            return
        gc.collect()
        self.synchronize()
        torch.cuda.reset_peak_memory_stats()
        yield found
        self.synchronize()
        vars(found).update(vars(self._levels("peak")))

    def times(self, call: Callable[[], Any]) -> Times:
        """The times of one call."""
        self.synchronize()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if self.on_gpu else []
        start = time.thread_time(), time.process_time(), time.perf_counter()
        if events:
            events[0].record()
        result = call()
        if events:
            events[1].record()
        end = time.thread_time(), time.process_time(), time.perf_counter()
        del result
        self.synchronize()
        host = [b - a for a, b in zip(start, end, strict=True)]
        seconds = events[0].elapsed_time(events[1]) / 1e3 if events else host[2]
        return Times(*host, seconds)
