"""What a process of a run did, as lines of JSON in a folder: `FUNCTIONALIZE_REPORT=DIR`, for `functionalize report`.

    {"kind": "calls", "rank": 0, "at": 1764547200.1, "step": "train_step", "what": "replay", ...}

A line is written by one call of the system, so that a process that is killed leaves whole lines. A file ends after
`MOST` bytes. What the logs of misses, refusals, audits and sizes say is written, too, whatever else shows them.
Invariant: a disk that fails ends the log, with a warning, and not the run.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import warnings
from pathlib import Path
from time import time
from typing import Any

import torch.distributed as dist

from functionalize.util.switches import AUDITS, MISSES, REFUSALS, SIZES

MOST = 32 << 20  # bytes of a file


class RunLog:
    """The file of this process in a folder, which is made if need be; a forked process has a file of its own."""

    def __init__(self, folder: str) -> None:
        self._folder, self._pid, self._file, self._left = Path(folder), 0, -1, MOST
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"FUNCTIONALIZE_REPORT names {folder!r}, which is no folder: {error}"
            ) from error
        for logger in (MISSES, REFUSALS, AUDITS, SIZES):
            logger.addFilter(_Written(self, logger))
            logger.setLevel(min(logging.INFO, logger.getEffectiveLevel()))

    def write(self, kind: str, **fields: Any) -> None:
        """Add a line. kind: "program", "calls", "memory" or "log". at: seconds since the epoch, else now."""
        if self._left <= 0 and self._pid == os.getpid():
            return
        line = {"kind": kind, "rank": _rank(), "at": time(), **fields}
        text = json.dumps(line, separators=(",", ":"), default=str).encode() + b"\n"
        try:
            if self._pid != os.getpid():
                self._open()
            self._left -= len(text)
            os.write(self._file, text if self._left > 0 else b'{"kind":"full"}\n')
        except OSError as error:
            self._left = 0
            warnings.warn(f"the report in {self._folder} ends here: {error}", stacklevel=2)

    def _open(self) -> None:
        self._pid, self._left = os.getpid(), MOST
        path = self._folder / f"rank{_rank()}.{self._pid}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)


class _Written(logging.Filter):
    """Writes the records of a logger, and lets those pass that it showed before."""

    def __init__(self, log: RunLog, logger: logging.Logger) -> None:
        super().__init__()
        self._log, self._shown = log, logger.getEffectiveLevel()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.INFO:
            name = record.name.rpartition(".")[2]
            self._log.write("log", at=record.created, log=name, text=record.getMessage())
        return record.levelno >= self._shown


def _rank() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", 0))


@functools.cache
def _log_in(folder: str) -> RunLog:
    return RunLog(folder)


def run_log() -> RunLog | None:
    """The log of this process; None without `FUNCTIONALIZE_REPORT`. Raises `ValueError` if that names no folder."""
    folder = os.environ.get("FUNCTIONALIZE_REPORT")
    return _log_in(os.path.abspath(folder)) if folder else None
