"""The columns of a sweep's table, and the lines below it: on the efficiencies of its times, and what is assumed.

    for name, head, show in COLUMNS: show(row[name])
    efficiencies([(figures.time, figures.time_range), ...])        a line per machine
    assumptions(choices, lines, remarks)                           a line per kernel, per number read, per remark

Columns in `ASKED` are shown only where the rows have them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from functionalize.planner.fake_world.kernel_log import Choice
from functionalize.planner.report.text import Memory
from functionalize.planner.time.step_time import StepTime
from functionalize.planner.timeline.timeline import EAGER
from functionalize.util.text import human_bytes, human_seconds

Column = tuple[str, str, Callable[[Any], str]]
COLUMNS: tuple[Column, ...] = (
    ("peak", "peak", human_bytes),
    ("program", "program", human_bytes),
    ("reserved", "reserved", human_bytes),
    ("device", "device", human_bytes),
    ("host", "host", human_bytes),
    ("sent", "sent", human_bytes),
    ("step", "step (modelled)", human_seconds),
    ("exposed", "exposed", human_seconds),
    ("mfu", "MFU", lambda x: "" if x is None else f"{x:.0%}"),
    (
        "throughput",
        "items/s/rank",
        lambda x: "" if x is None else f"{x:,.0f}" if x >= 100 else f"{x:.3g}",
    ),
    ("days", "days", lambda x: "" if x is None else f"{x:,.3g}" if x < 100 else f"{x:,.0f}"),
    ("cost", "cost", lambda x: "" if x is None else f"{x:,.0f}" if x >= 100 else f"{x:.3g}"),
    ("planned in", "planned in", human_seconds),
)
ASKED = ("program", "host", "days", "cost")  # after passes, of offloaded tensors, of a training run


def levels_row(memory: Memory) -> dict[str, Any]:
    """The bytes of eager's peak at each level; those in host memory if tensors are offloaded."""
    levels = memory.levels(EAGER)
    host = {"host": memory.host_peak} if memory.host_peak else {}
    return {
        "peak": levels.requested,
        "allocated": levels.allocated,
        "reserved": levels.reserved,
        "device": levels.device,
        **host,
    }


def efficiencies(times: Iterable[tuple[StepTime, tuple[float, float]]]) -> list[str]:
    """A line for each machine: which efficiencies its times have, and the range that follows.

    times: modelled times, each with its seconds at both ends of the range.
    """
    found: dict[str, tuple[float, float]] = {}
    for time, ends in times:
        if time.seconds:
            fast, slow = (end / time.seconds for end in ends)
            low, high = found.get(time.where, (fast, slow))
            found[time.where] = min(low, fast), max(high, slow)
    return [
        f"modelled on {where}"
        + (
            f": {low:.2f} to {high:.2f} times these seconds over the range of what was published"
            if high - low > 0.005
            else ""
        )
        for where, (low, high) in found.items()
    ]


def assumptions(
    choices: Iterable[Choice], assumed: Iterable[str], remarks: Iterable[str] = ()
) -> list[str]:
    """A line for each kernel that a target runs, each line that read a number, and each remark, without duplicates."""
    kernels = (f"assumed kernel: {c.op} -> {c.kernel}: {c.reason}" for c in choices)
    numbers = (f"assumed: the number read {line}" for line in assumed)
    return list(dict.fromkeys([*kernels, *numbers, *remarks]))
