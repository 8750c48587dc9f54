"""The calls of a captured step as lines of a run's log: calls in a row that did the same are one line.

    {"kind": "program", "step": "train_step", "number": 1, "reason": "the first call", "nodes": 412, ...}
    {"kind": "calls", "step": "train_step", "what": "replay", "program": 1, "first": 4, "calls": 37, ...}

A line spans a second at most, unless a call takes longer: a process that is killed loses what its last second did.
A call inside of another captured call is a part of that, and has no line.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from dataclasses import asdict, dataclass
from time import perf_counter, time
from typing import Any, NamedTuple

import torch

from functionalize.step.cache import CachedProgram
from functionalize.step.core import StepCore
from functionalize.util.run_log import RunLog

_SPAN = 1.0  # seconds of a line
_WHATS = {
    "replays": "replay",
    "captures": "record",
    "warmups": "warm-up",
    "audits": "audit",
    "eager": "eager",
}


class _Thread(threading.local):
    is_inside = False


_THREAD = _Thread()


class Began(NamedTuple):
    """The beginning of a call. at: seconds since the epoch. clock: of `perf_counter`."""

    at: float
    clock: float
    counts: tuple[int, ...]


@dataclass
class _Row:
    """Calls in a row. first: the number of the first one. seconds: of all. longest: seconds of one."""

    what: str
    program: int | None
    first: int
    at: float
    calls: int = 0
    seconds: float = 0.0
    longest: float = 0.0
    ended: float = 0.0


class CallLog:
    """The calls of one step. Of a step that several threads call at once, lines are in no order."""

    def __init__(self, core: StepCore, log: RunLog) -> None:
        self._core, self._log = core, log
        self._row: _Row | None = None
        self._numbers = weakref.WeakKeyDictionary[CachedProgram, int]()
        self._lock, self._calls = threading.Lock(), 0
        atexit.register(_flush, weakref.ref(self))

    def began(self) -> Began | None:
        """What `ended` takes; None in a call inside of another one."""
        if _THREAD.is_inside:
            return None
        _THREAD.is_inside = True
        return Began(time(), perf_counter(), self._counts())

    def ended(self, began: Began) -> None:
        """Note a call, which may have raised."""
        _THREAD.is_inside = False
        seconds = perf_counter() - began.clock
        grew = (
            what
            for what, before, now in zip(_WHATS.values(), began.counts, self._counts(), strict=True)
            if now > before
        )
        what = next(grew, "raised")
        with self._lock:
            self._calls += 1
            latest = self._core.cache.latest
            if latest is not None and latest not in self._numbers:
                self._note_program(latest)
            runs_program = what in ("replay", "audit", "record") and latest is not None
            program = self._numbers[latest] if runs_program and latest is not None else None
            row = self._row
            if row is None or (row.what, row.program) != (what, program):
                self._write()
                row = self._row = _Row(what, program, self._calls, began.at)
            row.calls += 1
            row.seconds += seconds
            row.longest = max(row.longest, seconds)
            row.ended = began.at + seconds
            if row.ended - row.at >= _SPAN:
                self._write()

    def flush(self) -> None:
        """Write the calls that have no line yet."""
        with self._lock:
            self._write()

    def _counts(self) -> tuple[int, ...]:
        stats = self._core.stats
        return stats.replays, stats.captures, stats.warmups, stats.audits, stats.eager

    def _write(self) -> None:
        row, self._row = self._row, None
        if row is not None:
            self._log.write("calls", step=self._core.name, **asdict(row), **_memory())

    def _note_program(self, cached: CachedProgram) -> None:
        number = self._numbers[cached] = len(self._numbers) + 1
        program = cached.program
        self._log.write(
            "program",
            step=self._core.name,
            number=number,
            reason=cached.reason,
            nodes=program.nodes(),
            inputs=len(program.inputs),
            guards=len(program.facts) + len(program.guards) + len(program.value_guards),
        )


def _flush(of: weakref.ref[CallLog]) -> None:
    log = of()
    if log is not None:
        log.flush()


def _memory() -> dict[str, Any]:
    """Bytes of this process that are resident now, and what torch has allocated on the device: now and at most."""
    found: dict[str, Any] = {}
    try:
        with open("/proc/self/statm") as file:
            found["resident"] = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not on Linux
        pass
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["device"] = torch.cuda.memory_allocated()
        found["device_peak"] = torch.cuda.max_memory_allocated()
    return found
