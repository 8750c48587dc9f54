"""Switches of the environment, for a run whose code is not to be edited. They are read when the package is first used.

    FUNCTIONALIZE=off                  every captured step runs eagerly, as if nothing was captured
    FUNCTIONALIZE=audit                every call that a program covers runs for real and is compared (`audit=1`)
    FUNCTIONALIZE_REPORT=DIR           what this process does is written there, see `run_log.py`
    FUNCTIONALIZE_LOGS=plans,misses    what is logged goes to standard error, by the names of `LOGS`; `all`: all of it

All ranks must have the same. Each name is a logger, too: `logging.getLogger("functionalize.plans")`.
Raises `ValueError` for a value that is none of these.
"""

from __future__ import annotations

import logging
import os

PLANS = logging.getLogger("functionalize.plans")  # what each call does, and why
MISSES = logging.getLogger("functionalize.misses")  # guards that did not hold, recordings not kept
REFUSALS = logging.getLogger("functionalize.refusals")  # what cannot be captured, or not saved
AUDITS = logging.getLogger("functionalize.audits")  # each audited call, and its difference
SIZES = logging.getLogger("functionalize.sizes")  # programs of other sizes, predicted or not
LOGS = {each.name.rpartition(".")[2]: each for each in (PLANS, MISSES, REFUSALS, AUDITS, SIZES)}


def mode() -> str:
    """The value of `FUNCTIONALIZE`: "off", "audit", or empty if it is not set."""
    found = os.environ.get("FUNCTIONALIZE", "")
    if found not in ("", "off", "audit"):
        raise ValueError(f"FUNCTIONALIZE is 'off' or 'audit', not {found!r}")
    return found


class _Ranked(logging.Formatter):
    """`[rank 3] functionalize.plans: step, call 17: replays`; the rank where there are several."""

    def format(self, record: logging.LogRecord) -> str:
        rank = os.environ.get("RANK")
        before = f"[rank {rank}] " if rank is not None else ""
        return f"{before}{record.name}: {super().format(record)}"


def show_logs(names: str) -> None:
    """Let these logs appear on standard error, whatever else is set up. names: separated by commas, or `all`."""
    wanted = list(LOGS) if names == "all" else [each.strip() for each in names.split(",")]
    unknown = [name for name in wanted if name not in LOGS]
    if unknown:
        raise ValueError(
            f"FUNCTIONALIZE_LOGS names {unknown[0]!r}, which is not one of {', '.join(LOGS)}"
        )
    for name in wanted:
        handler = logging.StreamHandler()
        handler.setFormatter(_Ranked())
        LOGS[name].handlers[:] = [handler]
        LOGS[name].setLevel(logging.DEBUG)
        LOGS[name].propagate = False  # else a handler of the application prints it again


if _names := os.environ.get("FUNCTIONALIZE_LOGS"):
    show_logs(_names)
