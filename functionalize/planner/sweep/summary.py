"""The figures of planned points as a table, JSON and CSV, and a search for the largest value that fits.

    sweep.text()                               the table as text; `sweep.table()` for `rich`
    sweep.rows(), sweep.to_json(), sweep.to_csv()
    sweep.largest("batch", limit=80e9)         the largest batch whose step fits in `limit` bytes

    peak      requested bytes of the peak with eager's lifetimes     exact for what is recorded (`docs/plan.md`)
    program   the same with lifetimes of the program, after passes   exact
    reserved  eager's, by a simulated caching allocator              simulated
    device    reserved and declared constants                        must fit in the device
    step      seconds of a step                                      modelled: `planner/time/step_time.py`
    throughput  tokens or samples per second and rank              modelled: those of `inputs`, by the seconds of a step

    sweep.over(Training(15e12, price=2.5))     the days, and the cost, of training on so many tokens, too

    sweep.within(80e9)                         the same on devices of so many bytes: `device` is what they hold then,
                                               and `fits` whether the step runs (`MemoryFigures.fit`)

Above the rows stand the columns, some only where the rows have them (`_ASKED`); below them a line for each machine with
the efficiencies of its times, and one for each kernel, number read or remark that is assumed.
Invariant: a row has the figures of its point or its error, never both.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from typing import Any, Protocol

from functionalize.cost.machines.machine import Machine
from functionalize.errors import PlanError
from functionalize.planner.fake_world.cuda_kernels import Choice
from functionalize.planner.report.text import Memory
from functionalize.planner.sweep.figures import Figures, levels_row
from functionalize.planner.sweep.points import Point
from functionalize.planner.sweep.training import Training
from functionalize.planner.time.step_time import StepTime
from functionalize.planner.timeline.timeline import EAGER
from functionalize.util.text import counted, human_bytes, human_seconds


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """One planned point.

    figures: its program, memory, traffic and time; None if the point failed.
    choices: the kernels that the target runs. assumed: lines that read a number from a fake tensor -> how often.
    remarks: what else a reader of the figures should know. recorded: the memory of a step that has no program.
    partners: the ranks with which it exchanges messages.
    seconds: the duration of planning. error: the failure in one line, cause: its exception; None if there is none.
    """

    point: Point
    figures: Figures | None = None
    choices: Sequence[Choice] = ()
    assumed: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    error: str | None = None
    cause: Exception | None = None
    remarks: Sequence[str] = ()
    recorded: Memory | None = None
    partners: Set[int] = frozenset()

    def __repr__(self) -> str:
        found = self.error or repr(self.figures or self.recorded)
        return f"<Plan {', '.join(f'{k} {short(v)}' for k, v in self.point.items())}: {found}>"

    @property
    def memory(self) -> Memory | None:
        """The memory of the step, also of one without a program; None if the point failed."""
        return self.recorded if self.figures is None else self.figures.memory


class PlansPoints(Protocol):
    """The methods of the planner that a sweep uses to plan more points."""

    def ranks(self, point: Point, timed: bool = True) -> list[Plan]:
        """Plan one point, on all ranks that are asked for. timed: whether figures are wanted, or memory alone."""
        ...


@dataclass(frozen=True, eq=False, repr=False)
class Sweep:
    """The plans of a grid, in its order. axes: the keys. searching: enters a planner for more points.

    limit: bytes of the devices; None: without a limit. training: a run whose days and cost are asked for.
    """

    plans: Sequence[Plan]
    axes: tuple[str, ...]
    searching: Callable[[], AbstractContextManager[PlansPoints]]
    limit: float | None = None
    training: Training | None = None

    def __repr__(self) -> str:
        return f"<Sweep of {', '.join(self.axes)}: {counted(len(self.plans), 'plan')}>"

    def __str__(self) -> str:
        return self.text()

    def within(self, limit: float) -> Sweep:
        """The same plans on devices of `limit` bytes."""
        _check_limit(limit)
        return replace(self, limit=limit)

    def over(self, training: Training) -> Sweep:
        """The same plans with the days and the cost of a training run."""
        return replace(self, training=training)

    def rows(self, program: bool = True) -> list[dict[str, Any]]:
        """A dict per point: its keys, its figures or its `error`, and the seconds that planning took.

        program: whether to have the peak of each program, or only of those after passes.
        """
        rows = [_row(each, self.limit, self.training) for each in self.plans]
        for each, row in zip(self.plans, rows, strict=True):
            if each.figures is not None and (program or each.figures.replay):
                row["program"] = each.figures.program_peak
        return rows

    def to_json(self) -> str:
        """The rows as JSON, with the categories at eager's peak, the choices of kernels, and the range of the time."""
        more = [
            {
                "choices": [asdict(c) for c in each.choices],
                "assumed": dict(each.assumed),
                "remarks": list(each.remarks),
                "categories": each.memory.by_category(EAGER) if each.memory is not None else {},
                **(each.figures.times if each.figures is not None else {}),
            }
            for each in self.plans
        ]
        rows = [{**row, **extra} for row, extra in zip(self.rows(), more, strict=True)]
        return json.dumps(rows, indent=2, default=str)

    def to_csv(self) -> str:
        """The rows as CSV, with unformatted numbers."""
        rows = self.rows()
        names = list(dict.fromkeys(name for row in rows for name in row))
        file = io.StringIO()
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return file.getvalue()

    def cells(self) -> list[list[str]]:
        """The table: a row of heads, then one per point."""
        axes = [axis for axis in self.axes if len({str(p.point[axis]) for p in self.plans}) > 1]
        axes, rows = axes or list(self.axes), self.rows(program=False)
        columns = [c for c in COLUMNS if c[0] not in _ASKED or any(c[0] in row for row in rows)]
        heads = [*axes, *(head.replace("items", self.items) for _, head, _ in columns)]
        both = zip(self.plans, rows, strict=True)
        return [heads, *(_cells(each, row, axes, columns) for each, row in both)]

    @property
    def items(self) -> str:
        """What the steps train on: "tokens", "samples" or both; "items" if it is not known."""
        kinds = {p.figures.items.kind for p in self.plans if p.figures and p.figures.items}
        return " or ".join(sorted(kinds)) or "items"

    def text(self) -> str:
        """The table as plain text: above it the keys that all points share, below it the assumptions."""
        cells = self.cells()
        heads = cells[0]
        same = [a for a in self.axes if a not in heads]
        above = ", ".join(f"{axis} {short(self.plans[0].point[axis])}" for axis in same)
        keys = heads.index("peak")
        whole = [row if len(row) == len(heads) else row[:keys] for row in cells]
        widths = [max(map(len, column)) for column in zip_longest(*whole, fillvalue="")]
        lines = (
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=False))
            for row in cells
        )
        return "\n".join([*([above] if above else []), *lines, *self.notes()])

    def table(self) -> Any:
        """The table for `rich.print`."""
        from rich.table import Table

        heads, *rows = self.cells()
        table = Table(*heads, caption="\n".join(self.notes()) or None)
        for column in table.columns:
            column.justify = "right"
        for row in rows:
            table.add_row(*row)
        return table

    def notes(self) -> list[str]:
        """The assumptions of the figures: kernels of the target, numbers read from fake tensors, efficiencies."""
        figures = [each.figures for each in self.plans if each.figures is not None]
        return efficiencies((each.time, each.time_range) for each in figures) + assumptions(
            (choice for each in self.plans for choice in each.choices),
            (line for each in self.plans for line in each.assumed),
            (remark for each in self.plans for remark in each.remarks),
        )

    def largest(
        self, key: str, limit: float, low: int = 1, most: int = 1 << 20, **fixed: Any
    ) -> int:
        """The largest integer value of `key` (a batch, a length) with which the eager step fits in `limit` bytes.

        Found by doubling, then bisection, assuming that memory grows with the value; each trial is a plan. The other
        keys have the values of the grid's first point, replaced by `fixed`.
        Raises `PlanError` if `low` does not fit, or if a trial cannot be planned.
        """
        _check_limit(limit)
        if not 1 <= low <= most:
            raise PlanError(f"`{key}` is searched from {low} to {most}: give 1 <= low <= most")
        point = {**self.plans[0].point, **fixed}
        point.pop("passes", None)  # passes do not change eager's memory
        unknown = [name for name in (key, *fixed) if name not in self.plans[0].point]
        if unknown:
            key = unknown[0]
            raise PlanError(
                f"`{key}` is no key of this sweep: give it to `fz.plan`, as one value or in the grid"
            )
        with self.searching() as planner:

            def fits(value: int) -> bool:
                every = planner.ranks({**point, key: value}, timed=False)
                for tried in every:
                    if tried.memory is None:
                        raise PlanError(
                            f"{key} {value} cannot be planned: {tried.error}"
                        ) from tried.cause
                found = (tried.memory for tried in every if tried.memory is not None)
                return all(memory.fit(limit, EAGER).refused is None for memory in found)

            if not fits(low):
                raise PlanError(f"{key} {low} does not fit in {human_bytes(limit)}")
            high = low
            while high < most and fits(min(2 * high, most)):
                high = min(2 * high, most)
            low, high = high, min(2 * high, most)
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if fits(middle) else (low, middle)
            return low


def _check_limit(limit: Any) -> None:
    if isinstance(limit, str) or not limit > 0:
        raise PlanError(f"a limit is a number of bytes, not {limit!r}")


def _row(each: Plan, limit: float | None, training: Training | None = None) -> dict[str, Any]:
    keys = {
        key: value if isinstance(value, (int, float)) and math.isfinite(value) else str(value)
        for key, value in each.point.items()
    }
    if each.memory is None:
        return {**keys, "error": each.error, "planned in": each.seconds}
    figures = each.figures.row if each.figures is not None else levels_row(each.memory)
    if training is not None and each.figures is not None:
        rate, items = each.figures.throughput, each.figures.items
        figures = {**figures, "days": training.days(rate, items.world if items else 1)}
        if training.price is not None:
            figures["cost"] = training.cost(rate)
    if limit is not None:
        fit = each.memory.fit(limit, EAGER)
        figures = {**figures, "device": fit.nbytes, "fits": fit.refused is None}
    return {**keys, **figures, "planned in": each.seconds}


def _cells(
    each: Plan, row: Mapping[str, Any], axes: Sequence[str], columns: Sequence[_Column]
) -> list[str]:
    keys = [short(each.point[axis]) for axis in axes]
    if each.memory is None:
        return [*keys, f"error: {each.error}"]
    return [*keys, *(show(row[name]) if name in row else "" for name, _, show in columns)]


def varying(sweep: Sweep) -> list[str]:
    """The keys that have several values."""
    return [a for a in sweep.axes if len({str(p.point[a]) for p in sweep.plans}) > 1]


def label(point: Mapping[str, Any], keys: Sequence[str]) -> str:
    """The values of some keys as text: `batch 4, world 64`."""
    return ", ".join(f"{key} {short(point[key])}" for key in keys)


def short(value: Any) -> str:
    """The value of a key as text: a mesh as `dp 64 x tp 8` or `64 x 8`, a `Machine` as `own`."""
    if isinstance(value, Mapping):
        return " x ".join(f"{name} {size}" for name, size in value.items())
    if isinstance(value, tuple):
        return " x ".join(map(str, value))
    return "own" if isinstance(value, Machine) else str(value)


# -- columns, and lines below a table --------------------------------------------------------------

_Column = tuple[str, str, Callable[[Any], str]]
COLUMNS: tuple[_Column, ...] = (
    ("peak", "peak", human_bytes),
    ("program", "program", human_bytes),
    ("reserved", "reserved", human_bytes),
    ("device", "device", human_bytes),
    ("host", "host", human_bytes),
    ("sent", "sent", human_bytes),
    ("step", "step (modelled)", human_seconds),
    ("exposed", "exposed", human_seconds),
    ("waiting", "waiting", human_seconds),
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
_ASKED = (
    "program",
    "host",
    "waiting",
    "days",
    "cost",
)  # after passes, of offloaded tensors, for ranks of a pipeline, of a training run


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
